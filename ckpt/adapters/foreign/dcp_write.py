"""Writes any state at rest as a checkpoint of torch.distributed.checkpoint.

Each file has some slabs of tensors, as `torch.save` writes them one after the other, which is what that library's own
writer does; the metadata is written by it. What changes from one of its saves to the next, the path and a random number
in the metadata, is left out or is the state id, so that equal states have equal files.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

from ckpt.adapters.foreign.pieces import Out, Piece, Plan
from ckpt.adapters.foreign.sidecar import NAME, foreign_names, sidecar
from ckpt.adapters.foreign.slabs import slabs
from ckpt.engine.stream import Content, Source
from ckpt.geometry import Box, TensorSpec
from ckpt.state.dtypes import torch_dtype
from ckpt.state.names import split
from ckpt.state.values import decode

CHUNK = 16 << 20  # a few of them are in memory at a time
FILE_BYTES = 256 << 20  # of tensors in a file, which is one piece
METADATA = ".metadata"

Item: TypeAlias = tuple[str, TensorSpec | None, Box | None]  # a key, and a slab of its tensor, or none: it is an object


class DcpOutput:
    """The files of one state, each of them a piece (`ckpt.adapters.foreign.pieces.Output`). Tied tensors are written
    under each of their names. A state read back without the sidecar lacks what the library cannot hold: ties, stacking,
    values of ranks."""

    def __init__(
        self,
        content: Content,
        with_sidecar: bool = True,
        file_bytes: int = FILE_BYTES,
        *,
        form: str = "dcp",
        objects: Mapping[str, Any] | None = None,
        beside: Mapping[str, bytes] = {},
    ) -> None:
        """objects: what is pickled under which key, if not every plain value under its name; beside: further files."""
        self._content, self._with_sidecar, self._beside = content, with_sidecar, beside
        keys = self._keys = foreign_names(content)
        specs = {t.name: t for t in content.tensors}
        kept = {name: name for name in specs} | dict(content.aliases)
        self._tensors = {keys[name]: specs[kept[name]] for name in kept}
        self._paths = {keys[n]: split(n) for n in keys}
        if objects is None:
            named = self._named_values()
            objects = {key: decode(content.values[name], key) for key, name in named.items()}
            self._paths |= {key: split(name) for key, name in named.items()}
        self._objects = objects
        self._chunk = min(CHUNK, file_bytes)
        self._items = list(_runs(self._tensors, objects, self._chunk, file_bytes))
        self._names = [f"__{n}_0.distcp" for n in range(len(self._items))]
        pieces = tuple(self._piece(name, run) for name, run in zip(self._names, self._items, strict=True))
        further = (*beside, *([NAME] if with_sidecar else []), METADATA)
        told = {name: hashlib.sha256(data).hexdigest() for name, data in beside.items()}
        options = {"beside": told, "objects": sorted(objects), "torch": torch.__version__}  # which pickles them
        self.plan = Plan(form, options, pieces, further, METADATA)

    def _named_values(self) -> dict[str, str]:
        """Names of values by their keys."""
        values = self._content.values
        named = {".".join(map(str, split(name))): name for name in values}
        if len(named) != len(values) or named.keys() & self._tensors.keys():
            return {name: name for name in values}
        return named

    def _piece(self, name: str, run: Sequence[Item]) -> Piece:
        reads = counts = 0
        for key, spec, box in run:
            if spec is not None and box is not None:
                reads += box.volume * spec.itemsize
                counts += box.volume * spec.itemsize if self._keys[spec.name] == key else 0
        return Piece(name, 0, reads, counts)

    def write(self, number: int, source: Source, out: Out) -> list[int]:
        """Gives the bytes of each item."""
        return [out.write(_saved(self._data(source, *item))) for item in self._items[number]]

    def _data(self, source: Source, key: str, spec: TensorSpec | None, box: Box | None) -> Any:
        if spec is None or box is None:
            return self._objects[key]
        found = source.read(spec.name, box).contiguous()
        if found.untyped_storage().nbytes() != found.nbytes:  # all of which would be written
            found = found.clone()
        return found.view(torch_dtype(spec.dtype))

    def further(self, state_id: str, told: Sequence[Any], scratch: Path) -> dict[str, bytes]:
        described: dict[str, Any] = {
            key: TensorStorageMetadata(_properties(s), torch.Size(s.shape), [_chunk(b) for b in _boxes(s, self._chunk)])
            for key, s in self._tensors.items()
        }
        described |= {key: BytesStorageMetadata() for key in self._objects}
        results = []
        for name, run, sizes in zip(self._names, self._items, told, strict=True):
            at = 0
            for (key, _, box), size in zip(run, sizes, strict=True):
                index = MetadataIndex(key, None if box is None else box.offset)
                results.append(WriteResult(index, size, _StorageInfo(name, at, size)))
                at += size
        _Writer(scratch, state_id).finish(Metadata(described, planner_data=self._paths), [results])
        found = dict(self._beside)
        if self._with_sidecar:
            found[NAME] = sidecar(self._content, state_id)
        return found | {METADATA: (scratch / METADATA).read_bytes()}


class _Writer(FileSystemWriter):  # type: ignore[misc]
    """The library's own, for the metadata."""

    def __init__(self, folder: Path, state_id: str) -> None:
        super().__init__(folder)
        self._state_id = state_id

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(save_id=self._state_id)


def _runs(
    tensors: Mapping[str, TensorSpec], objects: Mapping[str, Any], chunk: int, file_bytes: int
) -> Iterator[list[Item]]:
    """What is in each file: all objects in the first, then slabs of at most `file_bytes` together, or one."""
    run: list[Item] = [(key, None, None) for key in objects]
    size = 0
    for key, spec in tensors.items():
        for box in _boxes(spec, chunk):
            nbytes = box.volume * spec.itemsize
            if run and size + nbytes > file_bytes:
                yield run
                run, size = [], 0
            run.append((key, spec, box))
            size += nbytes
    if run:
        yield run


def _boxes(spec: TensorSpec, chunk: int) -> list[Box]:
    """At least one, as the library wants it, though it hold nothing."""
    return list(slabs(spec.shape, spec.itemsize, chunk)) or [Box.whole(spec.shape)]


def _saved(data: Any) -> memoryview:
    """In memory first, since what fails while torch writes is told as something else."""
    file = io.BytesIO()
    torch.save(data, file)
    return file.getbuffer()


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(box.offset), torch.Size(box.extent))


def _properties(spec: TensorSpec) -> TensorProperties:
    return TensorProperties(dtype=torch_dtype(spec.dtype))
