"""Walks a user's state and captures it: every tensor as live views with boxes, every plain value by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from ckpt.adapters import dtensors, megatron, optimizers
from ckpt.adapters.placement import Placement
from ckpt.errors import StateMismatch, Unsupported
from ckpt.geometry import Box, TensorSpec
from ckpt.state import Captured, PerRank, Replicated, ShardedTensor, TrainState
from ckpt.state.dtypes import STORED, dtype_name
from ckpt.state.names import Key, join
from ckpt.state.values import Json

Path = tuple[Key, ...]
Setter = Callable[[Any], None]


@dataclass(frozen=True)
class Known:
    """What a checkpoint holds, for a capture that is to be loaded: tensors by each of their names, encoded values."""

    tensors: Mapping[str, TensorSpec]
    values: Mapping[str, Json]


@dataclass(frozen=True)
class Named:
    """A parameter that a module of the state gave: its path and placement. Optimizers find theirs by identity."""

    path: Path
    placement: Placement


def capture(state: Mapping[str, Any] | TrainState, known: Known | None = None) -> Captured:
    """Captures a state for saving (known is None) or for loading into it.

    Modules come first, so that optimizers find the names of their parameters wherever they stand in the dict. Raises
    Unsupported or StateMismatch naming the entry; nothing is changed.
    """
    walker = Walker(known)
    if isinstance(state, TrainState):
        walker.mapping(state.parts(), ())
        walker.mapping(state.extra, ())
    elif isinstance(state, Mapping):
        walker.mapping(state, ())
    else:
        raise Unsupported(f"the state is a {type(state).__name__}; pass a dict or a ckpt.TrainState")
    for later in walker.later:
        later()
    walker.captured.seal()
    return walker.captured


class Walker:
    """One pass over a state. `parameters` maps id(parameter) to its name; `later` runs when all modules are known."""

    def __init__(self, known: Known | None) -> None:
        self.known = known
        self.captured = Captured()
        self.parameters: dict[int, Named] = {}
        self.later: list[Callable[[], None]] = []

    def mapping(self, state: Mapping[Any, Any], path: Path) -> None:
        for key in list(state):
            self.entry(state[key], (*path, key), _item_setter(state, key))

    def entry(self, node: Any, path: Path, put: Setter | None) -> None:
        """One entry of the state. put: replaces it in its container, where that can be done."""
        if isinstance(node, PerRank):
            self.value(node.value, path, None if put is None else (lambda v: put(PerRank(v))), per_rank=True)
        elif isinstance(node, Replicated):
            self.entry(node.value, path, None if put is None else (lambda v: put(Replicated(v))))
        elif isinstance(node, TrainState):
            self.mapping({**node.parts(), **node.extra}, path)
        elif isinstance(node, ShardedTensor):
            self.tensor(node.local, path, _declared(node, join(path)))
        elif isinstance(node, torch.Tensor):
            self.tensor(node, path)
        elif isinstance(node, np.ndarray):
            self.tensor(self._from_numpy(node, join(path)), path)
        elif isinstance(node, nn.Module):
            self.module(node, path)
        elif isinstance(node, torch.optim.Optimizer):
            self.later.append(lambda: optimizers.capture(self, node, path))
        elif hasattr(node, "state_dict") or hasattr(node, "load_state_dict"):
            self.later.append(lambda: self.stateful(node, path))
        elif isinstance(node, Mapping) and node and all(type(k) in (str, int) for k in node):
            self.mapping(node, path)
        elif isinstance(node, list | tuple) and any(_has_state(x) for x in node):
            for i, x in enumerate(node):
                self.entry(x, (*path, i), _item_setter(node, i) if isinstance(node, list) else None)
        else:
            self.value(node, path, put)

    def tensor(self, tensor: torch.Tensor, path: Path, placement: Placement | None = None) -> None:
        """A tensor with a placement; without one, a DTensor's own or the whole."""
        name = join(path)
        if placement is None:
            tensor, placement = self.place(tensor, name)
        dtype = dtype_name(tensor.dtype, name)
        spec = TensorSpec(name, placement.shape, dtype, STORED[dtype].itemsize, placement.stack)
        self.captured.add_tensor(spec, placement.shards(tensor, name))

    @staticmethod
    def place(tensor: torch.Tensor, name: str) -> tuple[torch.Tensor, Placement]:
        if dtensors.is_dtensor(tensor):
            return dtensors.local_of(tensor, name)
        return tensor, Placement.whole(tensor.shape)

    def value(self, value: Any, path: Path, put: Setter | None, *, per_rank: bool = False) -> None:
        """A plain value; on load it is put back into its container."""
        name = join(path)
        if put is None and self.known is not None:
            raise Unsupported(
                f"{name}: a plain value inside a tuple or read-only mapping cannot be replaced; use a list"
            )
        self.captured.add_value(name, value, per_rank=per_rank)
        self.captured.appliers.append(lambda values: put(values[name]) if put and name in values else None)

    def module(self, module: nn.Module, path: Path) -> None:
        """A module: parameters and persistent buffers in place, extra state through its own setters."""
        if megatron.is_megatron(module):
            megatron.capture(self, module, path)
            return
        for name, entry in module.state_dict(keep_vars=True).items():
            if name.split(".")[-1] == "_extra_state":
                owner = module.get_submodule(name.rpartition(".")[0])
                self.value(entry, (*path, name), owner.set_extra_state)
            elif isinstance(entry, torch.Tensor):
                self.tensor(entry, (*path, name))
                _, placement = self.place(entry, join((*path, name)))
                self.parameters.setdefault(id(entry), Named((*path, name), placement))
            else:
                raise Unsupported(f"{join((*path, name))}: a module's state holds a {type(entry).__name__}")

    def stateful(self, node: Any, path: Path) -> None:
        """An object with state_dict and load_state_dict. On load its state is filled in a copy and then given back."""
        if not (hasattr(node, "state_dict") and hasattr(node, "load_state_dict")):
            raise Unsupported(f"{join(path)}: {type(node).__name__} has only one of state_dict and load_state_dict")
        state = node.state_dict()
        if self.known is not None:
            state = _fresh(state)
        if not isinstance(state, Mapping) or not state:
            box = {"state": state}
            self.entry(state, path, _item_setter(box, "state"))
            self.captured.appliers.append(lambda _: node.load_state_dict(box["state"]))
            return
        self.mapping(state, path)
        self.captured.appliers.append(lambda _: node.load_state_dict(state))

    def _from_numpy(self, array: np.ndarray, name: str) -> torch.Tensor:
        usable = array.flags.writeable and not any(s < 0 for s in array.strides) and array.dtype.isnative
        if not usable and (self.known is not None or not array.dtype.isnative):
            raise Unsupported(f"{name}: a NumPy array that is read-only, reversed or of foreign byte order; copy it")
        try:
            return torch.from_numpy(array if usable else array.copy())
        except TypeError as error:
            raise Unsupported(f"{name}: a NumPy array of dtype {array.dtype}: {error}") from None


def _has_state(node: Any) -> bool:
    if isinstance(node, Mapping):
        return any(_has_state(x) for x in node.values())
    if isinstance(node, list | tuple):
        return any(_has_state(x) for x in node)
    kinds = (torch.Tensor, np.ndarray, nn.Module, torch.optim.Optimizer, ShardedTensor, PerRank, Replicated)
    return isinstance(node, kinds) or hasattr(node, "state_dict")


def _item_setter(container: Any, key: Any) -> Setter | None:
    if not hasattr(container, "__setitem__"):
        return None

    def put(value: Any) -> None:
        container[key] = value

    return put


def _fresh(node: Any) -> Any:
    """A copy of a state dict with containers and tensors of its own, to be filled."""
    if isinstance(node, torch.Tensor):
        return node.detach().clone()
    if isinstance(node, np.ndarray):
        return node.copy()
    if isinstance(node, Mapping):
        return {k: _fresh(v) for k, v in node.items()}
    if isinstance(node, list | tuple) and _has_state(node):
        return type(node)(_fresh(x) for x in node)
    return node


def _declared(node: ShardedTensor, name: str) -> Placement:
    parts = []
    for offset, extent, inner in node.boxes:
        outer = Box(tuple(map(int, offset)), tuple(map(int, extent)))
        if len(outer.extent) != len(node.global_shape) or any(
            s > n for s, n in zip(outer.stop, node.global_shape, strict=True)
        ):
            raise StateMismatch(f"{name}: box {outer} leaves the global shape {list(node.global_shape)}")
        lead = len(outer.extent) - node.local.dim()
        parts.append((outer, Box(tuple(map(int, inner)), outer.extent[lead:])))
    return Placement(tuple(map(int, node.global_shape)), node.stack, tuple(parts))
