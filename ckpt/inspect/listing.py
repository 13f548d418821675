"""What a root holds: its commits, with what their provenance says, and attempts that came to nothing."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

from ckpt.errors import CkptError, CorruptCheckpoint, StoreError
from ckpt.state.values import parse_json
from ckpt.store.leases import Lease, moment
from ckpt.store.log import History, Record
from ckpt.store.objects import NotFound, ObjectStore
from ckpt.store.records import Intent, attempt_prefix, pinned

Status = Literal["current", "shadowed", "branch", "retired", "voided", "dead", "unfinished"]
"""current: a load of the step takes it. shadowed: a newer commit of the lineage has the same step. branch: the newest
commit does not descend from it. retired: not offered any more. Of attempts that were never committed: voided, dead (a
newer job has claimed the root since), unfinished (its job may be writing)."""

_READERS = 16


@dataclass(frozen=True)
class Entry:
    """One commit or attempt. number: of the commit's record; None for an attempt. step: None where an attempt does not
    tell. time: seconds since 1970, None where unknown. bytes: of the tensors of a commit, or of an attempt's objects.
    layout: of the job that saved it, as in run.json, None where it gave none. notes: leases, marks, reasons, damage."""

    status: Status
    number: int | None
    step: int | None
    time: float | None
    bytes: int | None
    world: int | None
    layout: Mapping[str, Any] | None
    state_id: str | None
    attempt: str
    notes: tuple[str, ...]


def commits(store: ObjectStore, history: History, leases: list[Lease], now: float, *, everything: bool) -> list[Entry]:
    """The commits in the order of the log; without `everything` only those that a load of some step takes.

    A damaged run.json is a note of its commit. Raises StoreError."""
    retired, lineage = history.retired, history.lineage()
    offered: dict[int, int] = {}
    for record in lineage:
        offered.setdefault(record.step, record.number)
    ours = {r.number for r in lineage}
    purposes: dict[int, list[str]] = {}
    for lease in leases:
        if lease.holds(now):
            purposes.setdefault(lease.commit, []).append(
                lease.purpose if lease.expires is None else f"in use: {lease.purpose}"
            )

    def status(record: Record) -> Status:
        if record.number in retired:
            return "retired"
        if record.number not in ours:
            return "branch"
        return "current" if offered[record.step] == record.number else "shadowed"

    def entry(record: Record) -> Entry:
        kind = status(record)
        notes = list(purposes.get(record.number, []))
        run: dict[str, Any] = {}
        try:
            run = _run(store, record)
        except CorruptCheckpoint as error:
            notes.append("data deleted" if kind == "retired" else str(error))
        return Entry(
            kind,
            record.number,
            record.step,
            moment(run.get("time")),
            record.document.get("bytes"),
            run.get("world"),
            run.get("layout"),
            str(record.document["state_id"]),
            attempt_prefix(record.claim, record.attempt),
            tuple(notes),
        )

    chosen = [r for r in history.records if r.kind == "commit" and (everything or status(r) == "current")]
    with ThreadPoolExecutor(_READERS) as pool:
        return list(pool.map(entry, chosen))


def attempts(store: ObjectStore, history: History) -> list[Entry]:
    """Attempts without a commit, by claim and name. Raises StoreError."""
    sizes: dict[str, int] = {}
    for key, size in store.list("attempts/").items():
        parts = key.split("/")
        if len(parts) > 3:
            prefix = "/".join(parts[:3]) + "/"
            sizes[prefix] = sizes.get(prefix, 0) + size
    committed = {attempt_prefix(r.claim, r.attempt) for r in history.records if r.kind == "commit"}
    claims = {r.claim for r in history.records if r.kind == "claim"}
    last = history.last_claim
    found = []
    for prefix, size in sizes.items():
        if prefix in committed:
            continue
        _, claim, attempt, _ = prefix.split("/")
        outcome = history.outcome(attempt)
        notes: tuple[str, ...] = ()
        if outcome is not None:
            status: Status = "voided"
            notes = (str(outcome.document.get("reason", "")),)
        elif last is not None and claim == last.claim:
            status = "unfinished"
        else:
            status = "dead"
            notes = () if claim in claims else ("of a claim that the log does not have",)
        step, world = _planned(store, prefix)
        found.append(Entry(status, None, step, None, size, world, None, None, prefix, notes))
    return found


def _run(store: ObjectStore, record: Record) -> dict[str, Any]:
    data = pinned(store, record, "run.json")
    document = parse_json(data, "run.json")
    return document if isinstance(document, dict) else {}


def _planned(store: ObjectStore, prefix: str) -> tuple[int | None, int | None]:
    """Step and number of ranks of an attempt, as far as its intent tells."""
    try:
        intent = Intent.parse(store.get(prefix + "intent.json"), prefix + "intent.json")
    except CkptError as error:
        if isinstance(error, StoreError) and not isinstance(error, NotFound):
            raise
        return None, None
    return intent.step, intent.world
