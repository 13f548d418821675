"""What is stored where: logical tensors, the arrays that hold them, and the arrays' objects.

A tensor of 64 KiB or more has an array of its own on the canonical grid. Smaller ones of one dtype share a packed
one-dimensional array: sorted by name, each flattened in row-major order, none across the border of an object.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ckpt.geometry.box import Box, Index
from ckpt.geometry.grid import MIB, Grid, canonical_grid

PACK_BELOW = 64 * 1024
PACK_OBJECT = 4 * MIB


@dataclass(frozen=True, slots=True, order=True)
class TensorSpec:
    """A logical tensor: full name, global shape, dtype name, bytes per element, number of stacking axes."""

    name: str
    shape: Index
    dtype: str
    itemsize: int
    stack: int = 0

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.itemsize

    @property
    def packed(self) -> bool:
        return self.nbytes < PACK_BELOW


@dataclass(frozen=True, slots=True)
class StoredArray:
    """One Zarr array. `tensors` are (index into the catalogue's tensors, first element): one entry with element 0
    for an array of its own; for a packed array all its tensors, in the order of their elements."""

    dtype: str
    itemsize: int
    packed: bool
    grid: Grid
    tensors: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class StoredObject:
    """One object of an array: the box of array elements it holds, and which tensor boxes those are.

    `pieces` are (tensor index, box of that tensor, first element within the object); for an array of one tensor
    the piece is the object's own box and the last number is 0.
    """

    array: int
    index: Index
    box: Box
    pieces: tuple[tuple[int, Box, int], ...]


@dataclass(frozen=True, slots=True)
class Catalogue:
    """All tensors of a state, sorted by name, and the arrays that store them: a function of the specs alone."""

    tensors: tuple[TensorSpec, ...]
    arrays: tuple[StoredArray, ...]

    @staticmethod
    def of(specs: Sequence[TensorSpec]) -> Catalogue:
        """Raises ValueError when two specs have one name."""
        tensors = tuple(sorted(specs))
        if len({t.name for t in tensors}) != len(tensors):
            raise ValueError("two logical tensors have one name")
        arrays, packs = [], defaultdict(list)
        for index, spec in enumerate(tensors):
            if spec.packed:
                packs[spec.dtype].append(index)
            else:
                grid = canonical_grid(spec.shape, spec.itemsize, spec.stack)
                arrays.append(StoredArray(spec.dtype, spec.itemsize, False, grid, ((index, 0),)))
        arrays += [_pack(tensors, dtype, members) for dtype, members in sorted(packs.items())]
        return Catalogue(tensors, tuple(arrays))

    def objects(self) -> Iterator[StoredObject]:
        """Every stored object, array by array in the catalogue's order, cells in row-major order."""
        for number, array in enumerate(self.arrays):
            yield from self.objects_of(number, array)

    def objects_of(self, number: int, array: StoredArray) -> Iterator[StoredObject]:
        """The objects of one array, `number` being its place in the catalogue."""
        if not array.packed:
            for index, box in array.grid.cells():
                yield StoredObject(number, index, box, ((array.tensors[0][0], box, 0),))
            return
        members = iter(array.tensors)
        upcoming = next(members, None)
        for index, box in array.grid.cells():
            pieces = []
            while upcoming is not None and upcoming[1] < box.stop[0]:
                tensor, start = upcoming
                spec = self.tensors[tensor]
                if spec.nbytes:
                    pieces.append((tensor, Box.whole(spec.shape), start - box.offset[0]))
                upcoming = next(members, None)
            yield StoredObject(number, index, box, tuple(pieces))


def _pack(tensors: Sequence[TensorSpec], dtype: str, members: Sequence[int]) -> StoredArray:
    itemsize = tensors[members[0]].itemsize
    room = PACK_OBJECT // itemsize
    placed, end = [], 0
    for index in members:
        size = math.prod(tensors[index].shape)
        if size and end // room != (end + size - 1) // room:
            end = -(-end // room) * room
        placed.append((index, end))
        end += size
    if end <= room:
        grid = canonical_grid((end,), itemsize)
    else:
        grid = Grid((end,), (room,), (room // 2,))
    return StoredArray(dtype, itemsize, True, grid, tuple(placed))
