"""What a log means, and a state machine of several claimants against a list in memory."""

import itertools

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ckpt.errors import Fenced
from ckpt.store.log import Log
from tests.store.logs import (
    Document,
    MemoryStore,
    _read,
    claim,
    commit,
    key,
    retire,
    stored,
    unsettled,
    void,
    written_as,
)


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
