"""Kernels and their plain reference twins.

What lives here: arithmetic that is worth compiling, behind functions that always work on NumPy and torch alone.
Imports nothing else of ckpt. Start reading at `philox` (counter-based random bits), `field` (arithmetic modulo
2^61 - 1) and `bytedot` (exact integer products of bytes, the inner loop of the fingerprint). `library` opens the
compiled kernels of cuda_ext/, `copies` copies boxes with them, and `logical` draws
random numbers.
"""
