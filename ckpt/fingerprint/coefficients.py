"""Coefficients of the fingerprint: two independent uniform numbers below p for each axis and index."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch

from ckpt.native import bytedot, field, philox

U64 = npt.NDArray[np.uint64]

KEY = (0x636B7074, 0x66703031)  # the ASCII letters "ckpt" and "fp01"
DIGIT = 1 << 16  # an axis of more words than this uses two digits


@lru_cache(maxsize=64)
def axis_coefficients(axis: int, digit: int) -> U64:
    """uint64 [2, 65536]: the coefficients of indices 0..65535 of one digit of one axis.

    Philox 4x32-10 under `KEY` at counter (index, 2 * axis + digit, 0, 0) gives words w0..w3; the two coefficients
    are (w0 + 2^32 w1) and (w2 + 2^32 w3), each modulo 2^61, where the value p counts as 0.
    """
    return _coefficients(axis, digit, 0, DIGIT)


def _coefficients(axis: int, digit: int, start: int, stop: int) -> U64:
    counter = np.zeros((4, stop - start), dtype=np.uint64)
    counter[0] = np.arange(start, stop, dtype=np.uint64)
    counter[1] = 2 * axis + digit
    w = philox.philox4x32(counter, KEY)
    mask, shift = np.uint64(field.P), np.uint64(32)
    pair = np.stack([(w[0] | (w[1] << shift)) & mask, (w[2] | (w[3] << shift)) & mask])
    pair[pair == mask] = 0
    return pair


@dataclass(frozen=True, slots=True)
class Digits:
    """A run of one digit of one axis: indices start..stop of the coefficients (axis, digit)."""

    axis: int
    digit: int
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start

    def values(self) -> U64:
        """uint64 [2, size]."""
        if self.stop > DIGIT:  # the high digit of an axis of more than 2^32 words
            return _coefficients(self.axis, self.digit, self.start, self.stop)
        return axis_coefficients(self.axis, self.digit)[:, self.start : self.stop]


def product(runs: tuple[Digits, ...]) -> U64:
    """Coefficients of all index combinations of several runs in row-major order: uint64 [2, product of sizes]."""
    out = np.ones((2, 1), dtype=np.uint64)
    for run in runs:
        out = field.multiply(out[:, :, None], run.values()[:, None, :]).reshape(2, -1)
    return out


def byte_values(words: U64, start: int, stop: int) -> U64:
    """Coefficients of bytes start..stop of little-endian words: byte q of a word has 2^(8q) times the word's."""
    shifts = np.array([1, 1 << 8, 1 << 16, 1 << 24], dtype=np.uint64)
    spread = field.multiply(words[:, :, None], shifts).reshape(2, -1)
    return spread[:, start:stop]


@dataclass(frozen=True, slots=True)
class Columns:
    """The trailing part of a tensor that one row of the matrix product covers: `runs` of digits whose last one
    counts 32-bit words, of which the bytes first_byte..last_byte of the whole row are held."""

    runs: tuple[Digits, ...]
    first_byte: int
    last_byte: int

    @property
    def nbytes(self) -> int:
        return self.last_byte - self.first_byte


@dataclass(frozen=True, slots=True)
class Table:
    """What a row of bytes is multiplied with: the digit table, and the sums of the coefficients that depend on
    geometry alone: of every byte, and of every `unit`-th byte (the elements, or words, that count plus one)."""

    digits: torch.Tensor
    byte_sum: U64
    unit_sum: U64


@lru_cache(maxsize=256)
def table(columns: Columns, unit: int) -> Table:
    """unit: bytes per counted unit (1, 2 or 4)."""
    if len(columns.runs) == 1 and columns.runs[0].size >= DIGIT // 8:
        return _slice_of_axis(columns, unit)
    values = byte_values(product(columns.runs), columns.first_byte, columns.last_byte)
    return Table(bytedot.digit_table(values), field.total(values), field.total(values[:, ::unit]))


def _slice_of_axis(columns: Columns, unit: int) -> Table:
    """The same for a long run of one axis: a slice of the axis's own table, which is made once."""
    run = columns.runs[0]
    digits, prefix = _axis_table(run.axis, run.digit)
    lo, hi = 4 * run.start + columns.first_byte, 4 * run.start + columns.last_byte
    sums = prefix[unit]
    at = lo // unit
    return Table(digits[lo:hi], _between(prefix[1], lo, hi), _between(sums, at, at + (hi - lo) // unit))


@lru_cache(maxsize=16)
def _axis_table(axis: int, digit: int) -> tuple[torch.Tensor, dict[int, U64]]:
    values = byte_values(axis_coefficients(axis, digit), 0, 4 * DIGIT)
    return bytedot.digit_table(values), {unit: field.prefix_sums(values[:, ::unit]) for unit in (1, 2, 4)}


def _between(prefix: U64, start: int, stop: int) -> U64:
    return field.reduce(prefix[:, stop] + np.uint64(field.P) - prefix[:, start])
