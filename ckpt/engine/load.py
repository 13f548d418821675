"""The load: phase 1 changes nothing, phase 2 writes in place and verifies from the live tensors.

Each stored byte is read once over the whole job, exchanged, and placed straight into live memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ckpt.engine import fill
from ckpt.engine.fill import Filling
from ckpt.engine.merge import compare_plans
from ckpt.engine.mover import Move, Mover, elements_of, part_of, read_moves
from ckpt.engine.opened import check_objects
from ckpt.engine.session import Buffers, Done, Phases, Session
from ckpt.engine.target import Options
from ckpt.errors import CorruptCheckpoint, StoreError
from ckpt.geometry import Catalogue, Plan, Unit, read_plan
from ckpt.native.copies import copy_boxes
from ckpt.state.captured import Captured
from ckpt.state.dtypes import opaque
from ckpt.store.arrays import Arrays
from ckpt.store.opened import Opened
from ckpt.store.remedies import OLDER

_BLAME = "stored bytes were swapped, or memory or the exchange is faulty; load again, or an older step"
_REMEDY = "load again, or an older step, before training or saving"
_AGREE_EVERY = 8  # rounds between two looks at whether some rank has failed


@dataclass(frozen=True)
class Loaded:
    """Outcome of a load: bytes of the whole state as stored, tensors and values loaded, seconds, also per phase;
    rederived: this rank's random streams that were made anew."""

    bytes: int
    tensors: int
    values: int
    verified: bool
    seconds: float
    phases: dict[str, float]
    plan: str
    rederived: tuple[str, ...]


@dataclass
class _Job:
    """One load on this rank."""

    session: Session
    opened: Opened
    filling: Filling
    plan: Plan


def load(
    session: Session,
    opened: Opened,
    capture: Callable[[Opened], Captured],
    options: Options,
    *,
    verify: bool,
    atomic: bool,
    layout: dict[str, Any] | None,
) -> Loaded:
    """Collective. Fills every rank's state from an opened commit.

    capture: makes this rank's state with live views, given what the checkpoint holds; called once. atomic: keep a copy
    of the old tensors and put it back when phase 2 fails. Raises StateMismatch, CorruptCheckpoint or StoreError with
    nothing changed, or StateInvalid on every rank once tensors may have changed.
    """
    phases, comm = Phases(), session.comm
    with phases("plan"):
        filling = fill.prepare(comm, opened, capture, options, layout, "load")
        job = _Job(session, opened, filling, _plan(session, opened, filling))
        with comm.phase("load: check objects"):
            check_objects(session, opened)
    session.faults("load.opened")
    failed = f"loading step {opened.record.step} failed"
    with fill.changing(filling, atomic, failed, _REMEDY) as begin_to_apply:
        with phases("read"):
            _read(job)
        session.faults("load.placed")
        if verify:
            with phases("verify"):
                fill.verify(comm, opened.manifest, filling, "load", _BLAME)
        session.faults("load.verified")
        with phases("apply"):
            fill.apply(comm, filling, begin_to_apply, "load")
    return Loaded(
        opened.manifest.nbytes,
        len(filling.fill),
        len(filling.captured.values),
        verify,
        phases.total,
        phases.seconds,
        job.plan.summary(),
        filling.rederived,
    )


def _plan(session: Session, opened: Opened, filling: Filling) -> Plan:
    comm = session.comm
    with comm.phase("load: plan"):
        plan = read_plan(opened.manifest.catalogue, filling.wanted, comm.world, session.budget)
        digest = plan.digest()
    compare_plans(comm, digest, "load")
    return plan


def _read(job: _Job) -> None:
    """Reads, exchanges and places, round by round; the next round's reads run while this one is exchanged. A local
    failure, an interrupt too, is kept until the ranks next agree, so that they stay in step; then all stop."""
    session, catalogue = job.session, job.opened.manifest.catalogue
    arrays = Arrays(session.kvstore, job.opened.prefix + "state/", catalogue, session.context)
    mover = Mover(session.comm, [t.itemsize for t in catalogue.tensors])
    staging, done = Buffers(), Done(session, job.plan)
    failure: BaseException | None = None
    ahead: dict[int, Any] = {}
    for number, units in enumerate(job.plan.rounds):
        buffers: dict[int, torch.Tensor] = {}
        if failure is None:
            try:
                begun = ahead if number else _start(job, arrays, units)
                for n, future in begun.items():
                    buffers[n] = _finish(job, arrays, staging, units[n], future)
                    done.add(units[n].nbytes)
                if number == 0 and buffers:
                    session.faults("load.read")
                last = number + 1 == len(job.plan.rounds)
                ahead = {} if last else _start(job, arrays, job.plan.rounds[number + 1])
            except BaseException as error:
                failure = error
        moves = read_moves(units)
        if moves:
            give = _outgoing(moves, buffers, units, catalogue, session.comm.rank)
            arrived = mover.exchange(moves, give, "load: exchange")
            copy_boxes([c for m, elements in arrived for c in job.filling.places(m.link.tensor, m.link.box, elements)])
        if failure is None:
            _place_own(job, units, buffers)
            for buffer in buffers.values():
                staging.give(buffer)
        if number % _AGREE_EVERY == 0 or number + 1 == len(job.plan.rounds):
            with session.comm.phase("load: read"):
                if failure is not None:
                    raise failure


def _place_own(job: _Job, units: Sequence[Unit], buffers: Mapping[int, torch.Tensor]) -> None:
    """Places what this rank has read for itself."""
    catalogue = job.opened.manifest.catalogue
    copies = []
    for n, buffer in buffers.items():
        packed = catalogue.arrays[units[n].array].packed
        for link in units[n].links:
            if job.session.comm.rank in link.ranks:
                copies += job.filling.places(link.tensor, link.box, part_of(buffer, link, packed))
    copy_boxes(copies)


def _start(job: _Job, arrays: Arrays, units: Sequence[Unit]) -> dict[int, Any]:
    started: dict[int, Any] = {}
    for number, unit in enumerate(units):
        if unit.owner == job.session.comm.rank:
            if _is_whole(job.opened.manifest.catalogue, unit):
                started[number] = arrays.read_object(unit.array, unit.index)
            else:
                where = tuple(slice(o, s) for o, s in zip(unit.box.offset, unit.box.stop, strict=True))
                started[number] = arrays.handle(unit.array)[where].read()
    return started


def _is_whole(catalogue: Catalogue, unit: Unit) -> bool:
    """Whether a unit is all of a stored object, not some of its chunks."""
    return catalogue.arrays[unit.array].grid.cell_box(unit.index) == unit.box


def _finish(job: _Job, arrays: Arrays, staging: Buffers, unit: Unit, begun: Any) -> torch.Tensor:
    """The elements of a unit that was started to be read; those of a whole object lie in a buffer of `staging`."""
    catalogue = job.opened.manifest.catalogue
    array = catalogue.arrays[unit.array]
    where = f"{arrays.describe(unit.array)} {_named(job, unit)}"
    if not _is_whole(catalogue, unit):
        try:
            return elements_of(begun.result(), array.itemsize)
        except Exception as error:
            raise arrays.read_error(error, where) from error
    buffer = staging.take(unit.nbytes).view(opaque(array.itemsize)).reshape(unit.box.extent)
    try:
        begun.decode(array.grid, unit.box, buffer.numpy())
    except CorruptCheckpoint as error:
        raise CorruptCheckpoint(f"{where}: a stored chunk is missing or damaged: {error}; {OLDER}") from None
    except StoreError as error:
        raise StoreError(f"{where}: {error}") from error
    return buffer


def _named(job: _Job, unit: Unit) -> str:
    names = [job.opened.manifest.catalogue.tensors[k.tensor].name for k in unit.links]
    return f"(tensor {names[0]}, chunk {'/'.join(map(str, unit.index))})"


def _outgoing(
    moves: Sequence[Move],
    buffers: Mapping[int, torch.Tensor],
    units: Sequence[Unit],
    catalogue: Catalogue,
    rank: int,
) -> Iterator[tuple[Move, torch.Tensor]]:
    for move in moves:
        if move.source == rank:
            array = catalogue.arrays[units[move.unit].array]
            if move.unit in buffers:
                yield move, part_of(buffers[move.unit], move.link, array.packed)
            else:  # reading failed: the others get zeros and, right after, the error
                yield move, torch.zeros(move.link.box.extent, dtype=opaque(array.itemsize))
