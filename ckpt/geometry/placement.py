"""Placement rules: which boxes of a logical tensor a rank holds under the usual ways to cut one.

Every rule returns boxes in the order in which the pieces lie in the rank's local tensor.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from ckpt.geometry.box import Box, Index


def even_cut(size: int, parts: int, index: int) -> tuple[int, int]:
    """(offset, extent) of part `index` when `size` is cut into `parts` equal parts.

    Raises ValueError when it does not divide.
    """
    if size % parts:
        raise ValueError(f"{size} does not divide into {parts} equal parts")
    return size // parts * index, size // parts


def ceil_cut(size: int, parts: int, index: int) -> tuple[int, int]:
    """(offset, extent) of part `index` under `torch.chunk`'s rule: parts of ceil(size / parts), the last ones
    shorter or empty. An empty part lies at offset `size`, so it never collides with a real one."""
    step = -(-size // parts)
    offset = min(step * index, size)
    return offset, min(step, size - offset)


def balanced_cut(size: int, parts: int, index: int) -> tuple[int, int]:
    """(offset, extent) of part `index` when the first `size % parts` parts have one element more."""
    base, more = divmod(size, parts)
    return base * index + min(index, more), base + (index < more)


def shard(shape: Index, cuts: Iterable[tuple[int, int, int]], cut=even_cut) -> Box:  # type: ignore[no-untyped-def]
    """The box left after cutting axes in turn: each cut is (axis, parts, index).

    Several cuts may name one axis (two mesh dimensions on one tensor dimension): a later cut divides what the
    earlier ones left. `cut` is one of the rules above.
    """
    offset, extent = [0] * len(shape), list(shape)
    for axis, parts, index in cuts:
        start, size = cut(extent[axis], parts, index)
        offset[axis] += start
        extent[axis] = size
    return Box(tuple(offset), tuple(extent))


def fused_blocks(shape: Index, axis: int, blocks: Sequence[int], parts: int, index: int) -> list[Box]:
    """Boxes of one rank when `axis` is a fusion of blocks (gate and up, or Q, K and V), each cut separately.

    `blocks` are the sizes of the blocks along `axis`; each must divide into `parts`. The rank's local tensor is
    its parts of the blocks, one after the other.
    """
    if sum(blocks) != shape[axis]:
        raise ValueError(f"blocks {list(blocks)} do not add up to axis {axis} of {shape}")
    boxes, start = [], 0
    for size in blocks:
        inner, extent = even_cut(size, parts, index)
        boxes.append(_along(shape, axis, start + inner, extent))
        start += size
    return boxes


def stacked(box: Box, *indices: int) -> Box:
    """The box of one slice of a tensor whose leading axes stack layers (or layers and experts)."""
    return Box(indices + box.offset, (1,) * len(indices) + box.extent)


def flat_interval(shape: Index, start: int, stop: int) -> list[Box]:
    """Boxes of the elements start..stop of a tensor in row-major order: at most 2 * ndim - 1 of them.

    Raises ValueError when the interval leaves the tensor.
    """
    if not 0 <= start <= stop <= math.prod(shape):
        raise ValueError(f"interval {start}:{stop} leaves a tensor of shape {shape}")
    if start == stop:
        return []
    if not shape:
        return [Box((), ())]
    return _flat(shape, start, stop)


def _flat(shape: Index, start: int, stop: int) -> list[Box]:
    if len(shape) == 1:
        return [Box((start,), (stop - start,))]
    row = math.prod(shape[1:])
    first, head = divmod(start, row)
    last, tail = divmod(stop, row)
    if first == last:
        return [stacked(b, first) for b in _flat(shape[1:], head, tail)]
    boxes = []
    if head:
        boxes += [stacked(b, first) for b in _flat(shape[1:], head, row)]
        first += 1
    if first < last:
        boxes.append(_along(shape, 0, first, last - first))
    if tail:
        boxes += [stacked(b, last) for b in _flat(shape[1:], 0, tail)]
    return boxes


def _along(shape: Index, axis: int, offset: int, extent: int) -> Box:
    offsets, extents = [0] * len(shape), list(shape)
    offsets[axis], extents[axis] = offset, extent
    return Box(tuple(offsets), tuple(extents))
