"""Files read through memory maps that keep nothing: pages go back to the system once they are copied."""

from __future__ import annotations

import io
import mmap
import zlib
from pathlib import Path

import numpy as np
import torch

from ckpt.adapters.foreign.slabs import slabs
from ckpt.errors import CorruptCheckpoint, StoreError
from ckpt.geometry import Box

OPEN = 200  # files that are open at a time; a process may have about 1000
_AT_ONCE = 1 << 20  # bytes copied before pages are given back: a fault maps more of a file than is asked for


class MappedFiles:
    """The files of one folder; those that were used last stay mapped, each of which costs a descriptor. Not safe for
    threads."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._maps: dict[str, mmap.mmap] = {}

    def part(self, file: str, offset: int, length: int, what: str) -> memoryview:
        """A part of a file. Raises CorruptCheckpoint where the file is missing or too short, StoreError where it cannot
        be read; `what` is meant to be there."""
        mapped = self._map(file)
        if offset < 0 or length < 0 or offset + length > len(mapped):
            raise CorruptCheckpoint(
                f"{self._folder}/{file}: {what} lies past the end of the file, which is cut short: copy it again"
            )
        return memoryview(mapped)[offset : offset + length]

    def check_crc32(self, file: str, start: int, nbytes: int, crc: int, where: str) -> None:
        """Of a part that is known to be there; a CRC-32 of 0 stands for none. Raises CorruptCheckpoint."""
        if not crc:
            return
        mapped, found = self._map(file), 0
        for at in range(start, start + nbytes, _AT_ONCE):
            found = zlib.crc32(memoryview(mapped)[at : min(at + _AT_ONCE, start + nbytes)], found)
            mapped.madvise(mmap.MADV_DONTNEED)
        if found != crc:
            raise CorruptCheckpoint(f"{where}: the CRC32 of its elements is not the recorded one: the file is damaged")

    def copy(
        self, into: torch.Tensor, file: str, start: int, shape: tuple[int, ...], strides: tuple[int, ...], box: Box
    ) -> None:
        """Copies a box of an array that is known to be in a file. into: an opaque dtype, the shape of the box. start:
        the array's first byte, which need not be aligned, so that torch must not look at it; strides: in bytes."""
        mapped = self._map(file)
        kind = {torch.uint8: "u1", torch.int16: "<i2", torch.int32: "<i4", torch.int64: "<i8"}.get(into.dtype, "<c16")
        array = np.ndarray(shape, kind, mapped, start, strides)
        target = into.numpy()
        for part in slabs(box.extent, into.element_size(), _AT_ONCE):
            within = Box(tuple(a + b for a, b in zip(box.offset, part.offset, strict=True)), part.extent)
            target[part.slices] = array[within.slices]
            mapped.madvise(mmap.MADV_DONTNEED)

    def _map(self, file: str) -> mmap.mmap:
        mapped = self._maps.pop(file, None)
        self._maps[file] = found = self._mapped(file) if mapped is None else mapped  # the last one used is the last
        if len(self._maps) > OPEN:
            del self._maps[next(iter(self._maps))]  # which closes it once nobody has a part of it
        return found

    def _mapped(self, file: str) -> mmap.mmap:
        path = self._folder / file
        if Path(file).name != file:
            raise CorruptCheckpoint(f"{self._folder}: names the file {file!r} outside of its folder")
        try:
            with path.open("rb") as opened:
                return mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
        except FileNotFoundError:
            raise CorruptCheckpoint(f"{path}: missing, though the metadata names it") from None
        except ValueError as error:  # an empty file
            raise CorruptCheckpoint(f"{path}: {error}") from None
        except OSError as error:
            raise StoreError(f"{path}: cannot be read: {error.strerror}") from error


class MappedPart(io.RawIOBase):
    """A part of a mapped file as a file of its own, which copies no more than is read."""

    def __init__(self, part: memoryview) -> None:
        self._part, self._at = part, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: len(self._part)}[whence]
        if base + offset < 0:
            raise OSError("a place before the beginning")
        self._at = base + offset
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        end = len(self._part) if size is None or size < 0 else self._at + size
        data = bytes(self._part[self._at : end])
        self._at += len(data)
        return data
