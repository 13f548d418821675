"""Loader states of other libraries as plain values: tensors and arrays in them become bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ckpt.errors import CorruptCheckpoint, Unsupported
from ckpt.state.dtypes import bits, dtype_name, torch_dtype

_TENSOR, _ARRAY = "ckpt.data tensor", "ckpt.data array"


def freeze(node: Any, where: str) -> Any:
    """A copy of nested dicts, lists and tuples in which every tensor and array is a dict of plain values. Other values
    stay as they are; saving refuses those that it does not know. Raises Unsupported naming `where`."""
    if isinstance(node, torch.Tensor):
        if node.layout is not torch.strided or node.device.type != "cpu":
            raise Unsupported(
                f"{where}: a loader state holds a tensor that is not a dense one on the CPU; leave it out"
            )
        raw = bits(node.detach().resolve_conj().resolve_neg()).contiguous().numpy().tobytes()
        return {_TENSOR: (dtype_name(node.dtype, where), list(node.shape), raw)}
    if isinstance(node, np.ndarray):
        if node.dtype.kind not in "biufc" or not node.dtype.isnative:
            raise Unsupported(f"{where}: a loader state holds a NumPy array of {node.dtype}; leave it out")
        return {_ARRAY: (node.dtype.str, list(node.shape), node.tobytes())}
    if isinstance(node, dict):
        if _TENSOR in node or _ARRAY in node:
            raise Unsupported(f"{where}: a loader state uses the key {_TENSOR!r} or {_ARRAY!r} itself; use another")
        return {key: freeze(value, f"{where}/{key}") for key, value in node.items()}
    if type(node) in (list, tuple):
        return type(node)(freeze(value, f"{where}/{i}") for i, value in enumerate(node))
    return node


def thaw(node: Any, where: str) -> Any:
    """Inverse of `freeze`, with new containers. Raises CorruptCheckpoint naming `where`."""
    if isinstance(node, dict):
        try:
            if _TENSOR in node:
                name, shape, raw = node[_TENSOR]
                flat = torch.frombuffer(bytearray(raw), dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)
                return flat.view(torch_dtype(name)).reshape(shape)
            if _ARRAY in node:
                name, shape, raw = node[_ARRAY]
                return np.frombuffer(bytearray(raw), np.dtype(name)).reshape(shape)
        except (ValueError, TypeError, RuntimeError) as error:
            raise CorruptCheckpoint(f"{where}: not a loader state that ckpt wrote: {error}") from None
        return {key: thaw(value, f"{where}/{key}") for key, value in node.items()}
    if type(node) in (list, tuple):
        return type(node)(thaw(value, f"{where}/{i}") for i, value in enumerate(node))
    return node
