"""What a user may declare about an entry of the state."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Literal, TypeAlias

import numpy as np
import torch

from ckpt.errors import StateMismatch


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
    the streams back last. On another layout a stream goes on where it depends only on coordinates that both layouts
    have (docs/state.md); any other makes the load fail, but those that match a pattern of `rederive` ("torch",
    "megatron/*", ...): they are made anew from the saved ones and the rank's coordinates, and the load says which.
    Give each Checkpointer its layout: without one, only another number of ranks is seen to be another layout. Streams
    of `ckpt.random` need none of this, since no layout enters them.
    """

    generators: Mapping[str, torch.Generator | np.random.Generator] = field(default_factory=dict)
    rederive: Collection[str] = ()


@dataclass(frozen=True)
class Vocabulary:
    """Says that tensors have rows of padding beyond the vocabulary, and that these may be left behind by a load into a
    model of another padded size. Where the size is the same, padding is loaded like all the rest.

    size: rows that are no padding. padding: "masked" if the loss masks the logits of padding, so that it never took
    part in training, or "drop" to give it up although it did. Rows of padding of the loaded state are zero, in the
    weights and in what an optimizer keeps for them. names: patterns of the tensors' names; those of Megatron Core by
    default.
    """

    size: int
    padding: Literal["masked", "drop"]
    names: Sequence[str] = ("*word_embeddings.weight*", "*output_layer.weight*", "*output_layer.bias*")

    def __post_init__(self) -> None:
        if type(self.size) is not int or self.size < 1 or self.padding not in ("masked", "drop"):
            raise StateMismatch(
                f"Vocabulary(size={self.size!r}, padding={self.padding!r}): give a positive int, and 'masked' or 'drop'"
            )

    def names_it(self, name: str) -> bool:
        """Whether a tensor is one that these patterns name."""
        return any(fnmatchcase(name, pattern) for pattern in self.names)

    def fits(self, name: str, saved: tuple[int, ...], own: tuple[int, ...]) -> bool:
        """Whether a tensor may be loaded although its number of rows is another."""
        return self.names_it(name) and saved != own and len(saved) == len(own) > 0 and saved[1:] == own[1:]


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
