"""The files of older Megatron checkpoints, `mp_rank_XX[_YYY]/model_optim_rng.pt`, as one flat state at rest.

Format (megatron/training/checkpointing.py, `get_checkpoint_name` and `generate_state_dict`): each rank of tensor and
pipeline parallelism (XX and YYY) has what `torch.save` makes of a dict: `model`, or `model0` and so on for interleaved
stages, with the state dict of its part; `optimizer`; `rng_state`; and values. Elements are read through memory maps.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch

from ckpt.adapters.foreign.mapped import MappedFiles, MappedPart
from ckpt.adapters.foreign.restricted import Place, SavedTensor, check_within, read_archive
from ckpt.engine.stream import Content
from ckpt.errors import CorruptCheckpoint, StoreError, Unsupported
from ckpt.geometry import Box, TensorSpec
from ckpt.state.dtypes import STORED, dtype_name, opaque
from ckpt.state.values import canonical_json

FILE = "model_optim_rng.pt"
_CHUNK = re.compile(r"model(\d*)")


class RankFile:
    """One rank's file. models: of each chunk of the model, by its number, what its state dict has; rest: all else."""

    def __init__(self, folder: Path) -> None:
        """Reads the pickle, which holds no elements. Raises CorruptCheckpoint, StoreError or Unsupported."""
        self.path = folder / FILE
        self._files = MappedFiles(folder)
        self._whole: set[str] = set()
        try:
            size = self.path.stat().st_size
        except FileNotFoundError:
            raise CorruptCheckpoint(f"{self.path}: missing, so this is no whole checkpoint of Megatron") from None
        except OSError as error:
            raise StoreError(f"{self.path}: cannot be read: {error.strerror}") from error
        archive: Any = MappedPart(self._files.part(FILE, 0, size, "its archive"))
        found, self._places = read_archive(archive, str(self.path), inert=True)
        if not isinstance(found, dict):
            raise CorruptCheckpoint(f"{self.path}: holds a {type(found).__name__}, where Megatron writes a dict")
        self.models: dict[int, Mapping[Any, Any]] = {}
        self.rest: dict[Any, Any] = {}
        for key, value in found.items():
            chunk = _CHUNK.fullmatch(key) if isinstance(key, str) else None
            if chunk is None:
                self.rest[key] = value
            elif isinstance(value, dict):
                self.models[int(chunk[1] or 0)] = value
            else:
                raise CorruptCheckpoint(f"{self.path}: {key} is a {type(value).__name__}, not a state dict")
        if sorted(self.models) != list(range(len(self.models))) or not self.models:
            raise CorruptCheckpoint(f"{self.path}: has the chunks {sorted(self.models)} of a model; some are missing")

    def tensors(self, chunk: int) -> Iterator[tuple[str, SavedTensor]]:
        """Names and places of a chunk's tensors, checked to lie within the file."""
        for name, value in self.models[chunk].items():
            if isinstance(value, dict):
                raise Unsupported(
                    f"{self.path}: {name} is a dict of tensors, as before Megatron Core; convert it with Megatron's "
                    "own tools/checkpoint first"
                )
            if isinstance(value, SavedTensor):
                if not isinstance(name, str):
                    raise CorruptCheckpoint(f"{self.path}: {name!r} is no name of a tensor")
                check_within(value, self._place(value), f"{self.path}: {name}")
                yield name, value

    def _place(self, saved: SavedTensor) -> Place:
        return self._places[saved.record]

    def read(self, name: str, saved: SavedTensor, box: Box) -> torch.Tensor:
        """A box of a tensor. The CRC32 of a storage, which tensors may share, is checked when it is first touched."""
        place, size = self._place(saved), saved.dtype.itemsize
        if saved.record not in self._whole:
            self._files.check_crc32(FILE, place.start, place.nbytes, place.crc, f"{self.path}: {name}")
            self._whole.add(saved.record)
        found = torch.empty(box.extent, dtype=opaque(size))
        if box.volume:
            strides = tuple(s * size for s in saved.stride)
            self._files.copy(found, FILE, place.start + saved.offset * size, saved.shape, strides, box)
        return found


class RankFiles:
    """The files of all ranks as one state, whose tensors are called `folder/chunk/name`. Not safe for threads."""

    def __init__(self, folder: Path) -> None:
        """Raises CorruptCheckpoint where a rank's file is missing, and what `RankFile` raises."""
        self.url, self.folder = str(folder), folder
        self.ranks = {at: RankFile(path) for at, path in _listed(folder).items()}
        self.tp, self.pp = (1 + max(at[i] for at in self.ranks) for i in (0, 1))
        missing = [(t, p) for t in range(self.tp) for p in range(self.pp) if (t, p) not in self.ranks]
        if missing:
            raise CorruptCheckpoint(
                f"{folder}: has no file of tensor rank {missing[0][0]}, pipeline rank {missing[0][1]}; copy all of them"
            )
        self._saved: dict[str, tuple[RankFile, SavedTensor]] = {}
        specs = []
        for at, file in self.ranks.items():
            for chunk in file.models:
                for name, saved in file.tensors(chunk):
                    full = self.name(at, chunk, name)
                    dtype = dtype_name(saved.dtype, f"{file.path}: {name}")
                    specs.append(TensorSpec(full, saved.shape, dtype, STORED[dtype].itemsize))
                    self._saved[full] = file, saved
        told = [[str(f.path), f.path.stat().st_size, f.path.stat().st_mtime_ns] for f in self.ranks.values()]
        identity = hashlib.sha256(canonical_json(list(told))).hexdigest()
        self.content = Content(tuple(sorted(specs)), {}, {}, ({},), {}, identity)

    def name(self, at: tuple[int, int], chunk: int, name: str) -> str:
        return f"{self.ranks[at].path.parent.name}/{chunk}/{name}"

    def read(self, name: str, box: Box) -> torch.Tensor:
        """See `ckpt.engine.stream.Source`."""
        file, saved = self._saved[name]
        return file.read(name, saved, box)


def _listed(folder: Path) -> dict[tuple[int, int], Path]:
    """The folders by tensor and pipeline rank."""
    found: dict[tuple[int, int], Path] = {}
    try:
        paths = sorted(folder.glob("mp_rank_*"))
    except OSError as error:
        raise StoreError(f"{folder}: cannot be read: {error.strerror}") from error
    for path in paths:
        numbers = re.fullmatch(r"mp_rank_(\d{2,5})(?:_(\d{3,5}))?(_\d{3,5})?", path.name)
        if numbers is None:
            raise CorruptCheckpoint(f"{path}: not mp_rank_, a tensor rank, and maybe a pipeline rank")
        if numbers[3]:
            raise_expert_parallel(path)
        at = int(numbers[1]), int(numbers[2] or 0)
        if found.setdefault(at, path) != path:
            raise CorruptCheckpoint(f"{path}: the same rank as {found[at].name}; keep one of the two")
    if not found:
        raise StoreError(f"{folder}: no folders mp_rank_XX there; check the path")
    return found


def raise_expert_parallel(path: Path) -> NoReturn:
    raise Unsupported(
        f"{path}: of a rank of expert parallelism; load it with Megatron, and save it as torch_dist, which is read"
    )
