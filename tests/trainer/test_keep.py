"""`Checkpointer(keep=...)` on two ranks: what goes, what a load meets, and what an error of it may not do."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt.store.collect import take_over
from ckpt.store.log import Log
from ckpt.store.objects import open_store
from tests.support.ranks import Crew

pytestmark = [pytest.mark.ranks]

WORLD = 2
KEEP = ckpt.Keep(last=2, every=4, grace=0)
LAYOUT = ckpt.Layout(dp=WORLD)


@pytest.fixture(scope="module")
def crew() -> Iterator[Crew]:
    with Crew(WORLD) as crew:
        yield crew


def new_state() -> dict[str, Any]:
    return {"x": torch.zeros(1000), "step": 0}


def steps_of(root: Path) -> tuple[list[int], int]:
    with ckpt.Checkpointer(root, ckpt.Layout(), read_only=True) as ck:
        return ck.steps(), len(list(root.glob("attempts/*/*")))


def train(rank: int, world: int, root: str, first: int, last: int, tell_at: int | None = None) -> int | None:
    """Trains on with a commit of each step; gives the exit code of a preemption."""
    state = new_state()
    try:
        with ckpt.Checkpointer(root, LAYOUT, every_steps=1, keep=KEEP, grace=30, timeout=60) as ck:
            ck.load(state)
            assert state["step"] == first - 1 and bool((state["x"] == first - 1).all())
            for step in range(first, last + 1):
                if step == tell_at and rank == 1:
                    os.kill(os.getpid(), signal.SIGTERM)
                state["x"] += 1
                state["step"] = step
                ck.after_step(step, state)
    except ckpt.Preempted as end:
        return int(end.code)
    return None


def test_a_job_keeps_what_the_rules_say_and_the_next_one_goes_on(crew: Crew, tmp_path: Path) -> None:
    crew.run(train, str(tmp_path), 1, 7)
    assert steps_of(tmp_path) == ([4, 6, 7], 3)
    crew.run(train, str(tmp_path), 8, 10)
    assert steps_of(tmp_path) == ([4, 8, 9, 10], 4)


def keep_the_best_of_a_text(rank: int, world: int, root: str, tell: bool) -> tuple[str, int]:
    """Each collection fails. The job is told to end after that, or goes on."""
    state = new_state() | {"loss": "low"}
    keep = ckpt.Keep(best=1, metric="loss")
    ended = "not"
    try:
        with ckpt.Checkpointer(root, LAYOUT, every_steps=1, keep=keep, grace=30, timeout=60) as ck:
            for step in range(1, 9):
                if step == 2 and tell:
                    os.kill(os.getpid(), signal.SIGTERM)
                state["step"] = step
                ck.after_step(step, state)
    except ckpt.Preempted as end:
        ended = f"{end.code}"
    except ckpt.CkptError as error:
        ended = str(error)
    with ckpt.Checkpointer(root, LAYOUT, read_only=True) as ck:
        return ended, ck.latest() or 0


def test_every_rank_hears_of_a_collection_that_failed(crew: Crew, tmp_path: Path) -> None:
    for ended, _ in crew.run(keep_the_best_of_a_text, str(tmp_path), False):
        assert "loss of step 1 is str; metric= takes the name of a number" in ended


def test_the_last_step_is_committed_whatever_became_of_the_collection(crew: Crew, tmp_path: Path) -> None:
    outcomes = crew.run(keep_the_best_of_a_text, str(tmp_path), True)
    assert [ended for ended, _ in outcomes] == ["75", "75"]
    assert outcomes[0][1] == outcomes[1][1] and outcomes[0][1] in (2, 3, 4)


def test_a_job_that_is_told_to_end_leaves_the_rest_to_the_next_one(crew: Crew, tmp_path: Path) -> None:
    assert crew.run(train, str(tmp_path), 1, 20, 5) == [75, 75]
    steps, _ = steps_of(tmp_path)
    last = steps[-1]
    assert last in (5, 6, 7)
    crew.run(train, str(tmp_path), last + 1, last + 1)
    expected = sorted({s for s in range(4, last, 4)} | {last, last + 1})
    assert steps_of(tmp_path) == (expected, len(expected))


def read_while_it_goes(rank: int, world: int, root: str) -> list[int]:
    """A reader's every load gives one step, whole, while rank 0 is also the job that lets steps go."""
    seen = []
    with (
        ckpt.Checkpointer(root, LAYOUT, keep=ckpt.Keep(last=1, grace=0)) as ck,
        ckpt.Checkpointer(root, LAYOUT, read_only=True) as reader,
    ):
        for step in range(1, 9):
            ck.save(step, {"x": torch.full((1000,), float(step)), "step": step})
            state = new_state()
            reader.load(state)
            assert bool((state["x"] == state["step"]).all())
            seen.append(state["step"])
    return seen


def test_a_reader_beside_the_collection_reads_the_newest(crew: Crew, tmp_path: Path) -> None:
    assert crew.run(read_while_it_goes, str(tmp_path)) == [list(range(1, 9))] * 2
    assert steps_of(tmp_path) == ([8], 1)


def fenced_at_the_end(rank: int, world: int, root: str) -> None:
    with ckpt.Checkpointer(root, LAYOUT, keep=KEEP) as ck:
        ck.save(1, new_state())
        ck._collecting.wait()
        if rank == 0:
            store = open_store(root)
            take_over(store, Log(store))


def test_a_job_that_was_fenced_after_its_last_commit_closes_in_peace(crew: Crew, tmp_path: Path) -> None:
    crew.run(fenced_at_the_end, str(tmp_path))
    assert steps_of(tmp_path) == ([1], 1)
