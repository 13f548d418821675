"""A running job collects its own root beside the training, and errors reach the trainer."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt.engine.comm import Comm
from ckpt.store.collect import Collector, take_over
from ckpt.store.log import Log
from ckpt.store.objects import open_store
from ckpt.trainer import collecting
from ckpt.trainer.collecting import Collecting
from tests.support.raw import log_records


def state(step: int) -> dict[str, Any]:
    return {"x": torch.full((200, 100), float(step))}


def claim_of(folder: Path) -> str:
    return str([r for r in log_records(folder).values() if r["kind"] == "claim"][-1]["claim"])


def attempts(folder: Path) -> int:
    return len(list(folder.glob("attempts/*/*")))


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event, list[int]]:
    """Runs of the real collector wait for the second event, and say by the first that they wait; and are counted."""
    waiting, go, runs = threading.Event(), threading.Event(), list[int]()

    class Gated(Collector):
        def run(self, base: int | None = None) -> Any:
            runs.append(1)
            waiting.set()
            assert go.wait(60)
            return super().run(base)

    monkeypatch.setattr(collecting, "Collector", Gated)
    return waiting, go, runs


def test_it_keeps_what_the_rules_say_while_the_job_saves(tmp_path: Path) -> None:
    with ckpt.Checkpointer(tmp_path) as ck:
        own = Collecting(Comm(), ckpt.Keep(last=2, every=4, grace=0), ck.url, None)
        for step in range(1, 10):
            ck.save(step, state(step))
            own.collect(claim_of(tmp_path))
        own.wait()
        own.collect(claim_of(tmp_path))
        own.wait()
        assert ck.steps() == [4, 8, 9] and attempts(tmp_path) == 3
        for step in (4, 8, 9):
            live = state(0)
            ck.load(live, step)
            assert bool((live["x"] == step).all())
    assert own.close() is None and own.close() is None


def test_a_call_returns_at_once_and_is_made_up_for(tmp_path: Path, gate: Any) -> None:
    waiting, go, runs = gate
    with ckpt.Checkpointer(tmp_path) as ck:
        own = Collecting(Comm(), ckpt.Keep(last=1, grace=0), ck.url, None)
        for step in (1, 2, 3, 4):
            ck.save(step, state(step))
            own.collect(claim_of(tmp_path))  # the first is still waiting
        assert waiting.wait(60) and len(runs) == 1 and ck.steps() == [1, 2, 3, 4]
        go.set()
        own.wait()
        assert len(runs) == 2 and ck.steps() == [4] and attempts(tmp_path) == 1
    assert own.close() is None


@pytest.mark.parametrize("ask", [lambda own, claim: own.collect(claim), lambda own, claim: _raise(own.close())])
def test_an_error_is_raised_where_the_trainer_next_asks(tmp_path: Path, ask: Callable[..., None]) -> None:
    with ckpt.Checkpointer(tmp_path) as ck:
        ck.save(1, state(1))
        own = Collecting(Comm(), ckpt.Keep(last=1, grace=0), ck.url, None)
        claim = claim_of(tmp_path)
        store = open_store(str(tmp_path))
        take_over(store, Log(store))
        own.collect(claim)
        own.wait()
        with pytest.raises(ckpt.Fenced):
            ask(own, claim)
        assert own.close() is None  # it is raised once


def _raise(error: Exception | None) -> None:
    assert error is not None
    raise error


def test_closing_ends_a_collection_between_two_steps(tmp_path: Path, gate: Any) -> None:
    waiting, go, _ = gate
    with ckpt.Checkpointer(tmp_path) as ck:
        for step in (1, 2, 3):
            ck.save(step, state(step))
        own = Collecting(Comm(), ckpt.Keep(last=1, grace=0), ck.url, None)
        own.collect(claim_of(tmp_path))
        assert waiting.wait(60)
        threading.Thread(target=lambda: own._stopping.wait(60) and go.set()).start()
        assert own.close() is None
        assert ck.steps() == [1, 2, 3] and attempts(tmp_path) == 3


def test_without_rules_there_is_no_thread(tmp_path: Path) -> None:
    own = Collecting(Comm(), None, str(tmp_path / "none"), None)
    own.collect("c")
    own.wait()
    assert own.close() is None and not (tmp_path / "none").exists()
