"""Case 22: a client that has been up for long sees what others commit, retire and delete: nothing is cached."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ckpt
from ckpt.store.log import Log
from ckpt.store.objects import ObjectStore, open_store
from tests.engine.states import refused_load, sample_state, state_bits
from tests.support.roots import Root


class Client:
    """A job, or with read_only a bystander, at a root."""

    def __init__(self, root: Root, **options: Any) -> None:
        self.ck = ckpt.Checkpointer(root.url, storage_options=root.storage_options, **options)

    def loads(self, step: int | None = None) -> int | None:
        """Loads into another state, checks all bits, and says which step it was."""
        state = sample_state(10_000)
        restored = self.ck.load(state, step)
        if restored is None:
            return None
        assert state_bits(state) == state_bits(sample_state(restored.step))
        return restored.step

    def sees(self, *steps: int) -> None:
        newest = steps[-1] if steps else None
        assert (self.ck.steps(), self.ck.latest(), self.loads()) == (list(steps), newest, newest)


@pytest.fixture
def store(root: Root) -> ObjectStore:
    return open_store(root.url, root.storage_options)


def records(store: ObjectStore) -> list[dict[str, Any]]:
    return [json.loads(store.get(key)) for key in store.list("log/")]


def data_of(store: ObjectStore, step: int) -> list[str]:
    """Keys of a committed step's stored objects."""
    (commit,) = [r for r in records(store) if r["kind"] == "commit" and r["step"] == step]
    return [key for key in store.list(f"attempts/{commit['claim']}/{commit['attempt']}/state/") if "/c/" in key]


def test_steps_of_others_are_seen_at_once(root: Root) -> None:
    reader, writer = Client(root, read_only=True), Client(root)
    reader.sees()
    steps: list[int] = []
    for step in (1, 2, 1_000_000):  # each record longer than the one before
        writer.ck.save(step, sample_state(step))
        steps.append(step)
        reader.sees(*steps)
        assert reader.loads(1) == 1
    late = Client(root, read_only=True)
    late.sees(*steps)
    for client in (reader, writer, late):
        client.ck.close()


def test_the_same_step_saved_again_is_seen(root: Root) -> None:
    reader, writer = Client(root, read_only=True), Client(root)
    writer.ck.save(5, sample_state(5))
    reader.sees(5)
    other = Client(root)
    assert other.loads() == 5
    other.ck.save(5, sample_state(6))
    state = sample_state(7)
    assert reader.ck.load(state) is not None
    assert state_bits(state) == state_bits(sample_state(6))
    with pytest.raises(ckpt.Fenced):
        writer.ck.save(6, sample_state(6))
    for client in (reader, writer, other):
        client.ck.close()


def test_a_retired_step_is_not_chosen(root: Root, store: ObjectStore) -> None:
    reader, writer = Client(root, read_only=True), Client(root)
    for step in (1, 2, 3):
        writer.ck.save(step, sample_state(step))
    reader.sees(1, 2, 3)
    log = Log(store)
    found = log.read().records
    (number,) = [r.number for r in found if r.kind == "commit" and r.step == 3]
    assert log.append({"kind": "retire", "claim": found[0].claim, "commit": number})
    store.delete(data_of(store, 3))
    reader.sees(1, 2)
    with pytest.raises(ckpt.CkptError, match=r"no committed step 3; there are \[1, 2\]"):
        reader.loads(3)
    for client in (reader, writer):
        client.ck.close()


def test_a_step_deleted_by_hand_is_an_error_and_an_older_one_loads(root: Root, store: ObjectStore) -> None:
    reader, writer = Client(root, read_only=True), Client(root)
    for step in (1, 2):
        writer.ck.save(step, sample_state(step))
    reader.sees(1, 2)
    keys = data_of(store, 2)
    assert len(keys) > 2
    store.delete(keys[:1])
    refused_load(reader.ck, sample_state(9), ckpt.CorruptCheckpoint, [keys[0], "load an older step"])
    assert reader.loads(1) == 1
    store.delete(keys)
    refused_load(reader.ck, sample_state(9), ckpt.CorruptCheckpoint, ["load an older step"])
    assert reader.loads(1) == 1
    for client in (reader, writer):
        client.ck.close()


@pytest.mark.parametrize("point", ["load.claimed", "load.opened", "load.read"])
def test_a_step_that_vanishes_under_a_load(root: Root, store: ObjectStore, point: str) -> None:
    """Deleted between two of the load's stages: the step is loaded whole, or refused with nothing changed."""
    armed: list[Callable[[], None]] = []
    reader = Client(root, read_only=True, faults=lambda at: armed.pop()() if armed and at == point else None)
    writer = Client(root)
    for step in (1, 2):
        writer.ck.save(step, sample_state(step))
    keys = data_of(store, 2)
    armed.append(lambda: store.delete(keys))
    state = sample_state(9)
    try:
        reader.ck.load(state, atomic=True)
    except ckpt.CorruptCheckpoint as error:
        assert state_bits(state) == state_bits(sample_state(9))
        assert "attempts/" in str(error)
    else:
        assert point == "load.read"  # all reads may have begun by then
        assert state_bits(state) == state_bits(sample_state(2))
    assert not armed
    assert reader.loads(1) == 1
    for client in (reader, writer):
        client.ck.close()


def test_a_folder_that_appears_and_goes_is_seen(tmp_path: Path) -> None:
    """The root itself may come and go, as on a file system that is mounted late."""
    root = Root(str(tmp_path / "late"))
    reader = Client(root, read_only=True)
    reader.sees()
    with ckpt.Checkpointer(root.url) as ck:
        ck.save(1, sample_state(1))
    reader.sees(1)
    (tmp_path / "late").rename(tmp_path / "gone")
    with pytest.raises(ckpt.CkptError):
        reader.loads()
    (tmp_path / "gone").rename(tmp_path / "late")
    reader.sees(1)
    reader.ck.close()
