"""Exchange plans: what moves between ranks when a state goes from one layout to another without a store.

Like every plan a value: the same on every rank, countable, testable without processes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ckpt.geometry.box import Box
from ckpt.geometry.catalogue import Catalogue
from ckpt.geometry.holdings import Holdings

_LOOK_BACK = 64  # open rounds that a transfer may still join
_OUT, _IN = 0, 1


@dataclass(frozen=True, slots=True)
class Transfer:
    """A box of one tensor (by catalogue index) that goes from one rank's memory to another's, or to its own."""

    source: int
    target: int
    tensor: int
    box: Box


@dataclass(frozen=True, slots=True)
class ExchangePlan:
    """What moves between two layouts without a store. `local`: boxes that stay on their rank; `rounds`: the others;
    within a round no rank sends or receives more than the budget, unless one box alone is larger."""

    local: tuple[Transfer, ...]
    rounds: tuple[tuple[Transfer, ...], ...]
    moved: int

    def digest(self) -> str:
        """SHA-256 over everything the plan says; equal plans have equal digests on every rank."""
        return hashlib.sha256(repr((self.local, self.rounds)).encode()).hexdigest()


def exchange_plan(
    catalogue: Catalogue, held: Sequence[Holdings], wanted: Mapping[int, Holdings], world: int, budget: int
) -> ExchangePlan:
    """Gives every rank what it wants from the ranks that hold it: from its own memory where it holds it itself, else
    from the holder that has sent least so far, then the nearest.

    held: one Holdings for each tensor, checked to cover it exactly; wanted: by index, inside the tensors' shapes.
    budget: bytes a rank may send or receive in a round; larger boxes are cut along their leading axes.
    """
    local: list[Transfer] = []
    rounds: list[list[Transfer]] = []
    loads: list[np.ndarray] = []
    sent = np.zeros(world, dtype=np.int64)
    moved = 0
    for tensor, wants in sorted(wanted.items()):
        itemsize = catalogue.tensors[tensor].itemsize
        for box, targets in zip(wants.boxes, wants.ranks, strict=True):
            for common, holders in held[tensor].meeting(box):
                for target in targets:
                    if target in holders:
                        local.append(Transfer(target, target, tensor, common))
                        continue
                    source = min(holders, key=lambda r: (sent[r], abs(r - target), r))
                    for piece in common.pieces(max(1, budget // itemsize)):
                        nbytes = piece.volume * itemsize
                        sent[source] += nbytes
                        moved += nbytes
                        _schedule(Transfer(source, target, tensor, piece), nbytes, rounds, loads, budget, world)
    return ExchangePlan(tuple(local), tuple(map(tuple, rounds)), moved)


def _schedule(
    one: Transfer, nbytes: int, rounds: list[list[Transfer]], loads: list[np.ndarray], budget: int, world: int
) -> None:
    """Into the first round, looking back a few, that keeps both ends within the budget."""
    ends = ([_OUT, _IN], [one.source, one.target])
    number = next(
        (n for n in range(max(0, len(rounds) - _LOOK_BACK), len(rounds)) if (loads[n][ends] + nbytes <= budget).all()),
        len(rounds),
    )
    if number == len(rounds):
        rounds.append([])
        loads.append(np.zeros((2, world), dtype=np.int64))
    rounds[number].append(one)
    loads[number][ends] += nbytes
