"""Commits that are being read, or marked, stay."""

import contextlib
import threading
from typing import Any

import pytest

from ckpt.errors import CkptError
from ckpt.store.leases import MARGIN, SECONDS, lease, mark, read_leases, stamp, unmark
from ckpt.store.log import Log
from ckpt.store.objects import ObjectStore, open_store
from ckpt.store.retention import Keep
from tests.store.retired import NOW, collect, collector, data_of, loads, records, save, steps, tree
from tests.support.roots import Root


@pytest.fixture
def store(request: pytest.FixtureRequest) -> ObjectStore:
    """Of `root` where a test has that, else of `folder`."""
    root: Root = request.getfixturevalue("root" if "root" in request.fixturenames else "folder")
    return open_store(root.url, root.storage_options)


def test_a_commit_being_read_stays_until_the_lease_ends(root: Root, store: ObjectStore) -> None:
    save(root, 1, 2, 3)
    first = records(store, "commit")[0]
    keep, whole = Keep(last=1, grace=0), data_of(store, 1)
    with lease(store, first.number, "load", clock=lambda: NOW):
        done = collect(store, keep)
        assert [r.step for r in done.retired] == [2] and steps(root) == [1, 3]
        assert data_of(store, 1) == whole
    assert read_leases(store) == []
    assert [r.step for r in collect(store, keep).retired] == [1] and data_of(store, 1) == {}


def test_a_lease_made_before_the_retire_was_seen_keeps_the_data(folder: Root, store: ObjectStore) -> None:
    """The collector has looked at the leases, then a reader makes one, then the retire lands."""
    save(folder, 1, 2)
    first = records(store, "commit")[0]
    whole = data_of(store, 1)
    with contextlib.ExitStack() as reading:

        def reader(at: str) -> None:
            if at == "collect.retired":
                reading.enter_context(lease(store, first.number, "load", clock=lambda: NOW))

        done = collect(store, Keep(last=1, grace=0), fault=reader)
        assert [(r.step, why) for r, why in done.waiting] == [(1, "load")]
        assert data_of(store, 1) == whole
        assert first.number in Log(store).read().retired  # what a reader looks for once it has its lease
    collect(store, Keep(last=1, grace=0))
    assert data_of(store, 1) == {}


def test_a_dead_readers_lease_runs_out_by_any_clock_within_the_margin(folder: Root, store: ObjectStore) -> None:
    save(folder, 1, 2)
    first = records(store, "commit")[0]
    keep, whole = Keep(last=1, grace=0), data_of(store, 1)
    with lease(store, first.number, "load", clock=lambda: NOW) as made:
        copied = store.get(made.key)
    store.put(made.key, copied)  # as if the reader had died
    for ahead in (0.0, MARGIN):  # of a collector's clock, in the last second of the lease
        collect(store, keep, NOW + SECONDS + ahead)
        assert data_of(store, 1) == whole and steps(folder) == [1, 2]
    collect(store, keep, NOW + SECONDS + MARGIN + 1)
    assert data_of(store, 1) == {} and read_leases(store) == []


@pytest.mark.parametrize("ahead", [-MARGIN, 0.0, MARGIN])
def test_a_clock_within_the_margin_never_shortens_the_grace(folder: Root, store: ObjectStore, ahead: float) -> None:
    """The clock that retires, against the one that deletes: true seconds since the retire are what counts."""
    save(folder, 1, 2)
    keep = Keep(last=1, grace=100)
    collect(store, keep, NOW)
    whole = data_of(store, 1)
    collect(store, keep, NOW + 99 + ahead)
    assert data_of(store, 1) == whole
    collect(store, keep, NOW + 101 + 2 * MARGIN + ahead)
    assert data_of(store, 1) == {}


def test_a_renewed_lease_outlives_its_first_term(folder: Root, store: ObjectStore) -> None:
    save(folder, 1, 2)
    first, clock, renewed = records(store, "commit")[0], [NOW], threading.Event()

    class Told:
        url = store.url

        def __getattr__(self, name: str) -> Any:
            return getattr(store, name)

        def put(self, key: str, data: bytes) -> None:
            store.put(key, data)
            if stamp(NOW + 1000.5).encode() in data:
                renewed.set()

    with lease(Told(), first.number, "load", seconds=0.5, clock=lambda: clock[0]):
        clock[0] = NOW + 1000
        assert renewed.wait(60)
        assert collect(store, Keep(last=1, grace=0), NOW + 1000).retired == []
    assert read_leases(store) == []


def test_a_marked_step_stays_for_ever(folder: Root, store: ObjectStore) -> None:
    save(folder, 1, 2, 3)
    assert mark(store, Log(store), 1).step == mark(store, Log(store), 1).step == 1
    assert len(read_leases(store)) == 1
    assert [r.step for r in collect(store, Keep(last=1, grace=0), NOW * 10).retired] == [2]
    loads(folder, 1)
    with pytest.raises(CkptError, match=r"no committed step 2; there are \[1, 3\]"):
        mark(store, Log(store), 2)
    unmark(store, Log(store), 1)
    assert [r.step for r in collect(store, Keep(last=1, grace=0)).retired] == [1]


@pytest.mark.parametrize(
    "bad", [b"{}", b"[]", b"\x00", b'{"commit":"2","expires":null,"format":1}', b'{"commit":2,"expires":7,"format":1}']
)
def test_a_lease_that_cannot_be_read_stops_the_collector(folder: Root, store: ObjectStore, bad: bytes) -> None:
    save(folder, 1, 2)
    store.put("leases/x.json", bad)
    running = collector(store, Keep(last=1, grace=0))
    whole = tree(store)
    with pytest.raises(CkptError, match=r"leases/x\.json"):
        running.run()
    assert tree(store) == whole
