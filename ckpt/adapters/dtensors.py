"""DTensor: where the local tensor of this rank lies in the logical tensor."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, product
from typing import Any, TypeAlias

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from ckpt.adapters.placement import Placement
from ckpt.errors import StateMismatch, Unsupported
from ckpt.geometry import Box

Runs: TypeAlias = list[tuple[int, int]]
"""Indices of one axis in the order in which they lie in local memory, as runs (start, length)."""


def is_dtensor(tensor: object) -> bool:
    return isinstance(tensor, DTensor)


def local_of(tensor: torch.Tensor, where: str) -> tuple[torch.Tensor, Placement]:
    """Local tensor and placement of a DTensor on a mesh of any number of axes, each of which replicates, shards (evenly
    or not), or shards with strides (FSDP2 over tensor parallelism).

    Raises Unsupported for partial sums, StateMismatch where the local shape is not the expected one.
    """
    assert isinstance(tensor, DTensor)
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise Unsupported(f"{where}: this rank is not in the device mesh of the DTensor; leave it out here")
    axes = runs_of(tuple(tensor.shape), tuple(mesh.shape), coordinate, tensor.placements, where)
    local = tensor._local_tensor
    expected = [sum(length for _, length in runs) for runs in axes]
    if list(local.shape) != expected:
        raise StateMismatch(f"{where}: local shape {list(local.shape)} of a DTensor that should have {expected}")
    return local, Placement(tuple(tensor.shape), 0, tuple(_parts(axes)))


def runs_of(
    shape: Sequence[int], mesh: Sequence[int], coordinate: Sequence[int], placements: Sequence[Any], where: str
) -> list[Runs]:
    """What of each axis of a tensor a mesh coordinate holds. Mesh axes are taken from the first to the last, and each
    cuts what the one before has left as `torch.chunk` does."""
    axes: list[Runs] = [[(0, n)] if n else [] for n in shape]
    for size, at, placement in zip(mesh, coordinate, placements, strict=True):
        factor = _split_factor(placement)
        if factor is not None:
            pieces = [_chunk(_chunk(axes[placement.dim], factor, n), size, at) for n in range(factor)]
            axes[placement.dim] = _joined([run for piece in pieces for run in piece])
        elif type(placement) is not Replicate:
            raise Unsupported(
                f"{where}: DTensor placement {placement}; only Shard and Replicate are carried: redistribute it first"
            )
    return axes


def _split_factor(placement: Any) -> int | None:
    """How many pieces an axis is first cut into, each of which is then cut over the mesh axis; None for no shard.
    A strided shard (torch.distributed.tensor.placement_types._StridedShard) stands for a cut that a later mesh axis of
    the list has made before."""
    if type(placement) is Shard:
        return 1
    if type(placement).__name__ == "_StridedShard":
        return int(placement.split_factor)
    return None


def _chunk(runs: Runs, count: int, number: int) -> Runs:
    """Piece `number` of `count`: all have the length rounded up, but the last ones, which may be shorter or empty."""
    total = sum(length for _, length in runs)
    step = -(-total // count)
    first, last = min(step * number, total), min(step * (number + 1), total)
    found, at = [], 0
    for start, length in runs:
        low, high = max(first, at), min(last, at + length)
        if low < high:
            found.append((start + low - at, high - low))
        at += length
    return found


def _joined(runs: Runs) -> Runs:
    """The same indices with adjacent runs made one."""
    found: Runs = []
    for start, length in runs:
        if found and sum(found[-1]) == start:
            found[-1] = (found[-1][0], found[-1][1] + length)
        else:
            found.append((start, length))
    return found


def _parts(axes: Sequence[Runs]) -> list[tuple[Box, Box]]:
    """(box of the logical tensor, box of the local tensor) for each choice of one run an axis."""
    if not all(axes):
        empty = Box((0,) * len(axes), tuple(sum(n for _, n in runs) for runs in axes))
        return [(empty, empty)]
    cells = []
    for runs in axes:
        ends = accumulate(length for _, length in runs)
        cells.append([(start, end - n, n) for (start, n), end in zip(runs, ends, strict=True)])
    parts = []
    for cell in product(*cells):
        offset, inner, extent = (tuple(one[i] for one in cell) for i in range(3))
        parts.append((Box(offset, extent), Box(inner, extent)))
    return parts
