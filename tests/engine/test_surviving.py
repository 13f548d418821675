"""A load whose commit is retired and deleted under it begins again on a live one, at whatever point it is."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt.adapters import capture, known_from
from ckpt.engine import load as loading
from ckpt.engine.comm import Comm
from ckpt.engine.opened import open_commit, pick
from ckpt.engine.session import Session
from ckpt.engine.surviving import load_surviving
from ckpt.engine.target import Options
from ckpt.errors import CkptError, CorruptCheckpoint, StateInvalid
from ckpt.store import arrays
from ckpt.store.collect import Collector, take_over
from ckpt.store.leases import read_leases
from ckpt.store.log import Log, Record
from ckpt.store.objects import kvstore_spec, open_store
from ckpt.store.retention import Keep
from tests.support.raw import raw


def state(step: int) -> dict[str, Any]:
    return {"x": torch.full((300, 100), float(step)), "y": torch.full((700, 50), -step), "n": step}


def save(folder: Path, *steps: int) -> None:
    with ckpt.Checkpointer(folder) as ck:
        ck.load(state(0))
        for step in steps:
            ck.save(step, state(step))


def collect(folder: Path) -> None:
    """Another job goes on by a step, keeps that one only, and deletes at once what no lease holds."""
    save(folder, 9)
    store = open_store(str(folder))
    log = Log(store)
    Collector(store, log, take_over(store, log), Keep(last=1, grace=0)).run()


class Reader:
    """What a read-only Checkpointer of one rank does to load. `act` is called once, at the fault point `at`."""

    def __init__(self, folder: Path, at: str = "", act: Callable[[], None] = lambda: None) -> None:
        self.store = open_store(str(folder))
        self.asked: list[int] = []
        self.act: Callable[[], None] | None = act

        def faults(point: str) -> None:
            todo = self.act
            if point == at and todo is not None:
                self.act = None
                todo()

        kvstore = kvstore_spec(str(folder))
        self.session = Session(self.store, kvstore, Log(self.store), Comm(), arrays.context(threads=1), faults)

    def load(self, live: dict[str, Any], step: int | None = None, *, leased: bool, atomic: bool = False) -> int | None:
        def one(record: Record) -> int:
            self.asked.append(record.step)
            opened = open_commit(self.session, record)
            self.session.faults("opened")
            loading.load(
                self.session,
                opened,
                lambda found: capture(live, known_from(found, None)),
                Options(),
                verify=True,
                atomic=atomic,
                layout=None,
            )
            return opened.record.step

        def choose() -> Record | None:
            found = pick(self.session, step)
            self.session.faults("picked")
            return found

        return load_surviving(self.session, choose, one, leased=leased)


def same(live: dict[str, Any], step: int) -> bool:
    wanted = state(step)
    return live["n"] == step and all(raw(live[n]) == raw(wanted[n]) for n in ("x", "y"))


@pytest.mark.parametrize("atomic", [False, True])
@pytest.mark.parametrize("at", ["picked", "opened", "load.opened"])
def test_without_a_lease_it_loads_the_next_live_commit(tmp_path: Path, at: str, atomic: bool) -> None:
    save(tmp_path, 1, 2)
    reader, live = Reader(tmp_path, at, lambda: collect(tmp_path)), state(0)
    assert reader.load(live, leased=False, atomic=atomic) == 9
    assert reader.asked == [2, 9] and same(live, 9)


@pytest.mark.parametrize("at", ["opened", "load.opened", "load.read", "load.placed"])
def test_a_lease_keeps_the_data_to_the_end(tmp_path: Path, at: str) -> None:
    save(tmp_path, 1, 2)
    reader, live = Reader(tmp_path, at, lambda: collect(tmp_path)), state(0)
    assert reader.load(live, leased=True) == 2
    assert reader.asked == [2] and same(live, 2) and read_leases(reader.store) == []


def test_a_lease_that_comes_too_late_is_given_back(tmp_path: Path) -> None:
    save(tmp_path, 1, 2)
    reader, live = Reader(tmp_path, "picked", lambda: collect(tmp_path)), state(0)
    assert reader.load(live, leased=True) == 9
    assert reader.asked == [9] and same(live, 9) and read_leases(reader.store) == []


def test_a_store_that_takes_no_lease_can_be_read(tmp_path: Path) -> None:
    save(tmp_path, 1)
    (tmp_path / "leases").write_bytes(b"a file where a folder is needed")
    reader, live = Reader(tmp_path), state(0)
    assert reader.load(live, leased=True) == 1 and same(live, 1)


def test_a_step_asked_for_by_name_is_not_exchanged_for_another(tmp_path: Path) -> None:
    save(tmp_path, 1, 2)
    early, live = Reader(tmp_path, "opened", lambda: collect(tmp_path)), state(0)
    with pytest.raises(CkptError, match=r"no committed step 2; there are \[9\]"):
        early.load(live, 2, leased=False)
    assert same(live, 0)


def test_a_mixed_state_is_called_so_when_nothing_else_can_be_loaded(tmp_path: Path) -> None:
    save(tmp_path, 1, 2)
    late = Reader(tmp_path, "load.opened", lambda: collect(tmp_path))
    with pytest.raises(StateInvalid, match="loading step 2 failed"):
        late.load(state(0), 2, leased=False)


def test_damage_that_no_retire_explains_is_an_error(tmp_path: Path) -> None:
    save(tmp_path, 1, 2)
    record = Log(open_store(str(tmp_path))).read().newest()
    assert record is not None
    (tmp_path / "attempts" / record.claim / record.attempt / "manifest.json").unlink()
    reader = Reader(tmp_path)
    with pytest.raises(CorruptCheckpoint, match=r"manifest\.json: missing"):
        reader.load(state(0), leased=True)
    assert reader.asked == [2]


def test_an_empty_root_has_nothing(tmp_path: Path) -> None:
    assert Reader(tmp_path / "new").load(state(0), leased=True) is None
