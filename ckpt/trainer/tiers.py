"""Two roots of one run: saves are committed to a fast one, and copied on to a durable one.

The durable log alone says which jobs there were, and in which order. A job claims there first and then, by the same
name, in the fast log. So each commit of the fast root names a claim of the durable log, and one that does not is
another run's. Which of two is newer follows from the order of their claims, and within one job from the fast log.
"""

from __future__ import annotations

import logging
import math
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from ckpt.engine.session import Session
from ckpt.errors import (
    CkptError,
    CorruptCheckpoint,
    RankFailed,
    StateInvalid,
    StoreError,
    Unsupported,
)
from ckpt.state.values import Json, canonical_json, parse_json
from ckpt.store.commit import complete_last
from ckpt.store.leases import stamp
from ckpt.store.log import History, Log, Origin, Record, check_fence, no_step
from ckpt.store.objects import kvstore_spec, open_store, split_url
from ckpt.store.retention import Keep
from ckpt.trainer.collecting import Collecting
from ckpt.trainer.draining import Draining, Told

log = logging.getLogger("ckpt")
T = TypeVar("T")
_ENDS = 5.0  # seconds that a thread gets to end when there is no time left


@dataclass(frozen=True)
class Place:
    """A save of the lineage, and its commit in each root; at least in one."""

    fast: Record | None
    durable: Record | None

    @property
    def record(self) -> Record:
        found = self.fast or self.durable
        assert found is not None
        return found


def lineage(durable: History, fast: History) -> list[Place]:
    """The newest commit of both roots that is not retired, and its ancestors that are not, newest first. Commits of
    the fast root whose claim the durable log does not know count for nothing. Pure."""
    claims = {r.claim: r.number for r in durable.records if r.kind == "claim"}
    ours = [r for r in fast.records if r.kind == "commit" and r.claim in claims]
    theirs = [r for r in durable.records if r.kind == "commit"]
    known = ((fast, {r.origin: r for r in ours}), (durable, {r.origin: r for r in theirs}))
    here = {r.origin: r for r in ours if r.number not in fast.retired}
    there = {r.origin: r for r in theirs if r.number not in durable.retired}
    at = _newest(list(here.values()), durable.newest(), claims, known[0][1])
    found, seen = [], set[Origin]()
    while at is not None and at not in seen:
        seen.add(at)
        if at in here or at in there:
            found.append(Place(here.get(at), there.get(at)))
        at = next((one for one in (_parent(history, commits.get(at)) for history, commits in known) if one), None)
    return found


def _parent(history: History, record: Record | None) -> Origin | None:
    return None if record is None or record.parent is None else history.records[record.parent - 1].origin


def _newest(
    here: list[Record], durable: Record | None, claims: Mapping[str, int], fast: Mapping[Origin, Record]
) -> Origin | None:
    """The newer of the newest live commits of either root, by claim and, within one, the order in the fast log."""
    newest = max(here, key=lambda r: (claims[r.claim], r.number), default=None)
    if newest is None or durable is None:
        one = newest or durable
        return None if one is None else one.origin
    claim = claims.get(durable.origin[0], claims[durable.claim])
    number = fast[durable.origin].number if durable.origin in fast else math.inf
    return max((claim, number, durable.origin), (claims[newest.claim], newest.number, newest.origin))[2]


class Tiers:
    """The fast root of one Checkpointer, and what goes on between it and the durable one."""

    def __init__(
        self,
        durable: Session,
        fast: str,
        keep: Keep | None,
        storage_options: Mapping[str, Any] | None,
        told: Told,
    ) -> None:
        """Not collective; writes nothing. fast: a path; keep: what to keep there; storage_options: of the durable root;
        told: see `Draining`.

        Raises Unsupported for a fast root that is no directory, CkptError where both are one."""
        if split_url(fast)[0] != "file":
            raise Unsupported(f"fast={fast!r}: the fast root must be a directory; give a path")
        store = open_store(fast)
        if store.url == durable.store.url:
            raise CkptError(f"fast={fast!r}: this is the durable root itself; give another directory, or none")
        self._comm, self._durable = durable.comm, durable
        self.fast = Session(store, kvstore_spec(fast), Log(store), durable.comm, durable.context, durable.faults)
        self._collecting = Collecting(durable.comm, keep, store.url, None)
        self._draining = Draining(store.url, durable.store.url, storage_options, told)

    def check_shared(self) -> None:
        """Collective. Raises Unsupported on every rank unless all see the directory that rank 0 sees."""
        comm, store = self._comm, self.fast.store
        key, data = f"probe/{secrets.token_hex(16)}", secrets.token_bytes(16)
        told: bytes | None = None
        with comm.phase("fast root: write"):
            if comm.rank == 0:
                store.put(key, data)
                told = canonical_json([key, data.hex()])
        key, wanted = parse_json(comm.broadcast(told, "fast root: is it shared"), "probe")
        try:
            with comm.phase("fast root: is it shared"):
                self._check_seen(key, bytes.fromhex(wanted))
        finally:
            if comm.rank == 0:
                store.delete([key])

    def _check_seen(self, key: str, wanted: bytes) -> None:
        try:
            seen = self.fast.store.get(key) == wanted
        except StoreError:
            seen = False
        if not seen:
            raise Unsupported(
                f"{self.fast.store.url}: rank {self._comm.rank} does not see there what rank 0 has written: the fast "
                "root must be one directory for all ranks; give one that all nodes share, or none"
            )

    def check_history(self) -> None:
        """On rank 0, before anything is claimed: commits first what the last job had written whole to the fast root.
        Raises CkptError where another run has commits there."""
        claims = {r.claim for r in self._durable.log.read().records if r.kind == "claim"}
        history = self.fast.log.read()
        retired = history.retired
        foreign = [
            r for r in history.records if r.kind == "commit" and r.number not in retired and r.claim not in claims
        ]
        if foreign:
            raise CkptError(
                f"{self.fast.store.url}: it holds step {foreign[-1].step} of another run (claim {foreign[-1].claim}, "
                f"which {self._durable.store.url} does not know); remove what is there, or give each run a directory "
                "of its own"
            )
        last = history.last_claim
        if last is not None and last.claim in claims:
            complete_last(self.fast.store, self.fast.log)

    def claim(self, document: Mapping[str, Json]) -> None:
        """On rank 0: claims the fast root by the name that the durable one was claimed by. Raises Fenced if another job
        has claimed that meanwhile."""
        check_fence(self._durable.log.read(), str(document["claim"]), self._durable.store.url)
        self.fast.log.claim({**document, "durable": self._durable.store.url})

    def lineage(self) -> list[Place]:
        """Not collective; always asks the stores."""
        return lineage(self._durable.log.read(), self.fast.log.read())

    def load(self, step: int | None, claim: str, one: Callable[[Session, Record], T]) -> tuple[T, int] | None:
        """Collective. Loads the newest step of both roots, or `step`, from the fast one if it is there, by calling
        `one`; None if nothing is committed and no step was asked for. Gives what that gives, and the number in the fast
        log of the commit that the next one follows.

        What is damaged in the fast root is loaded from the durable one, if it is there. Raises what `one` raises, and
        NothingCommitted naming the steps there are.
        """
        self._collecting.wait()
        found = self._pick(step)
        if found is None:
            return None
        place, newest = found
        done = self._load(place, one)
        number: bytes | None = None
        with self._comm.phase("load: go on from there"):
            if self._comm.rank == 0:
                base = self._base(place.record, claim)
                if newest and place.durable is None:
                    self._draining.drain(base.number, claim)
                number = canonical_json(base.number)
        return done, parse_json(self._comm.broadcast(number, "load: go on from there"), "commit record")

    def _pick(self, step: int | None) -> tuple[Place, bool] | None:
        """Collective: what to load, and whether it is the newest."""
        told: bytes | None = None
        with self._comm.phase("load: pick a step"):
            if self._comm.rank == 0:
                places = self.lineage()
                place = next((p for p in places if step in (None, p.record.step)), None)
                if place is None and step is not None:
                    raise no_step(self._durable.store.url, step, (p.record for p in places))
                records = () if place is None else (place.fast, place.durable)
                packed = [None if r is None else [r.number, r.document] for r in records]
                told = canonical_json([*packed, place in places[:1]])
        *packed, newest = parse_json(self._comm.broadcast(told, "load: pick a step"), "commit records")
        if not packed:
            return None
        return Place(*(None if r is None else Record(*r) for r in packed)), newest

    def _load(self, place: Place, one: Callable[[Session, Record], T]) -> T:
        damage: CkptError | None = None
        if place.fast is not None:
            try:
                return one(self.fast, place.fast)
            except (CorruptCheckpoint, StateInvalid) as error:
                if place.durable is None or not self._comm.agreed(error):
                    raise
                log.warning("loading step %d from the durable root: %s", place.record.step, error)
                damage = error
        assert place.durable is not None
        try:
            return one(self._durable, place.durable)
        except CkptError as error:
            if isinstance(damage, StateInvalid):  # the state is a mix, whatever this one says
                raise damage from error
            raise

    def _base(self, record: Record, claim: str) -> Record:
        """On rank 0: the commit of the fast log that stands for a save, be it retired. Where there is none, one is
        appended that has no data."""

        def known(history: History) -> Record | None:
            return next(
                (r for r in reversed(history.records) if r.kind == "commit" and r.origin == record.origin), None
            )

        same = ("step", "state_id", "bytes", "manifest", "ranks", "run")
        document: dict[str, Any] = {
            "kind": "commit",
            "claim": claim,
            "attempt": record.origin[1],
            "parent": None,
            **{name: record.document[name] for name in same},
            "origin": {"claim": record.origin[0], "attempt": record.origin[1]},
            "absent": True,
            "time": stamp(time.time()),
        }
        return known(self.fast.log.read()) or self.fast.log.append_fenced(claim, document, known)

    def follow(self, committed: Callable[[], Record | None], claim: str) -> None:
        """Not collective. Has an asynchronous save copied on once it is committed, for which `committed` waits."""
        if self._comm.rank == 0:
            self._draining.follow(committed, claim)

    def committed(self, record: Record, claim: str, *, raising: bool) -> None:
        """Collective; call it after a commit of this job to the fast root. Returns at once: the commit is copied on.
        If `raising`, the fast root is collected, and what went wrong with either before is raised on every rank."""
        error: Exception | None = None
        if self._comm.rank == 0:
            error = self._draining.error() if raising else None
            self._draining.drain(record.number, claim)
        if raising:
            with self._comm.phase("copy to the durable root"):
                if error is not None:
                    raise error
            self._collecting.collect(claim)

    def finish(self, step: int, seconds: float) -> None:
        """Collective. Waits for the copy of the last step of a job that has been told to end, at most for the fewest
        `seconds` that any rank has left. Raises nothing: what was not done is logged."""
        try:
            left = [float(d) for d in self._comm.all_gather(str(seconds).encode(), "copy to the durable root")]
            end = time.monotonic() + max(0.0, min(left))
            while True:
                told: bytes | None = None
                if self._comm.rank == 0:
                    # Others wait for this rank no longer than the time-out.
                    ended = self._draining.wait(max(0.0, min(end - time.monotonic(), self._comm.timeout / 2)))
                    told = b"over" if ended or time.monotonic() >= end else b"wait"
                if self._comm.broadcast(told, "copy to the durable root") == b"over":
                    break
        except RankFailed as error:
            log.error("while waiting for the copy of step %d: %s", step, error)
        if self._comm.rank == 0 and not self._draining.done:
            log.error(
                "step %d is in %s and not in %s: %s. If this node goes, it goes with it",
                step,
                self.fast.store.url,
                self._durable.store.url,
                self._draining.error() or "there was no time left to copy it",
            )

    def close(self, claim: str | None, *, in_haste: bool) -> list[Exception | None]:
        """Not collective; safe to call twice. Waits for the copy unless `in_haste`, and ends the threads; gives the
        errors that nobody has met. claim: of this job, if it is to collect the fast root once more."""
        if in_haste:
            self._draining.stop()
        self._draining.wait(_ENDS if in_haste else None)
        return [self._draining.error(), self._collecting.close(claim)]
