"""Plans: which rank writes or reads which stored object, and what moves between ranks, in rounds.

A plan is a value: the same on every rank, printable, countable, testable without processes. It contains every
stored object exactly once (writing), or every stored byte at most once over the whole job (reading).
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ckpt.geometry.box import Box
from ckpt.geometry.catalogue import Catalogue, StoredObject
from ckpt.geometry.holdings import Holdings


@dataclass(frozen=True, slots=True)
class Link:
    """A box of one tensor and the ranks on the other side of it.

    Writing: `ranks` is the one rank that the owner takes the box from (perhaps itself). Reading: every rank that
    the owner gives the box to (perhaps itself). `start`: for a packed object, the tensor's first element in the
    unit's buffer; `within` is then the whole tensor, otherwise the unit's box in the array.
    """

    tensor: int
    box: Box
    ranks: tuple[int, ...]
    within: Box
    start: int


@dataclass(frozen=True, slots=True)
class Unit:
    """A region of one stored array, the rank that writes or reads it, and its links. `index` is the grid index
    of the stored object it belongs to."""

    array: int
    index: tuple[int, ...]
    box: Box
    owner: int
    nbytes: int
    links: tuple[Link, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """Units in rounds. Within a round no rank owns more than the budget, nor sends or receives more, unless a
    single unit alone is larger."""

    world: int
    rounds: tuple[tuple[Unit, ...], ...]
    moved: int
    owned: tuple[int, ...]

    @property
    def units(self) -> Iterator[Unit]:
        for units in self.rounds:
            yield from units

    def digest(self) -> str:
        """SHA-256 over everything the plan says; equal plans have equal digests on every rank."""
        h = hashlib.sha256()
        for number, units in enumerate(self.rounds):
            for u in units:
                h.update(repr((number, u.array, u.index, u.box.offset, u.box.extent, u.owner)).encode())
                for k in u.links:
                    h.update(repr((k.tensor, k.box.offset, k.box.extent, k.ranks)).encode())
        return h.hexdigest()

    def summary(self) -> str:
        """One line for people: bytes moved between ranks, of all bytes, the rounds, and the busiest rank."""
        total = sum(self.owned)
        share = 100 * self.moved / total if total else 0.0
        busiest = max(self.owned) if self.owned else 0
        return (
            f"{total / 2**20:.1f} MiB in {len(self.rounds)} rounds, {self.moved / 2**20:.1f} MiB moved "
            f"({share:.0f} %), at most {busiest / 2**20:.1f} MiB on one rank"
        )


def write_plan(catalogue: Catalogue, held: Sequence[Holdings], world: int, budget: int) -> Plan:
    """Gives every stored object one writer: the rank that holds most of it, then the one with least to write,
    then the lowest. What the writer lacks comes from the nearest rank that holds it.

    held: one Holdings for each tensor of the catalogue, checked to cover it exactly. budget: bytes a rank may own,
    send or receive in a round.
    """
    return _plan(catalogue, held, world, budget, split=False, links=_sources)


def read_plan(catalogue: Catalogue, wanted: Mapping[int, Holdings], world: int, budget: int) -> Plan:
    """Reads every needed stored byte once: an object that one rank wants whole is read by such a rank, others
    chunk by chunk by the rank that wants most of the chunk; ties go to the one with least to read.

    wanted: for each tensor (by catalogue index) that anybody loads, what each rank wants of it.
    """
    held = [wanted.get(i, _NOTHING) for i in range(len(catalogue.tensors))]
    return _plan(catalogue, held, world, budget, split=True, links=_targets)


_NOTHING = Holdings((), ())
_Met = list[tuple[int, Box, Box, int, tuple[int, ...]]]


def _plan(
    catalogue: Catalogue,
    held: Sequence[Holdings],
    world: int,
    budget: int,
    split: bool,
    links: Callable[[_Met, int], tuple[Link, ...]],
) -> Plan:
    owned = np.zeros(world, dtype=np.int64)
    rounds: list[list[Unit]] = []
    loads: list[np.ndarray] = []
    current = [0] * world
    moved = 0
    for stored in catalogue.objects():
        for unit in _units(catalogue, stored, held, owned, split, links):
            load = _load(unit, catalogue)
            number = _place(unit, load, current, loads, budget, world)
            if number == len(rounds):
                rounds.append([])
            rounds[number].append(unit)
            moved += sum(n for (_, kind), n in load.items() if kind == _IN)
    return Plan(world, tuple(map(tuple, rounds)), moved, tuple(owned.tolist()))


def _units(
    catalogue: Catalogue,
    stored: StoredObject,
    held: Sequence[Holdings],
    owned: np.ndarray,
    split: bool,
    links: Callable[[_Met, int], tuple[Link, ...]],
) -> Iterator[Unit]:
    array = catalogue.arrays[stored.array]
    met = _meet(stored, held)
    if not met:
        return
    parts: list[tuple[Box, _Met]] = [(stored.box, met)]
    if split and not array.packed and not _wanted_whole(met, stored.box):
        parts = [(box, _clip(met, box)) for box in array.grid.chunks_of(stored.box)]
    for box, inside in parts:
        if inside:
            owner = _owner(inside, owned)
            nbytes = box.volume * array.itemsize
            owned[owner] += nbytes
            yield Unit(stored.array, stored.index, box, owner, nbytes, links(inside, owner))


def _meet(stored: StoredObject, held: Sequence[Holdings]) -> _Met:
    return [
        (tensor, common, piece, start, ranks)
        for tensor, piece, start in stored.pieces
        for common, ranks in held[tensor].meeting(piece)
    ]


def _clip(met: _Met, box: Box) -> _Met:
    clipped = ((tensor, common.intersect(box), ranks) for tensor, common, _, _, ranks in met)
    return [(tensor, common, box, 0, ranks) for tensor, common, ranks in clipped if common is not None]


def _wanted_whole(met: _Met, box: Box) -> bool:
    return any(common == box for _, common, _, _, _ in met)


def _owner(met: _Met, owned: np.ndarray) -> int:
    overlap: dict[int, int] = defaultdict(int)
    for _, common, _, _, ranks in met:
        for rank in ranks:
            overlap[rank] += common.volume
    return min(overlap, key=lambda r: (-overlap[r], owned[r], r))


def _sources(met: _Met, owner: int) -> tuple[Link, ...]:
    return tuple(
        Link(tensor, common, (min(ranks, key=lambda r: (abs(r - owner), r)),), within, start)
        for tensor, common, within, start, ranks in met
    )


def _targets(met: _Met, owner: int) -> tuple[Link, ...]:
    return tuple(Link(tensor, common, ranks, within, start) for tensor, common, within, start, ranks in met)


_OWN, _IN, _OUT = 0, 1, 2


def _load(unit: Unit, catalogue: Catalogue) -> dict[tuple[int, int], int]:
    """Bytes that a unit puts on ranks: owned; and moved in or out, counted on the far side and on the owner."""
    itemsize = catalogue.arrays[unit.array].itemsize
    load: dict[tuple[int, int], int] = defaultdict(int)
    load[unit.owner, _OWN] += unit.nbytes
    for link in unit.links:
        for rank in link.ranks:
            if rank != unit.owner:
                load[rank, _IN] += link.box.volume * itemsize
                load[unit.owner, _OUT] += link.box.volume * itemsize
    return load


def _place(
    unit: Unit,
    load: Mapping[tuple[int, int], int],
    current: list[int],
    loads: list[np.ndarray],
    budget: int,
    world: int,
) -> int:
    """The first round, from the owner's current one on, in which the unit keeps every rank within the budget."""
    number = current[unit.owner]
    while True:
        if number == len(loads):
            loads.append(np.zeros((world, 3), dtype=np.int64))
        table = loads[number]
        if all(not table[key] or table[key] + n <= budget for key, n in load.items()):
            break
        number += 1
    for key, n in load.items():
        loads[number][key] += n
    current[unit.owner] = number
    return number
