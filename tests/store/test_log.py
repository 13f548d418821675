"""The log: gapless, created once, fenced, whoever races."""

import itertools
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from ckpt.errors import CkptError, Fenced, StoreError
from ckpt.store.log import Log, Record
from ckpt.store.objects import ObjectStore, open_store
from tests.store.logs import (
    Document,
    MemoryStore,
    Wrapped,
    claim,
    commit,
    key,
    settled,
    stored,
    unsettled,
    void,
    written_as,
)
from tests.support.roots import Root


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Retries without waiting; the seconds that would have been waited."""
    waited: list[float] = []
    monkeypatch.setattr("ckpt.store.log.time", SimpleNamespace(sleep=waited.append, monotonic=time.monotonic))
    return waited


# --- Appending and reading ---


def test_records_are_numbered_without_a_gap_created_once_and_read_by_everybody(store: ObjectStore) -> None:
    log, late = Log(store), Log(store)
    assert log.read().last == 0 and log.read().last_claim is None and late.read().records == ()

    documents = [claim("a"), commit("a", "x", 5), void("a", "y"), claim("b")]
    for number, document in enumerate(documents, 1):
        assert log.append(document)
        assert log.last == number
    assert store.list("log/") == {key(n): len(stored(d)) for n, d in enumerate(documents, 1)}
    assert [store.get(key(n)) for n in range(1, 5)] == [stored(d) for d in documents]

    before = store.get(key(1))
    assert not late.append(claim("late"))  # it has read nothing yet: the number 1 is taken
    assert store.get(key(1)) == before
    assert late.last == 1  # and now it knows the winner
    for reader in (log, late, Log(store)):
        history = reader.read()
        assert [r.number for r in history.records] == [1, 2, 3, 4]
        assert [written_as(r) for r in history.records] == documents
        assert history.last_claim is not None and history.last_claim.claim == "b"
        assert [history.outcome(a) for a in "xyz"] == [history.records[1], history.records[2], None]
    assert late.append(claim("late"))
    assert log.read().last == 5


def test_only_the_last_claimant_appends_and_the_other_is_told_by_whom_it_was_fenced(store: ObjectStore) -> None:
    old, new = Log(store), Log(store)
    assert old.claim(claim("a")).number == 1
    assert new.claim(claim("b")).number == 2
    with pytest.raises(Fenced, match=r"claimed by host-of-b, claim b \(ours: a\)"):
        old.append_fenced("a", commit("a", "x", 1), unsettled)
    with pytest.raises(Fenced, match="host-of-b"):
        old.append_fenced("a", void("a", "x"), unsettled)
    record = new.append_fenced("b", commit("b", "y", 1), settled("y"))
    assert (record.number, record.kind, record.step, record.parent, record.attempt) == (3, "commit", 1, None, "y")
    assert new.append_fenced("b", void("b", "y"), settled("y")) == record  # what is settled stays
    assert old.read().last == 3
    with pytest.raises(Fenced, match="nobody"):
        Log(MemoryStore()).append_fenced("a", void("a", "x"), unsettled)


def _lost_answer(store: ObjectStore, document: Document) -> Wrapped:
    def create(key: str, data: bytes) -> bool:
        store.create(key, data)
        raise StoreError("the answer was lost")

    return Wrapped(store, create=create)


def _own_taken_for_anothers(store: ObjectStore, document: Document) -> Wrapped:
    return Wrapped(store, create=lambda key, data: store.create(key, data) and False)


def _lost_request(store: ObjectStore, document: Document) -> Wrapped:
    answers = iter([StoreError("refused"), StoreError("refused"), None])

    def create(key: str, data: bytes) -> bool:
        answer = next(answers)
        if answer:
            raise answer
        return store.create(key, data)

    return Wrapped(store, create=create)


def _lost_answer_and_then_unreachable(store: ObjectStore, document: Document) -> Wrapped:
    down = itertools.count()

    def create(key: str, data: bytes) -> bool:
        store.create(key, data)
        raise StoreError("the answer was lost")

    def get(key: str) -> bytes:
        if store.list(key) and next(down) < 3:
            raise StoreError("unreachable")
        return store.get(key)

    return Wrapped(store, create=create, get=get)


def _lands_late(store: ObjectStore, document: Document) -> Wrapped:
    """The first request times out, and arrives after the second one was sent."""
    calls = itertools.count()

    def create(key: str, data: bytes) -> bool:
        if next(calls) == 0:
            raise StoreError("timed out")
        assert store.create(key, data)
        return store.create(key, data)

    return Wrapped(store, create=create)


def _cannot_sync(store: ObjectStore, document: Document) -> Wrapped:
    tries = itertools.count()

    def sync(*prefixes: str) -> None:
        if next(tries) < 2:
            raise StoreError("fsync failed")

    return Wrapped(store, sync=sync)


UNCERTAIN = [
    _lost_answer,
    _own_taken_for_anothers,
    _lost_request,
    _lost_answer_and_then_unreachable,
    _lands_late,
    _cannot_sync,
]


@pytest.mark.parametrize("fault", UNCERTAIN)
def test_an_append_whose_answer_is_lost_is_read_back_and_counts_once(
    store: ObjectStore, fault: Callable[[ObjectStore, Document], Wrapped], patient: list[float]
) -> None:
    Log(store).append(claim("a"))
    shaky: Any = fault(store, claim("a"))
    log = Log(store)
    log.read()
    log._store = shaky
    record = log.append_fenced("a", commit("a", "x", 1), settled("x"))
    assert (record.number, record.kind, record.attempt) == (2, "commit", "x")
    assert [r.kind for r in Log(store).read().records] == ["claim", "commit"]
    assert log.append_fenced("a", void("a", "x"), settled("x")) == record
    assert Log(store).read().last == 2


@pytest.mark.parametrize("winner", [claim("b"), void("a", "other")], ids=["fenced", "goes on"])
@pytest.mark.parametrize("answer", ["lost", "false"])
def test_an_append_that_lost_the_number_rereads_and_decides_again(
    store: ObjectStore, winner: Document, answer: str, patient: list[float]
) -> None:
    log = Log(store)
    log.claim(claim("a"))
    first = iter([True])

    def create(key: str, data: bytes) -> bool:
        if next(first, False):
            assert Log(store).read().last == 1 and store.create(key, stored(winner))
            if answer == "lost":
                raise StoreError("no answer")
        return store.create(key, data)

    log._store = Wrapped(store, create=create)  # type: ignore[assignment]
    if winner["kind"] == "claim":
        with pytest.raises(Fenced, match="host-of-b"):
            log.append_fenced("a", commit("a", "x", 1), settled("x"))
        assert [r.kind for r in Log(store).read().records] == ["claim", "claim"]
    else:
        assert log.append_fenced("a", commit("a", "x", 1), settled("x")).number == 3
        assert [r.kind for r in Log(store).read().records] == ["claim", "void", "commit"]


def test_an_unreachable_store_is_an_error_after_a_while_and_the_log_can_be_used_again(
    store: ObjectStore, patient: list[float]
) -> None:
    log = Log(store)
    log.claim(claim("a"))

    def down(*_: Any) -> Any:
        raise StoreError("no route to host")

    log._store = Wrapped(store, create=down)  # type: ignore[assignment]
    with pytest.raises(StoreError, match="no route"):
        log.append_fenced("a", commit("a", "x", 1), settled("x"))
    assert 5 < sum(patient) < 30
    log._store = Wrapped(store, create=down, get=down)  # type: ignore[assignment]
    with pytest.raises(StoreError, match="no route"):
        log.append(commit("a", "x", 1))
    log._store = store
    assert log.append_fenced("a", commit("a", "x", 1), settled("x")).number == 2


def test_a_store_that_waits_long_itself_is_asked_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, asked = itertools.count(0, 40), []

    def slow(key: str, data: bytes) -> bool:
        asked.append(key)
        raise StoreError("silent")

    monkeypatch.setattr("ckpt.store.log.time", SimpleNamespace(sleep=lambda s: None, monotonic=lambda: next(clock)))
    with pytest.raises(StoreError, match="silent"):
        Log(Wrapped(MemoryStore(), create=slow)).append(claim("a"))  # type: ignore[arg-type]
    assert len(asked) == 2


def test_a_store_that_says_exists_and_shows_nothing_is_an_error_and_no_endless_loop(patient: list[float]) -> None:
    log = Log(Wrapped(MemoryStore(), create=lambda key, data: False))  # type: ignore[arg-type]
    with pytest.raises(StoreError, match=r"000000000001.json.*says that it exists"):
        log.claim(claim("a"))


# --- Races ---


def at_once(acts: list[Callable[[], Any]]) -> list[Any]:
    """What each of them returned or raised, all started together."""
    ready = threading.Barrier(len(acts))

    def go(act: Callable[[], Any]) -> Any:
        ready.wait(30)
        try:
            return act()
        except CkptError as error:
            return error

    with ThreadPoolExecutor(len(acts)) as pool:
        return [future.result(60) for future in [pool.submit(go, act) for act in acts]]


def appending(log: Log, document: Document) -> Callable[[], Record]:
    return partial(log.append_fenced, document["claim"], document, settled(document["attempt"]))


def test_racing_appenders_get_different_numbers_and_leave_no_gap(root: Root, store: ObjectStore) -> None:
    Log(store).claim(claim("a"))

    def appender(name: str) -> Callable[[], list[int]]:
        own = Log(open_store(root.url, root.storage_options))

        def act() -> list[int]:
            documents = [void("a", f"{name}{i}") for i in range(5)]
            return [own.append_fenced("a", d, settled(d["attempt"])).number for d in documents]

        return act

    numbers = at_once([appender(name) for name in "wxyz"])
    assert all(found == sorted(found) for found in numbers)
    assert sorted(n for found in numbers for n in found) == list(range(2, 22))
    records = Log(store).read().records
    assert {r.attempt for r in records[1:]} == {f"{name}{i}" for name in "wxyz" for i in range(5)}


def test_two_committers_of_one_attempt_leave_one_record(root: Root, store: ObjectStore) -> None:
    Log(store).claim(claim("a"))
    logs = [Log(open_store(root.url, root.storage_options)) for _ in range(4)]
    found = at_once([appending(log, commit("a", "x", 1)) for log in logs])
    assert [r.number for r in found] == [2] * 4
    assert Log(store).read().last == 2


def test_a_commit_that_races_a_claim_lands_before_it_or_not_at_all(root: Root, store: ObjectStore) -> None:
    claimant, rival = (Log(open_store(root.url, root.storage_options)) for _ in range(2))
    for number in range(10):
        mine, theirs = f"a{number}", f"b{number}"
        claimant.claim(claim(mine))
        rival.read()
        done, raced = at_once([appending(claimant, commit(mine, mine, 1)), partial(rival.claim, claim(theirs))])
        records = Log(store).read().records
        assert records[raced.number - 1].claim == theirs
        if isinstance(done, Fenced):
            assert [(r.kind, r.claim) for r in records[-2:]] == [("claim", mine), ("claim", theirs)]
        else:
            assert [(r.kind, r.claim) for r in records[-2:]] == [("commit", mine), ("claim", theirs)]
