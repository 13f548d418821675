"""Reads whole stored objects: the index and inner chunks of Zarr's `sharding_indexed` codec, every CRC32C checked.

TensorStore decodes objects too, and does so where only some chunks of one are wanted. For whole objects this takes a
fraction of its time: the elements go straight into a buffer that is used again.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import google_crc32c
import numpy as np
import numpy.typing as npt
import tensorstore as ts

from ckpt.errors import CorruptCheckpoint, StoreError
from ckpt.geometry import Box, Grid
from ckpt.geometry.box import Index
from ckpt.store.remedies import file_remedy


class DamagedObject(CorruptCheckpoint):
    """A stored object that is not whole. parts: the index of each damaged chunk among the object's chunks, or None
    where all of the object is lost, and what is wrong."""

    def __init__(self, parts: Sequence[tuple[Index | None, str]]) -> None:
        super().__init__("; ".join(problem for _, problem in parts))
        self.parts = tuple(parts)


class StartedRead(Protocol):
    """A whole object whose reading has begun. Used once, from one thread."""

    def decode(self, grid: Grid, box: Box, into: npt.NDArray[Any]) -> None:
        """Waits, and fills `into` (shape `box.extent`, the stored item size); `box` is the object's, clipped.

        Raises DamagedObject naming all that is missing or damaged, once `into` has the chunks that are not; StoreError
        where the store cannot be read."""


class FileRead:
    """An object in a local file, which the system is told to read ahead."""

    def __init__(self, path: str) -> None:
        try:
            self._file: int | None = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(self._file, 0, 0, os.POSIX_FADV_WILLNEED)
        except FileNotFoundError:
            self._file = None
        except OSError as error:
            raise StoreError(f"{path}: cannot read: {error.strerror}; {file_remedy(error.errno)}") from error

    def decode(self, grid: Grid, box: Box, into: npt.NDArray[Any]) -> None:
        if self._file is None:
            raise DamagedObject([(None, "there is no such object")])
        file = self._file
        try:
            _decode(lambda start, nbytes: os.pread(file, nbytes, start), os.fstat(file).st_size, grid, box, into)
        except OSError as error:
            raise StoreError(f"cannot read: {error.strerror}; {file_remedy(error.errno)}") from error

    def __del__(self) -> None:
        if getattr(self, "_file", None) is not None:
            os.close(self._file)  # type: ignore[arg-type]


class RemoteRead:
    """An object in any of TensorStore's key-value stores."""

    def __init__(self, store: ts.KvStore, key: str, explain: Callable[[Exception], str]) -> None:
        """explain: what an error of the store says, with the remedy."""
        self._future, self._explain = store.read(key), explain

    def decode(self, grid: Grid, box: Box, into: npt.NDArray[Any]) -> None:
        try:
            found = self._future.result()
        except Exception as error:
            raise StoreError(f"cannot read: {self._explain(error)}") from error
        if found.state != "value":
            raise DamagedObject([(None, "there is no such object")])
        decode(found.value, grid, box, into)


def decode(data: bytes, grid: Grid, box: Box, into: npt.NDArray[Any]) -> None:
    """`StartedRead.decode` of an object that has been read."""
    _decode(lambda start, nbytes: data[start : start + nbytes], len(data), grid, box, into)


def _decode(read: Callable[[int, int], bytes], length: int, grid: Grid, box: Box, into: npt.NDArray[Any]) -> None:
    """read: gives so many bytes from a place on."""
    if length != grid.object_bytes(box, into.itemsize):
        raise DamagedObject([(None, f"{length} bytes instead of {grid.object_bytes(box, into.itemsize)}")])
    slots = tuple(c // k for c, k in zip(grid.cell, grid.chunk, strict=True))
    index_bytes = 16 * math.prod(slots)
    end = length - index_bytes - 4
    raw = _checked(read, end, index_bytes)
    if raw is None:
        raise DamagedObject([(None, "digest mismatch in the index of its chunks")])
    index = np.frombuffer(raw, "<u8").reshape(*slots, 2)
    size = math.prod(grid.chunk) * into.itemsize
    damaged: list[tuple[Index | None, str]] = []
    for inner in grid.chunks_of(box):
        inside = inner.relative_to(box)
        slot = tuple(o // k for o, k in zip(inside.offset, grid.chunk, strict=True))
        name = f"chunk {'/'.join(map(str, slot))}"
        start, nbytes = (int(x) for x in index[slot])
        if nbytes != size + 4 or start + nbytes > end:
            damaged.append((slot, f"{name} is missing or lies outside of the object"))
            continue
        data = _checked(read, start, size)
        if data is None:
            damaged.append((slot, f"digest mismatch in {name}"))
            continue
        chunk = np.frombuffer(data, into.dtype).reshape(grid.chunk)
        into[inside.slices] = chunk[tuple(slice(0, e) for e in inside.extent)]
    if damaged:
        raise DamagedObject(damaged)


def _checked(read: Callable[[int, int], bytes], start: int, nbytes: int) -> bytes | None:
    """So many bytes, if their little-endian CRC32C is what follows them; else None."""
    data, stored = read(start, nbytes), read(start + nbytes, 4)
    if len(data) != nbytes or google_crc32c.value(data) != int.from_bytes(stored, "little"):
        return None
    return data
