"""Arithmetic modulo the Mersenne prime p = 2^61 - 1 on uint64 arrays whose values are below p."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

U64 = npt.NDArray[np.uint64]

P = (1 << 61) - 1
_P = np.uint64(P)
_32 = np.uint64(32)
_29 = np.uint64(29)
_61 = np.uint64(61)
_3 = np.uint64(3)
_LOW32 = np.uint64(0xFFFFFFFF)
_LOW29 = np.uint64((1 << 29) - 1)


def reduce(x: U64) -> U64:
    """Any uint64 to its value modulo p."""
    x = (x & _P) + (x >> _61)
    return np.minimum(x, x - _P)  # below p the subtraction wraps around to a large number


def multiply(a: U64, b: U64) -> U64:
    """Product modulo p, with broadcasting: schoolbook in 32-bit halves, using 2^64 = 8 and 2^61 = 1."""
    ah, al = a >> _32, a & _LOW32
    bh, bl = b >> _32, b & _LOW32
    middle = ah * bl + al * bh  # below 2^62
    high = reduce(((ah * bh) << _3) + (middle >> _29))
    return reduce(high + ((middle & _LOW29) << _32) + reduce(al * bl))


def prefix_sums(x: U64) -> U64:
    """Sums of the first 0..n elements along the last axis, modulo p; n below 2^31. Shape [..., n + 1]."""
    halves = np.zeros((2, *x.shape[:-1], x.shape[-1] + 1), dtype=np.uint64)
    np.cumsum(x & _LOW32, axis=-1, out=halves[0, ..., 1:])
    np.cumsum(x >> _32, axis=-1, out=halves[1, ..., 1:])
    return reduce(reduce(halves[0]) + multiply(reduce(halves[1]), np.array(1 << 32, dtype=np.uint64)))


def total(x: U64) -> U64:
    """Sum along the last axis modulo p, of fewer than 2^31 elements."""
    low = (x & _LOW32).sum(axis=-1, dtype=np.uint64)
    high = (x >> _32).sum(axis=-1, dtype=np.uint64)
    return reduce(reduce(low) + multiply(reduce(high), np.array(1 << 32, dtype=np.uint64)))
