"""Verifies the documents of a commit: its record, what it pins, intent and receipts, and the zarr.json files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import Executor
from typing import TypeVar

from ckpt.errors import CkptError, StoreError
from ckpt.inspect.committed import Committed, open_committed
from ckpt.inspect.damage import Damage
from ckpt.store.arrays import metadata_objects
from ckpt.store.commit import assemble
from ckpt.store.log import FORMAT, History, Record
from ckpt.store.objects import NotFound, ObjectStore
from ckpt.store.records import PINNED, Intent, Receipt, attempt_prefix, receipt_key, sha256

T = TypeVar("T", Intent, Receipt)


def check_documents(
    store: ObjectStore, history: History, record: Record, pool: Executor
) -> tuple[Committed | None, list[Damage]]:
    """The opened commit, or None where what it pins is damaged, and all that is wrong. Raises StoreError."""
    prefix = attempt_prefix(record.claim, record.attempt)
    found: list[Damage] = []
    claim = next((r for r in reversed(history.records[: record.number]) if r.kind == "claim"), None)
    if claim is None or claim.claim != record.claim:
        problem = "its claim is not the last one before it, so no job can have appended it"
        found.append(Damage("record", f"log/{record.number:012d}.json", problem))
    pins = _read(store, [prefix + name for name in PINNED], pool, found)
    for name, field in PINNED.items():
        data = pins.get(prefix + name)
        if data is not None and sha256(data) != record.document[field]:
            found.append(Damage("document", prefix + name, f"not the bytes that the commit of step {record.step} pins"))
    committed = None
    if not any(d.file.startswith(prefix) for d in found):
        try:
            committed = open_committed(store, record)
        except CkptError as error:
            if isinstance(error, StoreError):
                raise
            found.append(Damage("document", prefix + "manifest.json", str(error)))
    if committed is not None:
        found += _check_record(committed)
    if "origin" not in record.document:  # a copy of a commit has no intent and no receipts
        found += _check_receipts(store, record, committed, pool)
    if committed is not None:
        expected = {
            prefix + "state/" + key: data for key, data in metadata_objects(committed.manifest.catalogue).items()
        }
        read = _read(store, expected, pool, found)
        for key, content in read.items():
            if content != expected[key]:
                found.append(Damage("document", key, "does not follow from the manifest"))
    return committed, found


def _check_record(committed: Committed) -> list[Damage]:
    """Whether the commit agrees with what it pins. A copy's provenance is that of its original."""
    record, run = committed.record, committed.run
    origin = record.document.get("origin", record.document)
    stated = {
        "step": (record.step, run.get("step")),
        "bytes": (record.document.get("bytes"), committed.manifest.nbytes),
        "claim": (origin.get("claim") if isinstance(origin, dict) else None, run.get("claim")),
        "attempt": (origin.get("attempt") if isinstance(origin, dict) else None, run.get("attempt")),
    }
    file = f"log/{record.number:012d}.json"
    return [
        Damage("record", file, f"its {name} is {said!r} and not {found!r}, as in what it pins")
        for name, (said, found) in stated.items()
        if said != found
    ]


def _check_receipts(store: ObjectStore, record: Record, committed: Committed | None, pool: Executor) -> list[Damage]:
    """Whether intent and receipts, on their own, give the very commit that is in the log."""
    prefix = attempt_prefix(record.claim, record.attempt)
    found: list[Damage] = []
    name = prefix + "intent.json"
    data = _read(store, [name], pool, found).get(name)
    intent = None if data is None else _parsed(Intent, data, name, store, found)
    world = intent.world if intent is not None else len(committed.ranks) if committed is not None else 0
    keys = [receipt_key(prefix, rank) for rank in range(world)]
    receipts = {}
    for key, content in _read(store, keys, pool, found).items():
        receipt = _parsed(Receipt, content, key, store, found)
        if receipt is not None:
            receipts[key] = receipt
    if data is None or intent is None or len(receipts) < world:
        return found
    pins = {r.intent for r in receipts.values()}
    if len(pins) == 1 and pins != {sha256(data)}:
        suspects = [name] if world > 1 else [name, *keys]
        return found + [Damage("document", key, "intent and receipts do not agree") for key in suspects]
    wanted = [(sha256(data), intent.attempt, rank) for rank in range(world)]
    is_strange = [(r.intent, r.attempt, r.rank) != w for r, w in zip(receipts.values(), wanted, strict=True)]
    if any(is_strange):
        problem = "belongs to another intent, attempt or rank"
        strange = [key for key, yes in zip(receipts, is_strange, strict=True) if yes]
        return found + [Damage("document", key, problem) for key in strange]
    try:
        run = store.get(prefix + "run.json")
        sealed = assemble(intent, list(receipts.values()), run, store.url)
    except NotFound:
        return found  # told before
    except (CkptError, LookupError, ValueError) as error:
        if isinstance(error, StoreError):
            raise
        return [*found, Damage("document", prefix + "receipts/", f"intent and receipts do not prove it whole: {error}")]
    again = {"format": FORMAT, **sealed.document}
    wrong = sorted(k for k in {*again, *record.document} if again.get(k) != record.document.get(k))
    if "run" in wrong and committed is None:
        wrong.remove("run")  # told before
    if wrong:
        problem = f"{', '.join(wrong)}: not what intent and receipts give"
        found.append(Damage("record", f"log/{record.number:012d}.json", problem))
    return found


def _read(store: ObjectStore, keys: Iterable[str], pool: Executor, found: list[Damage]) -> Mapping[str, bytes]:
    """The objects that are there, by key; adds to `found` those that are not."""

    def get(key: str) -> bytes | None:
        try:
            return store.get(key)
        except NotFound:
            return None

    wanted = list(keys)
    read = dict(zip(wanted, pool.map(get, wanted), strict=True))
    found += [Damage("missing", key, "there is no such file") for key, data in read.items() if data is None]
    return {key: data for key, data in read.items() if data is not None}


def _parsed(kind: type[T], data: bytes, key: str, store: ObjectStore, found: list[Damage]) -> T | None:
    try:
        return kind.parse(data, f"{store.url}/{key}")
    except CkptError as error:
        found.append(Damage("document", key, str(error)))
        return None
