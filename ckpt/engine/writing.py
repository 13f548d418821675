"""What a save writes: stored objects, assembled round by round from what the ranks hold, and the metadata of arrays."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ckpt.engine.merge import Union
from ckpt.engine.mover import Move, Mover, by_unit, gather_box, held_parts, part_of, write_moves
from ckpt.engine.session import Done, Session
from ckpt.engine.writer import Writer, write_metadata
from ckpt.fingerprint import ZERO, Digest, add, box_digests
from ckpt.geometry import Box, Plan, Unit
from ckpt.native.copies import copy_boxes
from ckpt.state.captured import Captured
from ckpt.state.values import Json
from ckpt.store.arrays import Arrays
from ckpt.store.records import Intent


@dataclass
class Job:
    """One save on this rank, as it goes through its phases."""

    session: Session
    captured: Captured
    union: Union
    plan: Plan
    intent: Intent
    per_rank: dict[str, Json]
    prefix: str


def write(job: Job) -> tuple[dict[str, Digest], list[tuple[int, tuple[int, ...]]], BaseException | None]:
    """Writes this rank's objects round by round. A local failure, an interrupt too, is kept until the end and returned,
    so that the other ranks' exchanges go on and the ranks stay in step."""
    session, catalogue = job.session, job.union.catalogue
    rank = session.comm.rank
    arrays = Arrays(session.kvstore, job.prefix + "state/", catalogue, session.context)
    mover = Mover(session.comm, [t.itemsize for t in catalogue.tensors])
    writer = Writer(session, arrays, catalogue, Done(session, job.plan).add)
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
                    _write_unit(job, writer, unit, incoming.get(number, ()), written)
                    objects.append((unit.array, unit.index))
                    if len(objects) == 1:
                        session.faults("save.object")
        except BaseException as error:
            failure = error
    try:
        writer.drain()
        if failure is None:
            write_metadata(session, arrays, catalogue, job.prefix)
            writer.sync()
    except BaseException as error:
        failure = failure or error
    return dict(written), objects, failure


def _outgoing(job: Job, moves: Sequence[Move]) -> Iterator[tuple[Move, torch.Tensor]]:
    tensors = job.union.catalogue.tensors
    for move in moves:
        if move.source == job.session.comm.rank:
            yield move, gather_box(job.captured.tensors[tensors[move.link.tensor].name], move.link.box)


def _write_unit(
    job: Job, writer: Writer, unit: Unit, incoming: Iterable[tuple[Any, torch.Tensor]], written: dict[str, Digest]
) -> None:
    """Assembles one stored object in a private buffer, digests it, and starts to write it."""
    catalogue = job.union.catalogue
    array = catalogue.arrays[unit.array]
    buffer = writer.take(unit.array, unit.box)
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
    writer.write(unit.array, unit.box, buffer)


def _pieces(unit: Unit, buffer: torch.Tensor, packed: bool) -> Iterator[tuple[int, Box, torch.Tensor]]:
    """The tensor boxes that a unit's buffer holds: its own box, or each packed tensor."""
    if not packed:
        yield unit.links[0].tensor, unit.box, buffer
        return
    seen = {link.tensor: link for link in unit.links}
    for tensor, link in seen.items():
        flat = buffer[link.start : link.start + link.within.volume]
        yield tensor, link.within, flat.reshape(link.within.extent)
