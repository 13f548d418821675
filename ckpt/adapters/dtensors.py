"""DTensor: the placement of its local shard."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from ckpt.adapters.placement import Placement
from ckpt.errors import StateMismatch, Unsupported
from ckpt.geometry import Box


def is_dtensor(tensor: object) -> bool:
    return isinstance(tensor, DTensor)


def local_of(tensor: torch.Tensor, where: str) -> tuple[torch.Tensor, Placement]:
    """Local tensor and placement of a DTensor whose mesh axes shard (evenly or not) or replicate.

    Raises Unsupported for partial and strided placements, StateMismatch where the local shape is not the expected one.
    """
    assert isinstance(tensor, DTensor)
    for placement in tensor.placements:
        if type(placement) not in (Shard, Replicate):
            raise Unsupported(f"{where}: DTensor placement {placement}; only Shard and Replicate are carried so far")
    if tensor.device_mesh.get_coordinate() is None:
        raise Unsupported(f"{where}: this rank is not in the device mesh of the DTensor; leave it out here")
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    local = tensor._local_tensor
    if tuple(local.shape) != tuple(shape):
        raise StateMismatch(f"{where}: local shape {list(local.shape)} of a DTensor that should have {list(shape)}")
    start = tuple(o if n else 0 for o, n in zip(offset, shape, strict=True))
    return local, Placement(tuple(tensor.shape), 0, ((Box(start, tuple(shape)), Box.whole(tuple(shape))),))
