"""From receipts to a commit: pure checks, then two manifests and one append. Any rank, or a later job, can do it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ckpt.errors import CkptError, CorruptCheckpoint, StateMismatch, StoreError
from ckpt.fingerprint import ZERO, Digest, add
from ckpt.geometry import Box, Catalogue, Holdings
from ckpt.state.values import Json, canonical_json
from ckpt.store.log import FORMAT, History, Log, Record
from ckpt.store.objects import NotFound, ObjectStore, create_same
from ckpt.store.records import Intent, Manifest, Receipt, attempt_prefix, sha256

NoFaults: Callable[[str], None] = lambda point: None  # noqa: E731


@dataclass(frozen=True)
class Sealed:
    """The three records that a commit pins, as bytes, and what the commit says."""

    manifest: Manifest
    ranks: bytes
    document: Json


def assemble(intent: Intent, receipts: Sequence[Receipt], run: bytes, url: str) -> Sealed:
    """Checks that the receipts prove the attempt whole, and makes its records; what comes out does not depend on who
    asks. Raises StateMismatch where replicas differ, CorruptCheckpoint where what was written is not what was held.
    """
    if sorted(r.rank for r in receipts) != list(range(intent.world)):
        raise CorruptCheckpoint(f"{url}: attempt {intent.attempt} lacks receipts of some ranks")
    expected = sha256(intent.document())
    for r in receipts:
        if r.attempt != intent.attempt or r.intent != expected:
            raise CorruptCheckpoint(f"{url}: the receipt of rank {r.rank} belongs to another intent")
    catalogue = Catalogue.of(intent.tensors)
    digests = held_digests(catalogue, {r.rank: r.held for r in receipts})
    _check_written(catalogue, digests, receipts, url)
    manifest = Manifest.of(catalogue, digests, intent.aliases, intent.values)
    ranks = canonical_json(
        {
            "format": FORMAT,
            "world": intent.world,
            "ranks": [dict(r.per_rank) for r in sorted(receipts, key=lambda r: r.rank)],
        }
    )
    document = {
        "kind": "commit",
        "claim": intent.claim,
        "attempt": intent.attempt,
        "step": intent.step,
        "parent": intent.parent,
        "state_id": manifest.state_id,
        "bytes": manifest.nbytes,
        "manifest": sha256(manifest.document()),
        "ranks": sha256(ranks),
        "run": sha256(run),
    }
    return Sealed(manifest, ranks, document)


def held_digests(catalogue: Catalogue, held: Mapping[int, Mapping[str, list[tuple[Box, Digest]]]]) -> dict[str, Digest]:
    """Digest of each tensor from the digests of the boxes that ranks hold. Replicas must agree, and the distinct
    boxes must cover the tensor exactly. Raises StateMismatch naming the tensor and the ranks."""
    found: dict[str, list[tuple[int, Box, Digest]]] = defaultdict(list)
    for rank, tensors in held.items():
        for name, boxes in tensors.items():
            for box, digest in boxes:
                found[name].append((rank, box, digest))
    digests = {}
    for spec in catalogue.tensors:
        entries = found.pop(spec.name, [])
        Holdings.of((rank, box) for rank, box, _ in entries).check_cover(spec.name, spec.shape)
        distinct: dict[Box, tuple[int, Digest]] = {}
        for rank, box, digest in sorted(entries):
            first, known = distinct.setdefault(box, (rank, digest))
            if known != digest:
                raise StateMismatch(
                    f"{spec.name}: ranks {first} and {rank} hold different bits of {box}, which should be replicas; "
                    "synchronise them before saving, or declare the entry per rank"
                )
        digests[spec.name] = add(*(d for _, d in distinct.values()))
    if found:
        raise StateMismatch(f"{min(found)}: held by a rank but not part of the intent")
    return digests


def _check_written(catalogue: Catalogue, digests: Mapping[str, Digest], receipts: Sequence[Receipt], url: str) -> None:
    objects = sorted(o for r in receipts for o in r.objects)
    if objects != sorted((o.array, o.index) for o in catalogue.objects()):
        raise CorruptCheckpoint(f"{url}: the receipts do not name every stored object exactly once")
    for spec in catalogue.tensors:
        written = add(ZERO, *(r.written[spec.name] for r in receipts if spec.name in r.written))
        if written != digests[spec.name]:
            raise CorruptCheckpoint(
                f"{spec.name}: what was written is not what was held in memory: the bits changed while they were "
                "copied or exchanged, or the tensor was modified during the save; save again"
            )


def publish(
    store: ObjectStore, log: Log, intent: Intent, sealed: Sealed, fault: Callable[[str], None] = NoFaults
) -> Record:
    """Writes the manifests and appends the commit. Returns the commit record, ours or that of another committer of the
    same attempt. Raises Fenced when a newer job has claimed the root, StoreError when the attempt was voided."""
    prefix = attempt_prefix(intent.claim, intent.attempt)
    create_same(store, prefix + "manifest.json", sealed.manifest.document())
    fault("commit.manifest")
    create_same(store, prefix + "ranks/manifest.json", sealed.ranks)
    fault("commit.append")  # all parts are durable by now: a receipt is created after what it stands for was synced
    record = log.append_fenced(intent.claim, sealed.document, lambda h: settled(h, intent.attempt))
    fault("commit.done")
    if record.kind != "commit":
        raise StoreError(f"{store.url}: attempt {intent.attempt} was voided by another rank; save again")
    return record


def settled(history: History, attempt: str) -> Record | None:
    """The commit or void of an attempt, if the log has one."""
    return history.outcome(attempt)


def void(log: Log, claim: str, attempt: str, reason: str) -> Record:
    """Appends a void, so that the attempt can never be committed; returns the commit if it came first."""
    document = {"kind": "void", "claim": claim, "attempt": attempt, "reason": reason[:500]}
    return log.append_fenced(claim, document, lambda h: settled(h, attempt))


def complete_last(store: ObjectStore, log: Log) -> Record | None:
    """Commits the attempt of the last claim that has all its receipts but no outcome, if there is one: what a dead job
    had finished writing is not lost. Called by a job before it claims. Raises Fenced when another job claims first.

    An attempt that does not follow that claim's newest commit is left alone: its job went on without it.
    """
    history = log.read()
    last = history.last_claim
    if last is None:
        return None
    prefix = f"attempts/{last.claim}/"
    keys = store.list(prefix)
    attempts = sorted({key[len(prefix) :].split("/")[0] for key in keys})
    newest = next((r.number for r in reversed(history.records) if r.kind == "commit" and r.claim == last.claim), None)
    found = [_finished(store, f"{prefix}{a}/", keys) for a in attempts if settled(history, a) is None]
    whole = [(intent, sealed) for intent, sealed in filter(None, found) if newest in (None, intent.parent)]
    for intent, sealed in sorted(whole, key=lambda pair: pair[0].step, reverse=True):
        try:
            return publish(store, log, intent, sealed)
        except CorruptCheckpoint:
            continue
        except StoreError:  # unless the attempt was voided meanwhile
            if settled(log.read(), intent.attempt) is None:
                raise
    return None


def _finished(store: ObjectStore, prefix: str, keys: Mapping[str, int]) -> tuple[Intent, Sealed] | None:
    """An attempt whose receipts prove it whole; None for any other, however damaged: nobody will miss it."""
    receipts = [k for k in keys if k.startswith(prefix + "receipts/")]
    try:
        intent = Intent.parse(store.get(prefix + "intent.json"), f"{store.url}/{prefix}intent.json")
        if len(receipts) != intent.world:
            return None
        parsed = [Receipt.parse(store.get(k), f"{store.url}/{k}") for k in receipts]
        run = store.get(prefix + "run.json")
        if prefix != attempt_prefix(intent.claim, intent.attempt):
            return None
        return intent, assemble(intent, parsed, run, store.url)
    except CkptError as error:
        if isinstance(error, StoreError) and not isinstance(error, NotFound):
            raise
        return None
