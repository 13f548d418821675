"""Case 13, veomni-1164: mixed generations.

The fault: a directory is used again while its completion marker is still there; a crash half-way leaves old and new
shards under one valid-looking manifest. Here every attempt has a folder of its own, nothing that is committed is ever
written again, and only the log says what is a checkpoint: a load gives one generation or the other, whole.
(The long kill tests are in tests/engine/test_kill.py.)
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from tests.support.ranks import Crew
from tests.support.raw import log_records, raw, tree

OLD, NEW = 1.0, 2.0
ROWS = 600


def _state(value: float, rows: int = ROWS) -> dict[str, Any]:
    return {"a": torch.full((rows, 700), value), "b": torch.full((9,), value), "scheduler": value}


def _generation(state: dict[str, Any]) -> float:
    """The one value that all of the state holds; fails where it is a mix."""
    value = state["scheduler"]
    for name in ("a", "b"):
        assert raw(state[name]) == raw(torch.full_like(state[name], value))
    return float(value)


class _Fault(Exception):
    """What goes wrong in the middle of a save."""


POINTS = [
    "save.begin",
    "save.intent",
    "save.object",
    "save.written",
    "save.receipt",
    "commit.manifest",
    "commit.append",
    "commit.done",
]


@pytest.mark.parametrize("same_step", [True, False], ids=["the same step", "a later step"])
@pytest.mark.parametrize("point", POINTS)
def test_a_save_that_breaks_at_any_point_leaves_one_whole_generation(
    point: str, same_step: bool, tmp_path: Path
) -> None:
    def fault(at: str) -> None:
        if armed and at == point:
            raise _Fault

    step, armed = 5 if same_step else 10, False
    with ckpt.Checkpointer(tmp_path, faults=fault) as ck:
        ck.save(5, _state(OLD))
        before = tree(tmp_path)
        armed = True
        with pytest.raises(_Fault):
            ck.save(step, _state(NEW))
    after = tree(tmp_path)
    assert {name: after.get(name) for name in before} == before  # nothing committed was touched
    target = _state(0.0)
    with ckpt.Checkpointer(tmp_path) as ck:
        restored = ck.load(target)
        assert restored is not None
        committed = point == "commit.done"
        assert _generation(target) == (NEW if committed else OLD)
        assert restored.step == (step if committed else 5)
        ck.save(step, _state(3.0))  # and the step can be saved again
        ck.load(target)
        assert _generation(target) == 3.0
        if not same_step:
            ck.load(target, step=5)
            assert _generation(target) == OLD
    files = tree(tmp_path)
    assert {name: files.get(name) for name in before} == before


def _die_in_save(rank: int, world: int, root: str, victim: int) -> None:
    def die(at: str) -> None:
        if armed and rank == victim and at == "save.object":
            os._exit(1)

    armed = False
    half = ROWS // world

    def mine(value: float) -> dict[str, Any]:
        boxes = [((rank * half, 0), (half, 700), (0, 0))]
        local = torch.full((half, 700), value)
        return {**_state(value), "a": ckpt.ShardedTensor(local, boxes, (ROWS, 700))}

    with ckpt.Checkpointer(root, faults=die, timeout=60) as ck:
        ck.save(5, mine(OLD))
        armed = True
        ck.save(5, mine(NEW))


@pytest.fixture
def two() -> Iterator[Crew]:
    with Crew(2) as made:
        yield made


@pytest.mark.ranks
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_killed_over_an_old_step_then_a_smaller_world(victim: int, two: Crew, tmp_path: Path) -> None:
    """The shards that the dead attempt left behind stay, and are never mixed in."""
    outcomes = two.run(_die_in_save, str(tmp_path), victim, expect_failures=True)
    assert outcomes[victim].exitcode == 1 and outcomes[1 - victim].error_type == "RankFailed"
    left = tree(tmp_path)
    target = _state(0.0)
    with ckpt.Checkpointer(tmp_path) as ck:
        assert ck.load(target) is not None and _generation(target) == OLD
        ck.save(5, _state(3.0))
        ck.load(target)
        assert _generation(target) == 3.0
    assert {name: tree(tmp_path).get(name) for name in left} == left
    commits = [r["attempt"] for r in log_records(tmp_path).values() if r["kind"] == "commit"]
    assert len(set(commits)) == len(commits) == 2
