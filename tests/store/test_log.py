"""The log: gapless, created once, fenced; what its records mean; and a state machine of several claimants against a
list in memory."""

import itertools
import json
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ckpt.errors import CkptError, CorruptCheckpoint, Fenced, StoreError
from ckpt.store.log import History, Log, Record
from ckpt.store.objects import NotFound, ObjectStore, open_store
from tests.support.raw import canonical
from tests.support.roots import Root

Document = dict[str, Any]


def claim(name: str) -> Document:
    return {"kind": "claim", "claim": name, "host": f"host-of-{name}"}


def commit(name: str, attempt: str, step: int, parent: int | None = None) -> Document:
    pinned = {"state_id": "s", "manifest": "m", "ranks": "r", "run": "p"}
    return {"kind": "commit", "claim": name, "attempt": attempt, "step": step, "parent": parent, **pinned}


def void(name: str, attempt: str) -> Document:
    return {"kind": "void", "claim": name, "attempt": attempt, "reason": "test"}


def retire(name: str, number: int) -> Document:
    return {"kind": "retire", "claim": name, "commit": number}


def key(number: int) -> str:
    return f"log/{number:012d}.json"


def stored(document: Document) -> bytes:
    return canonical({"format": 1, **document})


def unsettled(history: History) -> None:
    return None


def settled(attempt: str) -> Callable[[History], Record | None]:
    return lambda history: history.outcome(attempt)


def written_as(record: Record) -> Document:
    return {k: v for k, v in record.document.items() if k != "format"}


class Wrapped:
    """A store with some verbs replaced."""

    def __init__(self, store: ObjectStore, **verbs: Callable[..., Any]) -> None:
        self._store, self._verbs = store, verbs

    def __getattr__(self, name: str) -> Any:
        return self._verbs.get(name) or getattr(self._store, name)


class MemoryStore:
    """The verbs that a log needs, over a dict. `before_create` is called once, then forgotten."""

    url = "memory://root"
    blanks = False

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.before_create: Callable[[], None] | None = None

    def get(self, key: str) -> bytes:
        if key not in self.objects:
            raise NotFound(f"{key}: not found")
        return self.objects[key]

    def put(self, key: str, data: bytes) -> None:
        self.objects[key] = data

    def create(self, key: str, data: bytes) -> bool:
        act, self.before_create = self.before_create, None
        if act is not None:
            act()
        return self.objects.setdefault(key, data) is data

    def list(self, prefix: str = "") -> dict[str, int]:
        return {k: len(v) for k, v in sorted(self.objects.items()) if k.startswith(prefix)}

    def delete(self, keys: Iterable[str]) -> None:
        for k in keys:
            self.objects.pop(k, None)

    def sync(self, *prefixes: str) -> None:
        pass


@pytest.fixture
def store(root: Root) -> ObjectStore:
    return open_store(root.url, root.storage_options)


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


# --- What is refused ---


def put(store: ObjectStore, *documents: Document | bytes) -> None:
    for number, document in enumerate(documents, 1):
        store.put(key(number), document if isinstance(document, bytes) else stored(document))


def test_a_gap_names_the_lost_record(store: ObjectStore) -> None:
    put(store, claim("a"), commit("a", "x", 1), commit("a", "y", 2, 2), claim("b"))
    store.delete([key(2)])
    log = Log(store)
    for _ in range(2):  # not even the second time is the part before the gap taken for all
        with pytest.raises(CorruptCheckpoint, match=r"log/000000000002\.json.*missing, though log/000000000004\.json"):
            log.read()
    store.delete([key(1)])
    with pytest.raises(CorruptCheckpoint, match=r"log/000000000001\.json.*missing"):
        Log(store).read()


def test_a_listing_that_misses_a_record_is_no_gap(store: ObjectStore) -> None:
    """A directory that is listed while others append may show a record and not the one before it."""
    put(store, claim("a"), commit("a", "x", 1), claim("b"))
    partial: Any = Wrapped(store, list=lambda prefix: {key(3): 1})
    assert Log(partial).read().last == 3


@pytest.mark.parametrize("name", ["readme.txt", "000000000002.json.bak", "2.json", "000000000000.json", "x/y.json"])
def test_a_foreign_file_in_the_log_is_named(store: ObjectStore, name: str) -> None:
    put(store, claim("a"))
    store.put(f"log/{name}", b"{}")
    with pytest.raises(CorruptCheckpoint, match=f"{name}: a foreign file in the log"):
        Log(store).read()


GOOD = commit("a", "x", 1)

BAD: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "not a canonical JSON"),
    "cut off": (stored(GOOD)[:-9], "not a canonical JSON"),
    "not JSON": (b"\xff\xfe", "not a canonical JSON"),
    "spaces": (json.dumps({"format": 1, **GOOD}, sort_keys=True).encode(), "canonical"),
    "order": (json.dumps({"zzz": 0, "format": 1, **GOOD}, separators=(",", ":")).encode(), "canonical"),
    "twice the same key": (stored(GOOD)[:-1] + b',"step":1}', "canonical"),
    "newline": (stored(GOOD) + b"\n", "canonical"),
    "a list": (b"[]", "not an object"),
    "no kind": (stored({"claim": "a"}), "its kind is None"),
    "unknown kind": (stored({**GOOD, "kind": "pin"}), "its kind is 'pin'"),
    "no claim": (stored({k: v for k, v in GOOD.items() if k != "claim"}), "claim of a commit is None"),
    "no attempt": (stored({k: v for k, v in GOOD.items() if k != "attempt"}), "attempt of a commit is None"),
    "no manifest": (stored({k: v for k, v in GOOD.items() if k != "manifest"}), "manifest of a commit is None"),
    "step is text": (stored({**GOOD, "step": "1"}), "step of a commit is '1'"),
    "step is true": (stored({**GOOD, "step": True}), "step of a commit is True"),
    "parent to come": (stored({**GOOD, "parent": 2}), "no earlier commit"),
    "parent zero": (stored({**GOOD, "parent": 0}), "no earlier commit"),
    "parent is text": (stored({**GOOD, "parent": "1"}), "no earlier commit"),
    "parent is a claim": (stored({**GOOD, "parent": 1}), "no earlier commit"),
    "retires a claim": (stored(retire("a", 1)), "no earlier commit"),
    "retires nothing": (stored({"kind": "retire", "claim": "a"}), "commit of a retire is None"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_malformed_record_is_refused_by_name(name: str) -> None:
    data, why = BAD[name]
    store = MemoryStore()
    put(store, claim("a"), data)
    with pytest.raises(CorruptCheckpoint, match=rf"memory://root/log/000000000002\.json: .*{why}"):
        Log(store).read()
    log = Log(store)
    log._records = list(_read(claim("a")).records)  # as one that read before the damage
    with pytest.raises(CorruptCheckpoint, match=why):
        log.append_fenced("a", GOOD, settled("x"))


@pytest.mark.parametrize("version", [2, 0, None, "1", True])
def test_another_format_version_asks_for_another_ckpt(version: Any) -> None:
    store = MemoryStore()
    put(store, claim("a"), canonical({**GOOD, "kind": "a kind to come", "format": version}))
    with pytest.raises(CkptError, match=rf"000000000002\.json: format version {version!r}; .* use a newer ckpt"):
        Log(store).read()


# --- What a log means ---


def _read(*documents: Document) -> History:
    store = MemoryStore()
    put(store, *documents)
    return Log(store).read()


def test_the_lineage_follows_parents_from_the_newest_commit() -> None:
    history = _read(
        claim("a"),
        commit("a", "s1", 1),
        commit("a", "s2", 2, 2),
        commit("a", "s3", 3, 3),
        claim("b"),  # goes back to step 2 and trains on from there
        commit("b", "t3", 3, 3),
        void("b", "t4"),
        commit("b", "t5", 5, 6),
    )
    assert [r.attempt for r in history.lineage()] == ["t5", "t3", "s2", "s1"]
    assert history.newest() == history.records[7]
    assert history.newest(3) == history.records[5]  # and not the step 3 that was left behind
    assert history.newest(2) == history.records[2]
    assert history.newest(4) is None
    assert [_read(*map(written_as, history.records[:n])).lineage()[:1] for n in (0, 1)] == [[], []]


def test_of_one_step_saved_twice_the_newer_counts() -> None:
    history = _read(claim("a"), commit("a", "x", 7), commit("a", "y", 7, 2))
    assert [r.attempt for r in history.lineage()] == ["y", "x"]
    assert history.newest(7) == history.records[2]


def test_a_retired_commit_is_passed_over_and_its_ancestors_are_not() -> None:
    commits = [claim("a"), commit("a", "s1", 1), commit("a", "s2", 2, 2), commit("a", "s3", 3, 3)]
    middle = _read(*commits, retire("a", 3))
    assert [r.step for r in middle.lineage()] == [3, 1]
    assert middle.newest(2) is None
    newest = _read(*commits, retire("a", 4))
    assert [r.step for r in newest.lineage()] == [2, 1]
    everything = _read(*commits, *(retire("a", n) for n in (2, 3, 4)))
    assert everything.lineage() == [] and everything.newest() is None


def test_a_job_that_starts_from_nothing_begins_a_lineage_of_its_own() -> None:
    history = _read(claim("a"), commit("a", "s1", 1), claim("b"), commit("b", "t1", 1))
    assert [r.attempt for r in history.lineage()] == ["t1"]
    assert _read(*map(written_as, history.records), retire("b", 4)).lineage() == [history.records[1]]


# --- Several claimants, in any order, with a rival in the middle of an append ---

WHO = st.integers(0, 2)
PICK = st.none() | st.integers(0, 99)
RIVAL = st.none() | st.tuples(WHO, st.booleans())  # who, and whether it claims


class Claimants(RuleBasedStateMachine):
    """Three processes with a log each, as stale as it comes, against a list of documents. A rival may act at the worst
    moment, just before the record of another is created."""

    def __init__(self) -> None:
        super().__init__()
        self.store = MemoryStore()
        self.logs = [Log(self.store) for _ in range(3)]
        self.held: list[str | None] = [None] * 3
        self.model: list[Document] = []
        self.names = itertools.count()

    def name(self) -> str:
        return f"n{next(self.names)}"

    def holder(self) -> str | None:
        return next((d["claim"] for d in reversed(self.model) if d["kind"] == "claim"), None)

    def commits(self) -> list[int]:
        return [n for n, d in enumerate(self.model, 1) if d["kind"] == "commit"]

    def claim_anew(self, who: int) -> None:
        self.held[who] = name = self.name()
        self.logs[who].claim(claim(name))
        self.model.append(claim(name))

    def append(self, who: int, document: Document, rival: tuple[int, bool] | None = None) -> None:
        """Appends for `who`, and checks that it lands exactly when nobody has claimed since."""
        mine = document["claim"]
        if rival is not None and rival[0] != who and mine == self.holder():
            self.store.before_create = lambda: self.intrude(*rival)
        try:
            record = self.logs[who].append_fenced(mine, document, unsettled)
        except Fenced:
            assert mine != self.holder()
        else:
            assert mine == self.holder()
            self.model.append(document)
            assert record.number == len(self.model)

    def intrude(self, who: int, claims: bool) -> None:
        if claims or self.held[who] is None:
            self.claim_anew(who)
        else:
            self.append(who, void(self.held[who] or "", self.name()))

    @initialize()
    def somebody_claims(self) -> None:
        self.claim_anew(0)

    @rule(who=WHO)
    def claims(self, who: int) -> None:
        self.claim_anew(who)

    @rule(who=WHO, step=st.integers(0, 3), parent=PICK, rival=RIVAL)
    def commits_an_attempt(self, who: int, step: int, parent: int | None, rival: tuple[int, bool] | None) -> None:
        earlier = self.commits()
        follows = earlier[parent % len(earlier)] if earlier and parent is not None else None
        if self.held[who] is not None:
            self.append(who, commit(self.held[who] or "", self.name(), step, follows), rival)

    @rule(who=WHO, rival=RIVAL)
    def voids_an_attempt(self, who: int, rival: tuple[int, bool] | None) -> None:
        if self.held[who] is not None:
            self.append(who, void(self.held[who] or "", self.name()), rival)

    @precondition(lambda self: self.commits())
    @rule(who=WHO, which=st.integers(0, 99), rival=RIVAL)
    def retires_a_commit(self, who: int, which: int, rival: tuple[int, bool] | None) -> None:
        if self.held[who] is not None:
            self.append(who, retire(self.held[who] or "", self.commits()[which % len(self.commits())]), rival)

    @rule(who=WHO)
    def reads(self, who: int) -> None:
        assert [written_as(r) for r in self.logs[who].read().records] == self.model

    @rule(who=WHO)
    def loses_its_memory(self, who: int) -> None:
        self.logs[who] = Log(self.store)

    @invariant()
    def the_store_holds_the_model_and_means_the_same(self) -> None:
        assert self.store.objects == {key(n): stored(d) for n, d in enumerate(self.model, 1)}
        last: str | None = None
        for document in self.model:
            last = document["claim"] if document["kind"] == "claim" else last
            assert document["claim"] == last
        retired = {d["commit"] for d in self.model if d["kind"] == "retire"}

        def chain(number: int | None) -> list[int]:
            return [] if number is None else [number, *chain(self.model[number - 1]["parent"])]

        newest = max((n for n in self.commits() if n not in retired), default=None)
        found = [r.number for r in Log(self.store).read().lineage()]
        assert found == [n for n in chain(newest) if n not in retired]


Claimants.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestClaimants = Claimants.TestCase
