"""Copying commits from root to root. A copy has the state id of its original, and needs it no more.

A copy is an attempt of the destination like any other, under a claim of its log. Its name follows from what is copied,
and everything in it does too. So several copiers may work on one attempt, and one that comes after a kill goes on where
the last one was: as long as nobody else has claimed the root, it may do so under the same claim, since all that is ever
done under a claim for copies is to write the same bytes under the same names and to append the same commits. An attempt
of an older claim is never gone on with: whoever has claimed since may be deleting it.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ckpt.errors import CkptError, CorruptCheckpoint, NothingCommitted, StoreError
from ckpt.store.collect import check_whole, take_over
from ckpt.store.commit import NoFaults
from ckpt.store.leases import lease
from ckpt.store.log import History, Log, Origin, Record, check_fence
from ckpt.store.objects import ObjectStore
from ckpt.store.records import PINNED, Manifest, attempt_prefix, pinned
from ckpt.store.transfer import Transfer

POINTS = ("copy.begin", "copy.object", "copy.objects", "copy.records", "copy.commit")
"""Where `fault` is called: the source is leased; an object is written and read back (from several threads); all are;
the pinned documents too; the commit is there."""

THREADS = 4


@dataclass(frozen=True)
class Copied:
    """source, record: the commit in either root. fresh: whether this call has copied it; if not, it was there. written,
    nbytes: objects that were written now, and their bytes; found: objects that an earlier copy had left."""

    source: Record
    record: Record
    fresh: bool
    written: int = 0
    nbytes: int = 0
    found: int = 0


@dataclass(frozen=True)
class Side:
    """One root: its store, and a log that nobody else uses meanwhile."""

    store: ObjectStore
    log: Log


def claim_for_copies(target: Side) -> str:
    """A claim of the destination to copy under: the last one if it was made for copies, else a new one, which fences
    off a job that is still writing there. Raises StoreError, or Fenced."""
    last = target.log.read().last_claim
    if last is not None and last.document.get("copies") is True:
        return last.claim
    return take_over(target.store, target.log, copies=True)


def ancestors(history: History, record: Record) -> list[Origin]:
    """What a commit descends from, nearest first, retired ones too."""
    found = []
    while record.parent is not None:
        record = history.records[record.parent - 1]
        found.append(record.origin)
    return found


def copy_of(history: History, origin: Origin) -> Record | None:
    """The newest commit of a save in a log, unless it is retired."""
    retired = history.retired
    alive = (r for r in reversed(history.records) if r.kind == "commit" and r.number not in retired)
    return next((r for r in alive if r.origin == origin), None)


def check_place(target: History, record: Record, above: Sequence[Origin], url: str) -> None:
    """Raises CkptError where a commit with these ancestors would hide what a target has."""
    head = target.newest()
    if head is not None and head.origin not in above:
        raise CkptError(
            f"{url}: its newest step is {head.step}, from which step {record.step} does not descend: copied after it, "
            "that would take its place; copy to another root, and a run's steps in their order"
        )


def outstanding(source: History, target: History) -> tuple[list[Record], list[Record]]:
    """Commits of the source's lineage that the target lacks, oldest first: those that can be copied, in this order, and
    those that lie before the target's newest, where they would come too late."""
    lineage, head = source.lineage(), target.newest()
    before: set[Origin] = set()
    if lineage and head is not None:
        chain = [lineage[0].origin, *ancestors(source, lineage[0])]
        before = set(chain[chain.index(head.origin) + 1 :]) if head.origin in chain else before
    lacking = [r for r in reversed(lineage) if copy_of(target, r.origin) is None]
    return [r for r in lacking if r.origin not in before], [r for r in lacking if r.origin in before]


def copy_commit(
    source: Side,
    number: int,
    target: Side,
    claim: str,
    *,
    branch: bool = False,
    threads: int = THREADS,
    progress: Callable[[int], None] = lambda nbytes: None,
    fault: Callable[[str], None] = NoFaults,
    stop: Callable[[], bool] = lambda: False,
) -> Copied:
    """Copies commit `number` of the source's log, and commits it in the target under `claim`, as a child of its nearest
    ancestor there. If the target has it already, nothing is done.

    branch: whether it may become the newest of a target whose newest it does not descend from; that is refused
    otherwise. progress: told the bytes of each object that is done, from several threads. stop: asked before each
    object whether to end early.

    Raises CkptError where it would hide what the target has, NothingCommitted where the commit is retired,
    CorruptCheckpoint naming what is damaged at either end, Fenced when a job has claimed the target, StoreError, or
    Stopped; nothing is committed then, and another call goes on from there.
    """
    with contextlib.ExitStack() as holding:
        with contextlib.suppress(StoreError):  # a source that cannot be written to: its grace has to do
            holding.enter_context(lease(source.store, number, f"copy to {target.store.url}"))
        history = source.log.read()  # after the lease: see `ckpt.store.leases`
        record = history.records[number - 1]
        _check_live(history, record, source)
        fault("copy.begin")
        job = _Job(source, record, ancestors(history, record), target, claim, branch)
        there = job.settled(target.log.read())
        if there is not None:
            return Copied(record, there, False)
        try:
            return job.run(threads, progress, fault, stop)
        except CorruptCheckpoint:
            _check_live(source.log.read(), record, source)  # its data may be gone for that reason
            raise


@dataclass(frozen=True)
class _Job:
    """One copy. above: the ancestors of what is copied, nearest first."""

    source: Side
    record: Record
    above: Sequence[Origin]
    target: Side
    claim: str
    branch: bool

    def run(
        self, threads: int, progress: Callable[[int], None], fault: Callable[[str], None], stop: Callable[[], bool]
    ) -> Copied:
        source, target = self.source.store, self.target.store
        here = attempt_prefix(self.record.claim, self.record.attempt)
        documents = {name: pinned(source, self.record, name) for name in PINNED}
        manifest = Manifest.parse(documents["manifest.json"], f"{source.url}/{here}manifest.json")
        if manifest.state_id != self.record.document["state_id"]:
            raise CorruptCheckpoint(f"{source.url}/{here}manifest.json: its state id is not the committed one")
        attempt = _name(self.target.log.read(), self.record.origin)
        there = attempt_prefix(self.claim, attempt)
        transfer = Transfer(source, here, target, there, manifest, progress, fault, stop)
        moved = transfer.run(threads)
        fault("copy.objects")
        for name in reversed(PINNED):  # the manifest last
            transfer.put(name, documents[name])
        fault("copy.records")
        document = _document(self.record, self.claim, attempt, source.url)
        check_whole(target, Record(0, document))
        target.sync(there)
        committed, fresh = self._append(document)
        fault("copy.commit")
        return Copied(self.record, committed, fresh, moved.written, moved.nbytes, moved.found)

    def settled(self, history: History) -> Record | None:
        """The commit, if the target has it. Raises Fenced, or CkptError, where it may not be appended to that log."""
        there = copy_of(history, self.record.origin)
        if there is None:
            check_fence(history, self.claim, self.target.store.url)
            if not self.branch:
                check_place(history, self.record, self.above, self.target.store.url)
        return there

    def _append(self, document: dict[str, Any]) -> tuple[Record, bool]:
        """The commit, ours or another copier's, and whether it is ours. Its parent, the nearest ancestor that was ever
        there, is looked up in the very log that it is appended to."""
        while True:
            history = self.target.log.read()
            there = self.settled(history)
            if there is not None:
                return there, False
            at = {r.origin: r.number for r in history.records if r.kind == "commit"}
            parent = next((at[origin] for origin in self.above if origin in at), None)
            if self.target.log.append({**document, "parent": parent}):
                appended = self.target.log.last
                return self.target.log.read().records[appended - 1], True


def _document(record: Record, claim: str, attempt: str, url: str) -> dict[str, Any]:
    """The commit of a copy, but for its parent."""
    origin = record.document.get("origin")
    if origin is None:
        origin = {"claim": record.claim, "attempt": record.attempt, "url": url, "commit": record.number}
    same = ("step", "state_id", "bytes", "manifest", "ranks", "run")
    return {
        "kind": "commit",
        "claim": claim,
        "attempt": attempt,
        **{name: record.document[name] for name in same},
        "origin": origin,
    }


def _name(history: History, origin: Origin) -> str:
    """The attempt that a save is copied to. It has another one each time that a copy was retired: that one's data may
    be going this very moment."""
    times = sum(r.kind == "commit" and r.origin == origin for r in history.records)
    return hashlib.sha256("/".join((*origin, str(times))).encode()).hexdigest()[:32]


def _check_live(history: History, record: Record, source: Side) -> None:
    if record.kind != "commit" or record.number in history.retired:
        steps = sorted({r.step for r in history.lineage()})
        raise NothingCommitted(f"{source.store.url}: log record {record.number} is no live commit; steps: {steps}")
