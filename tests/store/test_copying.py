"""Copying commits: what arrives, in which order it is shown, and that neither a kill at any point, nor damage at either
end, nor another copier, nor another job makes anything of it wrong. Roots are made by real saves of one rank."""

import shutil
import threading
from pathlib import Path

import pytest

from ckpt.errors import CkptError, CorruptCheckpoint, Fenced, NothingCommitted
from ckpt.store.collect import Collector, take_over
from ckpt.store.copying import POINTS, Copied, claim_for_copies, copy_commit, copy_of, outstanding
from ckpt.store.leases import read_leases
from ckpt.store.log import History
from ckpt.store.retention import Keep
from ckpt.store.transfer import Stopped
from tests.store.copies import attempt, commits, copy, loads, save, side, steps
from tests.support.raw import attempt_folder, forge_commit, tree
from tests.support.roots import Root


def test_a_copy_is_whole_and_needs_its_original_no_more(source: Root, root: Root, tmp_path: Path) -> None:
    done = copy(source, 2, root)
    assert done.fresh and done.found == 0 and done.source.step == 2
    original, record = commits(source)[1], commits(root)[0]
    assert record.document | {"claim": 0, "attempt": 0, "parent": 0, "origin": 0} == original.document | {
        "claim": 0,
        "attempt": 0,
        "parent": 0,
        "origin": 0,
    }
    assert record.parent is None and record.origin == original.origin == (original.claim, original.attempt)
    expected = attempt(source, original)
    for name in [name for name in expected if name == "intent.json" or name.startswith("receipts/")]:
        del expected[name]
    assert attempt(root, record) == expected
    assert done.written == len([k for k in expected if k.startswith("state/")])
    assert read_leases(side(source).store) == []
    shutil.rmtree(source.url)
    assert steps(root) == [2]
    loads(root, 2)
    again = Root(str(tmp_path / "again"))
    copy(root, 2, again)  # from S3 too
    loads(again, 2)
    assert commits(again)[0].document["origin"] == record.document["origin"]


def test_what_is_there_is_not_copied_again(made: Root, there: Root, tmp_path: Path) -> None:
    copy(made, 2, there)
    before = tree(Path(there.url))
    done = copy(made, 2, there)
    assert not done.fresh and done.record.number == 2 and tree(Path(there.url)) == before
    elsewhere = Root(str(tmp_path / "elsewhere"))
    copy(there, 2, elsewhere)  # a copy of a copy is a copy of the same save
    before = tree(Path(elsewhere.url))
    assert not copy(made, 2, elsewhere).fresh and tree(Path(elsewhere.url)) == before
    assert not copy(there, 2, made).fresh, "nor is it copied back"


def test_the_target_shows_one_lineage(made: Root, there: Root) -> None:
    copy(made, 1, there)
    copy(made, 3, there)
    assert steps(there) == [1, 3]
    assert [r.parent for r in commits(there)] == [None, commits(there)[0].number]
    before = tree(Path(there.url))
    with pytest.raises(CkptError, match="its newest step is 3, from which step 2 does not descend"):
        copy(made, 2, there)
    assert tree(Path(there.url)) == before
    ready, late = outstanding(side(made).log.read(), side(there).log.read())
    assert ready == [] and [r.step for r in late] == [2]


def test_a_job_goes_on_from_a_copy_and_nothing_is_hidden_after_that(source: Root, there: Root) -> None:
    copy(source, 2, there)
    save(there, 5)
    assert steps(there) == [2, 5]
    with pytest.raises(CkptError, match="newest step is 5, from which step 3 does not descend"):
        copy(source, 3, there)
    copy(there, 5, source, branch=True)  # the child of 2 there, too
    assert steps(source) == [1, 2, 5]
    loads(source, 5)


def test_a_copy_follows_an_ancestor_that_is_retired(source: Root, there: Root) -> None:
    copy(source, 1, there)
    copy(source, 2, there)
    for root in (source, there):
        to = side(root)
        newest = to.log.read().newest()
        assert newest is not None
        claim = take_over(to.store, to.log)
        assert to.log.append({"kind": "retire", "claim": claim, "commit": newest.number, "time": ""})
    save(source, 4)  # a child of 2
    ready, late = outstanding(side(source).log.read(), side(there).log.read())
    assert [r.step for r in ready] == [2, 4] and late == []
    copy(source, 4, there)
    assert steps(there) == [1, 4] and commits(there)[2].parent == commits(there)[1].number


def test_a_retired_copy_is_made_anew_under_another_name(source: Root, there: Root) -> None:
    copy(source, 2, there)
    copy(source, 3, there)
    to = side(there)
    done = Collector(to.store, to.log, take_over(to.store, to.log), Keep(last=1, grace=0)).run()
    assert [r.step for r in done.retired] == [2] and len(done.removed) == 1
    assert copy(source, 2, there, branch=True).fresh
    assert len({r.attempt for r in commits(there)}) == 3
    loads(there, 2)


class Fault(Exception):
    pass


@pytest.mark.parametrize("stopping", [False, True])
def test_an_interrupted_copy_is_gone_on_with(made: Root, there: Root, stopping: bool) -> None:
    seen: list[str] = []

    def third(point: str) -> None:
        seen.append(point)
        if seen.count("copy.object") == 3 and not stopping:
            raise Fault

    with pytest.raises(Stopped if stopping else Fault):
        copy(made, 3, there, threads=1, fault=third, stop=lambda: stopping and seen.count("copy.object") == 3)
    assert commits(there) == [] and steps(there) == []
    data = {k: v for k, v in tree(Path(there.url)).items() if "/c/" in k}
    assert len(data) in (3, 4)  # the thread may have begun the next one
    told: list[int] = []
    done = copy(made, 3, there, progress=told.append)
    assert done.fresh and done.found == len(data)
    assert {k: v for k, v in tree(Path(there.url)).items() if k in data} == data
    assert len([r for r in side(there).log.read().records if r.kind == "claim"]) == 1
    assert sum(told) == sum(len(v) for k, v in tree(Path(there.url)).items() if "/c/" in k)
    loads(there, 3)


@pytest.mark.parametrize("at", POINTS[:-1])
def test_a_copier_whose_root_is_claimed_commits_nothing(made: Root, there: Root, at: str) -> None:
    def claim(point: str) -> None:
        if point == at and once.acquire(blocking=False):
            take_over(rival.store, rival.log)

    once, rival = threading.Lock(), side(there)
    with pytest.raises(Fenced):
        copy(made, 3, there, fault=claim)
    assert commits(there) == []
    before = len(side(there).store.list("attempts/"))
    assert copy(made, 3, there).found == 0, "an attempt of an older claim may be going"
    assert len(side(there).store.list("attempts/")) > before
    loads(there, 3)


def test_copiers_of_one_claim_help_each_other(made: Root, there: Root) -> None:
    to = side(there)
    claim = claim_for_copies(to)
    meet = threading.Barrier(2, timeout=60)
    done: list[Copied] = []

    def work(number: int) -> None:
        met = threading.Event()

        def wait(point: str) -> None:
            if point == "copy.records" and not met.is_set():
                met.set()
                meet.wait()

        done.append(copy_commit(side(made), number, side(there), claim, fault=wait))

    number = commits(made)[2].number
    threads = [threading.Thread(target=work, args=(number,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(commits(there)) == 1 and [one.record for one in done] == commits(there) * 2
    loads(there, 3)


def test_the_source_is_leased_meanwhile(source: Root, there: Root) -> None:
    of = side(source)
    collector = Collector(of.store, of.log, take_over(of.store, of.log), Keep(last=1, grace=0))

    def collect(point: str) -> None:
        if point == "copy.begin":
            assert [r.step for r in collector.run().retired] == [1]

    copy(source, 2, there, fault=collect)
    loads(there, 2)
    collector.run()
    assert steps(source) == [3]
    with pytest.raises(NothingCommitted, match=r"no live commit; steps: \[3\]"):
        copy_commit(side(source), commits(source)[1].number, side(there), claim_for_copies(side(there)))


def test_a_source_that_is_retired_all_the_same_says_so(source: Root, there: Root) -> None:
    """One that takes no lease, whose data goes in the middle of the copy."""
    (Path(source.url) / "leases").write_bytes(b"a file where a folder is needed")
    of = side(source)

    def lose(point: str) -> None:
        if point == "copy.begin":
            claim = take_over(of.store, of.log)
            assert of.log.append({"kind": "retire", "claim": claim, "commit": commits(source)[1].number, "time": ""})
            shutil.rmtree(attempt_folder(Path(source.url)).parent / commits(source)[1].attempt)

    with pytest.raises(NothingCommitted, match="no live commit"):
        copy(source, 2, there, fault=lose)
    assert commits(there) == []


def test_a_commit_whose_data_was_never_there_is_a_parent_and_no_more(source: Root) -> None:
    to = side(source)
    claim = take_over(to.store, to.log)
    like = commits(source)[2].document
    absent = {
        **like,
        "claim": claim,
        "attempt": "a" * 32,
        "parent": None,
        "absent": True,
        "time": "2026-01-01T00:00:00Z",
    }
    assert to.log.append(absent)
    number = to.log.last
    assert to.log.append({**like, "claim": claim, "attempt": "b" * 32, "parent": number})
    history = to.log.read()
    assert isinstance(history, History) and number in history.retired
    assert [r.number for r in history.lineage()] == [to.log.last] and copy_of(history, (claim, "a" * 32)) is None
    done = Collector(to.store, to.log, claim, Keep(steps=(1, 2, 3), grace=0)).run()
    assert done.retired == [] and done.removed == []


@pytest.mark.parametrize("origin", ["x", {"claim": "c"}, {"claim": 1, "attempt": "a"}])
def test_a_malformed_origin_is_damage(source: Root, origin: object) -> None:
    forge_commit(Path(source.url), lambda d: d.update(origin=origin))
    with pytest.raises(CorruptCheckpoint, match="its origin is"):
        side(source).log.read()
