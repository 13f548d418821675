"""Write and read plans on random tensors, partitions and budgets, checked element by element and carried out in NumPy.

Elements of 8 KiB to 1 MiB (they exist only as labels here) make small shapes reach every kind of storage: packed arrays
of one object and of several, and arrays of many objects with many chunks.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt.geometry import Box, Catalogue, Holdings, Plan, TensorSpec, Unit, read_plan, write_plan
from ckpt.geometry.plan import Link
from tests.geometry.partitions import Held, holders, partitions

Index = tuple[int, ...]
ITEMSIZES = {"d8k": 1 << 13, "d64k": 1 << 16, "d256k": 1 << 18, "d1m": 1 << 20}
UNSET = -1


@dataclass(frozen=True)
class Job:
    """Tensors of a state, who holds them, and the budget of a round."""

    world: int
    specs: tuple[TensorSpec, ...]
    held: dict[str, Held]
    budget: int

    @property
    def catalogue(self) -> Catalogue:
        return Catalogue.of(self.specs)

    def holdings(self) -> list[Holdings]:
        return [Holdings.of(self.held[t.name]) for t in self.catalogue.tensors]


@st.composite
def specs_of(draw: st.DrawFn) -> tuple[TensorSpec, ...]:
    specs = []
    for number in range(draw(st.integers(1, 4))):
        dtype = draw(st.sampled_from(sorted(ITEMSIZES)))
        shape = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
        stack = draw(st.integers(0, min(2, len(shape))))
        specs.append(TensorSpec(f"t{number}", shape, dtype, ITEMSIZES[dtype], stack))
    return tuple(draw(st.permutations(specs)))


@st.composite
def placed(draw: st.DrawFn, specs: Sequence[TensorSpec], world: int) -> dict[str, Held]:
    return {s.name: draw(holders(draw(partitions(s.shape)), world)) for s in specs}


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    specs = draw(specs_of())
    world = draw(st.integers(1, 7))
    budget = draw(st.sampled_from([1, 1 << 16, 1 << 20, 1 << 22, 1 << 24, 1 << 30]))
    return Job(world, specs, draw(placed(specs, world)), budget)


def region(box: Box, origin: Index | None = None) -> tuple[Any, ...]:
    """Index of a box's elements in an array that starts at `origin`; gives a view also for a scalar."""
    starts = box.offset if origin is None else tuple(o - s for o, s in zip(box.offset, origin, strict=True))
    return (..., *(slice(o, o + e) for o, e in zip(starts, box.extent, strict=True)))


def inside(outer: Box, inner: Box) -> bool:
    return all(
        a <= b and b + f <= a + e
        for a, e, b, f in zip(outer.offset, outer.extent, inner.offset, inner.extent, strict=True)
    )


def labels(catalogue: Catalogue) -> list[np.ndarray]:
    """Each tensor with a number of its own in every element."""
    return [
        1 + index * 1_000_000 + np.arange(math.prod(t.shape)).reshape(t.shape)
        for index, t in enumerate(catalogue.tensors)
    ]


def place_of(buffer: np.ndarray, link: Link, packed: bool) -> np.ndarray:
    """The elements of a link's box in a unit's buffer, as a view: what `Link` says about `within` and `start`."""
    if packed:
        tensor = buffer[link.start : link.start + math.prod(link.within.extent)].reshape(link.within.extent)
    else:
        tensor = buffer
    return tensor[region(link.box, link.within.offset)]


class Memory:
    """What each rank holds: a copy of each of its boxes, by tensor."""

    def __init__(self, catalogue: Catalogue, held: dict[str, Held], full: Sequence[np.ndarray] | None) -> None:
        self.boxes: dict[tuple[int, int], list[tuple[Box, np.ndarray]]] = defaultdict(list)
        for index, spec in enumerate(catalogue.tensors):
            for rank, box in held.get(spec.name, []):
                own = full[index][region(box)].copy() if full is not None else np.full(box.extent, UNSET)
                self.boxes[rank, index].append((box, own))

    def take(self, rank: int, tensor: int, box: Box) -> np.ndarray:
        """The elements of a box, which the rank must hold in one piece."""
        (found,) = [own[region(box, b.offset)] for b, own in self.boxes[rank, tensor] if b.volume and inside(b, box)]
        return found

    def put(self, rank: int, tensor: int, box: Box, elements: np.ndarray) -> None:
        """Puts the elements of a box wherever the rank wants them."""
        for wanted, own in self.boxes[rank, tensor]:
            common = wanted.intersect(box)
            if common is not None:
                own[region(common, wanted.offset)] = elements[region(common, box.offset)]


def save(job: Job, plan: Plan) -> dict[tuple[int, Index], np.ndarray]:
    """Carries out a write plan: every object by array and grid index."""
    catalogue = job.catalogue
    memory = Memory(catalogue, job.held, labels(catalogue))
    objects: dict[tuple[int, Index], np.ndarray] = {}
    for unit in plan.units:
        buffer = np.full(unit.box.extent, UNSET)
        for link in unit.links:
            (source,) = link.ranks
            place = place_of(buffer, link, catalogue.arrays[unit.array].packed)
            assert (place == UNSET).all(), "two links give one element"
            place[...] = memory.take(source, link.tensor, link.box)
        assert (unit.array, unit.index) not in objects, "an object is written twice"
        objects[unit.array, unit.index] = buffer
    return objects


def stored_labels(catalogue: Catalogue) -> list[np.ndarray]:
    """What each stored array must hold, from the labelled tensors alone; UNSET between packed tensors."""
    full = labels(catalogue)
    found = []
    for array in catalogue.arrays:
        whole = np.full(array.grid.shape, UNSET)
        for tensor, start in array.tensors:
            if array.packed:
                whole[start : start + full[tensor].size] = full[tensor].ravel()
            else:
                whole = full[tensor]
        found.append(whole)
    return found


@settings(max_examples=80)
@given(jobs())
def test_a_write_plan_writes_every_object_once_with_the_right_elements(job: Job) -> None:
    catalogue = job.catalogue
    plan = write_plan(catalogue, job.holdings(), job.world, job.budget)
    objects = save(job, plan)
    for number, (array, whole) in enumerate(zip(catalogue.arrays, stored_labels(catalogue), strict=True)):
        assert {i for a, i in objects if a == number} == set(np.ndindex(*array.grid.counts))
        for index in np.ndindex(*array.grid.counts):
            start = tuple(i * c for i, c in zip(index, array.grid.cell, strict=True))
            cell = whole[tuple(slice(a, a + c) for a, c in zip(start, array.grid.cell, strict=True))]
            assert objects[number, index].tolist() == cell.tolist()


@settings(max_examples=80)
@given(jobs())
def test_the_writer_holds_most_then_has_least_to_write_then_is_lowest(job: Job) -> None:
    catalogue = job.catalogue
    plan = write_plan(catalogue, job.holdings(), job.world, job.budget)
    owned = [0] * job.world
    moved = 0
    for unit in sorted(plan.units, key=lambda u: (u.array, u.index)):
        overlap = [0] * job.world
        for tensor, box in object_boxes(catalogue, unit):
            for rank, mine in job.held[catalogue.tensors[tensor].name]:
                overlap[rank] += len(elements(mine) & elements(box))
        assert unit.owner == min(range(job.world), key=lambda r: (-overlap[r], owned[r], r))
        assert unit.nbytes == unit.box.volume * catalogue.arrays[unit.array].itemsize
        owned[unit.owner] += unit.nbytes
        for link in unit.links:
            holds = [r for r, b in job.held[catalogue.tensors[link.tensor].name] if b.volume and inside(b, link.box)]
            assert link.ranks == (min(holds, key=lambda r: (abs(r - unit.owner), r)),), "the nearest holder gives"
            if link.ranks != (unit.owner,):
                moved += link.box.volume * catalogue.arrays[unit.array].itemsize
    assert plan.owned == tuple(owned)
    assert plan.moved == moved


def object_boxes(catalogue: Catalogue, unit: Unit) -> Iterator[tuple[int, Box]]:
    """The tensors' boxes in a unit, from the arrays' places alone."""
    array = catalogue.arrays[unit.array]
    for tensor, start in array.tensors:
        shape = catalogue.tensors[tensor].shape
        if not array.packed:
            yield tensor, unit.box
        elif math.prod(shape) and unit.box.offset[0] <= start < unit.box.offset[0] + unit.box.extent[0]:
            yield tensor, Box.whole(shape)


def elements(box: Box) -> set[Index]:
    return {tuple(i + o for i, o in zip(at, box.offset, strict=True)) for at in np.ndindex(*box.extent)}


def check_rounds(plan: Plan, catalogue: Catalogue, budget: int, writing: bool) -> None:
    """In each round each rank owns, sends and receives at most the budget, or it is one unit alone that exceeds it."""
    for units in plan.rounds:
        assert units, "an empty round"
        loads: dict[tuple[int, str], list[int]] = defaultdict(list)
        for unit in units:
            itemsize = catalogue.arrays[unit.array].itemsize
            loads[unit.owner, "owns"].append(unit.nbytes)
            far: dict[int, int] = defaultdict(int)
            for link in unit.links:
                for rank in link.ranks:
                    if rank != unit.owner:
                        far[rank] += link.box.volume * itemsize
            for rank, nbytes in far.items():
                loads[rank, "sends" if writing else "receives"].append(nbytes)
            if far:
                loads[unit.owner, "receives" if writing else "sends"].append(sum(far.values()))
        for who, amounts in loads.items():
            assert sum(amounts) <= budget or len(amounts) == 1, (who, amounts)


@settings(max_examples=80)
@given(jobs())
def test_rounds_keep_the_budget(job: Job) -> None:
    catalogue = job.catalogue
    plan = write_plan(catalogue, job.holdings(), job.world, job.budget)
    check_rounds(plan, catalogue, job.budget, writing=True)
    wanted = dict(enumerate(job.holdings()))
    check_rounds(read_plan(catalogue, wanted, job.world, job.budget), catalogue, job.budget, writing=False)


@st.composite
def two_layouts(draw: st.DrawFn) -> tuple[Job, Job]:
    """The same tensors on two numbers of ranks; the second job may leave out some tensors and boxes."""
    saved = draw(jobs())
    world = draw(st.integers(1, 7))
    wanted = draw(placed(saved.specs, world))
    for name in list(wanted):
        if draw(st.integers(0, 5)) == 0:
            del wanted[name]
        elif draw(st.integers(0, 3)) == 0:
            wanted[name] = draw(st.lists(st.sampled_from(wanted[name]), unique=True)) if wanted[name] else []
    return saved, Job(world, saved.specs, wanted, draw(st.sampled_from([1, 1 << 20, 1 << 30])))


@settings(max_examples=120)
@given(two_layouts())
def test_a_save_and_a_load_on_another_layout_move_every_element_to_its_place(pair: tuple[Job, Job]) -> None:
    check_save_and_load(*pair)


def test_many_small_tensors_in_packed_arrays_of_several_objects() -> None:
    """500 tensors of two dtypes, up to 15 elements each, whole on a rank or cut over several."""
    chosen = random.Random(7)
    specs, held = [], {}
    for number in range(500):
        dtype, most = ("d8k", 7) if number % 2 else ("d4k", 15)
        n = chosen.randint(0, most)
        specs.append(TensorSpec(f"t{chosen.random()}", (n,), dtype, ITEMSIZES.get(dtype, 1 << 12)))
        cuts = sorted([0, n, *(chosen.randint(0, n) for _ in range(number % 4))])
        held[specs[-1].name] = [(chosen.randrange(5), Box((a,), (b - a,))) for a, b in itertools.pairwise(cuts)]
    saved = Job(5, tuple(specs), held, 1 << 22)
    catalogue = saved.catalogue
    assert [a.packed for a in catalogue.arrays] == [True, True]
    assert min(a.grid.counts[0] for a in catalogue.arrays) > 1, "each array has several objects"
    wanted = {s.name: [(chosen.randrange(3), Box.whole(s.shape))] for s in specs if chosen.random() < 0.9}
    check_save_and_load(saved, Job(3, saved.specs, wanted, 1 << 20))
    check_rounds(write_plan(catalogue, saved.holdings(), 5, 1 << 22), catalogue, 1 << 22, writing=True)


def check_save_and_load(saved: Job, loaded: Job) -> None:
    """Saves labelled tensors by the write plan of one job, loads them by the read plan of the other, and compares."""
    catalogue = saved.catalogue
    objects = save(saved, write_plan(catalogue, saved.holdings(), saved.world, saved.budget))
    wanted = {i: Holdings.of(loaded.held[t.name]) for i, t in enumerate(catalogue.tensors) if t.name in loaded.held}
    plan = read_plan(catalogue, wanted, loaded.world, loaded.budget)
    memory = Memory(catalogue, loaded.held, None)
    reads = [np.zeros(array.grid.shape, dtype=np.int64) for array in catalogue.arrays]
    owned = [0] * loaded.world
    moved = 0
    for unit in plan.units:
        array = catalogue.arrays[unit.array]
        reads[unit.array][region(unit.box)] += 1
        start = tuple(i * c for i, c in zip(unit.index, array.grid.cell, strict=True))
        buffer = objects[unit.array, unit.index][region(unit.box, start)]
        assert buffer.shape == unit.box.extent, "a unit lies in one object"
        assert unit.nbytes == buffer.size * array.itemsize
        owned[unit.owner] += unit.nbytes
        for link in unit.links:
            for rank in link.ranks:
                memory.put(rank, link.tensor, link.box, place_of(buffer, link, array.packed))
                moved += link.box.volume * array.itemsize * (rank != unit.owner)
    assert all((count <= 1).all() for count in reads), "a stored byte is read twice"
    for (rank, tensor), boxes in memory.boxes.items():
        for box, own in boxes:
            assert own.tolist() == labels(catalogue)[tensor][region(box)].tolist(), (rank, tensor, box)
    assert plan.owned == tuple(owned)
    assert plan.moved == moved


@settings(max_examples=80)
@given(two_layouts())
def test_a_reader_wants_most_of_what_it_reads_and_nothing_unwanted_is_read(pair: tuple[Job, Job]) -> None:
    saved, loaded = pair
    catalogue = saved.catalogue
    held = {i: loaded.held[t.name] for i, t in enumerate(catalogue.tensors) if t.name in loaded.held}
    plan = read_plan(catalogue, {i: Holdings.of(h) for i, h in held.items()}, loaded.world, loaded.budget)
    for unit in plan.units:
        wants = [0] * loaded.world
        for tensor, box in object_boxes(catalogue, unit):
            for rank, mine in held.get(tensor, []):
                wants[rank] += len(elements(mine) & elements(box))
        assert wants[unit.owner] == max(wants) > 0
        array = catalogue.arrays[unit.array]
        cell = tuple(min(c, n - i * c) for n, c, i in zip(array.grid.shape, array.grid.cell, unit.index, strict=True))
        chunk_at = tuple(o % k for o, k in zip(unit.box.offset, array.grid.chunk, strict=True))
        assert not any(chunk_at), "units start where chunks start"
        if unit.box.extent != cell:
            assert all(e <= k for e, k in zip(unit.box.extent, array.grid.chunk, strict=True))
            start = tuple(i * c for i, c in zip(unit.index, array.grid.cell, strict=True))
            ((tensor, _),) = array.tensors
            assert not any(b.volume and inside(b, Box(start, cell)) for _, b in held[tensor]), "wanted whole"


@settings(max_examples=40)
@given(jobs(), st.randoms(use_true_random=False))
def test_reordered_declarations_give_the_same_plans(job: Job, order: random.Random) -> None:
    specs = list(job.specs)
    order.shuffle(specs)
    held = {}
    for name in sorted(job.held, reverse=True):
        held[name] = list(job.held[name])
        order.shuffle(held[name])
    other = dataclasses.replace(job, specs=tuple(specs), held=held)
    first = write_plan(job.catalogue, job.holdings(), job.world, job.budget)
    second = write_plan(other.catalogue, other.holdings(), job.world, job.budget)
    assert (first, first.digest()) == (second, second.digest())
    wanted = dict(enumerate(other.holdings()))
    again = dict(reversed(wanted.items()))
    read = read_plan(job.catalogue, wanted, job.world, job.budget)
    assert read == read_plan(job.catalogue, again, job.world, job.budget)
    assert read.digest() == read_plan(other.catalogue, wanted, job.world, job.budget).digest()


@pytest.fixture
def small() -> Job:
    """One tensor of 32 MiB on 4 ranks, rank 1's part also on rank 3, and a packed scalar on all."""
    specs = (TensorSpec("w", (32,), "d1m", 1 << 20), TensorSpec("s", (), "d8k", 1 << 13))
    parts = [(r, Box((8 * r,), (8,))) for r in range(4)]
    return Job(4, specs, {"w": [*parts, (3, parts[1][1])], "s": [(r, Box((), ())) for r in range(4)]}, 1 << 30)


def test_the_digest_tells_plans_apart(small: Job) -> None:
    plan = write_plan(small.catalogue, small.holdings(), 4, small.budget)
    ((unit, *rest), *later) = plan.rounds
    link = unit.links[0]
    changed = [
        dataclasses.replace(unit, owner=unit.owner + 1),
        dataclasses.replace(unit, index=(9,)),
        dataclasses.replace(unit, box=Box(unit.box.offset, (1,))),
        dataclasses.replace(unit, links=()),
        dataclasses.replace(unit, links=(dataclasses.replace(link, ranks=(3,)), *unit.links[1:])),
        dataclasses.replace(unit, links=(dataclasses.replace(link, box=Box((0,), (1,))), *unit.links[1:])),
    ]
    plans = [plan, *(dataclasses.replace(plan, rounds=((u, *rest), *later)) for u in changed)]
    plans.append(dataclasses.replace(plan, rounds=((unit,), tuple(rest), *later)))
    assert len({p.digest() for p in plans}) == len(plans)


def test_the_small_plan_by_hand(small: Job) -> None:
    """w has two objects of 16 MiB: ranks 0 and 1 hold half of the first each, 2 and 3 half of the second. The scalar
    goes to the first rank that has nothing to write by then."""
    plan = write_plan(small.catalogue, small.holdings(), 4, small.budget)
    owners = {(u.array, u.index): u.owner for u in plan.units}
    first, second, scalar = sorted(owners)
    assert (owners[first], owners[second], owners[scalar]) == (0, 2, 1)
    given = {u.owner: [(str(k.box), k.ranks) for k in u.links] for u in plan.units}
    assert given == {
        0: [("[0:8]", (0,)), ("[8:16]", (1,))],
        2: [("[16:24]", (2,)), ("[24:32]", (3,))],
        1: [("[]", (1,))],
    }
    assert plan.moved == 16 << 20
    assert plan.owned == (16 << 20, 1 << 13, 16 << 20, 0)
    assert plan.summary() == "32.0 MiB in 1 rounds, 16.0 MiB moved (50 %), at most 16.0 MiB on one rank"
    tight = write_plan(small.catalogue, small.holdings(), 4, 1)
    assert {u.owner for u in tight.units} == {0, 1, 2}
    assert all(len({u.owner for u in units}) == len(units) for units in tight.rounds)


def test_a_partial_read_by_hand(small: Job) -> None:
    """Chunks of w are 2 elements. Rank 1 wants the second object whole and reads it so; of the first object only the
    chunks that somebody wants are read, each by the rank that wants most of it, then by the one with least to read."""
    ((w, spec),) = [(i, t) for i, t in enumerate(small.catalogue.tensors) if t.name == "w"]
    assert spec.nbytes == 32 << 20
    wanted = {
        w: Holdings.of([(1, Box((16,), (16,))), (0, Box((18,), (3,))), (0, Box((3,), (4,))), (2, Box((5,), (4,)))])
    }
    plan = read_plan(small.catalogue, wanted, 3, 1 << 30)
    found = [(u.owner, str(u.box), [(str(k.box), k.ranks) for k in u.links]) for u in plan.units]
    assert found == [
        (0, "[2:4]", [("[3:4]", (0,))]),
        (0, "[4:6]", [("[4:6]", (0,)), ("[5:6]", (2,))]),
        (2, "[6:8]", [("[6:7]", (0,)), ("[6:8]", (2,))]),
        (2, "[8:10]", [("[8:9]", (2,))]),
        (1, "[16:32]", [("[16:32]", (1,)), ("[18:21]", (0,))]),
    ]


def test_an_empty_state_has_an_empty_plan() -> None:
    plan = write_plan(Catalogue.of([]), [], 3, 1)
    assert (plan.rounds, plan.moved, plan.owned) == ((), 0, (0, 0, 0))
    zero = Catalogue.of([TensorSpec("z", (3, 0), "d8k", 1 << 13)])
    assert write_plan(zero, [Holdings.of([])], 2, 1).rounds == ()
    assert plan.summary().startswith("0.0 MiB in 0 rounds")
