"""Collecting a root: commits that no rule keeps are retired, and what nobody can need any more is deleted.

Only the job of the last claim may do so. What it deletes is dead for good, whoever claims meanwhile: attempts of older
claims without a commit (the fence lets nobody commit them), attempts with a `void`, and attempts whose commit has a
`retire`, once the grace is over and no lease holds them. So a collector that is fenced in the middle of a deletion
harms nobody; it stops at the next look at the log.

It may be killed at any point. The log says what is retired, an attempt's objects are found by listing, and the
documents that name an attempt's objects go last.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from ckpt.errors import CkptError, CorruptCheckpoint
from ckpt.state.values import decode, parse_json
from ckpt.store.arrays import expected_objects, metadata_objects
from ckpt.store.commit import NoFaults, complete_last
from ckpt.store.leases import MARGIN, Lease, held, moment, read_leases, stamp
from ckpt.store.log import History, Log, Record, check_fence
from ckpt.store.objects import ObjectStore, probe
from ckpt.store.records import PINNED, Manifest, attempt_prefix, pinned
from ckpt.store.retention import Keep, Verdict, judge, retirable

POINTS = ("collect.retired", "collect.objects", "collect.arrays", "collect.records", "collect.removed")
"""Where `fault` is called: a retire was appended; an attempt's chunks are deleted; its zarr.json files too; its
receipts and manifests too; all of it."""

_BATCH = 1000  # objects deleted between two looks at the log

Why = Literal["retired", "voided", "unfinished"]


@dataclass(frozen=True)
class Remains:
    """An attempt that may be deleted: its objects with their sizes, and why; commit: its number, if it is retired."""

    prefix: str
    why: Why
    commit: int | None
    objects: Mapping[str, int] = field(repr=False)

    @property
    def nbytes(self) -> int:
        return sum(self.objects.values())


@dataclass(frozen=True)
class Collected:
    """What one run did, or would do. verdicts: on every commit that was not retired before; retired: those that are
    now; removed: attempts deleted; waiting: retired commits whose data is still there, and why."""

    verdicts: list[Verdict]
    retired: list[Record]
    removed: list[Remains]
    waiting: list[tuple[Record, str]]


def remains(history: History, claim: str | None, keys: Mapping[str, int]) -> list[Remains]:
    """The attempts, among listed keys, that nobody can need but for readers of what is retired.

    claim: whose attempts without an outcome may be alive, as may be those of claims that the log does not know; None if
    no job is.
    """
    claims = {r.claim: r.number for r in history.records if r.kind == "claim"}
    retired = history.retired
    alive: set[str] = set()
    outcome: dict[str, Record] = {}
    for record in history.records:
        if record.kind in ("commit", "void"):
            outcome[attempt_prefix(record.claim, record.attempt)] = record
        if record.kind == "commit" and record.number not in retired:
            alive.add(attempt_prefix(record.claim, record.attempt))
    end = history.last + 1 if claim is None else claims[claim]
    attempts: dict[str, dict[str, int]] = defaultdict(dict)
    for key, size in keys.items():
        parts = key.split("/")
        if len(parts) > 3 and parts[0] == "attempts":
            attempts["/".join(parts[:3]) + "/"][key] = size
    found = []
    for prefix, objects in attempts.items():
        settled, number = outcome.get(prefix), claims.get(prefix.split("/")[1])
        if prefix in alive or number is None:
            continue
        if settled is not None and settled.kind == "commit":
            found.append(Remains(prefix, "retired", settled.number, objects))
        elif settled is not None:
            found.append(Remains(prefix, "voided", None, objects))
        elif number < end:
            found.append(Remains(prefix, "unfinished", None, objects))
    return found


def take_over(store: ObjectStore, log: Log, *, copies: bool = False) -> str:
    """Claims a root in order to collect it, or to copy into it if `copies`, as a job that saves nothing (world 0);
    returns the claim. A job that is still writing is fenced by this. What the last job had written whole is committed
    first. Raises StoreError, or Fenced when another job claims meanwhile."""
    probe(store)
    complete_last(store, log)
    claim = secrets.token_hex(16)
    document: dict[str, str | int] = {
        "kind": "claim",
        "claim": claim,
        "time": stamp(time.time()),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "world": 0,
    }
    if copies:
        document["copies"] = True
    log.claim(document)
    return claim


class Collector:
    """Collects one root for the job of one claim. For one thread at a time; it has a `Log` of its own.

    clock: seconds since 1970. fault: called at each of POINTS. stop: asked between two steps whether to end early.
    """

    def __init__(
        self,
        store: ObjectStore,
        log: Log,
        claim: str,
        keep: Keep,
        *,
        clock: Callable[[], float] = time.time,
        fault: Callable[[str], None] = NoFaults,
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self._store, self._log, self._claim, self._keep = store, log, claim, keep
        self._clock, self._fault, self._stop = clock, fault, stop
        self._metrics: dict[int, float | None] = {}
        self._whole: int | None = None  # the newest commit that was found complete
        self._listed = False  # whether all attempts were listed once
        self._removed: set[str] = set()

    def run(self, base: int | None = None) -> Collected:
        """Retires what the rules let go, then deletes what can go. May be called again, after an error too.

        base: a commit that this job has loaded and may load again. Raises Fenced when another job has claimed the root,
        CorruptCheckpoint when the newest commit is not whole, with no commit retired or deleted, or StoreError.
        """
        history = self._fenced()
        verdicts = self._judge(history, base)
        retired = self._retire(history, verdicts, base)
        history = self._fenced()
        leases = read_leases(self._store)  # after the retires: see `leases`
        due, waiting = sort_out(
            remains(history, self._claim, self._listing(history)), history, leases, self._keep.grace, self._clock()
        )
        if any(one.commit is not None for one in due):
            self._check_newest(history)
        removed = [one for one in due if self._remove(one)]
        expired = [one.key for one in leases if not one.holds(self._clock())]
        if expired:
            self._store.delete(expired)
        self._listed = len(removed) == len(due)
        return Collected(verdicts, retired, removed, waiting)

    def _fenced(self) -> History:
        history = self._log.read()
        check_fence(history, self._claim, self._store.url)
        return history

    def _judge(self, history: History, base: int | None) -> list[Verdict]:
        in_use = held(read_leases(self._store), self._clock())
        if base is not None:
            in_use.setdefault(base, "loaded by this job")
        return judge(history, self._keep, in_use, read_metrics(self._store, history, self._keep, self._metrics))

    def _retire(self, history: History, verdicts: list[Verdict], base: int | None) -> list[Record]:
        """Appends a retire for each commit that may go. Each is judged once more by the very log that the append
        follows, and by the leases of that moment."""
        untimed = [n for n, r in history.retired.items() if moment(r.document.get("time")) is None]
        going = retirable(verdicts)
        if going:
            self._check_newest(history)
        retired = []

        def spared(record: Record) -> Callable[[History], Record | None]:
            def settled(now: History) -> Record | None:
                gone = now.retired.get(record.number)
                still = any(r.number == record.number for r in retirable(self._judge(now, base)))
                return gone or (None if still else record)

            return settled

        for record in going:
            if self._stop():
                break
            done = self._log.append_fenced(self._claim, self._document(record.number), spared(record))
            if done.kind == "retire":
                retired.append(record)
                self._fault("collect.retired")
        for number in untimed:  # the grace can be counted from now only
            self._log.append_fenced(self._claim, self._document(number), lambda now: None)
        return retired

    def _document(self, number: int) -> dict[str, str | int]:
        return {"kind": "retire", "claim": self._claim, "commit": number, "time": stamp(self._clock())}

    def _check_newest(self, history: History) -> None:
        """Nothing may go while the newest commit is damaged: what is retired may be the only good checkpoint."""
        newest = history.lineage()[0]
        if newest.number != self._whole:
            check_whole(self._store, newest)
            self._whole = newest.number

    def _listing(self, history: History) -> dict[str, int]:
        """What there is of attempts: everything at first; later what has got an outcome since, for an attempt of an
        older claim can only have been left before."""
        if not self._listed:
            return self._store.list("attempts/")
        gone = [r for r in history.records if r.kind == "void" or r.number in history.retired]
        prefixes = {attempt_prefix(r.claim, r.attempt) for r in gone} - self._removed
        keys = {}
        for prefix in sorted(prefixes):
            found = self._store.list(prefix)
            keys.update(found)
            if not found:
                self._removed.add(prefix)
        return keys

    def _remove(self, one: Remains) -> bool:
        """Deletes an attempt; False if it was asked to stop first."""
        stages = ("collect.objects", "collect.arrays", "collect.records", "collect.removed")
        for stage, point in enumerate(stages):
            keys = [key for key in one.objects if _stage(key.removeprefix(one.prefix)) == stage]
            for start in range(0, len(keys), _BATCH):
                if self._stop():
                    return False
                self._fenced()
                self._store.delete(keys[start : start + _BATCH])
            self._fault(point)
        self._removed.add(one.prefix)
        return True


def _stage(name: str) -> int:
    """When an object of an attempt is deleted: chunks, then what describes arrays, then records, then the intent."""
    if name.startswith("state/"):
        return 1 if name.rpartition("/")[2] == "zarr.json" else 0
    return 3 if name == "intent.json" else 2


def survey(store: ObjectStore, log: Log, keep: Keep, clock: Callable[[], float] = time.time) -> Collected:
    """What a collector would do now if it claimed the root, and the last job had ended; changes nothing."""
    history, leases, now = log.read(), read_leases(store), clock()
    verdicts = judge(history, keep, held(leases, now), read_metrics(store, history, keep, {}))
    due, waiting = sort_out(remains(history, None, store.list("attempts/")), history, leases, keep.grace, now)
    return Collected(verdicts, retirable(verdicts), due, waiting)


def sort_out(
    found: Iterable[Remains], history: History, leases: list[Lease], grace: float, now: float
) -> tuple[list[Remains], list[tuple[Record, str]]]:
    """What can be deleted now, and which retired commits have to wait, and why. A grace of 0 ends at once; any other is
    longer by MARGIN, since another clock may have timed the retire."""
    due, waiting, in_use = [], [], held(leases, now)
    for one in sorted(found, key=lambda one: (one.commit or 0, one.prefix)):
        if one.commit is None:
            due.append(one)
            continue
        record = history.records[one.commit - 1]
        since = moment(history.retired[one.commit].document.get("time"))
        end = None if since is None else since + grace + MARGIN
        if one.commit in in_use:
            waiting.append((record, in_use[one.commit]))
        elif history.newest() is None:
            waiting.append((record, "nothing else is committed"))
        elif grace and (end is None or now <= end):
            waiting.append((record, f"grace until {'unknown' if end is None else stamp(end)}"))
        else:
            due.append(one)
    return due, waiting


def read_metrics(
    store: ObjectStore, history: History, keep: Keep, known: dict[int, float | None]
) -> dict[int, float | None]:
    """`keep.metric` of each commit of the lineage, by number; None where the state has no such value. Adds to `known`
    what it has to read. Raises CkptError where the value is no number, CorruptCheckpoint for a damaged manifest."""
    if keep.metric is None:
        return {}
    for record in history.lineage():
        if record.number not in known:
            key = attempt_prefix(record.claim, record.attempt) + "manifest.json"
            document = parse_json(pinned(store, record, "manifest.json", _REMEDY), f"{store.url}/{key}")
            known[record.number] = _number(document["values"].get(keep.metric), keep.metric, record)
    return known


def _number(document: object, name: str, record: Record) -> float | None:
    if document is None:
        return None
    value = decode(document, name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise CkptError(f"{name} of step {record.step} is {type(value).__name__}; metric= takes the name of a number")
    return float(value)


def check_whole(store: ObjectStore, record: Record) -> None:
    """Checks that a commit's records are those it pins and every object is there with its exact size, without reading
    tensors. Raises CorruptCheckpoint naming what is not."""
    prefix = attempt_prefix(record.claim, record.attempt)
    documents = {name: pinned(store, record, name, _REMEDY) for name in PINNED}
    catalogue = Manifest.parse(documents["manifest.json"], f"{store.url}/{prefix}manifest.json").catalogue
    expected = expected_objects(catalogue) | {key: len(data) for key, data in metadata_objects(catalogue).items()}
    found = store.list(f"{prefix}state/")
    for key, size in expected.items():
        if found.get(f"{prefix}state/{key}") != size:
            raise CorruptCheckpoint(f"{store.url}/{prefix}state/{key}: missing, or not of {size} bytes; {_REMEDY}")


_REMEDY = "no commit is retired or deleted while one is damaged: restore the file, or load an older step and save"
