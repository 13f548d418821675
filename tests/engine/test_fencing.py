"""A job that is held in a save while another takes its root over, a zombie or a paused committer: at each named point,
and before each call that it makes to the store."""

from collections.abc import Callable
from typing import Any

import pytest

import ckpt
from ckpt.engine.faults import POINTS
from tests.engine.jobs import Aside, Gate, Job, check, fenced
from tests.support.roots import Root

SAVE_POINTS = [p for p in POINTS if p.startswith(("save.", "commit."))]


def zombie(root: Root, hold: Callable[[Gate], Job]) -> tuple[Any, int | None, list[int]] | None:
    """A job with step 1 behind it is held in the save of step 2, while another loads and saves step 12. Returns what
    became of the save of step 2, what the other job loaded, and the steps; None where the save was never held."""
    gate = Gate()
    old = hold(gate)
    aside = Aside(lambda: old.save(2))
    if not aside.held_at(gate):
        assert isinstance(aside.join(), ckpt.Receipt)
        return None
    new = Job(root)
    loaded = new.load()
    new.save(12)
    gate.open()
    outcome = aside.join()
    fenced(old, 3)
    steps = check(root, old, new)
    new.save(13)
    assert check(root, old, new) == [*steps, 13]
    return outcome, loaded, steps


@pytest.mark.parametrize("point", SAVE_POINTS)
def test_a_zombie_held_in_a_save_never_commits_over_the_job_that_resumed(root: Root, point: str) -> None:
    def hold(gate: Gate) -> Job:
        armed: list[bool] = []
        old = Job(root, faults=lambda p: gate.pass_through() if armed and p == point else None)
        old.save(1)
        armed.append(True)
        return old

    found = zombie(root, hold)
    assert found is not None
    outcome, loaded, steps = found
    if SAVE_POINTS.index(point) < SAVE_POINTS.index("save.receipt"):
        assert isinstance(outcome, ckpt.Fenced) and "claimed by" in str(outcome)
        assert (loaded, steps) == (1, [1, 12])
    else:  # it had written all: the new job commits it and builds on it
        assert isinstance(outcome, ckpt.Receipt) and outcome.step == 2
        assert (loaded, steps) == (2, [1, 2, 12])


def test_a_zombie_held_before_each_call_to_the_store_of_a_save(root: Root) -> None:
    seen = []
    for number in range(50):
        place = Root(f"{root.url}/{number}", root.storage_options)

        def hold(gate: Gate, place: Root = place, number: int = number) -> Job:
            calls: list[tuple[str, Any]] = []

            def before(verb: str, key: Any) -> None:
                calls.append((verb, key))
                if armed and len(calls) - armed[0] == number + 1:
                    gate.pass_through()

            armed: list[int] = []
            old = Job(place, before=before)
            old.save(1)
            armed.append(len(calls))
            return old

        found = zombie(place, hold)
        if found is None:
            break
        outcome, loaded, steps = found
        assert (loaded, steps) == ((2, [1, 2, 12]) if isinstance(outcome, ckpt.Receipt) else (1, [1, 12]))
        assert isinstance(outcome, (ckpt.Receipt, ckpt.Fenced))
        seen.append(type(outcome))
    assert number >= 7  # the log twice, intent, run, receipt, two manifests, the record itself
    assert seen == sorted(seen, key=lambda kind: kind is ckpt.Receipt)  # once whole, it stays so
    assert {*seen} == {ckpt.Receipt, ckpt.Fenced}


def test_a_zombie_is_told_before_it_writes_anything(root: Root) -> None:
    points: list[str] = []
    old = Job(root, faults=points.append)
    old.save(1)
    assert Job(root).load() == 1
    points.clear()
    fenced(old, 2)
    assert points == []
