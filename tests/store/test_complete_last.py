"""A later job commits what a dead one had finished, and nothing else."""

from collections.abc import Callable
from typing import Any

import pytest

from ckpt.errors import Fenced
from ckpt.store.commit import assemble, complete_last, publish, void
from ckpt.store.log import Log
from ckpt.store.objects import ObjectStore
from tests.store.attempts import RUN, UNFINISHED, URL, claim, log_of, make_attempt, pinned, write


class Before:
    """A store that does something once, before it creates a certain key."""

    def __init__(self, store: ObjectStore, key: str, act: Callable[[], Any]) -> None:
        self._store, self._key, self._act = store, key, act
        self.url = store.url

    def create(self, key: str, data: bytes) -> bool:
        if self._key in key:
            self._key = "\0"
            self._act()
        return self._store.create(key, data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def test_a_later_job_commits_what_a_dead_one_had_finished(store: ObjectStore) -> None:
    claim(store, "claim")
    intent, receipts = make_attempt()
    write(store, intent, receipts)
    record = complete_last(store, Log(store))
    assert record is not None and (record.number, record.step) == (2, 7)
    found = pinned(store, record)
    assert (found.manifest, found.ranks) == (
        (sealed := assemble(intent, receipts, RUN, URL)).manifest,
        sealed.ranks,
    )
    assert complete_last(store, Log(store)) is None
    assert log_of(store) == [("claim", "claim", ""), ("commit", "claim", "attempt")]


def test_nothing_is_completed_in_an_empty_root(store: ObjectStore) -> None:
    assert complete_last(store, Log(store)) is None
    claim(store, "claim")
    assert complete_last(store, Log(store)) is None


@pytest.mark.parametrize("there", [["manifest.json"], ["manifest.json", "ranks/manifest.json"]])
def test_a_committer_that_died_between_its_writes_is_taken_over(store: ObjectStore, there: list[str]) -> None:
    claim(store, "claim")
    intent, receipts = make_attempt()
    prefix = write(store, intent, receipts)
    sealed = assemble(intent, receipts, RUN, URL)
    for name in there:
        store.create(prefix + name, sealed.manifest.document() if name == "manifest.json" else sealed.ranks)
    assert complete_last(store, Log(store)) is not None


@pytest.mark.parametrize("name", UNFINISHED)
def test_an_attempt_that_is_not_whole_is_left_alone_and_stops_nobody(store: ObjectStore, name: str) -> None:
    claim(store, "claim")
    prefix = write(store, *make_attempt())
    UNFINISHED[name](store, prefix)
    before = log_of(store)
    assert complete_last(store, Log(store)) is None
    assert log_of(store) == before
    write(store, *make_attempt(attempt="sound", step=6))  # an older one beside it is found all the same
    record = complete_last(store, Log(store))
    assert record is not None and record.attempt == "sound"


def test_only_attempts_of_the_last_claim_are_completed(store: ObjectStore) -> None:
    claim(store, "claim")
    write(store, *make_attempt())
    claim(store, "newer")
    assert complete_last(store, Log(store)) is None
    assert log_of(store) == [("claim", "claim", ""), ("claim", "newer", "")]


def test_of_several_finished_attempts_one_is_committed_the_furthest(store: ObjectStore) -> None:
    claim(store, "claim")
    for attempt, step in (("x", 8), ("y", 10), ("z", 9)):
        write(store, *make_attempt(attempt=attempt, step=step))
    record = complete_last(store, Log(store))
    assert record is not None and record.attempt == "y"
    assert complete_last(store, Log(store)) is None  # the others do not follow it


def test_an_attempt_that_its_job_gave_up_does_not_come_back_over_a_newer_commit(store: ObjectStore) -> None:
    """An interrupted save left all receipts, but neither commit nor void; the job went on and committed a later one."""
    claim(store, "claim")
    write(store, *make_attempt(attempt="given up", step=10))
    intent, receipts = make_attempt(attempt="later", step=20)
    write(store, intent, receipts)
    publish(store, Log(store), intent, assemble(intent, receipts, RUN, URL))
    assert complete_last(store, Log(store)) is None
    write(store, *make_attempt(attempt="next", step=30, parent=2))
    record = complete_last(store, Log(store))
    assert record is not None and (record.attempt, record.parent) == ("next", 2)
    assert [r.step for r in Log(store).read().lineage()] == [30, 20]


def test_the_first_save_after_a_load_is_completed_on_the_commit_that_was_loaded(store: ObjectStore) -> None:
    claim(store, "claim")
    intent, receipts = make_attempt(attempt="old")
    write(store, intent, receipts)
    publish(store, Log(store), intent, assemble(intent, receipts, RUN, URL))
    claim(store, "newer")
    write(store, *make_attempt(claim="newer", attempt="new", step=9, parent=2))
    record = complete_last(store, Log(store))
    assert record is not None and (record.claim, record.parent, record.number) == ("newer", 2, 4)


def test_a_claim_or_void_that_comes_in_between_is_respected(store: ObjectStore) -> None:
    claim(store, "claim")
    write(store, *make_attempt())
    racing: Any = Before(store, "log/", lambda: claim(store, "newer"))
    with pytest.raises(Fenced, match="newer"):
        complete_last(racing, Log(racing))
    assert log_of(store) == [("claim", "claim", ""), ("claim", "newer", "")]

    write(store, *make_attempt(claim="newer"))
    racing = Before(store, "log/", lambda: void(Log(store), "newer", "attempt", "by its own job"))
    assert complete_last(racing, Log(racing)) is None
    assert log_of(store)[2:] == [("void", "newer", "attempt")]


def test_a_commit_by_its_own_job_that_comes_in_between_is_the_one(store: ObjectStore) -> None:
    claim(store, "claim")
    intent, receipts = make_attempt()
    write(store, intent, receipts)
    sealed = assemble(intent, receipts, RUN, URL)
    racing: Any = Before(store, "log/", lambda: publish(store, Log(store), intent, sealed))
    record = complete_last(racing, Log(racing))
    assert record is not None and record.number == 2
    assert len(log_of(store)) == 2
