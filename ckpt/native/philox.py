"""Philox 4x32-10: random bits by key and counter (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3",
SC 2011). The reference twin of the compiled kernel."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch

U64 = npt.NDArray[np.uint64]
Words = TypeVar("Words", U64, torch.Tensor)

_MUL = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW = 0xFFFFFFFF


def rounds(x0: Words, x1: Words, x2: Words, x3: Words, key: tuple[int, int]) -> tuple[Words, Words, Words, Words]:
    """The four words of each counter, after ten rounds: arrays or tensors of one shape, of numbers below 2^32.

    In 64-bit integers, signed ones too: a product of two words may wrap into the sign there, and the mask undoes its
    extension.
    """
    k0, k1 = key
    for _ in range(10):
        a, b = x0 * _MUL[0], x2 * _MUL[1]
        x0, x2 = b >> 32, a >> 32  # type: ignore[assignment]
        for word, other, k in ((x0, x1, k0), (x2, x3, k1)):
            word &= _LOW
            word ^= other
            word ^= k
        a &= _LOW
        b &= _LOW
        x1, x3 = b, a
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return x0, x1, x2, x3


def philox4x32(counter: U64, key: tuple[int, int]) -> U64:
    """On counters of shape [4, n] (32-bit numbers held in uint64); returns 32-bit numbers, [4, n]."""
    return np.stack(rounds(counter[0], counter[1], counter[2], counter[3], key))
