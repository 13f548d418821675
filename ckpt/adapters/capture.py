"""Walks a user's state and captures it: every tensor as live views with boxes, every plain value by name."""

from __future__ import annotations

import copy
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, takewhile
from typing import Any

import numpy as np
import torch
from torch import nn

from ckpt.adapters import dtensors, megatron, megatron_optimizer, megatron_scheduler, optimizers, rng
from ckpt.adapters.placement import Placement
from ckpt.data.foreign import check_is_no_rank_loader
from ckpt.errors import StateMismatch, Unsupported
from ckpt.geometry import Box, TensorSpec
from ckpt.state import Captured, PerRank, Replicated, RngState, ShardedTensor, TrainState, Vocabulary
from ckpt.state.dtypes import STORED, dtype_name
from ckpt.state.names import Key, join, split
from ckpt.state.values import Json, decode

Path = tuple[Key, ...]
Setter = Callable[[Any], None]


@dataclass(frozen=True)
class Known:
    """What a checkpoint holds, for a capture that is to be loaded: tensors by each of their names, encoded values.
    vocabulary: whose tensors may have another number of rows here."""

    tensors: Mapping[str, TensorSpec]
    values: Mapping[str, Json]
    vocabulary: Vocabulary | None = None

    def shape_here(self, name: str, own: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of a saved tensor, or `own` where that is another padded size of it."""
        saved = self.tensors[name].shape
        return own if self.vocabulary is not None and self.vocabulary.fits(name, saved, own) else saved

    def tensors_below(self, prefix: str) -> Iterator[str]:
        """Names of tensors that start with `prefix`, sorted."""
        return _starting(self._tensor_names, prefix)

    def values_below(self, prefix: str) -> Iterator[str]:
        """Names of values that start with `prefix`, sorted."""
        return _starting(self._value_names, prefix)

    def plain_at(self, path: Path) -> dict[Key, Any]:
        """The plain values directly below a path, by key."""
        names = [n for n in self.values_below(join(path) + "/") if len(split(n)) == len(path) + 1]
        return {split(n)[-1]: decode(self.values[n], n) for n in names}

    @cached_property
    def _tensor_names(self) -> list[str]:
        return sorted(self.tensors)

    @cached_property
    def _value_names(self) -> list[str]:
        return sorted(self.values)


def _starting(names: Sequence[str], prefix: str) -> Iterator[str]:
    first = bisect_left(names, prefix)
    return takewhile(lambda name: name.startswith(prefix), (names[i] for i in range(first, len(names))))


@dataclass(frozen=True)
class Named:
    """A parameter of the state: its path and placement, whether it is trained. Optimizers find theirs by identity."""

    path: Path
    placement: Placement
    trained: bool = True


def capture(state: Mapping[str, Any] | TrainState, known: Known | None = None) -> Captured:
    """Captures a state for saving (known is None) or for loading into it.

    Modules come first, so that optimizers find the names of their parameters wherever they stand in the dict. Raises
    Unsupported or StateMismatch naming the entry; nothing is changed.
    """
    walker = Walker(known)
    if isinstance(state, TrainState):
        walker.train_state(state, ())
    elif isinstance(state, Mapping):
        walker.mapping(state, ())
    else:
        raise Unsupported(f"the state is a {type(state).__name__}; pass a dict or a ckpt.TrainState")
    for later in chain(walker.later, walker.last):
        later()
    if known is not None:
        for name in [n for n, t in walker.captured.tensors.items() if t.spec.stack and n not in known.tensors]:
            if any(known.tensors_below(name + "/")):  # kept slice by slice, because not all of them had it
                walker.captured.unstack(name)
    walker.captured.seal()
    return walker.captured


class Walker:
    """One pass over a state. `parameters` maps id(tensor that may be a parameter) to its name; `later` runs when all
    modules are known, `last` after that; `restored_groups` are the ids of optimizers' parameter groups that are
    captured."""

    def __init__(self, known: Known | None) -> None:
        self.known = known
        self.captured = Captured()
        self.parameters: dict[int, Named] = {}
        self.later: list[Callable[[], None]] = []
        self.last: list[Callable[[], None]] = []
        self.restored_groups: set[int] = set()

    def mapping(self, state: Mapping[Any, Any], path: Path) -> None:
        for key in list(state):
            self.entry(state[key], (*path, key), _item_setter(state, key))

    def train_state(self, state: TrainState, path: Path) -> None:
        for key, part in state.parts().items():
            self.entry(part, (*path, key), _attribute_setter(state, key))
        self.mapping(state.extra, path)

    def entry(self, node: Any, path: Path, put: Setter | None) -> None:
        """One entry of the state. put: replaces it in its container, where that can be done."""
        if isinstance(node, PerRank):
            self.value(node.value, path, None if put is None else (lambda v: put(PerRank(v))), per_rank=True)
        elif isinstance(node, Replicated):
            self.entry(node.value, path, None if put is None else (lambda v: put(Replicated(v))))
        elif isinstance(node, TrainState):
            self.train_state(node, path)
        elif isinstance(node, ShardedTensor):
            self.parameter(node.local, path, _declared(node, join(path)))
        elif isinstance(node, torch.Tensor):
            self.parameter(node, path)
        elif isinstance(node, np.ndarray):
            self.tensor(self._from_numpy(node, join(path)), path)
        elif isinstance(node, nn.Module):
            self.module(node, path)
        elif megatron.are_chunks(node):
            for chunk in node:
                self.module(chunk, path)
        elif isinstance(node, RngState):
            self.last.append(lambda: rng.capture(self, node, path))
        elif isinstance(node, torch.optim.Optimizer):
            self.later.append(lambda: optimizers.capture(self, node, path))
        elif megatron_optimizer.is_optimizer(node):
            self.later.append(lambda: megatron_optimizer.capture(self, node, path))
        elif megatron_scheduler.is_scheduler(node):  # after the optimizers: a list grows while it is run through
            self.later.append(lambda: self.later.append(lambda: megatron_scheduler.capture(self, node, path)))
        elif hasattr(node, "state_dict") or hasattr(node, "load_state_dict"):
            self.later.append(lambda: self.stateful(node, path))
        elif isinstance(node, Mapping) and node and all(type(k) in (str, int) for k in node):
            self.mapping(node, path)
        elif isinstance(node, list | tuple) and any(_has_state(x) for x in node):
            self.sequence(node, path, put)
        else:
            self.value(node, path, put)

    def sequence(self, node: list[Any] | tuple[Any, ...], path: Path, put: Setter | None) -> None:
        """A list or tuple that holds tensors or objects. A tuple is made anew where a plain value in it is replaced."""
        items = list(node) if isinstance(node, tuple) else node
        for i, x in enumerate(node):
            self.entry(x, (*path, i), None if put is None and isinstance(node, tuple) else _item_setter(items, i))
        if isinstance(node, tuple) and put is not None:
            make = type(node)._make if hasattr(node, "_make") else type(node)
            self.captured.appliers.append(lambda _: put(make(items)))

    def parameter(self, tensor: torch.Tensor, path: Path, placement: Placement | None = None) -> None:
        """A tensor that the caller holds, so that an optimizer of the same state may have it as a parameter."""
        self.tensor(tensor, path, placement)
        placed = self.place(tensor, join(path))[1] if placement is None else placement
        self.parameters.setdefault(id(tensor), Named(path, placed, tensor.requires_grad))

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
        if put is None:
            raise Unsupported(f"{name}: a plain value inside a read-only mapping cannot be replaced; use a dict")
        self.captured.add_value(name, value, per_rank=per_rank)
        self.captured.appliers.append(lambda values: put(values[name]) if name in values else None)

    def module(self, module: nn.Module, path: Path) -> None:
        """A module: parameters and persistent buffers in place, extra state through its own setters."""
        if megatron.is_megatron(module):
            megatron.capture(self, module, path)
            self.leave_out(megatron.unwrap(module), path)
            return
        live = {id(t) for t in chain(module.parameters(), module.buffers())}
        for name, entry in module.state_dict(keep_vars=True).items():
            if name.split(".")[-1] == "_extra_state":
                owner = module.get_submodule(name.rpartition(".")[0])
                self.value(entry, (*path, name), owner.set_extra_state)
            elif isinstance(entry, torch.Tensor):
                if id(entry) not in live:
                    raise Unsupported(
                        f"{join((*path, name))}: the module's state_dict gives a tensor that is none of its parameters "
                        "and buffers (a hook made it), so it cannot be filled in place; pass the tensors themselves"
                    )
                self.parameter(entry, (*path, name))
            else:
                raise Unsupported(f"{join((*path, name))}: a module's state holds a {type(entry).__name__}")
        self.leave_out(module, path)

    def leave_out(self, module: nn.Module, path: Path) -> None:
        """Notes what of a module is no part of a checkpoint."""
        for prefix, owner in module.named_modules():
            for name in owner._non_persistent_buffers_set:
                whole = f"{prefix}.{name}" if prefix else name
                self.captured.left_out[join((*path, whole))] = "a buffer registered with persistent=False"
        if any(p.grad is not None for p in module.parameters()):
            self.captured.left_out[join((*path, "(gradients)"))] = "gradients are no state between steps"

    def stateful(self, node: Any, path: Path) -> None:
        """An object with state_dict and load_state_dict. On load its state is filled in a copy and then given back; an
        object with check_state_dict is asked first, before anything has changed, whether it can take the saved values.
        """
        if not (hasattr(node, "state_dict") and hasattr(node, "load_state_dict")):
            raise Unsupported(f"{join(path)}: {type(node).__name__} has only one of state_dict and load_state_dict")
        optimizers.check_is_no_optimizer(node, join(path))
        check_is_no_rank_loader(node, join(path))
        state = node.state_dict()
        if self.known is not None:
            state = _fresh(state)
        if not isinstance(state, Mapping) or not state:
            box = {"state": state}
            self.entry(state, path, _item_setter(box, "state"))
            self.captured.appliers.append(lambda _: node.load_state_dict(box["state"]))
            return
        if self.known is not None and hasattr(node, "check_state_dict"):
            saved = self.known.plain_at(path)
            if saved:
                node.check_state_dict({**state, **saved})
        self.mapping(state, path)
        self.captured.appliers.append(lambda _: node.load_state_dict(state))

    def _from_numpy(self, array: np.ndarray, name: str) -> torch.Tensor:
        if type(array) not in (np.ndarray, np.memmap):
            raise Unsupported(
                f"{name}: a NumPy array of class {type(array).__name__}; pass the plain arrays it is made of"
            )
        usable = array.flags.writeable and not any(s < 0 for s in array.strides) and array.dtype.isnative
        if not usable and (self.known is not None or not array.dtype.isnative):
            raise Unsupported(f"{name}: a NumPy array that is read-only, reversed or of foreign byte order; copy it")
        try:
            return torch.from_numpy(array if usable else array.copy())
        except (TypeError, ValueError) as error:
            raise Unsupported(f"{name}: a NumPy array of dtype {array.dtype}: {error}; convert or copy it") from None


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


def _attribute_setter(owner: Any, name: str) -> Setter:
    def put(value: Any) -> None:
        setattr(owner, name, value)

    return put


def _fresh(node: Any) -> Any:
    """A copy of a state dict with containers (of the same types) and tensors of its own, to be filled."""
    if isinstance(node, torch.Tensor):
        return node.detach().clone()
    if isinstance(node, np.ndarray):
        return node.copy()
    if isinstance(node, MutableMapping):
        own = copy.copy(node)
        for key, value in node.items():
            own[key] = _fresh(value)
        return own
    if isinstance(node, Mapping):
        return {k: _fresh(v) for k, v in node.items()}
    if isinstance(node, list | tuple) and _has_state(node):
        make = type(node)._make if hasattr(node, "_make") else type(node)
        return make(_fresh(x) for x in node)
    return node


def _declared(node: ShardedTensor, name: str) -> Placement:
    shape, parts = tuple(map(int, node.global_shape)), []
    for offset, extent, inner in node.boxes:
        try:
            outer = Box(tuple(map(int, offset)), tuple(map(int, extent)))
            lead = max(0, len(outer.extent) - len(inner))
            parts.append((outer, Box(tuple(map(int, inner)), outer.extent[lead:])))
        except ValueError as error:
            raise StateMismatch(f"{name}: {error}; give (global offset, extent, local offset) of each piece") from None
        if len(outer.extent) != len(shape) or any(s > n for s, n in zip(outer.stop, shape, strict=True)):
            raise StateMismatch(f"{name}: box {outer} leaves the global shape {list(shape)}; correct one of them")
    if not 0 <= node.stack <= len(shape):
        raise StateMismatch(
            f"{name}: {node.stack} stacked axes in a tensor of shape {list(shape)}; correct one of them"
        )
    return Placement(shape, node.stack, tuple(parts))
