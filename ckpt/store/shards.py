"""Reads whole stored objects: the index and inner chunks of Zarr's `sharding_indexed` codec, every CRC32C checked.

TensorStore decodes objects too, and does so where only some chunks of one are wanted. For whole objects this takes a
fraction of its time: the elements go straight into a buffer that is used again.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any, Protocol

import google_crc32c
import numpy as np
import numpy.typing as npt
import tensorstore as ts

from ckpt.errors import CorruptCheckpoint, StoreError
from ckpt.geometry import Box, Grid


class StartedRead(Protocol):
    """A whole object whose reading has begun. Used once, from one thread."""

    def decode(self, grid: Grid, box: Box, into: npt.NDArray[Any]) -> None:
        """Waits, and fills `into` (shape `box.extent`, the stored item size); `box` is the object's, clipped.

        Raises CorruptCheckpoint saying what is missing or damaged, StoreError where the store cannot be read."""


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
            raise StoreError(f"{path}: cannot read: {error.strerror}") from error

    def decode(self, grid: Grid, box: Box, into: npt.NDArray[Any]) -> None:
        if self._file is None:
            raise CorruptCheckpoint("there is no such object")
        file = self._file
        try:
            _decode(lambda start, nbytes: os.pread(file, nbytes, start), os.fstat(file).st_size, grid, box, into)
        except OSError as error:
            raise StoreError(f"cannot read: {error.strerror}") from error

    def __del__(self) -> None:
        if getattr(self, "_file", None) is not None:
            os.close(self._file)  # type: ignore[arg-type]


class RemoteRead:
    """An object in any of TensorStore's key-value stores."""

    def __init__(self, store: ts.KvStore, key: str) -> None:
        self._future = store.read(key)

    def decode(self, grid: Grid, box: Box, into: npt.NDArray[Any]) -> None:
        try:
            found = self._future.result()
        except Exception as error:
            raise StoreError(f"cannot read: {str(error).split(' [source locations')[0]}") from error
        if found.state != "value":
            raise CorruptCheckpoint("there is no such object")
        data: bytes = found.value
        _decode(lambda start, nbytes: data[start : start + nbytes], len(data), grid, box, into)


def _decode(read: Callable[[int, int], bytes], length: int, grid: Grid, box: Box, into: npt.NDArray[Any]) -> None:
    """read: gives so many bytes from a place on."""
    if length != grid.object_bytes(box, into.itemsize):
        raise CorruptCheckpoint(f"{length} bytes instead of {grid.object_bytes(box, into.itemsize)}")
    slots = tuple(c // k for c, k in zip(grid.cell, grid.chunk, strict=True))
    index_bytes = 16 * math.prod(slots)
    end = length - index_bytes - 4
    raw = _checked(read, end, index_bytes, "the index of its chunks")
    index = np.frombuffer(raw, "<u8").reshape(*slots, 2)
    size = math.prod(grid.chunk) * into.itemsize
    for inner in grid.chunks_of(box):
        inside = inner.relative_to(box)
        slot = tuple(o // k for o, k in zip(inside.offset, grid.chunk, strict=True))
        name = f"chunk {'/'.join(map(str, slot))}"
        start, nbytes = (int(x) for x in index[slot])
        if nbytes != size + 4 or start + nbytes > end:
            raise CorruptCheckpoint(f"{name} is missing or lies outside of the object")
        chunk = np.frombuffer(_checked(read, start, size, name), into.dtype).reshape(grid.chunk)
        into[inside.slices] = chunk[tuple(slice(0, e) for e in inside.extent)]


def _checked(read: Callable[[int, int], bytes], start: int, nbytes: int, what: str) -> bytes:
    """So many bytes and, after them, their little-endian CRC32C."""
    data, stored = read(start, nbytes), read(start + nbytes, 4)
    if len(data) != nbytes or google_crc32c.value(data) != int.from_bytes(stored, "little"):
        raise CorruptCheckpoint(f"digest mismatch in {what}")
    return data
