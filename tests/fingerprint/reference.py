"""The fingerprint as its docstring says it, element by element in Python integers: slow, and written without the code
under test."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import cache

Index = tuple[int, ...]
P = 2**61 - 1


def philox(counter: Index, key: Index) -> Index:
    """Philox 4x32-10 of Random123."""
    x, k = list(counter), list(key)
    for _ in range(10):
        high0, low0 = divmod(0xD2511F53 * x[0], 1 << 32)
        high1, low1 = divmod(0xCD9E8D57 * x[2], 1 << 32)
        x = [high1 ^ x[1] ^ k[0], low1, high0 ^ x[3] ^ k[1], low0]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return tuple(x)


@cache
def coefficient(axis: int, digit: int, index: int) -> tuple[int, int]:
    """c_0 and c_1 of an index of a digit of an axis."""
    w = philox((index, 2 * axis + digit, 0, 0), (0x636B7074, 0x66703031))
    pair = [(w[0] + (w[1] << 32)) % 2**61, (w[2] + (w[3] << 32)) % 2**61]
    return pair[0] % P, pair[1] % P


def axis_coefficient(axis: int, words: int, index: int) -> tuple[int, int]:
    """C_0 and C_1 of an index of an axis that counts `words` words."""
    if words <= 2**16:
        return coefficient(axis, 0, index)
    low, high = coefficient(axis, 0, index % 2**16), coefficient(axis, 1, index // 2**16)
    return low[0] * high[0] % P, low[1] * high[1] % P


def digest(element: Callable[[Index], bytes], offset: Index, extent: Index, shape: Index) -> tuple[int, int]:
    """Digest of a box of a tensor of this shape; `element` gives the little-endian bytes of an index in the box."""
    sums = [0, 0]
    for at in itertools.product(*map(range, extent)):
        raw = element(at)
        index = tuple(o + i for o, i in zip(offset, at, strict=True))
        wide = [raw[i : i + 4] for i in range(0, len(raw), 4)]
        for word, data in enumerate(wide):
            per_word = max(1, 4 // len(raw))
            weights = [1, 1]
            for axis, (i, n) in enumerate(zip(index, shape, strict=True)):
                last = axis == len(shape) - 1
                factor = (
                    axis_coefficient(axis, -(-n // per_word), i // per_word) if last else axis_coefficient(axis, n, i)
                )
                weights = [w * f % P for w, f in zip(weights, factor, strict=True)]
            if shape:
                shift = 8 * len(raw) * (index[-1] % per_word) if len(raw) < 4 else 0
                weights = [w << shift for w in weights]
            if len(raw) > 4:
                factor = axis_coefficient(len(shape), len(wide), word)
                weights = [w * f % P for w, f in zip(weights, factor, strict=True)]
            value = int.from_bytes(data, "little") + 1
            sums = [(s + value * w) % P for s, w in zip(sums, weights, strict=True)]
    return sums[0], sums[1]
