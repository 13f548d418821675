"""Cutting a tensor into boxes whose elements lie together in a row-major file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ckpt.geometry import Box


def slabs(shape: tuple[int, ...], itemsize: int, limit: int, units: Sequence[tuple[int, ...]] = ()) -> Iterator[Box]:
    """Boxes that cover a tensor, in the order of its elements, each contiguous in row-major order and of at most
    `limit` bytes, or one element. None for a tensor without elements.

    units: extents of what is stored together, the larger first: where a slab has room for one along the axis that is
    cut, it begins and ends between two of them."""
    whole = Box.whole(shape)
    if whole.volume:
        yield from _cut(whole, 0, itemsize, limit, units)


def _cut(box: Box, axis: int, itemsize: int, limit: int, units: Sequence[tuple[int, ...]]) -> Iterator[Box]:
    if box.volume * itemsize <= limit or axis == len(box.extent):
        yield box
        return
    row = box.volume // box.extent[axis] * itemsize
    step = max(1, limit // row)
    step = next((step // unit[axis] * unit[axis] for unit in units if unit[axis] <= step), step)
    for start in range(0, box.extent[axis], step):
        offset, extent = list(box.offset), list(box.extent)
        offset[axis] += start
        extent[axis] = min(step, box.extent[axis] - start)
        yield from _cut(Box(tuple(offset), tuple(extent)), axis + 1, itemsize, limit, units)
