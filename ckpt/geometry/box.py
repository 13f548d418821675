"""Boxes: axis-aligned regions of a logical tensor."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import TypeAlias

Index: TypeAlias = tuple[int, ...]


@dataclass(frozen=True, slots=True, order=True)
class Box:
    """A region of a logical tensor: `offset[i] <= index[i] < offset[i] + extent[i]`.

    Both tuples have one non-negative integer per axis; a 0-dim tensor has the one box `Box((), ())` of volume 1.
    Raises ValueError when the lengths differ or a number is negative.
    """

    offset: Index
    extent: Index

    def __post_init__(self) -> None:
        if len(self.offset) != len(self.extent):
            raise ValueError(f"box offset {self.offset} and extent {self.extent} differ in length")
        if any(n < 0 for n in self.offset + self.extent):
            raise ValueError(f"box offset {self.offset}, extent {self.extent}: negative number")

    @staticmethod
    def whole(shape: Index) -> Box:
        """The box that is all of a tensor of this shape."""
        return Box((0,) * len(shape), tuple(shape))

    @property
    def stop(self) -> Index:
        return tuple(o + e for o, e in zip(self.offset, self.extent, strict=True))

    @property
    def volume(self) -> int:
        """Number of elements."""
        return math.prod(self.extent)

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(o, o + e) for o, e in zip(self.offset, self.extent, strict=True))

    def indices(self) -> Iterator[Index]:
        """Every index in the box, in row-major order."""
        return product(*(range(o, o + e) for o, e in zip(self.offset, self.extent, strict=True)))

    def intersect(self, other: Box) -> Box | None:
        """The common region, or None when no element is common."""
        lo = tuple(map(max, self.offset, other.offset))
        hi = tuple(map(min, self.stop, other.stop))
        if any(h <= b for h, b in zip(hi, lo, strict=True)):
            return None
        return Box(lo, tuple(h - b for h, b in zip(hi, lo, strict=True)))

    def contains(self, other: Box) -> bool:
        return all(
            a <= b and b + f <= a + e
            for a, e, b, f in zip(self.offset, self.extent, other.offset, other.extent, strict=True)
        )

    def relative_to(self, outer: Box) -> Box:
        """The same region in coordinates that start at `outer.offset`."""
        return Box(tuple(a - b for a, b in zip(self.offset, outer.offset, strict=True)), self.extent)

    def pieces(self, most: int) -> Iterator[Box]:
        """Parts of at most `most` elements: runs of the first axis that is longer than 1, cut again where need be."""
        if self.volume <= most:
            yield self
            return
        axis = next(i for i, n in enumerate(self.extent) if n > 1)
        step = max(1, most // (self.volume // self.extent[axis]))
        for start in range(0, self.extent[axis], step):
            offset, extent = list(self.offset), list(self.extent)
            offset[axis] += start
            extent[axis] = min(step, extent[axis] - start)
            yield from Box(tuple(offset), tuple(extent)).pieces(most)

    def __str__(self) -> str:
        return "[" + ", ".join(f"{o}:{o + e}" for o, e in zip(self.offset, self.extent, strict=True)) + "]"
