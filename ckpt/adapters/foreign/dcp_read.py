"""Checkpoints of torch.distributed.checkpoint on a file system.

Format (torch/distributed/checkpoint/filesystem.py): `.metadata` is a pickle of a `Metadata`: for each key a tensor's
dtype, size and chunks, or the mark of a pickled object; and for each chunk the file, first byte and length of what
`torch.save` wrote: a zip archive, whose CRC-32 of the elements is checked when a chunk is first touched. Chunks are
read through a memory map, so that no more of one is touched than is asked for.
"""

from __future__ import annotations

import hashlib
import io
import pathlib
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, metadata

from ckpt.adapters.foreign.mapped import MappedFiles, MappedPart
from ckpt.adapters.foreign.restricted import (
    Known,
    Place,
    SavedTensor,
    check_within,
    load_plain,
    read_archive,
    read_pickle,
)
from ckpt.adapters.foreign.sidecar import NAME, Keys, apply_sidecar, read_sidecar, read_tied
from ckpt.engine.stream import Content
from ckpt.errors import CkptError, CorruptCheckpoint, StateMismatch, StoreError, Unsupported
from ckpt.geometry import Box, Holdings, TensorSpec
from ckpt.state.dtypes import STORED, dtype_name, opaque
from ckpt.state.names import join
from ckpt.state.values import Json, canonical_json, encode


class _Ignored:
    """Stands for what Megatron Core keeps of the plans by which it saved; nothing in it is needed."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass


_LARGEST_VALUE = 64 << 20  # bytes of one pickled object
_KNOWN: Known = {
    **{
        ("torch.distributed.checkpoint.metadata", name): getattr(metadata, name)
        for name in (
            "Metadata",
            "TensorStorageMetadata",
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "TensorProperties",
            "MetadataIndex",
            "StorageMeta",
            "_MEM_FORMAT_ENCODING",
        )
    },
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): filesystem._StorageInfo,
    **{
        ("torch.distributed.checkpoint.planner", name): _Ignored
        for name in ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData")
    },
    ("megatron.core.dist_checkpointing.strategies.torch", "MCoreSavePlan"): _Ignored,
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): lambda name: torch.strided,
    ("collections", "OrderedDict"): OrderedDict,
    ("pathlib", "PosixPath"): pathlib.PurePosixPath,
    ("pathlib", "WindowsPath"): pathlib.PureWindowsPath,
    ("pathlib._local", "PosixPath"): pathlib.PurePosixPath,
}


@dataclass(frozen=True)
class _Chunk:
    """A box of a tensor, and where `torch.save` put it."""

    box: Box
    file: str
    offset: int
    length: int


class DcpCheckpoint:
    """One checkpoint of torch.distributed.checkpoint. Not safe for threads."""

    def __init__(self, folder: Path, document: Mapping[str, Json] | None = None) -> None:
        """Reads the metadata and the plain values. document: a sidecar, if not the one that lies there. Raises
        CorruptCheckpoint, StoreError or Unsupported naming the file; what cannot be kept of the values is in
        `content.left_out`."""
        self.folder, self.url = folder, str(folder)
        data = _whole_file(folder / ".metadata")
        self._meta: metadata.Metadata = read_pickle(io.BytesIO(data), _KNOWN, f"{folder}/.metadata")
        self._files = MappedFiles(folder)
        self._keys: Keys
        self._chunks: dict[str, list[_Chunk]] = {}
        self._dtypes: dict[str, torch.dtype] = {}
        self._found: dict[_Chunk, tuple[SavedTensor, Place]] = {}
        identity = _identity(folder, data)
        try:
            specs = tuple(sorted(self._specs()))
            document = document or read_sidecar(folder)
            values, left_out = self._values()
            names = self._names([s.name for s in specs] + list(values))
        except CkptError:
            raise
        except Exception as error:  # attributes of any type, or none
            raise CorruptCheckpoint(f"{folder}/.metadata: malformed: {type(error).__name__}: {error}") from None
        if document is not None:
            own = Content(specs, {}, {}, ({},), {}, identity)
            self.content, self._keys = apply_sidecar(own, document, folder)
            self._check_same({names[key]: value for key, value in values.items()})
            return
        if not (specs or values or left_out):
            raise CorruptCheckpoint(f"{folder}: a checkpoint with nothing in it")
        self._keys = {names[s.name]: [s.name] for s in specs}
        self.content = Content(
            tuple(sorted(TensorSpec(names[s.name], s.shape, s.dtype, s.itemsize) for s in specs)),
            {},
            {names[key]: value for key, value in values.items()},
            ({},),
            left_out,
            identity,
        )

    def _check_same(self, values: Mapping[str, Json]) -> None:
        """Raises CorruptCheckpoint where an object is not what the sidecar has."""
        for name, value in values.items():
            if self.content.values.get(name, value) != value:
                raise CorruptCheckpoint(
                    f"{self.folder}: {name} is not what {NAME} has; delete that to read the files as they are"
                )

    def _specs(self) -> list[TensorSpec]:
        """The tensors by their keys; notes where the chunks of each lie, which must cover it exactly."""
        found = []
        for key, entry in self._meta.state_dict_metadata.items():
            if isinstance(entry, metadata.BytesStorageMetadata):
                continue
            if not isinstance(entry, metadata.TensorStorageMetadata):
                raise TypeError(f"{key!r} is a {type(entry).__name__}")
            name = dtype_name(entry.properties.dtype, f"{self.folder}: {key}")
            spec = TensorSpec(_text(key), tuple(map(int, entry.size)), name, STORED[name].itemsize)
            boxes = [Box(tuple(map(int, c.offsets)), tuple(map(int, c.sizes))) for c in entry.chunks]
            chunks = [self._locate(key, box, spec.itemsize) for box in boxes if box.volume]
            try:
                Holdings.of((0, chunk.box) for chunk in chunks).check_cover(key, spec.shape)
            except StateMismatch as error:
                raise CorruptCheckpoint(f"{self.folder}/.metadata: {error}") from None
            self._chunks[key], self._dtypes[key] = chunks, entry.properties.dtype
            found.append(spec)
        return found

    def _locate(self, key: str, box: Box, itemsize: int) -> _Chunk:
        """What the metadata says of a chunk; its file must have room for that many elements."""
        info = self._meta.storage_data.get(metadata.MetadataIndex(key, torch.Size(box.offset)))
        if info is None:
            raise CorruptCheckpoint(f"{self.folder}/.metadata: {key}: no file has the chunk {box}")
        chunk = _Chunk(box, _text(info.relative_path), int(info.offset), int(info.length))
        self._part(info, key).release()
        if chunk.length < box.volume * itemsize:
            raise CorruptCheckpoint(
                f"{self.folder}/.metadata: {key}: the chunk {box} cannot be in {chunk.length} bytes of {chunk.file}"
            )
        return chunk

    def _part(self, info: Any, key: str) -> memoryview:
        if getattr(info, "transform_descriptors", None):
            raise Unsupported(f"{self.folder}: {key}: written through {info.transform_descriptors}; write it without")
        return self._files.part(_text(info.relative_path), int(info.offset), int(info.length), key)

    def _values(self) -> tuple[dict[str, Json], dict[str, str]]:
        values, left_out = {}, {}
        for key, entry in self._meta.state_dict_metadata.items():
            if not isinstance(entry, metadata.BytesStorageMetadata):
                continue
            info = self._meta.storage_data.get(metadata.MetadataIndex(key))
            if info is None:
                raise CorruptCheckpoint(f"{self.folder}/.metadata: {key}: no file has it")
            part = self._part(info, key)
            if len(part) > _LARGEST_VALUE:
                left_out[key] = f"an object of {len(part)} bytes"
                continue
            try:
                values[_text(key)] = encode(load_plain(bytes(part), f"{self.folder}/{info.relative_path}: {key}"), key)
            except Unsupported as error:
                left_out[key] = str(error)
        return values, left_out

    def _names(self, keys: list[str]) -> dict[str, str]:
        """Our name of each key: the path of the nested state dict that the planner noted, or the key alone."""
        paths = self._meta.planner_data if isinstance(self._meta.planner_data, Mapping) else {}
        named = {}
        for key in keys:
            path = paths.get(key)
            usable = isinstance(path, tuple) and path and all(type(p) in (str, int) for p in path)
            named[key] = join(path if usable and path is not None else [key])
        return named if len(set(named.values())) == len(named) else {key: join([key]) for key in keys}

    def read(self, name: str, box: Box) -> torch.Tensor:
        """See `ckpt.engine.stream.Source`."""
        return read_tied(self._read, self._keys[name], box, self.url)

    def _read(self, key: str, box: Box) -> torch.Tensor:
        size = self._dtypes[key].itemsize
        found = torch.empty(box.extent, dtype=opaque(size))
        for chunk in self._chunks[key]:
            common = chunk.box.intersect(box)
            if common is not None:
                saved, place = self._open(key, chunk)
                start = chunk.offset + place.start + saved.offset * size
                strides = tuple(s * size for s in saved.stride)
                into, within = found[common.relative_to(box).slices], common.relative_to(chunk.box)
                self._files.copy(into, chunk.file, start, saved.shape, strides, within)
        return found

    def _open(self, key: str, chunk: _Chunk) -> tuple[SavedTensor, Place]:
        """How a chunk is laid out, once it is known to be whole."""
        if chunk in self._found:
            return self._found[chunk]
        where = f"{self.folder}/{chunk.file}: {key} {chunk.box}"
        archive: Any = MappedPart(self._files.part(chunk.file, chunk.offset, chunk.length, key))
        saved, places = read_archive(archive, where)
        if not isinstance(saved, SavedTensor) or (saved.shape, saved.dtype) != (chunk.box.extent, self._dtypes[key]):
            raise CorruptCheckpoint(f"{where}: the file holds something else than the metadata says")
        place = places[saved.record]
        check_within(saved, place, where)
        self._files.check_crc32(chunk.file, chunk.offset + place.start, place.nbytes, place.crc, where)
        self._found[chunk] = saved, place
        return saved, place


def _text(value: Any) -> str:
    if type(value) is not str:
        raise TypeError(f"{value!r} is not text")
    return value


def _whole_file(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise CorruptCheckpoint(f"{path}: missing, so this is no whole checkpoint of torch.distributed") from None
    except OSError as error:
        raise StoreError(f"{path}: cannot be read: {error.strerror}") from error


def _identity(folder: Path, data: bytes) -> str:
    files = sorted((p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in folder.iterdir() if p.is_file())
    return hashlib.sha256(data + canonical_json([list(f) for f in files])).hexdigest()
