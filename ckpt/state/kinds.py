"""What a user may declare about an entry of the state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import torch


@dataclass(frozen=True)
class ShardedTensor:
    """This rank's part of a logical tensor, where ckpt cannot see it by itself.

    local: the tensor that holds it, any strides. boxes: (global offset, extent, local offset) of each piece; an
    offset or extent has one number per axis of `global_shape`, a local offset one per axis of `local` (which may
    lack leading axes of extent 1). global_shape: of the logical tensor. stack: how many leading axes of it stack
    layers or experts; it must be the same on every layout.
    """

    local: torch.Tensor
    boxes: Sequence[tuple[Sequence[int], Sequence[int], Sequence[int]]]
    global_shape: Sequence[int]
    stack: int = 0


@dataclass(frozen=True)
class PerRank:
    """A plain value that each rank has its own of."""

    value: Any


@dataclass(frozen=True)
class Replicated:
    """A tensor or plain value that is the same on every rank; a difference is an error."""

    value: Any


def per_rank(value: Any) -> PerRank:
    """Declares that each rank keeps its own `value` (plain data), by its coordinates in the layout."""
    return PerRank(value)


def replicated(value: Any) -> Replicated:
    """Declares that `value` is the same on every rank that has it. Checked byte for byte at save."""
    return Replicated(value)


@dataclass(frozen=True)
class RngState:
    """Every random stream of this rank, kept per rank: python's `random`, NumPy's global state, torch's CPU generator,
    the default generator of every CUDA device, and all streams of Megatron Core's RNG tracker.

    generators: generators of your own, by name; they must have the same names when the state is loaded. A load puts
    the streams back last. On another layout it is refused, since a stream of one rank has no meaning on another:
    leave the entry out and give `allow_extra`, or use `ckpt.random`, whose streams no layout enters. Give each
    Checkpointer its layout: without one, only another number of ranks is seen to be another layout.
    """

    generators: Mapping[str, torch.Generator | np.random.Generator] = field(default_factory=dict)


@dataclass
class TrainState:
    """The usual parts of a training run as one state. Parts left None are not part of it."""

    model: Any = None
    optimizer: Any = None
    scheduler: Any = None
    rng: Any = None
    data: Any = None
    extra: dict[str, Any] = field(default_factory=dict)

    def __init__(self, *, model=None, optimizer=None, scheduler=None, rng=None, data=None, **extra):  # type: ignore[no-untyped-def]
        self.model, self.optimizer, self.scheduler = model, optimizer, scheduler
        self.rng, self.data, self.extra = rng, data, extra

    def parts(self) -> dict[str, Any]:
        """The state as the dict that save and load work on; plain values live in `extra`."""
        named = {k: getattr(self, k) for k in ("model", "optimizer", "scheduler", "rng", "data")}
        return {k: v for k, v in named.items() if v is not None}


State: TypeAlias = Mapping[str, Any] | TrainState
"""What save, load and live resharding take."""
