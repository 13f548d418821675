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
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorstore as ts
import torch

from ckpt.engine.digests import Held, digests_of, held_document, parse_held
from ckpt.engine.merge import Union, check_cover, declare_all, partial_stacks, union_of
from ckpt.engine.mover import Move, Mover, by_unit, gather_box, held_parts, part_of, write_moves
from ckpt.engine.session import Buffers, InFlight, Phases, Session
from ckpt.errors import CkptError, RankFailed, StateMismatch, StoreError
from ckpt.fingerprint import ZERO, Digest, add, box_digests
from ckpt.geometry import Box, Layout, Plan, Unit, write_plan
from ckpt.native.copies import copy_boxes
from ckpt.state.captured import Captured
from ckpt.state.dtypes import STORED, opaque
from ckpt.state.values import Json, canonical_json, parse_json
from ckpt.store.arrays import Arrays, metadata_objects
from ckpt.store.commit import Sealed, assemble, held_digests, publish, void
from ckpt.store.log import FORMAT, Record
from ckpt.store.records import Intent, Receipt, attempt_prefix, sha256


@dataclass(frozen=True)
class Saved:
    """Outcome of a committed save: the commit's record, bytes of the whole state, seconds in all and per phase, and
    what the plan moved."""

    record: Record
    bytes: int
    seconds: float
    phases: dict[str, float]
    plan: str


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


@dataclass
class _Job:
    """One save on this rank, as it goes through its phases."""

    session: Session
    captured: Captured
    union: Union
    plan: Plan
    intent: Intent
    per_rank: dict[str, Json]
    prefix: str


def save(
    session: Session,
    cache: PlanCache,
    captured: Captured,
    *,
    claim: str,
    parent: int | None,
    step: int,
    layout: Layout | None,
) -> Saved:
    """Collective. Saves what all ranks captured as one step and commits it.

    Raises StateMismatch or Unsupported with nothing written, CorruptCheckpoint where bits changed on the way, Fenced
    when another job has claimed the root, StoreError, or RankFailed. Nothing but a commit makes an attempt visible.
    """
    comm, phases = session.comm, Phases()
    with phases("plan"):
        union, plan, digest, values, per_rank = _plan(session, cache, captured, step)
    with phases("digest"):
        held = _digest(session, captured, union)
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
        job = _Job(session, captured, union, plan, intent, per_rank, attempt_prefix(claim, intent.attempt))
        run = _begin(job, layout)
    try:
        with phases("write"):
            written, objects, failure = _write(job)
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
    return Saved(record, int(record.document["bytes"]), phases.total, phases.seconds, plan.summary())


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


def _digest(session: Session, captured: Captured, union: Union) -> Held:
    """Digests of everything this rank holds; all ranks' digests are compared where they are replicas."""
    comm = session.comm
    with comm.phase("save: digest"):
        held = digests_of(captured)
        document = held_document(held)
    everybody = comm.all_gather(document, "save: digests")
    with comm.phase("save: compare replicas"):
        if comm.rank == 0:
            held_digests(union.catalogue, {r: parse_held(d, r) for r, d in enumerate(everybody)})
    return held


def _begin(job: _Job, layout: Layout | None) -> bytes:
    """Rank 0 fixes the attempt; returns its provenance record."""
    session = job.session
    run = None
    with session.comm.phase("save: begin"):
        if session.comm.rank == 0:
            run = canonical_json(_provenance(job.intent, layout))
            created = session.store.create(job.prefix + "intent.json", job.intent.document())
            if not created or not session.store.create(job.prefix + "run.json", run):
                raise StoreError(f"{session.store.url}/{job.prefix}: a new attempt exists already")
            session.faults("save.intent")
    return session.comm.broadcast(run, "save: provenance")


def _provenance(intent: Intent, layout: Layout | None) -> Json:
    return {
        "format": FORMAT,
        "step": intent.step,
        "claim": intent.claim,
        "attempt": intent.attempt,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "world": intent.world,
        "layout": layout_document(layout),
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


def _write(job: _Job) -> tuple[dict[str, Digest], list[tuple[int, tuple[int, ...]]], BaseException | None]:
    """Writes this rank's objects round by round. A local failure, an interrupt too, is kept until the end and returned,
    so that the other ranks' exchanges go on and the ranks stay in step."""
    session, catalogue = job.session, job.union.catalogue
    rank = session.comm.rank
    arrays = Arrays(session.kvstore, job.prefix + "state/", catalogue, session.context)
    mover = Mover(session.comm, [t.itemsize for t in catalogue.tensors])
    buffers, flight = Buffers(), InFlight(session.budget // 2)
    written: dict[str, Digest] = defaultdict(lambda: ZERO)
    objects: list[tuple[int, tuple[int, ...]]] = []
    failure: BaseException | None = None
    for units in job.plan.rounds:
        moves = write_moves(units)
        incoming = by_unit(mover.exchange(moves, _outgoing(job, moves), "save: exchange") if moves else ())
        if failure is not None:
            continue
        try:
            for number, unit in enumerate(units):
                if unit.owner == rank:
                    _write_unit(job, arrays, buffers, flight, unit, incoming.get(number, ()), written)
                    objects.append((unit.array, unit.index))
                    if len(objects) == 1:
                        session.faults("save.object")
        except BaseException as error:
            failure = error
    try:
        flight.drain()
        if failure is None:
            _write_metadata(job, arrays)
            session.store.sync(*(arrays.describe(number) for number in sorted({array for array, _ in objects})))
    except BaseException as error:
        failure = failure or error
    return dict(written), objects, failure


def _outgoing(job: _Job, moves: Sequence[Move]) -> Iterator[tuple[Move, torch.Tensor]]:
    tensors = job.union.catalogue.tensors
    for move in moves:
        if move.source == job.session.comm.rank:
            yield move, gather_box(job.captured.tensors[tensors[move.link.tensor].name], move.link.box)


def _write_unit(
    job: _Job,
    arrays: Arrays,
    buffers: Buffers,
    flight: InFlight,
    unit: Unit,
    incoming: Iterable[tuple[Any, torch.Tensor]],
    written: dict[str, Digest],
) -> None:
    """Assembles one stored object in a private buffer, digests it, and starts to write it."""
    catalogue = job.union.catalogue
    array = catalogue.arrays[unit.array]
    staging = buffers.take(unit.nbytes)
    if array.packed:
        staging.zero_()
    buffer = staging.view(opaque(array.itemsize)).reshape(unit.box.extent)
    copies = [(part_of(buffer, link, array.packed), elements) for link, elements in incoming]
    for link in unit.links:
        if link.ranks[0] == unit.owner:
            name = catalogue.tensors[link.tensor].name
            for box, view in held_parts(job.captured.tensors[name].shards, link.box):
                if box == link.box:
                    copies.append((part_of(buffer, link, array.packed), view))
                    break
    copy_boxes(copies)
    pieces = [(catalogue.tensors[t], box, part) for t, box, part in _pieces(unit, buffer, array.packed)]
    digests = box_digests([(part, box, spec.shape) for spec, box, part in pieces])
    for (spec, _, _), digest in zip(pieces, digests, strict=True):
        written[spec.name] = add(written[spec.name], digest)
    values = buffer.numpy().view(np.dtype(STORED[array.dtype].zarr))
    handle = arrays.handle(unit.array)[tuple(slice(o, s) for o, s in zip(unit.box.offset, unit.box.stop, strict=True))]
    future = handle.write(values, can_reference_source_data_indefinitely=True)
    where = arrays.describe(unit.array)

    def finish() -> None:
        _finish_write(future.commit, where)
        buffers.give(staging)

    flight.add(unit.nbytes, finish)


def _pieces(unit: Unit, buffer: torch.Tensor, packed: bool) -> Iterator[tuple[int, Box, torch.Tensor]]:
    """The tensor boxes that a unit's buffer holds: its own box, or each packed tensor."""
    if not packed:
        yield unit.links[0].tensor, unit.box, buffer
        return
    seen = {link.tensor: link for link in unit.links}
    for tensor, link in seen.items():
        flat = buffer[link.start : link.start + link.within.volume]
        yield tensor, link.within, flat.reshape(link.within.extent)


def _finish_write(commit: ts.Future, where: str) -> None:
    try:
        commit.result()
    except Exception as error:
        text = str(error).split(" [source locations")[0]
        raise StoreError(f"{where}: writing failed: {text}; check space, permissions and the connection") from error


def _write_metadata(job: _Job, arrays: Arrays) -> None:
    """Every rank writes its share of the zarr.json files."""
    rank, world = job.session.comm.rank, job.session.comm.world
    mine = list(metadata_objects(job.union.catalogue).items())[rank::world]
    started = [(key, arrays.put(key, data)) for key, data in mine]
    for key, future in started:
        _finish_write(future, f"{job.session.store.url}/{job.prefix}state/{key}")


def _exchange_receipts(
    job: _Job, held: Held, written: dict[str, Digest], objects: list[tuple[int, tuple[int, ...]]]
) -> list[bytes]:
    session = job.session
    rank = session.comm.rank
    with session.comm.phase("save: receipt"):
        intent = sha256(job.intent.document())
        data = Receipt(job.intent.attempt, rank, intent, held, written, objects, job.per_rank).document()
        if not session.store.create(f"{job.prefix}receipts/{rank:06d}.json", data):
            raise StoreError(f"{session.store.url}/{job.prefix}: rank {rank} has a receipt already")
        session.faults("save.receipt")
    return session.comm.all_gather(data, "save: receipts")


def _commit(job: _Job, receipts: Sequence[bytes], run: bytes) -> Record:
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


def _publish(job: _Job, receipts: Sequence[bytes], run: bytes) -> Record:
    session = job.session
    parsed = [Receipt.parse(d, f"receipt of rank {r}") for r, d in enumerate(receipts)]
    sealed: Sealed = assemble(job.intent, parsed, run, session.store.url)
    return publish(session.store, session.log, job.intent, sealed, session.faults)


def _record_bytes(record: Record | None) -> bytes | None:
    return None if record is None else canonical_json([record.number, record.document])


def _void(job: _Job, error: BaseException) -> None:
    """After a failure that all ranks know of, rank 0 makes sure that the attempt can never be committed. Best effort:
    an attempt without all its receipts cannot be committed anyway. Where the group is broken, others may commit it."""
    if job.session.comm.rank == 0 and not job.session.comm.broken:
        with contextlib.suppress(CkptError):
            void(job.session.log, job.intent.claim, job.intent.attempt, f"{type(error).__name__}: {error}")
