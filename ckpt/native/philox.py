"""Philox 4x32-10: random bits by key and counter (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3",
SC 2011). NumPy reference."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]

_MUL = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)


def philox4x32(counter: U64, key: tuple[int, int]) -> U64:
    """Ten rounds on counters of shape [4, n] (32-bit numbers held in uint64); returns 32-bit numbers, [4, n]."""
    x0, x1, x2, x3 = (counter[i].astype(np.uint64) for i in range(4))
    k0, k1 = key
    for _ in range(10):
        a, b = x0 * _MUL[0], x2 * _MUL[1]
        x0, x1, x2, x3 = (
            (b >> _32) ^ x1 ^ np.uint64(k0),
            b & _LOW,
            (a >> _32) ^ x3 ^ np.uint64(k1),
            a & _LOW,
        )
        k0, k1 = (k0 + _WEYL[0]) & 0xFFFFFFFF, (k1 + _WEYL[1]) & 0xFFFFFFFF
    return np.stack([x0, x1, x2, x3])
