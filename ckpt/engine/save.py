"""The blocking save: plan, digest, exchange, write, receipt, commit.

Every rank digests what it holds and replicas are compared before a byte is written; the writer of each stored object
digests again what it assembled; a commit needs both sums to be equal.
"""

from __future__ import annotations

import contextlib
import os
import platform
import secrets
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from ckpt.engine.contents import Contents
from ckpt.engine.digests import Held, digests_of, held_document, parse_held
from ckpt.engine.merge import Union, check_cover, declare_all, partial_stacks, union_of
from ckpt.engine.session import Phases, Session
from ckpt.engine.writing import Job, write
from ckpt.errors import CkptError, RankFailed, StateMismatch
from ckpt.fingerprint import Digest
from ckpt.geometry import Layout, Plan, write_plan
from ckpt.state.captured import Captured
from ckpt.state.values import Json, canonical_json, parse_json
from ckpt.store.commit import Sealed, assemble, held_digests, publish, void
from ckpt.store.log import FORMAT, Record, check_fence
from ckpt.store.objects import create_same
from ckpt.store.records import Intent, Receipt, attempt_prefix, receipt_key, sha256


@dataclass(frozen=True)
class Saved:
    """Outcome of a committed save: the commit's record, bytes of the whole state, seconds in all and per phase, what
    the plan moved, and what was captured."""

    record: Record
    bytes: int
    seconds: float
    phases: dict[str, float]
    plan: str
    contents: Contents


@dataclass
class PlanCache:
    """The last merged and planned declarations: a run that saves the same tensors again plans nothing."""

    key: str = ""
    union: Union | None = None
    plan: Plan | None = None
    digest: str = ""
    hits: int = field(default=0)
    _stacks: tuple[str, frozenset[str]] = ("", frozenset())

    def partial_stacks(self, declared: Sequence[bytes]) -> frozenset[str]:
        """As `merge.partial_stacks`, which parses what all ranks say."""
        key = _key(declared)
        if self._stacks[0] != key:
            self._stacks = (key, partial_stacks(declared))
        return self._stacks[1]


def save(
    session: Session,
    cache: PlanCache,
    captured: Captured,
    *,
    claim: str,
    parent: int | None,
    step: int,
    layout: Json,
    numerics: Json = None,
    held: Held | None = None,
) -> Saved:
    """Collective. Saves what all ranks captured as one step and commits it.

    layout: as `layout_document` gives it. numerics: the document of the run's contract, if it has one. held: digests
    that were taken when a staged state was captured, of all of its tensors or some.

    Raises StateMismatch or Unsupported with nothing written, CorruptCheckpoint where bits changed on the way, Fenced
    when another job has claimed the root, StoreError, or RankFailed. Nothing but a commit makes an attempt visible.
    """
    comm, phases = session.comm, Phases()
    with phases("plan"):
        union, plan, digest, values, per_rank = _plan(session, cache, captured, step)
    with phases("digest"):
        held = _digest(session, captured, union, held or {})
    session.faults("save.begin")
    with phases("intent"):
        ids = comm.broadcast(secrets.token_hex(16).encode() if comm.rank == 0 else None, "save: attempt id")
        intent = Intent(
            claim,
            ids.decode(),
            step,
            parent,
            comm.world,
            digest,
            union.catalogue.tensors,
            union.aliases,
            values,
        )
        job = Job(session, captured, union, plan, intent, per_rank, attempt_prefix(claim, intent.attempt))
        run = _begin(job, {"layout": layout} | ({} if numerics is None else {"numerics": numerics}))
    try:
        with phases("write"):
            written, objects, failure = write(job)
            with comm.phase("save: write"):
                if failure is not None:
                    raise failure
                session.faults("save.written")
        with phases("receipt"):
            receipts = _exchange_receipts(job, held, written, objects)
        with phases("commit"):
            record = _commit(job, receipts, run)
    except BaseException as error:
        _void(job, error)
        raise
    contents = Contents(union, list(values), list(per_rank), captured.left_out)
    return Saved(record, int(record.document["bytes"]), phases.total, phases.seconds, plan.summary(), contents)


def parent_of(session: Session, claim: str, base: int | None, seen: int) -> int | None:
    """Collective: the commit that the next one follows: `base`, the last that was loaded or saved when the log had
    `seen` records, or a later one of this job that landed although its save raised. Raises Fenced."""
    comm = session.comm
    found: bytes | None = None
    with comm.phase("save: read the log"):
        if comm.rank == 0:
            history = session.log.read()
            check_fence(history, claim, session.store.url)
            landed = [r.number for r in history.records[seen:] if r.kind == "commit" and r.claim == claim]
            found = canonical_json(landed[-1] if landed else base)
    parent: int | None = parse_json(comm.broadcast(found, "save: parent"), "save: parent")
    return parent


def _plan(
    session: Session, cache: PlanCache, captured: Captured, step: int
) -> tuple[Union, Plan, str, dict[str, Json], dict[str, Json]]:
    comm = session.comm
    declared = declare_all(comm, captured, "save", step, cache.partial_stacks)
    with comm.phase("save: plan"):
        key = _key(declared.tensors)
        if cache.key != key or cache.union is None or cache.plan is None:
            union = union_of(declared.tensors)
            check_cover(union)
            plan = write_plan(union.catalogue, union.holdings, comm.world, session.budget)
            cache.key, cache.union, cache.plan, cache.digest = key, union, plan, plan.digest()
        else:
            cache.hits += 1
        clash = declared.values.keys() & {t.name for t in cache.union.catalogue.tensors}
        if clash:
            raise StateMismatch(f"{min(clash)}: a tensor on one rank and a plain value on another")
    return cache.union, cache.plan, cache.digest, declared.values, declared.per_rank


def _key(declared: Sequence[bytes]) -> str:
    return sha256(b"".join(sha256(d).encode() for d in declared))


def _digest(session: Session, captured: Captured, union: Union, known: Held) -> Held:
    """Digests of everything this rank holds; all ranks' digests are compared where they are replicas."""
    comm = session.comm
    with comm.phase("save: digest"):
        rest = {name: tensor for name, tensor in captured.tensors.items() if name not in known}
        held = {name: known[name] for name in captured.tensors if name in known} | digests_of(Captured(rest))
        document = held_document(held)
    everybody = comm.all_gather(document, "save: digests")
    with comm.phase("save: compare replicas"):
        if comm.rank == 0:
            held_digests(union.catalogue, {r: parse_held(d, r) for r, d in enumerate(everybody)})
    return held


def _begin(job: Job, told: dict[str, Json]) -> bytes:
    """Rank 0 fixes the attempt; returns its provenance record."""
    session = job.session
    run = None
    with session.comm.phase("save: begin"):
        if session.comm.rank == 0:
            run = canonical_json(_provenance(job.intent) | told)
            create_same(session.store, job.prefix + "intent.json", job.intent.document())
            create_same(session.store, job.prefix + "run.json", run)
            session.faults("save.intent")
    return session.comm.broadcast(run, "save: provenance")


def _provenance(intent: Intent) -> dict[str, Json]:
    return {
        "format": FORMAT,
        "step": intent.step,
        "claim": intent.claim,
        "attempt": intent.attempt,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "world": intent.world,
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "numpy": np.__version__,
        },
    }


def layout_document(layout: Layout | None) -> Json:
    """A layout as plain data, or None."""
    if layout is None:
        return None
    names = ("tp", "cp", "ep", "etp", "dp", "pp", "vpp", "order")
    return {n: getattr(layout, n) for n in names}


def _exchange_receipts(
    job: Job, held: Held, written: dict[str, Digest], objects: list[tuple[int, tuple[int, ...]]]
) -> list[bytes]:
    session = job.session
    rank = session.comm.rank
    with session.comm.phase("save: receipt"):
        intent = sha256(job.intent.document())
        data = Receipt(job.intent.attempt, rank, intent, held, written, objects, job.per_rank).document()
        create_same(session.store, receipt_key(job.prefix, rank), data)
        session.faults("save.receipt")
    return session.comm.all_gather(data, "save: receipts")


def _commit(job: Job, receipts: Sequence[bytes], run: bytes) -> Record:
    """Rank 0 commits; where the group breaks while it does, each other rank tries in turn before it reports that."""
    comm = job.session.comm
    record: Record | None = None
    try:
        with comm.phase("save: commit"):
            if comm.rank == 0:
                record = _publish(job, receipts, run)
        found = comm.broadcast(_record_bytes(record), "save: outcome")
    except RankFailed as error:
        if comm.rank == 0 or not comm.broken:
            raise
        time.sleep(0.2 * comm.rank)
        try:
            number = _publish(job, receipts, run).number
        except CkptError as second:
            raise RankFailed(f"{error}. Step {job.intent.step} was not committed: {second}") from error
        raise RankFailed(
            f"{error}. The save of step {job.intent.step} was committed all the same (log record {number})"
        ) from error
    number, document = parse_json(found, "save: outcome")
    return Record(number, document)


def _publish(job: Job, receipts: Sequence[bytes], run: bytes) -> Record:
    session = job.session
    parsed = [Receipt.parse(d, f"receipt of rank {r}") for r, d in enumerate(receipts)]
    sealed: Sealed = assemble(job.intent, parsed, run, session.store.url)
    return publish(session.store, session.log, job.intent, sealed, session.faults)


def _record_bytes(record: Record | None) -> bytes | None:
    return None if record is None else canonical_json([record.number, record.document])


def _void(job: Job, error: BaseException) -> None:
    """After a failure that all ranks know of, rank 0 makes sure that the attempt can never be committed. Best effort:
    an attempt without all its receipts cannot be committed anyway. Where the group is broken, others may commit it."""
    if job.session.comm.rank == 0 and not job.session.comm.broken:
        with contextlib.suppress(CkptError):
            void(job.session.log, job.intent.claim, job.intent.attempt, f"{type(error).__name__}: {error}")
