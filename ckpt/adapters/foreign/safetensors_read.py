"""Folders of safetensors files, with Hugging Face's index where there are several."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from ckpt.adapters.foreign.sidecar import NAME, Keys, apply_sidecar, read_sidecar, read_tied
from ckpt.adapters.foreign.work_folder import WORK
from ckpt.engine.stream import Content
from ckpt.errors import CorruptCheckpoint, StoreError, Unsupported
from ckpt.geometry import Box, TensorSpec
from ckpt.state.dtypes import STORED, bits, opaque
from ckpt.state.names import join
from ckpt.state.values import Json, canonical_json

INDEX = "model.safetensors.index.json"
DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
    "complex64": "C64",
}
NAMES = {code: name for name, code in DTYPES.items()}
_MAPPED = 32 << 20  # bytes read before the map of a file is made anew


class SafetensorsCheckpoint:
    """The safetensors files of a folder, or one such file. Not safe for threads."""

    def __init__(self, path: Path, document: Mapping[str, Json] | None = None) -> None:
        """Reads the headers, which the library checks. document: a sidecar, if not the one that lies there. Raises
        CorruptCheckpoint, StoreError or Unsupported naming the file; further files of the folder, and what a header
        says of its file, are in `content.left_out`."""
        self.url = str(path)
        self._folder = folder = path if path.is_dir() else path.parent
        files = _files(path)
        self._open: dict[str, Any] = {}
        self._read_of: dict[str, int] = {}
        self._file_of: dict[str, str] = {}
        self._keys: Keys
        specs, left_out = [], _further(path, files)
        for file, expected in files.items():
            opened = self._reopen(file)
            keys = set(opened.keys())
            if expected is not None and keys != expected:
                odd = min(keys ^ expected)
                raise CorruptCheckpoint(f"{folder / file}: {odd} is in only one of the file and {INDEX}")
            for key in sorted(keys):
                if key in self._file_of:
                    raise CorruptCheckpoint(f"{folder / file}: {key} is also in {self._file_of[key]}")
                self._file_of[key] = file
                specs.append(_spec(opened.get_slice(key), key, folder / file))
            about = {k: v for k, v in (opened.metadata() or {}).items() if (k, v) != ("format", "pt")}
            left_out |= {f"{file}: {key}": f"says {value[:80]!r}" for key, value in about.items()}
        self._sizes = {s.name: s.itemsize for s in specs}
        stats = [(f, (folder / f).stat().st_size, (folder / f).stat().st_mtime_ns) for f in sorted(files)]
        told = [[list(s) for s in stats], [[s.name, s.dtype, list(s.shape)] for s in specs]]
        identity = hashlib.sha256(canonical_json(told)).hexdigest()
        document = document or (read_sidecar(folder) if path.is_dir() else None)
        if document is not None:
            found = Content(tuple(specs), {}, {}, ({},), {}, identity)
            content, self._keys = apply_sidecar(found, document, folder)
            self.content = replace(content, left_out=left_out)
            return
        if not specs:
            raise CorruptCheckpoint(f"{path}: a checkpoint with no tensors")
        self._keys = {join([s.name]): [s.name] for s in specs}
        named = sorted(TensorSpec(join([s.name]), s.shape, s.dtype, s.itemsize) for s in specs)
        self.content = Content(tuple(named), {}, {}, ({},), left_out, identity)

    def read(self, name: str, box: Box) -> torch.Tensor:
        """See `ckpt.engine.stream.Source`."""
        return read_tied(self._read, self._keys[name], box, self.url)

    def _read(self, key: str, box: Box) -> torch.Tensor:
        file = self._file_of[key]
        nbytes = box.volume * self._sizes[key]
        if not nbytes:
            return torch.empty(box.extent, dtype=opaque(self._sizes[key]))
        self._read_of[file] += nbytes
        opened = self._open[file] if self._read_of[file] <= _MAPPED else self._reopen(file)
        try:
            found = opened.get_slice(key)[box.slices] if box.extent else opened.get_tensor(key)
        except (SafetensorError, OSError, IndexError) as error:
            raise CorruptCheckpoint(f"{self._folder / file}: {key}: {error}") from None
        return bits(found).reshape(box.extent)

    def _reopen(self, file: str) -> Any:
        """Opens a file, anew after some time: the library maps it, and what was read stays in memory until then."""
        path = self._folder / file
        self._open.pop(file, None)
        try:
            self._open[file] = safe_open(path, framework="pt")
        except FileNotFoundError:
            raise CorruptCheckpoint(f"{path}: missing, though it is named") from None
        except (SafetensorError, OSError, ValueError, RuntimeError) as error:
            raise CorruptCheckpoint(f"{path}: not a whole safetensors file: {error}") from None
        self._read_of[file] = 0
        return self._open[file]


def _further(path: Path, files: Mapping[str, object]) -> dict[str, str]:
    if not path.is_dir():
        return {}
    known = {*files, INDEX, NAME, WORK}
    return {p.name: "lies beside the tensors; copy it" for p in sorted(path.iterdir()) if p.name not in known}


def _files(path: Path) -> Mapping[str, set[str] | None]:
    """The files, by name, with the keys that the index gives to each; None where there is no index."""
    if not path.is_dir():
        if not path.is_file():
            raise StoreError(f"{path}: there is nothing that can be read; check the path")
        return {path.name: None}
    index = path / INDEX
    if not os.path.lexists(index):
        found = sorted(p.name for p in path.glob("*.safetensors"))
        if not found:
            raise StoreError(f"{path}: no safetensors files there")
        if any(re.search(r"-of-[0-9]+\.safetensors$", name) for name in found):
            raise CorruptCheckpoint(f"{path}: has parts of a checkpoint, but no {INDEX}, which is written last")
        return dict.fromkeys(found)
    try:
        named: dict[str, set[str] | None] = {}
        for key, file in json.loads(index.read_text())["weight_map"].items():
            if not isinstance(file, str) or Path(file).name != file:
                raise CorruptCheckpoint(f"{index}: names the file {file!r} outside of its folder")
            keys = named.setdefault(file, set())
            assert keys is not None
            keys.add(key)
    except OSError as error:
        raise StoreError(f"{index}: cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptCheckpoint(f"{index}: not an index of safetensors files: {error!r}") from None
    return named


def _spec(header: Any, key: str, file: Path) -> TensorSpec:
    code = str(header.get_dtype())
    if code not in NAMES:
        raise Unsupported(f"{file}: {key} has the dtype {code}, which ckpt does not carry")
    name = NAMES[code]
    return TensorSpec(key, tuple(header.get_shape()), name, STORED[name].itemsize)
