"""The one form in which adapters hand a rank's state to the engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ckpt.errors import StateMismatch
from ckpt.geometry import Box, TensorSpec
from ckpt.geometry.box import Index
from ckpt.state.groups import Group
from ckpt.state.memory import check_disjoint
from ckpt.state.names import join
from ckpt.state.streams import Stream


@dataclass(frozen=True)
class Shard:
    """A box of a logical tensor and the live memory that holds it: any strides, an opaque dtype of the same width,
    shape equal to the box's extent."""

    box: Box
    view: torch.Tensor

    def __post_init__(self) -> None:
        if tuple(self.view.shape) != self.box.extent:
            raise ValueError(f"view of shape {tuple(self.view.shape)} for box {self.box}")


@dataclass
class LocalTensor:
    """What one rank holds of one logical tensor. `aliases` are further names of the same memory on this rank."""

    spec: TensorSpec
    shards: list[Shard]


@dataclass
class Captured:
    """A rank's state: tensors by name, plain values by name (the same on every rank that has them), and plain values
    of this rank alone; `streams` has those of them that are random streams. `aliases` maps a further name of the same
    memory to the name that keeps the tensor. `groups` are the parameter groups of each optimizer, by its name, in their
    order. `stateless` has, by the name that a stacked parameter's optimizer state has in front of its keys, the slices
    that have no state here: a frozen layer, say. `left_out` has what is no part of a checkpoint, with the reason.
    `optimizers` are torch's that were met, those inside of others too.

    `apply` puts loaded values back: it is called once, after all tensors are loaded and verified, with all values
    (replicated and per rank) by name.
    """

    tensors: dict[str, LocalTensor] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    per_rank: dict[str, Any] = field(default_factory=dict)
    streams: dict[str, Stream] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    groups: dict[str, list[Group]] = field(default_factory=dict)
    stateless: dict[str, set[Index]] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)
    appliers: list[Callable[[dict[str, Any]], None]] = field(default_factory=list)

    def add_tensor(self, spec: TensorSpec, shards: list[Shard]) -> None:
        """Adds shards of a logical tensor; several calls may give parts of one (its layers, say).

        Raises StateMismatch when two parts disagree on shape or dtype.
        """
        known = self.tensors.setdefault(spec.name, LocalTensor(spec, []))
        if known.spec != spec:
            raise StateMismatch(
                f"{spec.name}: parts of it disagree: {known.spec.dtype}{list(known.spec.shape)} "
                f"and {spec.dtype}{list(spec.shape)}"
            )
        known.shards += [s for s in shards if s.box.volume]

    def add_value(self, name: str, value: Any, *, per_rank: bool = False) -> None:
        """Adds a plain value. Raises StateMismatch when the name is taken."""
        if name in self.values or name in self.per_rank or name in self.tensors:
            raise StateMismatch(f"{name}: two entries of the state have this name")
        (self.per_rank if per_rank else self.values)[name] = value

    def unstack(self, name: str) -> None:
        """Takes a stacked tensor apart into the slices that this rank holds, each a tensor `<name>/~i` of its own."""
        whole = self.tensors.pop(name)
        stack = whole.spec.stack
        for shard in whole.shards:
            lead = Box(shard.box.offset[:stack], shard.box.extent[:stack])
            box = Box(shard.box.offset[stack:], shard.box.extent[stack:])
            for index in lead.indices():
                inner = tuple(i - o for i, o in zip(index, lead.offset, strict=True))
                spec = replace(whole.spec, name=f"{name}/{join(index)}", shape=whole.spec.shape[stack:], stack=0)
                self.add_tensor(spec, [Shard(box, shard.view[inner])])

    def seal(self) -> None:
        """Finds tied tensors and checks that no memory is held twice otherwise. Called once, when all is added.

        Two tensors with the same views under two names are tied: the smaller name keeps the tensor, the other becomes
        an alias. Raises StateMismatch for any other overlap.
        """
        owners: dict[tuple[object, ...], str] = {}
        for name in sorted(self.tensors):
            tensor = self.tensors[name]
            key = tuple((s.box, _memory(s.view)) for s in tensor.shards)
            if not key:
                continue
            first = owners.setdefault((tensor.spec.shape, tensor.spec.dtype, *key), name)
            if first != name:
                self.aliases[name] = first
        for name in self.aliases:
            del self.tensors[name]
        check_disjoint([(t.spec.name, s.view) for t in self.tensors.values() for s in t.shards])


def _memory(view: torch.Tensor) -> tuple[object, ...]:
    return (view.device, view.data_ptr(), tuple(view.shape), view.stride())
