"""The canonical chunk grid: a pure function of a tensor's shape and item size.

No layout enters it, so the stored files are a function of the state alone.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from ckpt.geometry.box import Box, Index

MIB = 1 << 20
OBJECT_LIMIT = 16 * MIB
OBJECT_ENOUGH = 4 * MIB
CHUNK_LIMIT = 2 * MIB
SLICE_ALONE = 1 * MIB
SHORT_AXIS = 64
CUT_HALVINGS = 3  # 2**3 = 8 cuts


@dataclass(frozen=True, slots=True)
class Grid:
    """Two nested regular grids over an array: stored objects, and the chunks inside each object.

    shape: of the array; cell: extent of one object; chunk: extent of one inner chunk. Along each axis a cell is a
    power-of-two number of chunks. Cells at the far edges reach past the array.
    """

    shape: Index
    cell: Index
    chunk: Index

    def __post_init__(self) -> None:
        for n, c, k in zip(self.shape, self.cell, self.chunk, strict=True):
            if min(c, k) < 1 or c % k or (c // k) & (c // k - 1) or n < 0:
                raise ValueError(f"grid: cell {self.cell} is no power-of-two multiple of chunk {self.chunk}")

    @property
    def counts(self) -> Index:
        """Objects along each axis."""
        return tuple(-(-n // c) for n, c in zip(self.shape, self.cell, strict=True))

    def cells(self) -> Iterator[tuple[Index, Box]]:
        """Every object in row-major order: its grid index and its box, clipped to the array."""
        for index in itertools.product(*map(range, self.counts)):
            yield index, self.cell_box(index)

    def cell_box(self, index: Index) -> Box:
        """The box of one object, clipped to the array."""
        return self._box(index, self.cell, Box.whole(self.shape))

    def chunks_of(self, box: Box) -> Iterator[Box]:
        """The inner chunks of an object's (clipped) box, in row-major order."""
        counts = (-(-e // c) for e, c in zip(box.extent, self.chunk, strict=True))
        for index in itertools.product(*map(range, counts)):
            inside = self._box(index, self.chunk, Box.whole(box.extent))
            yield Box(tuple(a + b for a, b in zip(box.offset, inside.offset, strict=True)), inside.extent)

    def object_bytes(self, box: Box, itemsize: int) -> int:
        """Size of the stored object of a (clipped) box.

        Each inner chunk that meets the array is stored whole with a CRC32C of 4 bytes; then an index of 16 bytes
        for every inner chunk of the cell, with a CRC32C of its own (Zarr v3, sharding_indexed).
        """
        present = math.prod(-(-e // c) for e, c in zip(box.extent, self.chunk, strict=True))
        slots = math.prod(c // k for c, k in zip(self.cell, self.chunk, strict=True))
        return present * (math.prod(self.chunk) * itemsize + 4) + slots * 16 + 4

    @staticmethod
    def _box(index: Index, step: Index, within: Box) -> Box:
        offset = tuple(i * s for i, s in zip(index, step, strict=True))
        stop = map(min, (o + s for o, s in zip(offset, step, strict=True)), within.extent)
        return Box(offset, tuple(e - o for e, o in zip(stop, offset, strict=True)))


def canonical_grid(shape: Index, itemsize: int, stack: int = 0) -> Grid:
    """The grid of a tensor of this shape and item size (bytes), whose first `stack` axes stack layers or experts.

    Cells come from halving, rounding up, the axis halved least so far (ties: the lowest axis; extents of 64 or
    less are left alone while any longer axis remains). An object is the first cell that holds at most 16 MiB and
    then either at most 4 MiB or has each of the last two axes cut in 8. A chunk is the first cell after that of at
    most 2 MiB. The object is then rounded up to whole chunks; should that take it past 16 MiB, a later cell, the first
    that stays within, is the object. A stacked axis has extent 1 wherever one slice holds 1 MiB or more.
    """
    cell = [max(1, n) for n in shape]
    for axis in range(stack):
        if math.prod(cell[axis + 1 :]) * itemsize >= SLICE_ALONE:
            cell[axis] = 1
    halvings = [0] * len(cell)
    halved: list[int] = []
    size = list(cell)

    def nbytes() -> int:
        return math.prod(size) * itemsize

    def halve() -> bool:
        axes = [i for i, n in enumerate(size) if n > SHORT_AXIS] or [i for i, n in enumerate(size) if n > 1]
        if not axes:
            return False
        axis = min(axes, key=lambda i: halvings[i])
        halvings[axis] += 1
        halved.append(axis)
        size[axis] = -(-cell[axis] // (1 << halvings[axis]))
        return True

    def cut_enough() -> bool:
        return all(halvings[i] >= CUT_HALVINGS or size[i] <= SHORT_AXIS for i in range(len(size))[-2:])

    while nbytes() > OBJECT_LIMIT and halve():
        pass
    while nbytes() > OBJECT_ENOUGH and not cut_enough() and halve():
        pass
    cuts = len(halved)
    while nbytes() > CHUNK_LIMIT and halve():
        pass
    chunk = tuple(size)
    whole = [c << halved[cuts:].count(i) for i, c in enumerate(chunk)]
    while math.prod(whole) * itemsize > OBJECT_LIMIT:
        whole[halved[cuts]] >>= 1
        cuts += 1
    return Grid(tuple(shape), tuple(whole), chunk)
