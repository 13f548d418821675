"""A state at rest whose tensors are put together from boxes of another's: bits are moved, nothing is computed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from ckpt.adapters.foreign.same import same_bits
from ckpt.engine.stream import Source
from ckpt.errors import CorruptCheckpoint, StateMismatch
from ckpt.geometry import Box, Holdings, TensorSpec
from ckpt.state.dtypes import opaque


@dataclass(frozen=True)
class Move:
    """The box `taken` of the tensor `old`, and the box `placed` of the tensor `new` that has its elements. One of the
    boxes may have more axes, all of extent 1, in front. transposed: the last two axes are swapped."""

    old: str
    taken: Box
    new: str
    placed: Box
    transposed: bool = False

    def __post_init__(self) -> None:
        """Raises ValueError where the boxes do not have the same elements."""
        axes = min(len(self.taken.extent), len(self.placed.extent))
        taken, placed = _core(self.taken.extent, axes), _core(self.placed.extent, axes)
        swapped = (*taken[:-2], *reversed(taken[-2:])) if self.transposed else taken
        if swapped != placed or self.taken.volume != self.placed.volume or (self.transposed and axes < 2):
            raise ValueError(f"{self.old} {self.taken} is no box of the form of {self.new} {self.placed}")

    def back(self, box: Box) -> Box:
        """The part of `taken` that has the elements of `box`, which lies in `placed`."""
        axes = min(len(self.taken.extent), len(self.placed.extent))
        within = box.relative_to(self.placed)
        offset, extent = _core(within.offset, axes), _core(within.extent, axes)
        if self.transposed:
            offset, extent = (*offset[:-2], *reversed(offset[-2:])), (*extent[:-2], *reversed(extent[-2:]))
        front = len(self.taken.extent) - axes
        start = (*self.taken.offset[:front], *(o + at for o, at in zip(self.taken.offset[front:], offset, strict=True)))
        return Box(start, (*self.taken.extent[:front], *extent))

    def turn(self, found: torch.Tensor, extent: tuple[int, ...]) -> torch.Tensor:
        """What was read of `taken` as a view, or copy, of the form that it has in `placed`."""
        axes = min(len(self.taken.extent), len(self.placed.extent))
        core = found.reshape(found.shape[len(found.shape) - axes :])
        return (core.transpose(-1, -2) if self.transposed else core).reshape(extent)


def _core(numbers: tuple[int, ...], axes: int) -> tuple[int, ...]:
    return numbers[len(numbers) - axes :]


class Moved:
    """`source` with its tensors cut and put together anew. Values, and values of ranks, are as they were."""

    def __init__(
        self,
        source: Source,
        tensors: Iterable[TensorSpec],
        moves: Sequence[Move],
        lost: Mapping[str, str],
        told: str,
    ) -> None:
        """tensors: the new ones. moves: to boxes that cover each of them exactly once; equal boxes are copies, which
        have to have equal bits. lost: what is left out of the source, with the reason. told: tells this choice of moves
        from any other. Raises CorruptCheckpoint where boxes overlap, lie outside, or leave a gap."""
        self.url = source.url
        self._source, old = source, source.content
        self._moves = moves
        self._kept = {t.name: t.name for t in old.tensors} | dict(old.aliases)
        self._specs = {t.name: t for t in tensors}
        placed: dict[str, list[tuple[int, Box]]] = {name: [] for name in self._specs}
        for number, move in enumerate(moves):
            placed[move.new].append((number, move.placed))
        self._placed = {name: Holdings.of(boxes) for name, boxes in placed.items()}
        for name, spec in self._specs.items():
            try:
                self._placed[name].check_cover(name, spec.shape)
            except StateMismatch as error:
                raise CorruptCheckpoint(f"{self.url}: its parts do not make up {error}") from None
        self.content = replace(
            old,
            tensors=tuple(sorted(self._specs.values())),
            aliases={},
            left_out={**old.left_out, **lost},
            identity=f"{old.identity} {told}",
            state_id=None,
        )

    def read(self, name: str, box: Box) -> torch.Tensor:
        """See `ckpt.engine.stream.Source`. Raises CorruptCheckpoint too where copies differ."""
        found = torch.empty(box.extent, dtype=opaque(self._specs[name].itemsize))
        for common, numbers in self._placed[name].meeting(box) if box.volume else ():
            part = found[common.relative_to(box).slices]
            part.copy_(self._take(numbers[0], common))
            for number in numbers[1:]:
                if not same_bits(part, self._take(number, common)):
                    raise CorruptCheckpoint(
                        f"{self.url}: {self._moves[numbers[0]].old} and {self._moves[number].old} both have {name} "
                        f"{common}, and differ; repair the one that is wrong, or leave it out"
                    )
        return found

    def _take(self, number: int, box: Box) -> torch.Tensor:
        move = self._moves[number]
        return move.turn(self._source.read(self._kept[move.old], move.back(box)), box.extent)
