"""A job that is held in a load while another saves: at each named point, and before each call that it makes to the
store."""

from collections.abc import Callable
from typing import Any

import pytest

import ckpt
from ckpt.engine.faults import POINTS
from tests.engine.jobs import Aside, Gate, Job, check, fenced, last_claim
from tests.support.roots import Root

LOAD_POINTS = [p for p in POINTS if p.startswith("load.")]


def held(root: Root, hold: Callable[[Gate], Job]) -> tuple[Job, Job, Gate, Aside] | None:
    """A job that has saved step 1, and a second one that is held in its load of that; None where it was not held."""
    first, gate = Job(root), Gate()
    first.save(1)
    second = hold(gate)
    aside = Aside(second.load)
    if not aside.held_at(gate):
        assert aside.join() == 1
        return None
    return first, second, gate, aside


def slow_loader(root: Root, hold: Callable[[Gate], Job]) -> tuple[Any, Any, list[int]] | None:
    """A job has saved step 1. A second one is held in its load, while the first saves step 2, and a third loads and
    saves step 23. Returns what the load and the save of step 2 gave, and the steps."""
    found = held(root, hold)
    if found is None:
        return None
    first, second, gate, aside = found
    second_commit = _outcome(lambda: first.save(2))
    gate.open()
    loaded = aside.join()
    if not isinstance(loaded, BaseException):
        second.save(22)
        fenced(first, 3)
    return loaded, second_commit, check(root, first, second)


def overtaken_loader(root: Root, hold: Callable[[Gate], Job]) -> tuple[Any, list[int]] | None:
    """A job has saved step 1. A second one is held in its load, while a third loads and saves step 33; then the second
    goes on, and tries to save."""
    found = held(root, hold)
    if found is None:
        return None
    first, second, gate, aside = found
    third = Job(root)
    assert third.load() == 1
    third.save(33)
    gate.open()
    loaded = aside.join()
    if last_claim(root) == second.checkpointer._claim:  # it was held before its claim, so the root is its own now
        second.save(22)
        fenced(third, 34)
    else:  # what it read is sound, but it may not write
        fenced(second, 22)
        third.save(34)
    fenced(first, 3)
    return loaded, check(root, first, second, third)


def _outcome(act: Callable[[], Any]) -> Any:
    try:
        return act()
    except ckpt.CkptError as error:
        return error


def holding_at(root: Root, point: str) -> Callable[[Gate], Job]:
    """Makes a job that is held at a named point."""
    return lambda gate: Job(root, faults=lambda p: gate.pass_through() if p == point else None)


@pytest.mark.parametrize("point", LOAD_POINTS)
def test_a_slow_loader_has_fenced_the_job_before_it_from_its_claim_on(root: Root, point: str) -> None:
    found = slow_loader(root, holding_at(root, point))
    assert found is not None
    loaded, save_of_first, steps = found
    assert isinstance(save_of_first, ckpt.Fenced)
    assert (loaded, steps) == (1, [1, 22])


@pytest.mark.parametrize("point", LOAD_POINTS)
def test_a_slow_loader_that_was_overtaken_loads_sound_bits_and_may_not_save(root: Root, point: str) -> None:
    found = overtaken_loader(root, holding_at(root, point))
    assert found is not None
    loaded, steps = found
    # At load.claimed it has not looked yet: it reads the newest there is, though it is fenced.
    assert (loaded, steps) == (33 if point == "load.claimed" else 1, [1, 33, 34])


def holding_before(place: Root, number: int) -> Callable[[Gate], Job]:
    """Makes a job that is held before its call number `number` to the store."""

    def hold(gate: Gate) -> Job:
        calls: list[tuple[str, Any]] = []

        def before(verb: str, key: Any) -> None:
            calls.append((verb, key))
            if len(calls) == number + 1:
                gate.pass_through()

        return Job(place, before=before)

    return hold


def test_a_slow_loader_held_before_each_call_and_overtaken(root: Root) -> None:
    seen = []
    for number in range(200):
        place = Root(f"{root.url}/{number}", root.storage_options)
        found = overtaken_loader(place, holding_before(place, number))
        if found is None:
            break
        loaded, steps = found
        assert (loaded, steps) in [(33, [1, 33, 22]), (33, [1, 33, 34]), (1, [1, 33, 34])]
        seen.append((loaded, steps[-1]))
    assert number > 10
    assert seen == sorted(seen, key=[(33, 22), (33, 34), (1, 34)].index)
    assert {*seen} == {(33, 22), (33, 34), (1, 34)}


def test_a_slow_loader_held_before_each_call_to_the_store(root: Root) -> None:
    outcomes = []
    for number in range(200):
        place = Root(f"{root.url}/{number}", root.storage_options)
        found = slow_loader(place, holding_before(place, number))
        if found is None:
            break
        loaded, save_of_first, steps = found
        if isinstance(save_of_first, ckpt.Receipt):  # not claimed yet: then it must see that commit
            assert (loaded, steps) == (2, [1, 2, 22])
        else:
            assert isinstance(save_of_first, ckpt.Fenced)
            assert (loaded, steps) == (1, [1, 22])
        outcomes.append(type(save_of_first))
    assert number > 10
    assert outcomes == sorted(outcomes, key=lambda kind: kind is ckpt.Fenced)  # from its claim on
    assert {*outcomes} == {ckpt.Receipt, ckpt.Fenced}
