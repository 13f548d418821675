"""Writes any state at rest as one safetensors file for each rank of a layout, reading every byte of it once.

The state is read in bands, runs of a tensor that lie together in row-major order. What a rank has of a band lies
together in its file too, in one stretch or a few, so each band goes out in few writes and nothing larger is held.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from ckpt.adapters.foreign.folders import new_folder
from ckpt.adapters.foreign.mapped import OPEN
from ckpt.adapters.foreign.rank_files import Entry, RankFile, file_name
from ckpt.adapters.foreign.sidecar import NAME, sidecar
from ckpt.adapters.foreign.slabs import slabs
from ckpt.adapters.foreign.witness import Witness
from ckpt.adapters.foreign.work_folder import sync
from ckpt.engine.group import Group
from ckpt.engine.sharing import in_threads, share
from ckpt.engine.stream import Advance, Source
from ckpt.errors import CorruptCheckpoint, StoreError
from ckpt.fingerprint import from_hex, to_hex
from ckpt.geometry import Box, TensorSpec, canonical_grid
from ckpt.native.copies import copy_boxes
from ckpt.state.values import canonical_json, parse_json

BAND = 64 << 20  # bytes of a band, at most
_USUAL = 40 << 20  # of one where whole stored objects fit; the C library gives as much back at once when it is freed
PART = ".part"  # ends the name of a file that is not whole

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
) -> str:
    """Collective. Writes `files` into a folder that is new or empty, which all processes see, and gives the state id.
    Processes share the bands by bytes. Files get their names once all are whole and on the device.

    sources: the same state, opened once for each thread that is to work here; `advance` is called from all. Raises
    StoreError where the folder cannot be written or is not empty, and what a source raises; nothing is there then.
    """
    content = sources[0].content
    work = list(cut(content.tensors, band))
    mine = share([sum(box.volume * spec.itemsize for spec, box in bands) for bands in work], group.world)[group.rank]
    witnesses = [Witness(source) for source in sources]
    with contextlib.ExitStack() as stack:
        with group.phase("ranks: begin"):
            if group.rank == 0:
                stack.enter_context(new_folder(folder))
                for file in files:
                    _begin(folder, file)
        with group.phase("ranks: write"), _Opened(folder, files) as opened:
            in_threads([(w, opened) for w in witnesses], [work[n] for n in mine], lambda w, b: _write(*w, b, advance))
            opened.sync()
        told = canonical_json([[n, b.offset, b.extent, to_hex(d)] for w in witnesses for n, b, d in w.seen])
        everyone = group.all_gather(told, "ranks: digests")
        state_id: bytes | None = None
        with group.phase("ranks: finish"):
            if group.rank == 0:
                whole = Witness(sources[0])
                for rank, data in enumerate(everyone):
                    seen = parse_json(data, f"digests of process {rank}")
                    whole.add((n, Box(tuple(o), tuple(e)), from_hex(d)) for n, o, e, d in seen)
                state_id = whole.state_id().encode()
                if with_sidecar:
                    (folder / NAME).write_bytes(sidecar(content, state_id.decode()))
                for file in files:
                    _finish(folder, file)
                sync(folder)
    return group.broadcast(state_id, "ranks: state id").decode()


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
    """The files under way, for writing anywhere; `entries`: by tensor, the places that its parts have. Usable from
    several threads. Where there are many files each is opened for a write alone: a process may have about 1000 open."""

    def __init__(self, folder: Path, files: Sequence[RankFile]) -> None:
        self._folder, self._files = folder, files
        self.entries: dict[str, list[tuple[int, Entry]]] = defaultdict(list)
        for number, file in enumerate(files):
            for entry in file.entries:
                self.entries[entry.spec.name].append((number, entry))
        self._open: list[int] = []

    def __enter__(self) -> _Opened:
        if len(self._files) <= OPEN:
            for number in range(len(self._files)):
                with self._writing(number):
                    self._open.append(self._descriptor(number))
        return self

    def __exit__(self, *_: object) -> None:
        for opened in self._open:
            os.close(opened)

    def write(self, number: int, data: memoryview, at: int) -> None:
        """Raises StoreError."""
        start, nbytes = at, len(data)
        with self._writing(number), self._opened(number) as opened:
            while data:
                done = os.pwrite(opened, data, at)
                data, at = data[done:], at + done
            if hasattr(os, "posix_fadvise"):  # so that the device has work from the first band on, not at the end
                os.posix_fadvise(opened, start, nbytes, os.POSIX_FADV_DONTNEED)

    def sync(self) -> None:
        """Raises StoreError."""
        for number in range(len(self._files)):
            with self._writing(number), self._opened(number) as opened:
                os.fsync(opened)

    def _descriptor(self, number: int) -> int:
        return os.open(_path(self._folder, self._files[number]), os.O_WRONLY | os.O_CLOEXEC)

    @contextlib.contextmanager
    def _opened(self, number: int) -> Iterator[int]:
        if self._open:
            yield self._open[number]
            return
        opened = self._descriptor(number)
        try:
            yield opened
        finally:
            os.close(opened)

    @contextlib.contextmanager
    def _writing(self, number: int) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            path = self._folder / file_name(self._files[number].ranks[0])
            raise StoreError(f"{path}: cannot be written: {error.strerror}") from error


def _write(witness: Witness, opened: _Opened, bands: Bands, advance: Advance) -> None:
    for spec, band in bands:
        found = witness.read(spec.name, band)
        for number, entry in opened.entries[spec.name]:
            for stretch in entry.part.within(band):
                at = entry.start + stretch.start * spec.itemsize
                opened.write(number, _bytes(_gathered(found, stretch.shape, stretch.pairs)), at)
        advance(band.volume * spec.itemsize)


def _gathered(found: torch.Tensor, shape: tuple[int, ...], pairs: Sequence[tuple[Box, Box]]) -> torch.Tensor:
    """What a stretch holds of a band, in row-major order; the band itself where that is the same memory."""
    if len(pairs) == 1:
        view = found[pairs[0][0].slices]
        if view.is_contiguous():
            return view
    into = torch.empty(shape, dtype=found.dtype)
    copy_boxes([(into[inner.slices], found[box.slices]) for box, inner in pairs])
    return into


def _bytes(tensor: torch.Tensor) -> memoryview:
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def _path(folder: Path, file: RankFile) -> Path:
    return folder / f"{file_name(file.ranks[0])}{PART}"


def _begin(folder: Path, file: RankFile) -> None:
    with _path(folder, file).open("xb") as opened:
        opened.write(file.header)
        opened.truncate(file.nbytes)


def _finish(folder: Path, file: RankFile) -> None:
    """Gives a file its name, and the other ranks that hold the same theirs."""
    path = _path(folder, file)
    if path.stat().st_size != file.nbytes:
        raise CorruptCheckpoint(f"{path}: changed while it was written; nothing else may write there")
    for rank in file.ranks[1:]:
        try:
            os.link(path, folder / file_name(rank))
        except OSError:  # where the file system has no hard links
            shutil.copyfile(path, folder / file_name(rank))
            sync(folder / file_name(rank))
    path.rename(folder / file_name(file.ranks[0]))
