"""Files of another library, written piece by piece: any number of processes share them, and a kill costs the pieces at
hand.

What is written depends on the state and the options alone, not on how many processes there are or how often one was
killed. A finished piece leaves a record in the target's work folder (`ckpt.adapters.foreign.work_folder`); who goes on
checks its bytes and skips it. Points at which a test may act:

    files.piece   a piece has its record
    files.placed  a file has its place, others have not
    files.last    all have, and the work folder is still there
    files.ending  it is no longer one that counts
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ckpt.adapters.foreign.shared_work import begin, conversion_of, discarding, everyones, shared
from ckpt.adapters.foreign.witness import Witness, parse_seen, seen_document
from ckpt.adapters.foreign.work_folder import STAYS, WorkFolder
from ckpt.engine.comm import Comm
from ckpt.engine.faults import FaultPoint, no_faults
from ckpt.engine.group import Group
from ckpt.engine.stream import Advance, Source
from ckpt.errors import StoreError
from ckpt.state.values import Json

PIECE = 64 << 20  # bytes of the state in one, at most, or one slab
_DAY = 86400.0  # seconds that one process waits for another, which may have far more to do


@dataclass(frozen=True)
class Piece:
    """A run of bytes of a file. start: its first byte there. reads: bytes of the state that are read for it; counts:
    those of them that are not read for another too, as tied tensors are."""

    file: str
    start: int
    reads: int
    counts: int


@dataclass(frozen=True)
class Plan:
    """What is written. options: whatever tells this output from others of the same state; pieces: by number; further:
    names of the files that are made when all pieces are done; last: the file that makes a folder a checkpoint."""

    form: str
    options: Json
    pieces: tuple[Piece, ...]
    further: tuple[str, ...]
    last: str

    @property
    def files(self) -> list[str]:
        """Names of the files made of pieces."""
        return list(dict.fromkeys(piece.file for piece in self.pieces))


class Output(Protocol):
    """A format's way to write one state. Every process has an equal one."""

    @property
    def plan(self) -> Plan: ...

    def write(self, number: int, source: Source, out: Out) -> Json:
        """Writes the bytes of a piece, reading what it takes from `source`. What it gives is kept for `further`."""
        ...

    def further(self, state_id: str, told: Sequence[Any], scratch: Path) -> Mapping[str, bytes]:
        """By one process: the files that the plan calls further. told: what `write` gave for each piece; scratch: a
        folder for files of its own."""
        ...


class Out:
    """The bytes of one piece on their way into its file."""

    def __init__(self, opened: int, start: int, path: Path) -> None:
        self._opened, self._start, self._path = opened, start, path
        self._digest = hashlib.sha256()
        self.nbytes = 0

    @property
    def digest(self) -> str:
        """SHA-256 of what was written."""
        return self._digest.hexdigest()

    def write(self, data: Any) -> int:
        """Behind what was written before. data: any contiguous buffer. Gives its bytes; raises StoreError."""
        left = memoryview(data).cast("B")
        nbytes = len(left)
        self._digest.update(left)
        try:
            while left:
                done = os.pwrite(self._opened, left, self._start + self.nbytes)
                left, self.nbytes = left[done:], self.nbytes + done
        except OSError as error:
            raise StoreError(f"{self._path}: cannot be written: {error.strerror}{STAYS}") from error
        return nbytes

    def sync(self) -> None:
        """Raises StoreError."""
        try:
            os.fsync(self._opened)
        except OSError as error:
            raise StoreError(f"{self._path}: cannot be written: {error.strerror}{STAYS}") from error


def write_pieces(
    output: Output,
    source: Source,
    folder: Path,
    group: Group | None = None,
    *,
    advance: Advance = lambda nbytes: None,
    faults: FaultPoint = no_faults,
) -> str:
    """Collective. Writes a state into a folder that is new or empty, which all processes see, or goes on where a call
    for the same output was killed; gives the state id. Processes share the pieces by bytes.

    group: who takes part; all processes of torch.distributed if None. Raises StoreError where the folder cannot be
    written or is not empty, CkptError where another conversion is unfinished there, and what the source raises. After
    a StoreError, a RankFailed or an interrupt what is done stays; after any other CkptError nothing is there.
    """
    group = group or Comm(timeout=_DAY)
    plan = output.plan
    work = WorkFolder(folder, _identity(plan, source), plan.files, plan.further, plan.last)
    reads = [piece.reads for piece in plan.pieces]
    with discarding(work, group):
        there = begin(work, {"source": source.url, "format": plan.form}, len(reads), group)
        with group.phase("files: check"):
            kept = {n: work.kept(n, plan.pieces[n].file) for n in shared(there, reads, group)}
        done = everyones({n: record for n, record in kept.items() if record is not None}, group)
        if group.rank == 0:
            advance(sum(plan.pieces[n].counts for n in done))
        left = [n for n in range(len(reads)) if n not in done]
        written: dict[int, Json] = {}
        with group.phase("files: write"):
            for number in shared(left, reads, group):
                written[number] = _write(output, number, source, work)
                advance(plan.pieces[number].counts)
                faults("files.piece")
        done |= everyones(written, group)
        state_id: bytes | None = None
        with group.phase("files: finish"):
            if group.rank == 0:
                state_id = _finish(output, source, work, [done[n] for n in range(len(reads))], faults).encode()
    return group.broadcast(state_id, "files: state id").decode()


def _identity(plan: Plan, source: Source) -> str:
    pieces = [[p.file, p.start, p.reads] for p in plan.pieces]
    return conversion_of(source, [plan.form, plan.options, pieces, list(plan.further), plan.last])


def _write(output: Output, number: int, source: Source, work: WorkFolder) -> dict[str, Any]:
    """Gives the record of the piece."""
    piece, witness = output.plan.pieces[number], Witness(source)
    opened = work.open(piece.file)
    try:
        out = Out(opened, piece.start, work.target / piece.file)
        told = output.write(number, witness, out)
        out.sync()
    finally:
        os.close(opened)
    record = {
        "start": piece.start,
        "bytes": out.nbytes,
        "sha256": out.digest,
        "seen": seen_document(witness.seen),
        "told": told,
    }
    work.record(number, record)
    return record


def _finish(output: Output, source: Source, work: WorkFolder, records: Sequence[Any], faults: FaultPoint) -> str:
    whole = Witness(source)
    sizes = dict.fromkeys(output.plan.files, 0)
    for piece, record in zip(output.plan.pieces, records, strict=True):
        whole.add(parse_seen(record["seen"]))
        sizes[piece.file] = max(sizes[piece.file], record["start"] + record["bytes"])
    state_id = whole.state_id()
    further = output.further(state_id, [record["told"] for record in records], work.path)
    work.finish(sizes, further.items(), faults)
    return state_id
