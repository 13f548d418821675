"""The append-only log: the only truth about what is committed, and the fence between jobs.

Records are `log/<n>.json`, n counting from 1 without a gap, zero-padded to 12 digits. Each is created once and never
changed. Kinds: `claim` (a job will write from here on), `commit` (an attempt is a checkpoint), `void` (an attempt
never will be), `retire` (a checkpoint's data may be deleted).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ckpt.errors import CkptError, CorruptCheckpoint, Fenced, StoreError
from ckpt.state.values import Json, canonical_json, parse_json
from ckpt.store.objects import NotFound, ObjectStore

KINDS = ("claim", "commit", "void", "retire")
FORMAT = 1


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

    def outcome(self, attempt: str) -> Record | None:
        """The commit or void of an attempt, if there is one."""
        return next((r for r in self.records if r.kind in ("commit", "void") and r.attempt == attempt), None)

    def lineage(self) -> list[Record]:
        """The newest commit that is not retired, then its ancestors that are not retired, newest first."""
        retired = {int(r.document["commit"]) for r in self.records if r.kind == "retire"}
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

    def read(self) -> History:
        """The whole log as it is now: an uncached listing when nothing is known yet, then a probe of each next
        number until one is absent. Raises CorruptCheckpoint for a gap or a malformed record."""
        if not self._records:
            self._store.sync("log")
            for key in sorted(self._store.list("log/")):
                if key != _key(len(self._records) + 1):
                    raise CorruptCheckpoint(
                        f"{self._store.url}/{key}: the log must continue with {_key(len(self._records) + 1)}; "
                        "a record was lost or a foreign file lies there"
                    )
                self._take(self._store.get(key))
        while True:
            try:
                data = self._store.get(_key(len(self._records) + 1))
            except NotFound:
                return History(tuple(self._records))
            self._take(data)

    def append(self, document: Json) -> bool:
        """Tries to create the next record after what was last read. True: it is there, put by this call, or by an
        earlier one of the same document whose answer was lost. False: another record took the number; read again."""
        number = len(self._records) + 1
        data = canonical_json({"format": FORMAT, **document})
        for attempt in range(8):
            try:
                if self._store.create(_key(number), data):
                    self._store.sync("log")
                    self._take(data)
                    return True
                return self._read_back(number) == data
            except StoreError as error:
                if isinstance(error, NotFound) or attempt == 7:
                    raise
                found = self._read_back(number)
                if found is not None:
                    return found == data
                time.sleep(min(4.0, 0.1 * 2**attempt))
        raise AssertionError("unreachable")

    def _read_back(self, number: int) -> bytes | None:
        try:
            found = self._store.get(_key(number))
        except NotFound:
            return None
        self._take(found)
        return found

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
        document = parse_json(data, where)
        if not isinstance(document, dict) or document.get("kind") not in KINDS or "claim" not in document:
            raise CorruptCheckpoint(f"{where}: not a log record")
        check_format(document, where)
        parent = document.get("parent")
        if parent is not None and not 0 < parent < number:
            raise CorruptCheckpoint(f"{where}: its parent {parent} is not an earlier record")
        self._records.append(Record(number, document))


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
    if document.get("format") != FORMAT:
        raise CkptError(
            f"{where}: format version {document.get('format')!r}; this ckpt reads version {FORMAT}: use a newer ckpt"
        )


def _key(number: int) -> str:
    return f"log/{number:012d}.json"
