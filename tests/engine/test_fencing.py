"""Two jobs at one root, as exact interleavings: one is held at a point, the other runs from end to end, then the first
goes on. Each named point of a save and of a load, and before each call that a job makes to the store.

Whatever the point: no committed step is lost or changed, what a save reported is in the lineage of the newest commit,
each number of the log has one record, and each commit was appended under the last claim before it.
"""

import functools
import json
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

import ckpt
from ckpt.engine.faults import POINTS
from ckpt.store.objects import ObjectStore, open_store
from ckpt.store.remote import S3Store
from tests.support.raw import raw
from tests.support.roots import Root

SAVE_POINTS = [p for p in POINTS if p.startswith(("save.", "commit."))]
LOAD_POINTS = [p for p in POINTS if p.startswith("load.")]
PATIENCE = 60.0  # seconds after which a thread that was to be held, or to end, counts as stuck


def state_of(step: int) -> dict[str, Any]:
    """A state whose every bit follows from its step: a tensor with an array of its own, a packed one, a value."""
    big = (torch.arange(20_000, dtype=torch.int32) * 7919 + step).view(torch.float32).reshape(100, 200)
    return {"big": big, "small": torch.full((3,), float(step), dtype=torch.bfloat16), "step": step}


def blank() -> dict[str, Any]:
    return {"big": torch.zeros(100, 200), "small": torch.zeros(3, dtype=torch.bfloat16), "step": -1}


def bits(state: Mapping[str, Any]) -> tuple[bytes, bytes, Any]:
    return raw(state["big"]), raw(state["small"]), state["step"]


class Gate:
    """Holds the thread that comes to it first, until it is opened."""

    def __init__(self) -> None:
        self.reached, self._open = threading.Event(), threading.Event()

    def pass_through(self) -> None:
        if not self.reached.is_set():
            self.reached.set()
            assert self._open.wait(PATIENCE), "held for ever"

    def open(self) -> None:
        self._open.set()


class Counted:
    """A store that calls back before each of its verbs, with the verb and the key."""

    def __init__(self, store: ObjectStore, before: Callable[[str, Any], None]) -> None:
        self._store, self._before = store, before
        self.url = store.url

    def __getattr__(self, verb: str) -> Any:
        act = getattr(self._store, verb)

        def call(*args: Any) -> Any:
            self._before(verb, args[0] if args else None)
            return act(*args)

        return call


@functools.cache
def _client(options: tuple[tuple[str, str], ...]) -> Any:
    """One S3 client for all jobs of this file: to make one takes longer than a save."""
    return S3Store("s3://ckpt", dict(options))._connected()


def opened(root: Root, store: ObjectStore | None = None) -> ObjectStore:
    """The root's store, or the one given, with the common client."""
    store = store or open_store(root.url, root.storage_options)
    if isinstance(store, S3Store) and root.storage_options is not None:
        store._client = _client(tuple(sorted(root.storage_options.items())))
    return store


@dataclass
class Job:
    """A job of one rank: its Checkpointer, and what its saves reported."""

    root: Root
    faults: Callable[[str], None] = lambda point: None
    before: Callable[[str, Any], None] | None = None
    read_only: bool = False
    receipts: list[ckpt.Receipt] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.checkpointer = ckpt.Checkpointer(
            self.root.url, storage_options=self.root.storage_options, faults=self.faults, read_only=self.read_only
        )
        opened(self.root, self.checkpointer._store)
        if self.before is not None:
            store: Any = Counted(self.checkpointer._store, self.before)
            self.checkpointer._store = self.checkpointer._session.store = store
            self.checkpointer._session.log._store = store

    def save(self, step: int) -> ckpt.Receipt:
        receipt = self.checkpointer.save(step, state_of(step))
        self.receipts.append(receipt)
        return receipt

    def load(self, step: int | None = None) -> int | None:
        """The step that was loaded, after its bits were compared with those that it must have."""
        state = blank()
        restored = self.checkpointer.load(state, step)
        if restored is None:
            return None
        assert bits(state) == bits(state_of(restored.step))
        return restored.step


class Aside:
    """Runs something in a thread of its own; `result` is what it returned, or the ckpt error that it raised."""

    def __init__(self, act: Callable[[], Any]) -> None:
        self._act = act
        self.result: Any = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.result = self._act()
        except BaseException as error:  # looked at by whoever started it
            self.result = error

    def held_at(self, gate: Gate) -> bool:
        """Waits until the thread is held, or has ended without coming to the gate."""
        while not gate.reached.wait(0.005):
            if not self._thread.is_alive():
                return gate.reached.is_set()
        return True

    def join(self) -> Any:
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive(), "the first job did not end"
        return self.result


def commits_of(root: Root) -> list[dict[str, Any]]:
    """The commits of the log, read past the code under test, after what must hold of every log was checked."""
    store = opened(root)
    keys = list(store.list("log/"))
    assert keys == [f"log/{n:012d}.json" for n in range(1, len(keys) + 1)]
    claim, commits = None, []
    for number, key in enumerate(keys, 1):
        record = json.loads(store.get(key))
        claim = record["claim"] if record["kind"] == "claim" else claim
        assert record["claim"] == claim, f"record {number} was appended by a fenced job"
        if record["kind"] == "commit":
            commits.append({"number": number, **record})
    return commits


def check(root: Root, *jobs: Job) -> list[int]:
    """The committed steps, in order, after checking that all of them are one lineage and load with their own bits, and
    that every save that reported success is among them."""
    commits = commits_of(root)
    parents = [None, *(c["number"] for c in commits[:-1])] if commits else []
    assert [c["parent"] for c in commits] == parents
    reported = {(r.step, r.state_id) for job in jobs for r in job.receipts}
    assert reported <= {(c["step"], c["state_id"]) for c in commits}
    steps = [c["step"] for c in commits]
    reader = Job(root, read_only=True)
    assert reader.checkpointer.steps() == sorted(steps)
    assert [reader.load(step) for step in steps] == steps
    return steps


def last_claim(root: Root) -> str:
    found = opened(root)
    records = [json.loads(found.get(key)) for key in found.list("log/")]
    return str([r["claim"] for r in records if r["kind"] == "claim"][-1])


def fenced(job: Job, step: int) -> None:
    with pytest.raises(ckpt.Fenced, match="claimed by"):
        job.save(step)


# --- A zombie and a paused committer: held in a save ---


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


# --- A slow loader: held in a load ---


def slow_loader(root: Root, hold: Callable[[Gate], Job]) -> tuple[Any, Any, list[int]] | None:
    """A job has saved step 1. A second one is held in its load, while the first saves step 2, and a third loads and
    saves step 23. Returns what the load and the save of step 2 gave, and the steps."""
    first = Job(root)
    first.save(1)
    gate = Gate()
    second = hold(gate)
    aside = Aside(second.load)
    if not aside.held_at(gate):
        assert aside.join() == 1
        return None
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
    first = Job(root)
    first.save(1)
    gate = Gate()
    second = hold(gate)
    aside = Aside(second.load)
    if not aside.held_at(gate):
        assert aside.join() == 1
        return None
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


@pytest.mark.parametrize("point", LOAD_POINTS)
def test_a_slow_loader_has_fenced_the_job_before_it_from_its_claim_on(root: Root, point: str) -> None:
    def hold(gate: Gate) -> Job:
        return Job(root, faults=lambda p: gate.pass_through() if p == point else None)

    found = slow_loader(root, hold)
    assert found is not None
    loaded, save_of_first, steps = found
    assert isinstance(save_of_first, ckpt.Fenced)
    assert (loaded, steps) == (1, [1, 22])


@pytest.mark.parametrize("point", LOAD_POINTS)
def test_a_slow_loader_that_was_overtaken_loads_sound_bits_and_may_not_save(root: Root, point: str) -> None:
    def hold(gate: Gate) -> Job:
        return Job(root, faults=lambda p: gate.pass_through() if p == point else None)

    found = overtaken_loader(root, hold)
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


# --- What a job knows of its own commits ---


def test_a_commit_that_landed_though_its_save_raised_is_followed_by_the_next(root: Root) -> None:
    def lose(point: str) -> None:
        if point == "commit.done" and lost:
            raise ckpt.StoreError(lost.pop())

    lost: list[str] = []
    job = Job(root, faults=lose)
    job.save(1)
    lost.append("the answer was lost")
    with pytest.raises(ckpt.StoreError, match="the answer was lost"):
        job.save(2)
    job.save(3)
    assert check(root, job) == [1, 2, 3]  # one lineage


def test_a_job_that_goes_back_to_an_older_step_branches_from_it(root: Root) -> None:
    job = Job(root)
    for step in (1, 2, 3):
        job.save(step)
    assert job.load(1) == 1
    job.save(22)
    assert [(c["step"], c["parent"]) for c in commits_of(root)] == [(1, None), (2, 2), (3, 3), (22, 2)]
    reader = Job(root, read_only=True)
    assert reader.checkpointer.steps() == [1, 22] and reader.load() == 22
    with pytest.raises(ckpt.CkptError, match=r"no committed step 3; there are \[1, 22\]"):
        reader.load(3)


def test_a_zombie_is_told_before_it_writes_anything(root: Root) -> None:
    points: list[str] = []
    old = Job(root, faults=points.append)
    old.save(1)
    assert Job(root).load() == 1
    points.clear()
    fenced(old, 2)
    assert points == []


def test_a_closed_checkpointer_says_so(root: Root) -> None:
    job = Job(root)
    job.save(1)
    job.checkpointer.close()
    job.checkpointer.close()
    for act in (lambda: job.save(2), lambda: job.load()):
        with pytest.raises(ckpt.CkptError, match="closed"):
            act()
