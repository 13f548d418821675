"""`Checkpointer(url, fast=...)` on two ranks, and under kill -9 in the middle of copies."""

import json
import logging
import multiprocessing
import os
import random
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ckpt
from ckpt.store.collect import take_over
from ckpt.store.log import Log
from ckpt.store.objects import open_store
from ckpt.trainer import draining
from tests.support.ranks import Crew
from tests.support.raw import log_records, raw, tree
from tests.support.roots import Root
from tests.trainer.tiered import loaded, state, steps, tiered

WORLD = 2


@pytest.fixture
def durable(tmp_path: Path) -> Path:
    return tmp_path / "durable"


@pytest.fixture
def fast(tmp_path: Path) -> Path:
    return tmp_path / "fast"


# --- kill -9 ---


def _job(durable: Root, fast: str, first: int, seed: int) -> None:
    """Goes on from the newest step, and dies at a random point of a copy."""
    chance, real = random.Random(seed), draining.copy_commit
    deaths = [chance.choice(["copy.begin", "copy.object", "copy.objects", "copy.records", "copy.commit"])]

    def doomed(*args: Any, **more: Any) -> Any:
        def fault(point: str) -> None:
            if point in deaths and len(copies) > 1:
                os.kill(os.getpid(), signal.SIGKILL)

        copies.append(1)
        return real(*args, **more, fault=fault)

    copies: list[int] = []
    draining.copy_commit = doomed  # type: ignore[assignment]
    ck = ckpt.Checkpointer(durable.url, fast=fast, storage_options=durable.storage_options)
    assert loaded(ck) == (first - 1 or None)
    for step in range(first, first + 3):
        ck.save(step, state(step))
        ck._tiers._draining.wait()  # type: ignore[union-attr]
    os._exit(3)


@pytest.mark.ranks
def test_kills_in_the_middle_of_a_copy_lose_nothing(root: Root, fast: Path) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed.tensor", "ml_dtypes", "numpy"])
    seed, newest = random.SystemRandom().randrange(1 << 30), 0
    print(f"seed {seed}")
    options = {"storage_options": root.storage_options}
    for number in range(3):
        child = context.Process(target=_job, args=(root, str(fast), newest + 1, seed + number))
        child.start()
        child.join(60)
        assert child.exitcode == -signal.SIGKILL, child.exitcode
        with ckpt.Checkpointer(root.url, read_only=True, **options) as ck:
            assert loaded(ck) in (newest, newest + 1, newest + 2, None)
        newest = steps(fast)[-1]
        assert newest > 0
    with tiered(root.url, fast, **options) as ck:
        assert loaded(ck) == newest
    assert steps(root.url, **options)[-1] == newest


# --- ranks ---


@pytest.fixture(scope="module")
def crew() -> Iterator[Crew]:
    with Crew(WORLD) as crew:
        yield crew


def train(rank: int, world: int, root: Root, fast: str, first: int, last: int, tell_at: int | None) -> int | None:
    own = {"own": ckpt.per_rank([rank])}
    live = state(0) | own
    try:
        with ckpt.Checkpointer(
            root.url,
            ckpt.Layout(dp=WORLD),
            fast=fast,
            every_steps=1,
            grace=40,
            timeout=60,
            storage_options=root.storage_options,
        ) as ck:
            done = ck.load(live)
            assert (done.step if done else 0) == first - 1 and raw(live["x"]) == raw(state(first - 1)["x"])
            for step in range(first, last + 1):
                if step == tell_at and rank == 1:
                    os.kill(os.getpid(), signal.SIGTERM)
                live = state(step) | own
                ck.after_step(step, live)
    except ckpt.Preempted as end:
        return int(end.code)
    return None


@pytest.mark.ranks
def test_two_ranks_and_a_lost_node(crew: Crew, root: Root, tmp_path: Path) -> None:
    options = {"storage_options": root.storage_options}
    crew.run(train, root, str(tmp_path / "a"), 1, 3, None)
    assert steps(root.url, **options)[-1] == 3 and steps(tmp_path / "a")[-1] == 3
    assert crew.run(train, root, str(tmp_path / "a"), 4, 20, 6) == [75, 75]
    last = steps(tmp_path / "a")[-1]
    assert last in (6, 7, 8)
    assert steps(root.url, **options)[-1] == last, "the last step is copied before the node goes"
    crew.run(train, root, str(tmp_path / "b"), last + 1, last + 2, None)
    assert steps(root.url, **options)[-1] == last + 2


def not_in_time(rank: int, world: int, durable: str, fast: str) -> tuple[str, str]:
    """The copy hangs; the job is told to end, and has a second."""
    real, caught = draining.copy_commit, list[str]()

    class Heard(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            caught.append(record.getMessage())

    def hanging(*args: Any, stop: Any, **more: Any) -> Any:
        while not stop():
            threading.Event().wait(0.05)
        return real(*args, stop=stop, **more)

    draining.copy_commit = hanging  # type: ignore[assignment]
    logging.getLogger("ckpt").addHandler(heard := Heard())
    ended = "not"
    try:
        with ckpt.Checkpointer(durable, ckpt.Layout(dp=WORLD), fast=fast, every_steps=1, grace=1, timeout=60) as ck:
            for step in range(1, 9):
                if step == 2:
                    os.kill(os.getpid(), signal.SIGTERM)
                ck.after_step(step, state(step))
    except ckpt.Preempted as end:
        ended = str(end.code)
    finally:
        logging.getLogger("ckpt").removeHandler(heard)
        draining.copy_commit = real
    return ended, "\n".join(caught)


@pytest.mark.ranks
def test_a_copy_that_is_not_done_within_the_grace_is_logged(crew: Crew, durable: Path, fast: Path) -> None:
    (ended, said), (other, _) = crew.run(not_in_time, str(durable), str(fast))
    assert ended == other == "75"
    assert "there was no time left to copy it. If this node goes, it goes with it" in said
    assert steps(durable) == [] and steps(fast) != []


def each_its_own(rank: int, world: int, durable: str, fast: str) -> str:
    with ckpt.Checkpointer(durable, ckpt.Layout(dp=WORLD), fast=f"{fast}-{rank}", timeout=60) as ck:
        try:
            ck.save(1, state(1))
        except ckpt.Unsupported as error:
            return str(error)
    return "saved"


@pytest.mark.ranks
def test_ranks_that_see_other_directories_are_told(crew: Crew, durable: Path, fast: Path) -> None:
    for said in crew.run(each_its_own, str(durable), str(fast)):
        assert "rank 1 does not see there what rank 0 has written" in said
    assert not log_records(durable) and json.dumps(sorted(k for k in tree(fast.parent) if "probe" in k)) == "[]"


def failing(rank: int, world: int, durable: str, fast: str) -> list[str]:
    said = []
    with ckpt.Checkpointer(durable, ckpt.Layout(dp=WORLD), fast=fast, timeout=60) as ck:
        ck.save(1, state(1))
        ck._tiers._draining.wait()  # type: ignore[union-attr]
        if rank == 0:
            store = open_store(durable)
            take_over(store, Log(store))
        for step in (2, 3):
            try:
                ck.save(step, state(step))
            except ckpt.Fenced as error:
                said.append(str(error))
            ck._tiers._draining.wait()  # type: ignore[union-attr]
        ck._tiers._draining.error()  # type: ignore[union-attr]
    return said


@pytest.mark.ranks
def test_every_rank_hears_of_a_copy_that_failed(crew: Crew, durable: Path, fast: Path) -> None:
    first, second = crew.run(failing, str(durable), str(fast))
    assert len(first) == len(second) == 1
    assert "fenced" in first[0] and "rank 0 failed during copy to the durable root" in second[0]
    assert steps(fast)[-1] == 3 and steps(durable) == [1]
