"""Collecting a root: what goes, what stays, and that neither a kill at any point, nor a rival, nor a reader, nor
another clock changes that. Roots are made by real saves of one rank; trees are compared whole. What asks the store for
more than it does elsewhere runs in a directory and on S3, all else in a directory."""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import ckpt
from ckpt.errors import CkptError, CorruptCheckpoint, Fenced
from ckpt.store.collect import POINTS, Collected, Collector, check_whole, survey, take_over
from ckpt.store.commit import void
from ckpt.store.leases import MARGIN, moment, stamp
from ckpt.store.log import Log, Record
from ckpt.store.objects import ObjectStore, open_store
from ckpt.store.retention import Keep
from tests.store.retired import (
    NOW,
    attempts,
    collect,
    collector,
    data_of,
    loads,
    records,
    save,
    state,
    steps,
    tree,
)
from tests.support.roots import Root


@pytest.fixture
def store(request: pytest.FixtureRequest) -> ObjectStore:
    """Of `root` where a test has that, else of `folder`."""
    root: Root = request.getfixturevalue("root" if "root" in request.fixturenames else "folder")
    return open_store(root.url, root.storage_options)


def leave(store: ObjectStore, claim: str, attempt: str, like: Record) -> str:
    """What a job that was killed before its commit leaves: all that a committed attempt has, under another name."""
    prefix = f"attempts/{claim}/{attempt}/"
    source = f"attempts/{like.claim}/{like.attempt}/"
    for key, data in tree(store, source).items():
        store.put(prefix + key.removeprefix(source), data)
    return prefix


def test_what_no_rule_keeps_goes_after_the_grace_and_nothing_else(root: Root, store: ObjectStore) -> None:
    save(root, 1, 2, 3, 4, 5)
    whole, keep = tree(store), Keep(last=2, every=3, grace=100)
    seen = survey(store, Log(store), keep, lambda: NOW)
    assert tree(store) == whole, "a survey changes nothing"
    done = collect(store, keep)
    assert [r.step for r in seen.retired] == [r.step for r in done.retired] == [1, 2]
    assert steps(root) == [3, 4, 5] and done.removed == []
    assert [(r.step, why) for r, why in done.waiting] == [(s, f"grace until {stamp(NOW + 160)}") for s in (1, 2)]
    assert data_of(store, 1, 2, 3, 4, 5) == {k: v for k, v in whole.items() if k.startswith("attempts/")}
    assert collect(store, keep, NOW + 100 + MARGIN).removed == []
    done = collect(store, keep, NOW + 101 + MARGIN)
    assert sorted(one.commit or 0 for one in done.removed) == [2, 3] and done.retired == []
    assert {k for one in done.removed for k in one.objects} == whole.keys() - tree(store).keys()
    left = tree(store)
    assert left.items() >= data_of(store, 3, 4, 5).items() and data_of(store, 1, 2) == {}
    assert {k: v for k, v in whole.items() if k.startswith("log/")}.items() <= left.items(), "the log stays"
    for step in (3, 4, 5):
        loads(root, step)
    with pytest.raises(CkptError, match=r"no committed step 1; there are \[3, 4, 5\]"):
        loads(root, 1)


def test_attempts_that_nobody_can_commit_go_at_once(root: Root, store: ObjectStore) -> None:
    save(root, 1)
    (done,) = records(store, "commit")
    old = leave(store, done.claim, "a" * 32, done)
    store.delete([k for k in store.list(old + "receipts/")])  # or it would be completed
    unknown = leave(store, "f" * 32, "b" * 32, done)
    whole = tree(store)
    log = Log(store)
    claim = take_over(store, log)
    mine, voided = leave(store, claim, "c" * 32, done), leave(store, claim, "d" * 32, done)
    void(log, claim, "d" * 32, "a test")
    alive = tree(store, mine)
    done_now = Collector(store, Log(store), claim, Keep(), clock=lambda: NOW).run()
    assert {(one.prefix, one.why) for one in done_now.removed} == {(old, "unfinished"), (voided, "voided")}
    gone = {k: v for k, v in whole.items() if k.startswith(old)}
    left = tree(store)
    assert left.items() >= (whole.items() - gone.items()) | alive.items()
    assert attempts(store) == {unknown, mine, f"attempts/{done.claim}/{done.attempt}/"}


def test_a_finished_attempt_is_committed_before_the_root_is_claimed(root: Root, store: ObjectStore) -> None:
    save(root, 1, 2)
    store.delete(["log/000000000003.json"])  # as if the job had died just before its commit
    assert steps(root) == [1]
    assert collect(store, Keep()).removed == []
    assert steps(root) == [1, 2]
    loads(root, 2)


class Killed(BaseException):
    pass


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("point", POINTS)
def test_killed_at_any_point_a_second_run_finds_the_rest(
    folder: Root, store: ObjectStore, point: str, times: int
) -> None:
    save(folder, 1, 2, 3, 4)
    keep, live = Keep(last=1, grace=0), data_of(store, 4)
    seen: list[str] = []
    left = leave(store, records(store, "claim")[0].claim, "a" * 32, records(store, "commit")[0])
    store.delete([left + "receipts/000000.json"])

    def dies(at: str) -> None:
        seen.append(at)
        if seen.count(point) == times and at == point:
            raise Killed

    with pytest.raises(Killed):
        collect(store, keep, fault=dies)
    assert data_of(store, 4) == live
    for record in records(store, "commit"):  # what is still offered is whole
        if record.step in steps(folder):
            check_whole(store, record)
    collect(store, keep)
    assert tree(store, "attempts/") == live
    assert steps(folder) == [4] and len(records(store, "retire")) == 3
    loads(folder, 4)


def test_an_interrupted_deletion_leaves_the_intent_for_last(folder: Root, store: ObjectStore) -> None:
    save(folder, 1, 2)
    gone: list[str] = []

    class Watched:
        url = store.url

        def __getattr__(self, name: str) -> Any:
            return getattr(store, name)

        def delete(self, keys: list[str]) -> None:
            gone.extend(keys)
            store.delete(keys)

    log = Log(store)
    Collector(Watched(), log, take_over(store, log), Keep(last=1, grace=0), clock=lambda: NOW).run()
    names = [key.split("/", 3)[3] for key in gone]
    kinds = ["state" if n.startswith("state/") and not n.endswith("zarr.json") else n.split("/")[0] for n in names]
    assert names[-1] == "intent.json" and kinds.index("receipts") > max(i for i, k in enumerate(kinds) if k == "state")
    assert max(i for i, n in enumerate(names) if "zarr.json" in n) < min(i for i, n in enumerate(names) if "manif" in n)


def test_two_collectors_of_one_claim_do_the_work_once(root: Root, store: ObjectStore) -> None:
    save(root, 1, 2, 3, 4, 5)
    live, log = data_of(store, 5), Log(store)
    claim, start = take_over(store, log), threading.Barrier(2)

    def one() -> Collected:
        mine = Collector(open_store(root.url, root.storage_options), Log(store), claim, Keep(last=1, grace=0))
        start.wait(30)
        return mine.run()

    with ThreadPoolExecutor(2) as pool:
        running = [pool.submit(one) for _ in range(2)]
        assert sorted({r.step for done in running for r in done.result().retired}) == [1, 2, 3, 4]
    assert len(records(store, "retire")) == 4
    assert tree(store, "attempts/") == live


@pytest.mark.parametrize("point", POINTS)
def test_a_fenced_collector_stops_and_has_harmed_nobody(folder: Root, store: ObjectStore, point: str) -> None:
    """At each point another job resumes and saves before the collector goes on."""
    save(folder, 1, 2, 3)
    acted: list[str] = []

    def rival(at: str) -> None:
        if at == point and not acted:
            acted.append(at)
            save(folder, 4, 5)

    with pytest.raises(Fenced, match="claimed by"):
        collect(store, Keep(last=1, grace=0), fault=rival)
    assert acted
    assert len(records(store, "retire")) == (1 if point == "collect.retired" else 2)
    for record in records(store, "commit"):
        if record.step in steps(folder):
            check_whole(store, record)
    assert steps(folder)[-3:] == [3, 4, 5]
    loads(folder, 3)
    loads(folder, 5)


def test_a_zombie_can_retire_nothing(folder: Root, store: ObjectStore) -> None:
    save(folder, 1, 2)
    zombie = collector(store, Keep(last=1, grace=0))
    save(folder, 3)
    whole = tree(store)
    with pytest.raises(Fenced):
        zombie.run()
    assert tree(store) == whole


def test_a_commit_that_joins_meanwhile_is_judged_with(folder: Root, store: ObjectStore) -> None:
    """The job goes back to step 1 and saves while its collector is about to retire steps 1 and 2: those that the new
    branch needs by the rules stay."""
    options = {"storage_options": folder.storage_options}
    with ckpt.Checkpointer(folder.url, **options) as ck:
        for step in (1, 2, 3, 4):
            ck.save(step, state(step))
        claim = records(store, "claim")[-1].claim
        acted: list[int] = []

        class Late:
            url = store.url

            def __getattr__(self, name: str) -> Any:
                return getattr(store, name)

            def create(self, key: str, data: bytes) -> bool:
                if b'"kind":"retire"' in data and not acted:
                    acted.append(1)
                    ck.load(state(0), 1)
                    ck.save(9, state(9))
                return store.create(key, data)

        done = Collector(Late(), Log(Late()), claim, Keep(last=2, grace=0), clock=lambda: NOW).run()
    assert acted and done.retired == [] and steps(folder) == [1, 9]
    loads(folder, 1)


# --- what must not be lost ---


@pytest.mark.parametrize("harm", ["gone", "short", "manifest"])
def test_nothing_goes_while_the_newest_commit_is_damaged(folder: Root, store: ObjectStore, harm: str) -> None:
    save(folder, 1, 2, 3)
    victim = next(k for k in data_of(store, 3) if ("manifest.json" if harm == "manifest" else "/c/") in k)
    if harm == "gone":
        store.delete([victim])
    else:
        store.put(victim, store.get(victim)[:-1])
    running = collector(store, Keep(last=1, grace=0))
    whole = tree(store)
    with pytest.raises(CorruptCheckpoint, match="no commit is retired or deleted"):
        running.run()
    assert tree(store) == whole
    loads(folder, 2)


def test_what_is_retired_stays_where_nothing_else_is_committed(folder: Root, store: ObjectStore) -> None:
    save(folder, 1)
    log = Log(store)
    claim = take_over(store, log)
    assert log.append({"kind": "retire", "claim": claim, "commit": 2, "time": stamp(0)})
    whole = data_of(store, 1)
    done = collect(store, Keep(last=1, grace=0))
    assert [why for _, why in done.waiting] == ["nothing else is committed"] and data_of(store, 1) == whole


def test_a_retire_without_a_time_is_timed_from_when_it_is_seen(folder: Root, store: ObjectStore) -> None:
    save(folder, 1, 2)
    log = Log(store)
    claim = take_over(store, log)
    assert log.append({"kind": "retire", "claim": claim, "commit": 2})
    keep = Keep(last=1, grace=100)
    assert collect(store, keep).removed == []
    assert [one.commit for one in collect(store, keep, NOW + 200).removed] == [2]


def test_the_best_by_a_number_in_the_state(folder: Root, store: ObjectStore) -> None:
    with ckpt.Checkpointer(folder.url, storage_options=folder.storage_options) as ck:
        for step, loss in ((1, 0.5), (2, 0.25), (3, 2), (4, 1.0)):
            ck.save(step, state(step, loss=loss))
    seen = survey(store, Log(store), Keep(best=1, metric="loss", highest=True))
    assert [(v.record.step, v.kept) for v in seen.verdicts] == [(1, False), (2, False), (3, True), (4, True)]
    assert [r.step for r in collect(store, Keep(best=1, metric="loss")).retired] == [1, 3]
    with pytest.raises(CkptError, match="state of step 9 is list"):
        save_with_list(folder)
        collect(store, Keep(best=1, metric="state"))


def save_with_list(root: Root) -> None:
    with ckpt.Checkpointer(root.url, storage_options=root.storage_options) as ck:
        ck.load(state(0))
        ck.save(9, state(9, state=[1, {"a": 2}]))


def test_what_this_job_has_loaded_stays(folder: Root, store: ObjectStore) -> None:
    save(folder, 1, 2, 3)
    first = records(store, "commit")[0]
    assert [r.step for r in collector(store, Keep(last=1)).run(first.number).retired] == [2]


def test_a_collector_that_runs_again_finds_what_has_come_to_be_garbage(folder: Root, store: ObjectStore) -> None:
    """As in a job: one collector, after each commit."""
    with ckpt.Checkpointer(folder.url, storage_options=folder.storage_options) as ck:
        ck.save(1, state(1))
        own = Collector(store, Log(store), records(store, "claim")[-1].claim, Keep(last=1, grace=0))
        for step in (2, 3, 4):
            ck.save(step, state(step))
            assert [r.step for r in own.run().retired] == [step - 1]
            assert tree(store, "attempts/") == data_of(store, step)


def test_asked_to_stop_it_ends_between_two_steps(folder: Root, store: ObjectStore) -> None:
    save(folder, 1, 2, 3)
    left = leave(store, records(store, "claim")[0].claim, "a" * 32, records(store, "commit")[0])
    store.delete([left + "receipts/000000.json"])
    stopping: list[str] = []
    own = collector(
        store, Keep(last=1, grace=0), fault=stopping.append, stop=lambda: stopping[2:] == ["collect.objects"]
    )
    done = own.run()
    assert [r.step for r in done.retired] == [1, 2] and done.removed == [] and len(attempts(store)) == 4
    stopping.clear()
    own.run()
    assert tree(store, "attempts/") == data_of(store, 3)


def test_times_are_rounded_up_and_come_back() -> None:
    for seconds, wanted in ((NOW, NOW), (NOW + 0.001, NOW + 1), (0.0, 0.0)):
        assert moment(stamp(seconds)) == wanted
    assert [moment(x) for x in (None, "", 7, "2026-01-01")] == [None] * 4
