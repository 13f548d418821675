"""Megatron Core modules, through their `sharded_state_dict`: keys, global offsets, prepended layer and expert axes,
factories (fused gate and up). Which copy is the main replica does not matter: equal boxes are replicas.

Written against megatron-core 0.16; nothing of Megatron is imported before a module of it is met.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ckpt.adapters.placement import Placement
from ckpt.errors import StateMismatch, Unsupported
from ckpt.geometry import Box
from ckpt.state.names import Key, join

if TYPE_CHECKING:
    from ckpt.adapters.capture import Walker


def is_megatron(module: nn.Module) -> bool:
    """Whether a module, perhaps wrapped in Megatron's DDP or Float16Module, has a sharded_state_dict."""
    return hasattr(unwrap(module), "sharded_state_dict") and "megatron.core" in sys.modules


def are_chunks(node: object) -> bool:
    """Whether a list or tuple is one model as Megatron's `get_model` gives it: a module alone, or the chunks of
    interleaved pipeline stages, each of which knows its own `vp_stage`. They have one name: Megatron's keys and offsets
    are those of the whole model, so that no layout enters the names."""
    if not isinstance(node, list | tuple) or not all(isinstance(x, nn.Module) and is_megatron(x) for x in node):
        return False
    stages = [getattr(unwrap(x), "vp_stage", None) for x in node]
    return len(node) == 1 or (len(node) > 1 and stages == list(range(len(node))))


def unwrap(module: nn.Module) -> nn.Module:
    """The module inside Megatron's wrappers."""
    while type(module).__module__.startswith("megatron.core") and isinstance(
        getattr(module, "module", None), nn.Module
    ):
        module = module.module  # type: ignore[assignment]
    return module


def capture(walker: Walker, module: nn.Module, path: tuple[Key, ...]) -> None:
    """Captures a model chunk. Names are Megatron's keys; homogeneous layers are stacked on a leading axis."""
    from ckpt.adapters.capture import Named

    chunk: Any = unwrap(module)
    for entry in _entries(chunk.sharded_state_dict(metadata=_metadata())):
        kind = type(entry).__name__
        if kind == "ShardedTensor":
            placement, local, key = _placement(entry, join(path)), entry.data, entry.key
        elif kind == "ShardedTensorFactory":
            placement, local, key = _factory_placement(entry, join(path))
        elif kind == "ShardedObject":
            _object(entry, join((*path, entry.key)))
            continue
        elif kind == "LocalNonpersistentObject":
            continue
        else:
            raise Unsupported(f"{join(path)}: Megatron gives an entry of class {kind}, which ckpt does not know")
        walker.tensor(local, (*path, key), placement)
        walker.parameters.setdefault(id(local), Named((*path, key), placement, local.requires_grad))


def _metadata() -> dict[str, Any]:
    from megatron.core import parallel_state

    return {
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
    }


def _entries(node: Any) -> Iterator[Any]:
    if isinstance(node, Mapping):
        for value in node.values():
            yield from _entries(value)
    elif isinstance(node, list | tuple):
        for value in node:
            yield from _entries(value)
    else:
        yield node


def _placement(entry: Any, where: str) -> Placement:
    box = _box(entry, where)
    return Placement(tuple(entry.global_shape), entry.prepend_axis_num, ((box, Box.whole(tuple(entry.local_shape))),))


def _box(entry: Any, where: str) -> Box:
    if entry.flattened_range is not None:
        raise Unsupported(f"{where}/{entry.key}: a flattened range; use megatron-core 0.16 or newer")
    extent = (1,) * entry.prepend_axis_num + tuple(entry.local_shape)
    return Box(tuple(entry.global_offset), extent)


def _factory_placement(factory: Any, where: str) -> tuple[Placement, torch.Tensor, str]:
    """Placement of a parameter that a factory cuts into pieces (gate and up): where each piece lies, from its view."""
    pieces = [p for p in _entries(factory.build()) if type(p).__name__ == "ShardedTensor"]
    keys, shapes = {p.key for p in pieces}, {tuple(p.global_shape) for p in pieces}
    if len(keys) != 1 or len(shapes) != 1:
        raise Unsupported(f"{where}/{factory.key}: its factory makes tensors of several names: {sorted(keys)}")
    parts = tuple((_box(p, where), _view_box(factory.data, p.data, f"{where}/{p.key}")) for p in pieces)
    placement = Placement(shapes.pop(), pieces[0].prepend_axis_num, parts)
    if sum(inner.volume for _, inner in parts) != factory.data.numel():
        raise StateMismatch(f"{where}/{factory.key}: the pieces of its factory do not make up the parameter")
    return placement, factory.data, pieces[0].key


def _view_box(base: torch.Tensor, view: torch.Tensor, where: str) -> Box:
    """Which box of a contiguous tensor a narrowed view of it is."""
    same = view.untyped_storage().data_ptr() == base.untyped_storage().data_ptr()
    if not (same and base.is_contiguous()) or view.stride() != base.stride() or view.dim() != base.dim():
        raise Unsupported(
            f"{where}: a piece that its factory makes is not a plain part of the parameter in memory (transposed or "
            "copied, as by the legacy GroupedMLP); use SequentialMLP, or declare it with ckpt.ShardedTensor"
        )
    rest = int(view.storage_offset()) - int(base.storage_offset())
    offset = []
    for stride in base.stride():
        at, rest = divmod(rest, stride)
        offset.append(at)
    return Box(tuple(offset), tuple(view.shape))


def _object(entry: Any, where: str) -> None:
    """Megatron's opaque objects: empty extra states hold nothing; anything else is not carried yet."""
    data = entry.data
    if data is None or (hasattr(data, "getbuffer") and not data.getbuffer().nbytes):
        return
    if isinstance(data, torch.Tensor) and data.numel() == 0:
        return
    raise Unsupported(f"{where}: an extra state of class {type(data).__name__} (FP8 or a custom module); not carried")
