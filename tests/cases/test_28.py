"""Case 28: told to end, by a signal to some ranks or to all, all ranks commit one step and end with code 75."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ckpt
from tests.support.ranks import Crew

pytestmark = [pytest.mark.ranks]

WORLD = 4
LAST = 60


@pytest.fixture(scope="module")
def crew() -> Iterator[Crew]:
    with Crew(WORLD) as crew:
        yield crew


def train(rank: int, root: str, told: Any, every: int | None, kill: bool = False) -> tuple[Any, int, int]:
    """(exit code or None, step that was committed, sum that the run has reached); resumes what is there."""
    state = {"sum": torch.zeros(1000, dtype=torch.int64), "step": 0}
    committed = -1
    try:
        with ckpt.Checkpointer(root, ckpt.Layout(dp=WORLD), every_steps=every, grace=30, timeout=60) as ck:
            ck.load(state)
            while state["step"] < LAST:
                step = state["step"] + 1
                time.sleep(0.01)
                told(rank, step)
                part = torch.tensor([rank + step])
                dist.all_reduce(part)
                state["sum"] += part
                state["step"] = step
                ck.after_step(step, state)
            committed = ck.save(LAST, state).step
    except ckpt.Preempted as end:
        if kill:
            os.kill(os.getpid(), signal.SIGKILL)
        return end.code, end.step, int(state["sum"][0])
    return None, committed, int(state["sum"][0])


def expected(step: int) -> int:
    return sum(WORLD * s + 6 for s in range(1, step + 1))


def only_rank_2(rank: int, step: int) -> None:
    if rank == 2 and step == 5:
        os.kill(os.getpid(), signal.SIGTERM)


def all_with_jitter(rank: int, step: int) -> None:
    if step == 5 + 2 * rank:
        os.kill(os.getpid(), signal.SIGTERM)


def again_and_again(rank: int, step: int) -> None:
    if rank in (1, 3) and step >= 5:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGUSR1)


def from_another_thread(rank: int, step: int) -> None:
    if rank == 0 and step == 5:
        threading.Timer(0.015, os.kill, (os.getpid(), signal.SIGUSR1)).start()


HOW = {f.__name__: f for f in (only_rank_2, all_with_jitter, again_and_again, from_another_thread)}


def preempted_and_resumed(rank: int, world: int, root: str, how: str, every: int | None) -> list[Any]:
    found = [train(rank, root, HOW[how], every)]
    dist.barrier()
    found.append(train(rank, root, lambda rank, step: None, every))
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL  # given back
    return found


@pytest.mark.parametrize("every", [None, 1])
@pytest.mark.parametrize("how", HOW)
def test_all_ranks_commit_one_step_and_end(crew: Crew, tmp_path: Path, how: str, every: int | None) -> None:
    """With every=1 each signal comes while a save is under way."""
    found = crew.run(preempted_and_resumed, str(tmp_path / "root"), how, every, timeout=120)
    assert all(one == found[0] for one in found)
    (code, step, reached), (ended, last, total) = found[0]
    assert code == 75 and 5 < step <= 12 and reached == expected(step)
    assert (ended, last, total) == (None, LAST, expected(LAST))
    with ckpt.Checkpointer(tmp_path / "root", read_only=True) as ck:
        assert {step, LAST} <= set(ck.steps())


def poll_one(rank: int, world: int, root: str) -> tuple[Any, int]:
    seen = []

    def poll() -> bool:
        seen.append(1)
        return rank == 1 and len(seen) == 3  # true once: it is remembered

    state = {"x": torch.zeros(3)}
    with ckpt.Checkpointer(root, ckpt.Layout(dp=WORLD), signals=(), poll=poll, timeout=60) as ck:
        try:
            for step in range(1, 30):
                ck.after_step(step, state)
        except SystemExit as end:
            return end.code, len(seen)
    return None, len(seen)


def test_a_poll_of_one_rank_is_enough(crew: Crew, tmp_path: Path) -> None:
    found = crew.run(poll_one, str(tmp_path / "root"), timeout=60)
    assert found == [(75, 3)] * WORLD
    with ckpt.Checkpointer(tmp_path / "root", read_only=True) as ck:
        assert ck.steps() == [4]


def by_time(rank: int, world: int, root: str) -> list[int]:
    begun = []
    with ckpt.Checkpointer(root, ckpt.Layout(dp=WORLD), every_seconds=0.2, timeout=60) as ck:
        for step in range(1, 2000):
            time.sleep(0.002 * rank)  # clocks and paces differ
            if ck.after_step(step, {"x": torch.zeros(3)}) is not None:
                begun.append(step)
            if len(begun) == 3:
                break
    return begun


def test_saves_by_the_clock_are_of_the_same_steps_on_all_ranks(crew: Crew, tmp_path: Path) -> None:
    found = crew.run(by_time, str(tmp_path / "root"), timeout=120)
    assert len(found[0]) == 3 and all(one == found[0] for one in found)
    with ckpt.Checkpointer(tmp_path / "root", read_only=True) as ck:
        assert ck.steps() == found[0]


def killed_as_it_ends(rank: int, world: int, root: str) -> None:
    train(rank, root, only_rank_2, None, kill=True)


def test_sigkill_after_the_notice(tmp_path: Path) -> None:
    root = str(tmp_path / "root")
    with Crew(WORLD) as dying:
        dying.run(killed_as_it_ends, root, timeout=60, expect_failures=True)
    with ckpt.Checkpointer(root, read_only=True) as ck:
        assert len(ck.steps()) == 1
        state = {"sum": torch.zeros(1000, dtype=torch.int64), "step": 0}
        ck.load(state)
        assert int(state["sum"][0]) == expected(state["step"])


def errors_come_up(rank: int, world: int, root: str) -> str:
    """An asynchronous save fails on its own; the next steps say so on all ranks."""
    ck = ckpt.Checkpointer(root, ckpt.Layout(dp=WORLD), every_steps=1000, timeout=60)
    state = {"x": torch.zeros(3)}
    ck.save(1, state)
    dist.barrier()
    if rank == 0:
        os.rename(root, root + ".gone")
        Path(root).write_text("no folder")
    dist.barrier()
    ck.save_async(2, state)
    with pytest.raises(ckpt.StoreError) as error:
        for step in range(3, 900):
            ck.after_step(step, state)
            time.sleep(0.05)
    ck.close()
    return str(error.value)


def test_a_failed_save_is_raised_by_a_later_step(crew: Crew, tmp_path: Path) -> None:
    for said in crew.run(errors_come_up, str(tmp_path / "root"), timeout=90):
        assert "step 2 in the background failed" in said
