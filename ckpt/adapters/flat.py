"""Where a flat piece of a local tensor lies in the logical tensor: what one ZeRO rank keeps of a parameter's state."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from ckpt.adapters.placement import Placement, plain_bits
from ckpt.errors import StateMismatch
from ckpt.geometry import Box
from ckpt.geometry.placement import flat_interval
from ckpt.state.captured import Shard


@dataclass(frozen=True)
class FlatPlacement(Placement):
    """Placement of a 1-D tensor of `length` elements that are consecutive, in row-major order, in a local tensor.

    The piece is cut into blocks that are boxes of the local tensor; each part is the (box of the logical tensor, box of
    its block), and `blocks` has for each part the (number of its block's first element in the piece, extent of the
    block)."""

    length: int = 0
    blocks: tuple[tuple[int, tuple[int, ...]], ...] = field(default=())

    def shards(self, local: torch.Tensor, where: str) -> list[Shard]:
        """The parts of the piece as views of its live memory.

        Raises Unsupported for tensors whose memory is not plain, StateMismatch where the length is another one."""
        flat = plain_bits(local, where)
        if tuple(flat.shape) != (self.length,):
            raise StateMismatch(f"{where}: shape {list(flat.shape)} for a piece of {self.length} elements")
        found = []
        for (box, inner), (first, extent) in zip(self.parts, self.blocks, strict=True):
            block = flat[first : first + math.prod(extent)].view(extent)
            found.append(Shard(box, block[inner.slices].view(box.extent)))
        return found


def flat_piece(whole: Placement, shape: Sequence[int], start: int, stop: int) -> FlatPlacement:
    """Placement of the elements start..stop, in row-major order, of a local tensor of a shape, itself placed by
    `whole` (which may have several parts: fused gate and up, say).

    Raises ValueError where the interval leaves the local tensor.
    """
    shape = tuple(shape)
    steps = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    parts, blocks = [], []
    for block in flat_interval(shape, start, stop):
        first = sum(o * s for o, s in zip(block.offset, steps, strict=True)) - start
        for outer, inner in whole.parts:
            common = block.intersect(inner)
            if common is None:
                continue
            lead = len(outer.extent) - len(inner.extent)
            moved = (o + c - i for o, c, i in zip(outer.offset[lead:], common.offset, inner.offset, strict=True))
            box = Box((*outer.offset[:lead], *moved), (*outer.extent[:lead], *common.extent))
            parts.append((box, common.relative_to(block)))
            blocks.append((first, block.extent))
    return FlatPlacement(whole.shape, whole.stack, tuple(parts), stop - start, tuple(blocks))
