"""Writes any state at rest as one safetensors file for each rank of a layout, reading every byte of it once.

The state is read in bands, runs of a tensor that lie together in row-major order. What a rank has of a band lies
together in its file too, in one stretch or a few, so each band goes out in few writes and nothing larger is held.

A run of bands that is done leaves a record with the bands' digests in the target's work folder. Who goes on after a
kill takes them from the files again and compares: so nothing need be on the device before the end.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import torch

from ckpt.adapters.foreign.mapped import OPEN
from ckpt.adapters.foreign.rank_files import Entry, RankFile, file_name
from ckpt.adapters.foreign.shared_work import begin, conversion_of, discarding, everyones, shared
from ckpt.adapters.foreign.sidecar import NAME, sidecar
from ckpt.adapters.foreign.slabs import slabs
from ckpt.adapters.foreign.witness import Witness, parse_seen, seen_document
from ckpt.adapters.foreign.work_folder import STAYS, WorkFolder
from ckpt.engine.faults import FaultPoint, no_faults
from ckpt.engine.group import Group
from ckpt.engine.sharing import in_threads
from ckpt.engine.stream import Advance, Source
from ckpt.errors import StoreError
from ckpt.fingerprint import Digest, box_digests
from ckpt.geometry import Box, TensorSpec, canonical_grid
from ckpt.native.copies import copy_boxes
from ckpt.state.dtypes import opaque
from ckpt.state.values import Json

BAND = 64 << 20  # bytes of a band, at most
_USUAL = 40 << 20  # of one where whole stored objects fit; the C library gives as much back at once when it is freed

Bands = list[tuple[TensorSpec, Box]]


def write_ranks(
    sources: Sequence[Source],
    folder: Path,
    files: Sequence[RankFile],
    group: Group,
    *,
    with_sidecar: bool = True,
    band: int = BAND,
    advance: Advance = lambda n: None,
    faults: FaultPoint = no_faults,
) -> str:
    """Collective. Writes `files` into a folder that is new or empty, which all processes see, or goes on where a call
    for the same was killed; gives the state id. Processes share the bands by bytes. Files get their places once all are
    whole and on the device.

    sources: the same state, opened once for each thread that is to work here; `advance` and `faults` are called from
    all. Raises StoreError where the folder cannot be written or is not empty, CkptError where another conversion is
    unfinished there, and what a source raises. After a StoreError, a RankFailed or an interrupt what is done stays;
    after any other CkptError nothing is there.
    """
    content = sources[0].content
    runs = list(cut(content.tensors, band))
    sizes = [sum(box.volume * spec.itemsize for spec, box in run) for run in runs]
    same = {file_name(rank): file_name(file.ranks[0]) for file in files for rank in file.ranks[1:]}
    work = _work_folder(sources[0], folder, files, [*same, *([NAME] if with_sidecar else [])], band)
    with discarding(work, group):
        about = {"source": sources[0].url, "format": "ranks"}
        there = begin(work, about, len(runs), group, partial(_lay_out, work, files))
        opened = _Opened(work, files)
        kept: dict[int, Json] = {}
        with group.phase("ranks: check"), opened:
            in_threads(sources, shared(there, sizes, group), lambda _, n: _keep(kept, n, runs[n], work, opened))
        done = everyones(kept, group)
        if group.rank == 0:
            advance(sum(sizes[n] for n in done))
        left = [n for n in range(len(runs)) if n not in done]
        written: dict[int, Json] = {}

        def write(source: Source, number: int) -> None:
            written[number] = record = _write(Witness(source), opened, runs[number], advance)
            work.record(number, record, synced=False)
            faults("files.piece")

        with group.phase("ranks: write"), opened:
            in_threads(sources, shared(left, sizes, group), write)
            opened.sync()
        done |= everyones(written, group)
        state_id: bytes | None = None
        with group.phase("ranks: finish"):
            if group.rank == 0:
                whole = Witness(sources[0])
                for record in done.values():
                    whole.add(parse_seen(record["seen"]))
                state_id = whole.state_id().encode()
                further = [(NAME, sidecar(content, state_id.decode()))] if with_sidecar else []
                work.finish({file_name(f.ranks[0]): f.nbytes for f in files}, further, faults, same)
    return group.broadcast(state_id, "ranks: state id").decode()


def _work_folder(
    source: Source, folder: Path, files: Sequence[RankFile], further: Sequence[str], band: int
) -> WorkFolder:
    told = [[list(file.ranks), hashlib.sha256(file.header).hexdigest()] for file in files]
    identity = conversion_of(source, ["ranks", told, list(further), band])
    return WorkFolder(folder, identity, [file_name(file.ranks[0]) for file in files], further, file_name(0))


def _lay_out(work: WorkFolder, files: Sequence[RankFile]) -> None:
    for file in files:
        work.lay_out(file_name(file.ranks[0]), file.header, file.nbytes)


def cut(tensors: Sequence[TensorSpec], band: int) -> Iterator[Bands]:
    """All bands of a state, in the order of our own format, in runs of at most `band` bytes: small neighbours together.
    Bands begin where stored objects of our format do, or their inner chunks, so that those are read once."""
    run: Bands = []
    size = 0
    packed = [t for t in tensors if t.packed]  # which our format has together, by dtype
    for spec in [t for t in tensors if not t.packed] + sorted(packed, key=lambda t: (t.dtype, t)):
        for box in _bands(spec, band):
            nbytes = box.volume * spec.itemsize
            if run and size + nbytes > band:
                yield run
                run, size = [], 0
            run.append((spec, box))
            size += nbytes
    if run:
        yield run


def _bands(spec: TensorSpec, limit: int) -> Iterator[Box]:
    if spec.packed:
        yield from slabs(spec.shape, spec.itemsize, limit)
        return
    grid = canonical_grid(spec.shape, spec.itemsize, spec.stack)
    rows = [math.prod(spec.shape[axis + 1 :]) * spec.itemsize for axis in range(len(spec.shape))]
    axis = next(axis for axis, row in enumerate(rows) if row <= max(limit, spec.itemsize))  # which slabs cut
    whole = min(grid.cell[axis], spec.shape[axis]) * rows[axis]
    yield from slabs(spec.shape, spec.itemsize, min(limit, max(_USUAL, whole)), (grid.cell, grid.chunk))


class _Opened:
    """The files under way, for reading and writing anywhere; `entries`: by tensor, the places that its parts have.
    Usable from several threads, and entered as often as one likes. Where there are many files each is opened for a call
    alone: a process may have about 1000 open."""

    def __init__(self, work: WorkFolder, files: Sequence[RankFile]) -> None:
        self._work, self._names = work, [file_name(file.ranks[0]) for file in files]
        self.entries: dict[str, list[tuple[int, Entry]]] = defaultdict(list)
        for number, file in enumerate(files):
            for entry in file.entries:
                self.entries[entry.spec.name].append((number, entry))
        self._open: list[int] = []

    def __enter__(self) -> _Opened:
        if len(self._names) <= OPEN:
            try:
                for name in self._names:
                    self._open.append(self._work.open(name))
            except BaseException:
                self.__exit__()
                raise
        return self

    def __exit__(self, *_: object) -> None:
        while self._open:
            os.close(self._open.pop())

    def read(self, number: int, nbytes: int, at: int) -> torch.Tensor:
        """As uint8; zeros behind the end. Raises StoreError."""
        found = torch.zeros(nbytes, dtype=torch.uint8)
        into = found.numpy().data
        with self._using(number) as opened:
            while into:
                done = os.preadv(opened, [into], at)
                if not done:
                    break
                into, at = into[done:], at + done
        return found

    def write(self, number: int, data: memoryview, at: int) -> None:
        """Raises StoreError."""
        start, nbytes = at, len(data)
        with self._using(number) as opened:
            while data:
                done = os.pwrite(opened, data, at)
                data, at = data[done:], at + done
            if hasattr(os, "posix_fadvise"):  # so that the device has work from the first band on, not at the end
                os.posix_fadvise(opened, start, nbytes, os.POSIX_FADV_DONTNEED)

    def sync(self) -> None:
        """Raises StoreError."""
        for number in range(len(self._names)):
            with self._using(number) as opened:
                os.fsync(opened)

    @contextlib.contextmanager
    def _using(self, number: int) -> Iterator[int]:
        opened = self._open[number] if self._open else self._work.open(self._names[number])
        try:
            yield opened
        except OSError as error:
            path = self._work.target / self._names[number]
            raise StoreError(f"{path}: cannot be read or written: {error.strerror}{STAYS}") from error
        finally:
            if not self._open:
                os.close(opened)


def _keep(kept: dict[int, Json], number: int, run: Bands, work: WorkFolder, opened: _Opened) -> None:
    """Notes in `kept` that a run need not be written again, if all files have its bits."""
    record = work.known(number)
    if record is None:
        return
    told = {(name, box): digest for name, box, digest in parse_seen(record["seen"])}
    if all(_is_there(spec, band, told.get((spec.name, band)), opened) for spec, band in run):
        kept[number] = record


def _is_there(spec: TensorSpec, band: Box, digest: Digest | None, opened: _Opened) -> bool:
    """Whether the files, which together have all of a band, have bits of this digest, and equal ones where several have
    the same."""
    found = torch.empty(band.extent, dtype=opaque(spec.itemsize))
    places = [
        (number, entry.start + stretch.start * spec.itemsize, stretch)
        for number, entry in opened.entries[spec.name]
        for stretch in entry.part.within(band)
    ]
    for number, at, stretch in places:
        part = opened.read(number, math.prod(stretch.shape) * spec.itemsize, at).view(found.dtype).view(stretch.shape)
        copy_boxes([(found[box.slices], part[inner.slices]) for box, inner in stretch.pairs])
    if box_digests([(found, band, spec.shape)])[0] != digest:
        return False
    for number, at, stretch in places:
        part = _flat(_gathered(found, stretch.shape, stretch.pairs))
        if not torch.equal(opened.read(number, len(part), at), part):
            return False
    return True


def _write(witness: Witness, opened: _Opened, bands: Bands, advance: Advance) -> dict[str, Json]:
    """Gives the record of the run."""
    for spec, band in bands:
        found = witness.read(spec.name, band)
        for number, entry in opened.entries[spec.name]:
            for stretch in entry.part.within(band):
                at = entry.start + stretch.start * spec.itemsize
                opened.write(number, _flat(_gathered(found, stretch.shape, stretch.pairs)).numpy().data, at)
        advance(band.volume * spec.itemsize)
    return {"seen": seen_document(witness.seen)}


def _gathered(found: torch.Tensor, shape: tuple[int, ...], pairs: Sequence[tuple[Box, Box]]) -> torch.Tensor:
    """What a stretch holds of a band, in row-major order; the band itself where that is the same memory."""
    if len(pairs) == 1:
        view = found[pairs[0][0].slices]
        if view.is_contiguous():
            return view
    into = torch.empty(shape, dtype=found.dtype)
    copy_boxes([(into[inner.slices], found[box.slices]) for box, inner in pairs])
    return into


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)
