"""A checkpoint written from a state at rest, read box by box: bounded memory, and a kill costs the piece at hand.

What is written is what a job that held the state in memory would have written. The work is cut into pieces, runs of
stored objects of about `PIECE` bytes; any number of processes share them, and the outcome does not depend on how many.
A finished piece leaves a record, `pieces/<number>.json`, of the form of a receipt; who goes on with the attempt skips
it. The receipts of the ranks that saved the state, each of every so many pieces, are made from these at the end.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from ckpt.engine.mover import part_of
from ckpt.engine.session import MIB, Session
from ckpt.engine.sharing import in_threads, share
from ckpt.engine.writer import Writer, write_metadata
from ckpt.errors import CorruptCheckpoint
from ckpt.fingerprint import ZERO, Digest, add, box_digests
from ckpt.geometry import Box, Catalogue, Link, StoredObject, TensorSpec
from ckpt.native.copies import copy_boxes
from ckpt.state.values import Json, canonical_json, parse_json
from ckpt.store.arrays import Arrays
from ckpt.store.commit import assemble, publish
from ckpt.store.log import Record
from ckpt.store.objects import create_same
from ckpt.store.records import Intent, Receipt, attempt_prefix, receipt_key, sha256

PIECE = 64 * MIB


@dataclass(frozen=True)
class Content:
    """What a state at rest says of itself. tensors: sorted by name; aliases: further names of tied ones; values:
    canonical, by name; ranks: canonical values of each rank that saved it; left_out: what it has and ckpt cannot carry,
    with the reason; identity: tells it from any other state at this URL; state_id: the one that it says it has."""

    tensors: tuple[TensorSpec, ...]
    aliases: Mapping[str, str]
    values: Mapping[str, Json]
    ranks: tuple[Mapping[str, Json], ...]
    left_out: Mapping[str, str]
    identity: str
    step: int | None = None
    state_id: str | None = None

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors)


class Source(Protocol):
    """A state at rest."""

    @property
    def url(self) -> str: ...

    @property
    def content(self) -> Content: ...

    def read(self, name: str, box: Box) -> torch.Tensor:
        """The bits of a box of a tensor: host memory of shape `box.extent`, an opaque dtype of the same width. Raises
        CorruptCheckpoint or StoreError naming the file."""
        ...


Advance = Callable[[int], None]  # told how many more bytes of the state are written


@dataclass
class _Work:
    """One process's part of the writing of one attempt."""

    session: Session
    content: Content
    url: str  # of the source
    catalogue: Catalogue
    intent: Intent
    advance: Advance

    @property
    def prefix(self) -> str:
        return attempt_prefix(self.intent.claim, self.intent.attempt)

    @property
    def pinned(self) -> str:
        return sha256(self.intent.document())


def write_stream(session: Session, sources: Sequence[Source], intent: Intent, run: bytes, advance: Advance) -> Record:
    """Collective. Writes a state as the attempt of `intent`, or goes on with it, and commits it. Processes share
    what is not finished by bytes.

    sources: the state, opened by every process once for each thread that is to work there. intent.world: the number of
    its `content.ranks`. run: the provenance, the same as before where the attempt has begun. advance: called from all
    threads. Raises CorruptCheckpoint, StoreError, Fenced or RankFailed with nothing committed; what is finished stays.
    """
    comm = session.comm
    work = _Work(session, sources[0].content, sources[0].url, Catalogue.of(intent.tensors), intent, advance)
    with comm.phase("write: begin"):
        if comm.rank == 0:
            create_same(session.store, work.prefix + "intent.json", intent.document())
            create_same(session.store, work.prefix + "run.json", run)
        pieces = list(cut(work.catalogue))
        found = _finished(work, len(pieces)) if comm.rank == 0 else []
    # Told by one process, because what the others find changes while the first of them write.
    finished = set(parse_json(comm.broadcast(canonical_json(found), "write: finished"), "write: finished"))
    with comm.phase("write: pieces"):
        arrays = Arrays(session.kvstore, work.prefix + "state/", work.catalogue, session.context)
        write_metadata(session, arrays, work.catalogue, work.prefix)
        sizes = [sum(o.box.volume * work.catalogue.arrays[o.array].itemsize for o in piece) for piece in pieces]
        if comm.rank == 0:
            advance(sum(sizes[number] for number in finished))
        left = [number for number in range(len(pieces)) if number not in finished]
        mine = share([sizes[number] for number in left], comm.world)[comm.rank]
        in_threads(sources, [left[n] for n in mine], lambda s, n: _write_piece(work, s, arrays, n, pieces[n]))
    record: Record | None = None
    with comm.phase("write: commit"):
        if comm.rank == 0:
            record = _commit(work, len(pieces), run)
    outcome = comm.broadcast(None if record is None else str(record.number).encode(), "write: outcome")
    return session.log.read().records[int(outcome) - 1]


def cut(catalogue: Catalogue) -> Iterator[list[StoredObject]]:
    """All stored objects in their order, in pieces of at most PIECE bytes, or one object."""
    piece: list[StoredObject] = []
    size = 0
    for stored in catalogue.objects():
        nbytes = stored.box.volume * catalogue.arrays[stored.array].itemsize
        if piece and size + nbytes > PIECE:
            yield piece
            piece, size = [], 0
        piece.append(stored)
        size += nbytes
    if piece:
        yield piece


def _finished(work: _Work, pieces: int) -> list[int]:
    """The pieces that have a record; what else lies there counts for nothing."""
    there = work.session.store.list(f"{work.prefix}pieces/")
    return [number for number in range(pieces) if there.get(work.prefix + _piece_key(number))]


def _piece_key(number: int) -> str:
    return f"pieces/{number:06d}.json"


def _write_piece(work: _Work, source: Source, arrays: Arrays, number: int, piece: Sequence[StoredObject]) -> None:
    held: dict[str, list[tuple[Box, Digest]]] = defaultdict(list)
    written: dict[str, Digest] = defaultdict(lambda: ZERO)
    writer = Writer(work.session, arrays, work.catalogue, work.advance)
    for stored in piece:
        _write_object(work, source, writer, stored, held, written)
        work.session.faults("stream.object")
    writer.drain()
    writer.sync()
    objects = [(stored.array, stored.index) for stored in piece]
    receipt = Receipt(work.intent.attempt, number, work.pinned, dict(held), dict(written), objects, {})
    create_same(work.session.store, work.prefix + _piece_key(number), receipt.document())
    work.session.faults("stream.piece")


def _write_object(
    work: _Work,
    source: Source,
    writer: Writer,
    stored: StoredObject,
    held: dict[str, list[tuple[Box, Digest]]],
    written: dict[str, Digest],
) -> None:
    """Reads the boxes of one object, digests them, puts them together, digests that, and starts to write it."""
    array = work.catalogue.arrays[stored.array]
    buffer = writer.take(stored.array, stored.box)
    specs = [work.catalogue.tensors[tensor] for tensor, _, _ in stored.pieces]
    parts = []
    for spec, (tensor, box, start) in zip(specs, stored.pieces, strict=True):
        part = part_of(buffer, Link(tensor, box, (), box if array.packed else stored.box, start), array.packed)
        elements = source.read(spec.name, box)
        held[spec.name].append((box, box_digests([(elements, box, spec.shape)])[0]))
        copy_boxes([(part, elements)])
        parts.append((part, box, spec.shape))
    for spec, digest in zip(specs, box_digests(parts), strict=True):
        written[spec.name] = add(written[spec.name], digest)
    writer.write(stored.array, stored.box, buffer)


def _commit(work: _Work, pieces: int, run: bytes) -> Record:
    """Makes the receipts from the records of the pieces, and commits."""
    store, intent = work.session.store, work.intent
    found = []
    for number in range(pieces):
        key = work.prefix + _piece_key(number)
        piece = Receipt.parse(store.get(key), f"{store.url}/{key}")
        if piece.intent != work.pinned or piece.rank != number:
            raise CorruptCheckpoint(f"{store.url}/{key}: belongs to another attempt; delete {store.url}/{work.prefix}")
        found.append(piece)
    ranks = work.content.ranks
    receipts = [_merged(work, rank, found[rank :: intent.world], own) for rank, own in enumerate(ranks)]
    sealed = assemble(intent, receipts, run, store.url)
    _check_state_id(work, str(sealed.document["state_id"]))  # first: with its receipts whoever comes by may commit it
    for receipt in receipts:
        create_same(store, receipt_key(work.prefix, receipt.rank), receipt.document())
    work.session.faults("stream.receipts")
    return publish(store, work.session.log, intent, sealed, work.session.faults)


def _check_state_id(work: _Work, found: str) -> None:
    expected, store = work.content.state_id, work.session.store
    if expected not in (None, found):
        raise CorruptCheckpoint(
            f"{work.url}: what was read is the state {found}, but it says that it is {expected}: it is damaged, "
            f"or has changed since it was written; nothing was committed; delete {store.url}/{work.prefix}"
        )


def _merged(work: _Work, rank: int, pieces: Sequence[Receipt], own: Mapping[str, Json]) -> Receipt:
    held: dict[str, list[tuple[Box, Digest]]] = defaultdict(list)
    written: dict[str, Digest] = defaultdict(lambda: ZERO)
    for piece in pieces:
        for name, boxes in piece.held.items():
            held[name] += boxes
        for name, digest in piece.written.items():
            written[name] = add(written[name], digest)
    objects = [o for piece in pieces for o in piece.objects]
    return Receipt(work.intent.attempt, rank, work.pinned, dict(held), dict(written), objects, dict(own))
