"""A committed checkpoint as a state at rest, read box by box without a job."""

from __future__ import annotations

import contextlib
import math
import mmap
from itertools import product

import torch

from ckpt.engine.mover import elements_of
from ckpt.engine.opened import open_commit
from ckpt.engine.session import Session
from ckpt.engine.stream import Content
from ckpt.errors import CorruptCheckpoint, StoreError
from ckpt.geometry import Box, Grid
from ckpt.geometry.box import Index
from ckpt.state.dtypes import opaque
from ckpt.store.arrays import Arrays
from ckpt.store.log import Record
from ckpt.store.opened import Opened

_LARGE = 8 << 20  # bytes of a box that is worth memory of its own


class CommittedState:
    """One commit of a root of ours. Not safe for threads."""

    def __init__(self, session: Session, record: Record) -> None:
        """Collective: every rank gives the same record. Raises CorruptCheckpoint where a pinned record is not what the
        commit says."""
        self.opened: Opened = open_commit(session, record)
        manifest = self.opened.manifest
        catalogue = manifest.catalogue
        self.url = f"{session.store.url}@{record.step}"
        self.content = Content(
            catalogue.tensors,
            manifest.aliases,
            manifest.values,
            tuple(self.opened.ranks),
            {},
            f"{manifest.state_id} {record.document['ranks']}",
            record.step,
            manifest.state_id,
        )
        self._arrays = Arrays(session.kvstore, self.opened.prefix + "state/", catalogue, session.context)
        self._where = {
            catalogue.tensors[tensor].name: (number, start)
            for number, array in enumerate(catalogue.arrays)
            for tensor, start in array.tensors
        }
        self._specs = {t.name: t for t in catalogue.tensors}
        self._kept: tuple[tuple[int, Box], torch.Tensor] | None = None  # of a packed array: neighbours come next

    def read(self, name: str, box: Box) -> torch.Tensor:
        """See `ckpt.engine.stream.Source`. Every CRC32C on the way is checked."""
        number, start = self._where[name]
        array = self.opened.manifest.catalogue.arrays[number]
        if not box.volume:
            return torch.empty(box.extent, dtype=opaque(array.itemsize))
        if not array.packed:
            return self._read(number, box)
        shape = self._specs[name].shape
        whole = Box((start,), (Box.whole(shape).volume,))
        first, last = start // array.grid.cell[0], (whole.stop[0] - 1) // array.grid.cell[0]
        flat = torch.cat([self._cell(number, array.grid.cell_box((i,)), whole) for i in range(first, last + 1)])
        return flat.reshape(shape)[box.slices].contiguous()

    def _cell(self, number: int, cell: Box, wanted: Box) -> torch.Tensor:
        if self._kept is None or self._kept[0] != (number, cell):
            self._kept = (number, cell), self._read(number, cell)
        common = cell.intersect(wanted)
        assert common is not None
        return self._kept[1][common.relative_to(cell).slices]

    def _read(self, number: int, box: Box) -> torch.Tensor:
        array = self.opened.manifest.catalogue.arrays[number]
        where = f"{self.url}: {self._arrays.describe(number)} ({box})"
        cells = _whole_cells(array.grid, box)
        if cells:
            buffer = _fresh(box.extent, array.itemsize)
            into = buffer.numpy()
            try:
                started = [self._arrays.read_object(number, index) for index, _ in cells]
                for read, (_, cell) in zip(started, cells, strict=True):
                    read.decode(array.grid, cell, into[cell.relative_to(box).slices])
            except CorruptCheckpoint as error:
                raise CorruptCheckpoint(f"{where}: a stored chunk is missing or damaged: {error}") from None
            except StoreError as error:
                raise StoreError(f"{where}: {error}") from error
            return buffer
        slices = tuple(slice(o, s) for o, s in zip(box.offset, box.stop, strict=True))
        try:
            found = self._arrays.handle(number)[slices].read().result()
        except Exception as error:
            raise self._arrays.read_error(error, where) from error
        return elements_of(found, array.itemsize)


def _fresh(extent: Index, itemsize: int) -> torch.Tensor:
    """Memory for elements of an opaque dtype: in huge pages where there is much of it, since a fault for every 4 KiB
    takes as long as what is done with them, and given back to the system as soon as nothing refers to it."""
    nbytes = math.prod(extent) * itemsize
    if nbytes < _LARGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(extent, dtype=opaque(itemsize))
    mapped = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared memory seldom has huge pages
    with contextlib.suppress(OSError):  # a kernel without them
        mapped.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(mapped, dtype=opaque(itemsize)).reshape(extent)


def _whole_cells(grid: Grid, box: Box) -> list[tuple[Index, Box]]:
    """The index and box of each stored object of which a box is made up; none where it has parts of one."""
    first = tuple(o // c for o, c in zip(box.offset, grid.cell, strict=True))
    last = tuple((s - 1) // c for s, c in zip(box.stop, grid.cell, strict=True))
    if grid.cell_box(first).offset != box.offset or grid.cell_box(last).stop != box.stop:
        return []
    indices = product(*(range(a, b + 1) for a, b in zip(first, last, strict=True)))
    return [(index, grid.cell_box(index)) for index in indices]
