"""The append-only log: the only truth about what is committed, and the fence between jobs.

Records are `log/<n>.json`, n counting from 1 without a gap, zero-padded to 12 digits. Each is created once and never
changed. Kinds: `claim` (a job will write from here on), `commit` (an attempt is a checkpoint), `void` (an attempt
never will be), `retire` (a checkpoint's data may be deleted). A record of no bytes says nothing; see
`ObjectStore.blanks`.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeAlias

from ckpt.errors import CkptError, CorruptCheckpoint, Fenced, NothingCommitted, StoreError
from ckpt.state.values import Json, canonical_json, parse_json
from ckpt.store.objects import NotFound, ObjectStore

KINDS = ("claim", "commit", "void", "retire")
BLANK = "blank"  # the kind of a record of no bytes
FORMAT = 1

_FIELDS: dict[str, dict[str, type]] = {
    "claim": {"claim": str},
    "commit": {
        "claim": str,
        "attempt": str,
        "step": int,
        "state_id": str,
        "manifest": str,
        "ranks": str,
        "run": str,
    },
    "void": {"claim": str, "attempt": str},
    "retire": {"claim": str, "commit": int},
}

Origin: TypeAlias = tuple[str, str]

_TRIES = 8  # of an append whose outcome is unknown, over about ten seconds
_PATIENCE = 60.0  # seconds after which it is not tried again: a store may sit out faults itself
_READERS = 16  # records of a long log are read by so many threads


@dataclass(frozen=True, slots=True)
class Record:
    """One record: its number and its document. `kind` and `claim` are in every one."""

    number: int
    document: dict[str, Any]

    @property
    def kind(self) -> str:
        return str(self.document["kind"])

    @property
    def claim(self) -> str:
        return str(self.document["claim"])

    @property
    def attempt(self) -> str:
        return str(self.document.get("attempt", ""))

    @property
    def step(self) -> int:
        return int(self.document["step"])

    @property
    def parent(self) -> int | None:
        found = self.document.get("parent")
        return None if found is None else int(found)

    @property
    def origin(self) -> Origin:
        """Claim and attempt of the save that a commit stands for, the same in every root that it was copied to."""
        found = self.document.get("origin") or self.document
        return str(found["claim"]), str(found["attempt"])


@dataclass(frozen=True)
class History:
    """What a gapless run of records 1..n says."""

    records: tuple[Record, ...]

    @property
    def last(self) -> int:
        """Number of the last record; 0 for an empty log."""
        return len(self.records)

    @property
    def last_claim(self) -> Record | None:
        return next((r for r in reversed(self.records) if r.kind == "claim"), None)

    @property
    def retired(self) -> dict[int, Record]:
        """The last retire of each commit that has one, by the commit's number; and each commit whose data was never
        here, which is only there to be the parent of others."""
        absent = {r.number: r for r in self.records if r.kind == "commit" and r.document.get("absent") is True}
        return absent | {int(r.document["commit"]): r for r in self.records if r.kind == "retire"}

    def outcome(self, attempt: str) -> Record | None:
        """The commit or void of an attempt, if there is one."""
        return next((r for r in self.records if r.kind in ("commit", "void") and r.attempt == attempt), None)

    def lineage(self) -> list[Record]:
        """The newest commit that is not retired, then its ancestors that are not retired, newest first."""
        retired = self.retired
        found: list[Record] = []
        at = next((r for r in reversed(self.records) if r.kind == "commit" and r.number not in retired), None)
        while at is not None:
            if at.number not in retired:
                found.append(at)
            at = None if at.parent is None else self.records[at.parent - 1]
        return found

    def newest(self, step: int | None = None) -> Record | None:
        """The newest commit of the lineage, or the newest of it with this step."""
        return next((r for r in self.lineage() if step is None or r.step == step), None)


class Log:
    """Reads and appends records. One per process and root; not safe for use by two threads at once."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._records: list[Record] = []

    @property
    def last(self) -> int:
        """Number of the last record that was read or appended; asks nobody."""
        return len(self._records)

    def read(self) -> History:
        """The whole log as it is now: an uncached listing when nothing is known yet, then a probe of each next
        number until one is absent. Raises CorruptCheckpoint for a gap, a foreign file or a malformed record."""
        known = len(self._records)
        if not known:
            self._store.sync("log")
            try:
                self._read_listed(list(self._store.list("log/")))
            except BaseException:
                self._records.clear()  # or the next call would take what is before a gap for all
                raise
            known = len(self._records)
        with contextlib.suppress(NotFound):
            while True:
                self._take(self._store.get(_key(len(self._records) + 1)))
        if len(self._records) > known:
            self._store.sync("log")
        return History(tuple(self._records))

    def _read_listed(self, keys: list[str]) -> None:
        """Takes the records up to the last one listed. Others may append meanwhile, so the listing of a directory may
        show a record and not one before it: only reading tells that a record is missing."""
        foreign = [key for key in keys if not re.fullmatch(r"log/[0-9]{12}\.json", key) or key == _key(0)]
        if foreign:
            raise CorruptCheckpoint(f"{self._store.url}/{foreign[0]}: a foreign file in the log; move it away")
        wanted = [_key(number) for number in range(1, int(max(keys)[4:16]) + 1)] if keys else []
        with ThreadPoolExecutor(_READERS) as pool:
            reading = [pool.submit(self._store.get, key) for key in wanted]
        for key, record in zip(wanted, reading, strict=True):
            try:
                self._take(record.result())
            except NotFound:
                raise CorruptCheckpoint(
                    f"{self._store.url}/{key}: this record of the log is missing, though {max(keys)} is there; "
                    "restore it from a copy of the root"
                ) from None

    def append(self, document: Json) -> bool:
        """Tries to create the next record after what was last read; where a blank takes the number, the one after that.
        True: it is there, put by this call, or by an earlier one of the same document whose answer was lost. False:
        another record took the number; read again. StoreError: not known, though tried and read back for a while."""
        began = time.monotonic()
        data = canonical_json({"format": FORMAT, **document})
        failure = StoreError(
            f"{self._store.url}/{_key(self.last + 1)}: the store says that it exists, but cannot read it"
        )
        for attempt in range(_TRIES):
            if attempt:
                if time.monotonic() - began > _PATIENCE:
                    break
                time.sleep(min(4.0, 0.05 * 2**attempt))
            key = _key(len(self._records) + 1)
            try:
                created = self._store.create(key, data)
            except StoreError as error:
                created, failure = False, error
            try:
                found = data if created else self._store.get(key)
                self._store.sync("log")
            except NotFound:
                continue
            except StoreError as error:
                failure = error
                continue
            self._take(found)
            if self._records[-1].kind != BLANK:
                return found == data
            failure = StoreError(
                f"{self._store.url}/{key}: the store keeps nothing of what is sent; look at the network"
            )
        raise failure

    def append_fenced(self, claim: str, document: Json, settled: Callable[[History], Record | None]) -> Record:
        """Appends a record that only the last claimant may append.

        settled: looks at the log and returns the record that makes this append superfluous (another committer of
        the same attempt won), or None. Raises Fenced when another job has claimed the root.
        """
        while True:
            history = self.read()
            done = settled(history)
            if done is not None:
                return done
            check_fence(history, claim, self._store.url)
            if self.append(document):
                return self._records[-1]

    def claim(self, document: Json) -> Record:
        """Appends a claim, however often it has to try."""
        while True:
            self.read()
            if self.append(document):
                return self._records[-1]

    def _take(self, data: bytes) -> None:
        number = len(self._records) + 1
        where = f"{self._store.url}/{_key(number)}"
        if not data and self._store.blanks:
            self._records.append(Record(number, {"kind": BLANK}))
            return
        document = parse_json(data, where)
        fault = self._fault(document, where)
        if fault is not None:
            raise CorruptCheckpoint(f"{where}: not a log record: {fault}; restore it from a copy of the root")
        self._records.append(Record(number, document))

    def _fault(self, document: Json, where: str) -> str | None:
        """What is wrong with a document as the next record, or None."""
        if not isinstance(document, dict):
            return "it is not an object"
        check_format(document, where)
        kind = document.get("kind")
        if kind not in KINDS:
            return f"its kind is {kind!r}"
        for name, wanted in _FIELDS[kind].items():
            if type(document.get(name)) is not wanted:
                return f"{name} of a {kind} is {document.get(name)!r}"
        origin = document.get("origin")
        if origin is not None and not (
            isinstance(origin, dict) and all(isinstance(origin.get(name), str) for name in ("claim", "attempt"))
        ):
            return f"its origin is {origin!r}"
        before = {"commit": document.get("parent"), "retire": document.get("commit")}.get(kind)
        if before is not None and (
            type(before) is not int
            or not 0 < before <= len(self._records)
            or self._records[before - 1].kind != "commit"
        ):
            return f"it refers to {before!r}, which is no earlier commit"
        return None


def no_step(url: str, step: int, lineage: Iterable[Record]) -> NothingCommitted:
    """The error where a step is not among the commits that there are."""
    steps = sorted({record.step for record in lineage})
    return NothingCommitted(f"{url}: no committed step {step}; there are {steps or 'none'}")


def check_fence(history: History, claim: str, url: str) -> None:
    """Raises Fenced unless `claim` is the last claim of the log."""
    last = history.last_claim
    if last is None or last.claim != claim:
        who = "nobody" if last is None else f"{last.document.get('host', 'another host')}, claim {last.claim}"
        raise Fenced(
            f"{url}: fenced: this root is now claimed by {who} (ours: {claim}); this job must stop writing. "
            "If this job is the right one, start it again: it will claim anew"
        )


def check_format(document: dict[str, Any], where: str) -> None:
    """Raises CkptError for a format version that this ckpt does not read."""
    found = document.get("format")
    if type(found) is not int or found != FORMAT:
        raise CkptError(f"{where}: format version {found!r}; this ckpt reads version {FORMAT}: use a newer ckpt")


def _key(number: int) -> str:
    return f"log/{number:012d}.json"
