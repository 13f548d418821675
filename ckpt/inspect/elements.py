"""Differences of elements by their bits: how many, how far, and one of them for people to look at.

Two elements differ when their bits do: a NaN equals a NaN of the same bits, and 0.0 differs from -0.0. Distances are
for what has one. *ulp*: how many steps apart two floating-point numbers are among all numbers of their dtype, zeros of
both signs being one number and an infinity the step after the largest; none where either is NaN. For complex numbers it
is the larger one of both parts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from ckpt.state.dtypes import torch_dtype

Raw: TypeAlias = npt.NDArray[np.uint8]
Floats: TypeAlias = npt.NDArray[np.float64]

_BLOCK = 1 << 18  # elements whose distances are taken at a time
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_PARTS = {"complex32": "float16", "complex64": "float32", "complex128": "float64"}
_PACKED_4 = "float4_e2m1fn_x2"
_FOUR_BITS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True)
class Distance:
    """Over some differing elements. largest: the largest absolute difference, an int for integers, a float for all else
    that has one (inf where an infinity takes part); None where none has one (bool, float4, NaN on either side). ulp:
    the largest, for floating point. nan: how many pairs have a NaN."""

    largest: float | int | None = None
    ulp: int | None = None
    nan: int = 0

    def join(self, other: Distance) -> Distance:
        largest = max((x for x in (self.largest, other.largest) if x is not None), default=None)
        ulp = max((x for x in (self.ulp, other.ulp) if x is not None), default=None)
        return Distance(largest, ulp, self.nan + other.nan)


@dataclass(frozen=True)
class Element:
    """One element of one side: its value as text, and its bits, most significant digit first (of complex numbers the
    real part, then the imaginary)."""

    value: str
    bits: str


def differing(a: Raw, b: Raw) -> npt.NDArray[np.int64]:
    """Row-major numbers of the elements that differ. a, b: uint8 [elements, itemsize]."""
    return np.flatnonzero((a != b).any(axis=1)).astype(np.int64)


def distance(a: Raw, b: Raw, dtype: str) -> Distance:
    """Over all given elements, which are taken to differ. a, b: uint8 [elements, itemsize]."""
    found = Distance()
    for start in range(0, len(a), _BLOCK):
        found = found.join(_distance(a[start : start + _BLOCK], b[start : start + _BLOCK], dtype))
    return found


def element(raw: Raw, dtype: str) -> Element:
    """raw: uint8 [itemsize]."""
    part = raw[None]
    if dtype in _PARTS:
        halves = [element(half, _PARTS[dtype]) for half in part.reshape(2, -1)]
        return Element(f"({halves[0].value}, {halves[1].value}j)", f"{halves[0].bits} {halves[1].bits}")
    bits = raw[::-1].tobytes().hex()
    if dtype == _PACKED_4:
        return Element(f"({_four_bits(raw[0] & 15)}, {_four_bits(raw[0] >> 4)})", bits)
    kind = torch_dtype(dtype)
    if kind.is_floating_point:
        return Element(repr(float(_floats(part, dtype)[0])), bits)
    if dtype == "bool":
        return Element(str(bool(raw[0])), bits)
    return Element(str(int(part.view(np.dtype(dtype))[0, 0])), bits)


def _four_bits(code: int) -> float:
    value = _FOUR_BITS[int(code) & 7]
    return -value if code & 8 else value


def _distance(a: Raw, b: Raw, dtype: str) -> Distance:
    if not len(a) or dtype in ("bool", _PACKED_4):
        return Distance()
    if dtype in _PARTS:
        return _complex_distance(a, b, _PARTS[dtype])
    if torch_dtype(dtype).is_floating_point:
        x, y = _floats(a, dtype), _floats(b, dtype)
        known = ~(np.isnan(x) | np.isnan(y))
        nan = int(len(a) - known.sum())
        if not known.any():
            return Distance(nan=nan)
        with np.errstate(over="ignore", invalid="ignore"):
            apart = np.abs(x[known] - y[known])
        return Distance(float(_infinite(apart, x[known], y[known]).max()), _ulp(a[known], b[known], dtype), nan)
    kind = np.dtype(dtype)
    wide = np.int64 if kind.kind == "i" else np.uint64
    return Distance(_largest_gap(a.view(kind)[:, 0].astype(wide), b.view(kind)[:, 0].astype(wide)))


def _complex_distance(a: Raw, b: Raw, part: str) -> Distance:
    size = a.shape[1] // 2
    apart = np.zeros(len(a))
    known = np.ones(len(a), dtype=bool)
    ulp: int | None = None
    for piece in (slice(0, size), slice(size, None)):
        p, q = np.ascontiguousarray(a[:, piece]), np.ascontiguousarray(b[:, piece])
        x, y = _floats(p, part), _floats(q, part)
        here = ~(np.isnan(x) | np.isnan(y))
        known &= here
        with np.errstate(over="ignore", invalid="ignore"):
            apart = np.hypot(apart, _infinite(np.abs(x - y), x, y))
        if here.any():
            ulp = max(ulp or 0, _ulp(p[here], q[here], part))
    largest = float(apart[known].max()) if known.any() else None
    return Distance(largest, ulp, int(len(a) - known.sum()))


def _infinite(apart: Floats, x: Floats, y: Floats) -> Floats:
    """Equal infinities are no distance apart; x - y makes that NaN."""
    return np.where(x == y, 0.0, apart)


def _floats(raw: Raw, dtype: str) -> Floats:
    """float64 [elements], exact for every floating-point dtype."""
    tensor = torch.from_numpy(np.array(raw, order="C")).view(torch_dtype(dtype))
    return tensor[:, 0].to(torch.float64).numpy()


def _ulp(a: Raw, b: Raw, dtype: str) -> int:
    return _largest_gap(_ordered(a, dtype), _ordered(b, dtype))


def _ordered(raw: Raw, dtype: str) -> npt.NDArray[np.int64]:
    """int64 [elements]: integers in the order of the numbers, neighbours one apart."""
    size = raw.shape[1]
    code = np.ascontiguousarray(raw).view(_UNSIGNED[size])[:, 0].astype(np.uint64)
    if dtype == "float8_e8m0fnu":  # an exponent without a sign
        return code.astype(np.int64)
    sign = np.uint64(1 << (8 * size - 1))
    magnitude = (code & (sign - np.uint64(1))).astype(np.int64)
    return np.where(code & sign != 0, -magnitude, magnitude)


def _largest_gap(x: npt.NDArray[Any], y: npt.NDArray[Any]) -> int:
    """The largest |x - y|, exactly, of two arrays of int64 or uint64: modulo 2^64 the larger less the smaller is it."""
    larger, smaller = np.maximum(x, y), np.minimum(x, y)
    return int((larger.astype(np.uint64) - smaller.astype(np.uint64)).max())
