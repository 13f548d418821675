"""What one rank has of a logical tensor as one local tensor: along each axis, runs of indices, joined in their order.

So are cut: rows or columns (one run on one axis), fused gate and up (two runs), the layers of interleaved pipeline
stages (a run for each chunk of the model), and any of them at once on different axes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TypeAlias

from ckpt.geometry import Box

Run: TypeAlias = tuple[int, int]  # the first index, and how many


@dataclass(frozen=True)
class Part:
    """runs: of each axis, in the order in which they lie in the local tensor; none of length zero."""

    runs: tuple[tuple[Run, ...], ...]

    @staticmethod
    def of(runs: Sequence[Sequence[Run]]) -> Part:
        """Leaves out empty runs, and joins those that follow one another."""
        return Part(tuple(_joined(axis) for axis in runs))

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the local tensor."""
        return tuple(sum(count for _, count in axis) for axis in self.runs)

    @property
    def volume(self) -> int:
        return math.prod(self.shape)

    @property
    def boxes(self) -> list[tuple[Box, Box]]:
        """Each box of the logical tensor with the box of the local tensor that holds it."""
        return _boxes([[(first, at, count) for first, at, count in _placed(axis)] for axis in self.runs])

    def within(self, band: Box) -> Iterator[Stretch]:
        """What a band holds of the part. band: a box whose elements lie together in the row-major logical tensor."""
        met = [_met(axis, o, e) for axis, o, e in zip(self.runs, band.offset, band.extent, strict=True)]
        if not all(met):
            return
        outer = next((i for i, e in enumerate(band.extent) if e != 1), len(met) - 1) + 1
        shape = self.shape
        strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
        inner = _boxes(met[outer:])
        for lead in product(*met[:outer]):
            start = sum(at * stride for (_, at, _), stride in zip(lead, strides, strict=False))
            extent = tuple(count for _, _, count in lead)
            from_ = tuple(first for first, _, _ in lead)
            pairs = [
                (Box(from_ + a.offset, extent + a.extent), Box((0,) * len(extent) + b.offset, extent + b.extent))
                for a, b in inner
            ]
            yield Stretch(start, extent + shape[outer:], tuple(pairs))


@dataclass(frozen=True)
class Stretch:
    """Elements that lie together in a local tensor. start: the first one's number; shape: as an array of their own;
    pairs: each box of the band, in the band's own coordinates, with its box of that array."""

    start: int
    shape: tuple[int, ...]
    pairs: tuple[tuple[Box, Box], ...]


def _joined(runs: Sequence[Run]) -> tuple[Run, ...]:
    found: list[Run] = []
    for first, count in runs:
        if count and found and sum(found[-1]) == first:
            found[-1] = found[-1][0], found[-1][1] + count
        elif count:
            found.append((first, count))
    return tuple(found)


def _placed(runs: Sequence[Run]) -> list[tuple[int, int, int]]:
    """(first index, place in the local tensor, how many) of each run."""
    found, at = [], 0
    for first, count in runs:
        found.append((first, at, count))
        at += count
    return found


def _met(runs: Sequence[Run], offset: int, extent: int) -> list[tuple[int, int, int]]:
    """The same of what lies in an interval, with first indices counted from its beginning."""
    found = []
    for first, at, count in _placed(runs):
        low, high = max(first, offset), min(first + count, offset + extent)
        if low < high:
            found.append((low - offset, at + low - first, high - low))
    return found


def _boxes(axes: Sequence[Sequence[tuple[int, int, int]]]) -> list[tuple[Box, Box]]:
    found = []
    for runs in product(*axes):
        extent = tuple(count for _, _, count in runs)
        found.append((Box(tuple(f for f, _, _ in runs), extent), Box(tuple(a for _, a, _ in runs), extent)))
    return found
