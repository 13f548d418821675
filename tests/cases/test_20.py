"""Case 20, veomni-1181: one rank fails, the others hang.

The fault: a rank raises in a save or a load, and the others block in the next collective until it times out. Here
every operation is agreed on: all ranks raise within seconds, the error names the rank that failed and its cause, and
nothing of the failed attempt can be loaded. (The full table is in tests/engine/test_rank_failure.py.)
"""

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from tests.support.ranks import Crew
from tests.support.raw import log_records, raw

pytestmark = pytest.mark.ranks

SOON = 20.0  # seconds; a hang would last TIMEOUT
TIMEOUT = 200.0
Failure = tuple[str, str, float]


@pytest.fixture(scope="module")
def crew() -> Iterator[Crew]:
    with Crew(4) as made:
        yield made


class _Touchy:
    """An object of the state that fails where it is told to."""

    def __init__(self, fail: str | None) -> None:
        self.fail = fail

    def state_dict(self) -> dict[str, Any]:
        if self.fail == "capture":
            raise RuntimeError("disk of rank is on fire")
        return {"n": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.fail == "apply":
            raise RuntimeError("disk of rank is on fire")


def _state(rank: int, value: float, fail: str | None = None) -> dict[str, Any]:
    """A tensor cut over the ranks, one that all have, and one of each rank alone, which it writes and reads itself."""
    rows = torch.full((200, 500), value)
    boxes = [((200 * rank, 0), (200, 500), (0, 0))]
    own = {f"rank {rank}": torch.full((200, 500), value + rank)}
    return {
        "w": ckpt.ShardedTensor(rows, boxes, (800, 500)),
        "same": torch.full((3,), value),
        "o": _Touchy(fail),
        **own,
    }


def _timed(call: Callable[[], Any]) -> Failure:
    began = time.monotonic()
    try:
        call()
    except BaseException as error:
        return type(error).__name__, str(error), time.monotonic() - began
    return "", "", time.monotonic() - began


def _fail_once(rank: int, world: int, root: str, bad: int, where: str) -> tuple[Failure, str]:
    """One operation in which rank `bad` fails, then a save and a load with the same Checkpointer."""

    def fault(at: str) -> None:
        if armed and rank == bad and at == where:
            raise OSError("disk of rank is on fire")

    armed = False
    with ckpt.Checkpointer(root, faults=fault, timeout=TIMEOUT) as ck:
        ck.save(1, _state(rank, 1.0))
        armed = True
        fail = where if rank == bad else None
        if where.startswith("load") or where == "apply":
            failure = _timed(lambda: ck.load(_state(rank, 0.0, fail)))
        else:
            failure = _timed(lambda: ck.save(2, _state(rank, 2.0, fail)))
        armed = False
        target = _state(rank, 0.0)
        restored = ck.load(target)
        assert restored is not None and restored.step == 1
        assert raw(target["w"].local) == raw(torch.full((200, 500), 1.0))
        return failure, str(ck.save(3, target).step)


WHERE = ["capture", "save.object", "save.written", "save.receipt", "load.read", "apply"]


@pytest.mark.parametrize("bad", [0, 2])
@pytest.mark.parametrize("where", WHERE)
def test_a_rank_that_raises_takes_all_along_and_they_can_go_on(
    where: str, bad: int, crew: Crew, tmp_path: Path
) -> None:
    for rank, (failure, step) in enumerate(crew.run(_fail_once, str(tmp_path), bad, where)):
        kind, message, seconds = failure
        assert kind and seconds < SOON, (rank, failure)
        assert "on fire" in message, (rank, failure)
        assert rank == bad or f"rank {bad}" in message, (rank, failure)
        assert step == "3"
    commits = [r["step"] for r in log_records(tmp_path).values() if r["kind"] == "commit"]
    assert commits == [1, 3]


@pytest.mark.parametrize("bad", [0, 3])
def test_an_interrupt_on_one_rank_breaks_the_others_wait(bad: int, crew: Crew, tmp_path: Path) -> None:
    """It comes between two collectives, where nothing is agreed: a new Checkpointer is needed, but nobody hangs."""
    for rank, (kind, message, seconds) in enumerate(crew.run(_interrupt, str(tmp_path), bad)):
        assert seconds < SOON
        assert kind == ("KeyboardInterrupt" if rank == bad else "RankFailed"), (rank, kind, message)
        assert rank == bad or f"rank {bad}" in message, (rank, message)


def _interrupt(rank: int, world: int, root: str, bad: int) -> Failure:
    def fault(at: str) -> None:
        if rank == bad and at == "save.begin":
            raise KeyboardInterrupt

    with ckpt.Checkpointer(root, faults=fault, timeout=TIMEOUT) as ck:
        failure = _timed(lambda: ck.save(1, _state(rank, 1.0)))
    with ckpt.Checkpointer(root, timeout=TIMEOUT) as ck:
        assert ck.latest() is None
        ck.save(1, _state(rank, 1.0))
    return failure


def _exit(rank: int, world: int, root: str, bad: int) -> Failure:
    def fault(at: str) -> None:
        if rank == bad and at == "save.object":
            os._exit(9)

    with ckpt.Checkpointer(root, faults=fault, timeout=TIMEOUT) as ck:
        return _timed(lambda: ck.save(1, _state(rank, 1.0)))


def test_a_rank_that_is_gone_is_named_by_the_others(tmp_path: Path) -> None:
    with Crew(4) as four:
        outcomes = four.run(_exit, str(tmp_path), 2, expect_failures=True)
    assert outcomes[2].exitcode == 9
    for rank in (0, 1, 3):
        kind, message, seconds = outcomes[rank].value
        assert kind == "RankFailed" and "rank 2" in message and seconds < SOON, (rank, outcomes[rank].value)
    with ckpt.Checkpointer(tmp_path) as ck:
        assert ck.latest() is None and ck.load({"x": 1}) is None
