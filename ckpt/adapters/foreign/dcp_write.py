"""Writes any state at rest as a checkpoint of torch.distributed.checkpoint, through that library's own writer."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemWriter, SavePlan, SavePlanner
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult

from ckpt.adapters.foreign.folders import new_folder
from ckpt.adapters.foreign.sidecar import NAME, foreign_names, sidecar
from ckpt.adapters.foreign.slabs import slabs
from ckpt.adapters.foreign.witness import Witness
from ckpt.engine.stream import Advance, Source
from ckpt.geometry import Box, TensorSpec
from ckpt.state.dtypes import torch_dtype
from ckpt.state.names import split
from ckpt.state.values import decode

CHUNK = 16 << 20  # a few of them are in memory at a time


def write_dcp(
    source: Source,
    folder: Path,
    *,
    with_sidecar: bool = True,
    objects: Mapping[str, Any] | None = None,
    beside: Mapping[str, bytes] = {},
    advance: Advance = lambda n: None,
) -> str:
    """Writes into a folder that is new or empty, and gives the state id. Tied tensors are written under each of their
    names. A state read back without the sidecar lacks what the library cannot hold: ties, stacking, values of ranks.
    objects: what is pickled under which key, if not every plain value under its name; beside: further files.

    Raises StoreError where the folder cannot be written, or is not empty, and what the source raises; nothing is there
    then.
    """
    seen = Witness(source)
    with new_folder(folder):
        writer = _Writer(folder, seen, with_sidecar, beside)
        try:
            save({}, storage_writer=writer, planner=_Planner(seen, objects, advance), no_dist=True)
        except CheckpointException as error:
            raise next(iter(error.failures.values()))[0] from error
    return seen.state_id()


class _Writer(FileSystemWriter):  # type: ignore[misc]
    """The library's own, which writes the metadata last of all, after a check of what was read, and the sidecar."""

    def __init__(self, folder: Path, seen: Witness, with_sidecar: bool, beside: Mapping[str, bytes]) -> None:
        super().__init__(folder, overwrite=False)
        self._folder, self._seen, self._with_sidecar, self._beside = folder, seen, with_sidecar, beside

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        state_id = self._seen.state_id()
        for name, data in self._beside.items():
            (self._folder / name).write_bytes(data)
        if self._with_sidecar:
            (self._folder / NAME).write_bytes(sidecar(self._seen.content, state_id))
        super().finish(metadata, results)


class _Planner(SavePlanner):  # type: ignore[misc]
    """Gives the library's writer one slab after the other."""

    def __init__(self, source: Source, objects: Mapping[str, Any] | None, advance: Advance) -> None:
        self._source, self._advance = source, advance
        self._keys = foreign_names(source.content)
        specs = {t.name: t for t in source.content.tensors}
        kept = {name: name for name in specs} | dict(source.content.aliases)
        self._tensors = {self._keys[name]: specs[kept[name]] for name in kept}
        self._paths = {self._keys[n]: split(n) for n in self._keys}
        if objects is None:
            values = source.content.values
            named = {".".join(map(str, split(name))): name for name in values}
            if len(named) != len(values) or named.keys() & self._tensors.keys():
                named = {name: name for name in values}
            objects = {key: decode(values[name], key) for key, name in named.items()}
            self._paths |= {key: split(name) for key, name in named.items()}
        self._objects = objects

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        """Nothing to prepare."""

    def create_local_plan(self) -> SavePlan:
        items = [self._item(key, spec, box) for key, spec in self._tensors.items() for box in _boxes(spec)]
        items += [WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO) for key in self._objects]
        return SavePlan(items)

    def _item(self, key: str, spec: TensorSpec, box: Box) -> WriteItem:
        data = TensorWriteData(_chunk(box), _properties(spec), torch.Size(spec.shape))
        return WriteItem(MetadataIndex(key, box.offset), WriteItemType.SHARD, tensor_data=data)

    def create_global_plan(self, all_plans: Sequence[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        described: dict[str, Any] = {
            key: TensorStorageMetadata(_properties(s), torch.Size(s.shape), [_chunk(b) for b in _boxes(s)])
            for key, s in self._tensors.items()
        }
        described |= {key: BytesStorageMetadata() for key in self._objects}
        planned = [dataclasses.replace(p, planner_data=self._paths) for p in all_plans]
        return planned, Metadata(described, planner_data=self._paths)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        key = write_item.index.fqn
        if write_item.type == WriteItemType.BYTE_IO:
            data = io.BytesIO()
            torch.save(self._objects[key], data)
            return data
        spec = self._tensors[key]
        assert write_item.tensor_data is not None and write_item.index.offset is not None
        box = Box(tuple(write_item.index.offset), tuple(write_item.tensor_data.chunk.sizes))
        found = self._source.read(spec.name, box).view(torch_dtype(spec.dtype))
        if self._keys[spec.name] == key:
            self._advance(box.volume * spec.itemsize)
        return found


def _boxes(spec: TensorSpec) -> list[Box]:
    """At least one, as the library wants it, though it hold nothing."""
    return list(slabs(spec.shape, spec.itemsize, CHUNK)) or [Box.whole(spec.shape)]


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(box.offset), torch.Size(box.extent))


def _properties(spec: TensorSpec) -> TensorProperties:
    return TensorProperties(dtype=torch_dtype(spec.dtype))
