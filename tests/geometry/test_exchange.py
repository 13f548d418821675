"""Exchange plans carried out in NumPy: every rank ends with what it wants, and no round is over its budget."""

import dataclasses
from collections import defaultdict
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt.geometry import Box, Catalogue, ExchangePlan, Holdings, TensorSpec, exchange_plan
from tests.geometry.partitions import Held, holders, partitions

ITEMSIZE = 4
WORLD = 5


@dataclasses.dataclass(frozen=True)
class Job:
    shapes: tuple[tuple[int, ...], ...]
    held: tuple[Held, ...]
    wanted: tuple[Held, ...]
    budget: int

    @property
    def catalogue(self) -> Catalogue:
        return Catalogue.of([TensorSpec(f"t{i}", shape, "float32", ITEMSIZE, 0) for i, shape in enumerate(self.shapes)])

    def plan(self) -> ExchangePlan:
        wanted = {i: Holdings.of(w) for i, w in enumerate(self.wanted) if w}
        return exchange_plan(self.catalogue, [Holdings.of(h) for h in self.held], wanted, WORLD, self.budget)


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    shapes = tuple(draw(st.lists(st.lists(st.integers(0, 7), max_size=3).map(tuple), min_size=1, max_size=4)))
    held = tuple(draw(holders(draw(partitions(shape)), WORLD)) for shape in shapes)
    wanted = tuple(draw(st.one_of(st.just([]), holders(draw(partitions(shape)), WORLD))) for shape in shapes)
    return Job(shapes, held, wanted, draw(st.sampled_from([1, 8, 64, 1 << 20])))


@settings(deadline=None, max_examples=200)
@given(jobs())
def test_every_rank_gets_what_it_wants_from_ranks_that_hold_it(job: Job) -> None:
    plan = job.plan()
    full = [np.arange(np.prod(shape, dtype=int)).reshape(shape) + 1 for shape in job.shapes]
    memory: dict[tuple[int, int], np.ndarray] = defaultdict(lambda: np.zeros(0))
    for tensor, wants in enumerate(job.wanted):
        for rank, _ in wants:
            memory[rank, tensor] = np.zeros(job.shapes[tensor], dtype=int)
    for one in [*plan.local, *(t for transfers in plan.rounds for t in transfers)]:
        assert any(r == one.source and box.contains(one.box) for r, box in job.held[one.tensor])
        place = memory[one.target, one.tensor][(..., *one.box.slices)]
        assert (place == 0).all(), "an element arrives twice"
        place[...] = full[one.tensor][(..., *one.box.slices)]
    for tensor, wants in enumerate(job.wanted):
        for rank in {r for r, _ in wants}:
            expected = np.zeros(job.shapes[tensor], dtype=int)
            for box in (b for r, b in wants if r == rank):
                expected[(..., *box.slices)] = full[tensor][(..., *box.slices)]
            assert np.array_equal(memory[rank, tensor], expected)


@settings(deadline=None, max_examples=200)
@given(jobs())
def test_rounds_keep_the_budget_and_what_is_held_at_home_does_not_move(job: Job) -> None:
    plan = job.plan()
    assert all(t.source == t.target for t in plan.local)
    moved = 0
    for transfers in plan.rounds:
        load: dict[tuple[str, int], list[int]] = defaultdict(list)
        for t in transfers:
            assert not any(r == t.target and box.contains(t.box) for r, box in job.held[t.tensor])
            load["out", t.source].append(t.box.volume * ITEMSIZE)
            load["in", t.target].append(t.box.volume * ITEMSIZE)
            moved += t.box.volume * ITEMSIZE
        assert transfers and all(sum(n) <= max(job.budget, ITEMSIZE) for n in load.values())
    assert moved == plan.moved


def test_senders_share_the_work() -> None:
    """Eight boxes wanted elsewhere and held by four replicas: each replica sends two."""
    held = Holdings.of([(r, Box((i,), (1,))) for i in range(8) for r in range(4)])
    wanted = Holdings.of([(4, Box((i,), (1,))) for i in range(8)])
    catalogue = Catalogue.of([TensorSpec("x", (8,), "float32", 4, 0)])
    plan = exchange_plan(catalogue, [held], {0: wanted}, 5, 1 << 20)
    sent: dict[int, int] = defaultdict(int)
    for transfers in plan.rounds:
        for t in transfers:
            sent[t.source] += 1
    assert sent == {0: 2, 1: 2, 2: 2, 3: 2}


def test_the_plan_is_a_value() -> None:
    spec: list[Any] = [(0, Box((0, 0), (4, 2))), (1, Box((0, 2), (4, 2)))]
    job = Job(((4, 4),), (spec,), ([(0, Box((0, 0), (2, 4))), (1, Box((2, 0), (2, 4)))],), 16)
    assert job.plan() == job.plan() and job.plan().digest() == job.plan().digest()
    assert job.plan().digest() != dataclasses.replace(job, budget=8).plan().digest()
