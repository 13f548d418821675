"""Two jobs at one root, as exact interleavings: one is held at a point, the other runs from end to end, then the first
goes on. A point is a named one of a save or a load, or comes before a call that a job makes to the store.

Whatever the point, `check` finds: no committed step is lost or changed, what a save reported is in the lineage of the
newest commit, each number of the log has one record, and each commit was appended under the last claim before it.
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
from ckpt.store.objects import ObjectStore, open_store
from ckpt.store.remote import S3Store
from tests.support.raw import raw
from tests.support.roots import Root

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
