"""Reads the format `ranks` back: the files of all ranks of a layout as one state."""

from __future__ import annotations

import hashlib
import json
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from ckpt.adapters.foreign.mapped import MappedFiles
from ckpt.adapters.foreign.rank_files import ABOUT, file_name, layout_of
from ckpt.adapters.foreign.safetensors_read import NAMES
from ckpt.adapters.foreign.same import same_bits
from ckpt.adapters.foreign.sidecar import NAME, Keys, apply_sidecar, read_sidecar, read_tied
from ckpt.engine.stream import Content
from ckpt.errors import CorruptCheckpoint, StateMismatch, StoreError, Unsupported
from ckpt.geometry import Box, Holdings, Layout, TensorSpec
from ckpt.state.dtypes import STORED, opaque
from ckpt.state.names import join
from ckpt.state.values import Json, canonical_json
from ckpt.store.log import check_format


@dataclass(frozen=True)
class _Piece:
    """A box of a logical tensor in a file. inner: the same in the local tensor, whose shape and first byte follow."""

    box: Box
    file: str
    inner: Box
    shape: tuple[int, ...]
    start: int


class RanksCheckpoint:
    """The rank files of a folder. Not safe for threads."""

    def __init__(self, folder: Path, document: Mapping[str, Json] | None = None) -> None:
        """Reads the headers, which the library checks. document: a sidecar, if not the one that lies there. Raises
        CorruptCheckpoint, StoreError or Unsupported naming the file."""
        self.url = str(folder)
        self._folder, self._files = folder, MappedFiles(folder)
        self._pieces: dict[str, list[_Piece]] = defaultdict(list)
        self._specs: dict[str, TensorSpec] = {}
        files, left_out = _listed(folder)
        layouts = []
        for ranks in files.values():
            layouts.append(self._add(file_name(ranks[0])))
        count = sum(map(len, files.values()))
        self.layout: Layout = layouts[0]
        if any(layout != self.layout for layout in layouts) or count != self.layout.world:
            raise CorruptCheckpoint(
                f"{folder}: has the files of {count} ranks, where {self.layout} has {self.layout.world}, or of several "
                "layouts; copy all files of one conversion"
            )
        self._held = {key: self._checked(key, spec) for key, spec in self._specs.items()}
        told = [[list(key), ranks] for key, ranks in sorted(files.items())]
        shapes = [[s.name, s.dtype, list(s.shape)] for s in sorted(self._specs.values())]
        identity = hashlib.sha256(canonical_json([told, shapes])).hexdigest()
        document = document or read_sidecar(folder)
        self._keys: Keys
        if document is not None:
            found = Content(tuple(self._specs.values()), {}, {}, ({},), {}, identity)
            content, self._keys = apply_sidecar(found, document, folder)
            self.content = replace(content, left_out=left_out)
            return
        if not self._specs:
            raise CorruptCheckpoint(f"{folder}: a checkpoint with no tensors")
        self._keys = {join([key]): [key] for key in self._specs}
        named = sorted(replace(spec, name=join([key])) for key, spec in self._specs.items())
        self.content = Content(tuple(named), {}, {}, ({},), left_out, identity)

    def read(self, name: str, box: Box) -> torch.Tensor:
        """See `ckpt.engine.stream.Source`. Raises CorruptCheckpoint where two ranks hold different bits of one box."""
        return read_tied(self._read, self._keys[name], box, self.url)

    def _read(self, key: str, box: Box) -> torch.Tensor:
        itemsize = self._specs[key].itemsize
        found = torch.empty(box.extent, dtype=opaque(itemsize))
        pieces = self._pieces[key]
        for common, numbers in self._held[key].meeting(box):
            first, *copies = (pieces[number] for number in numbers)
            into = found[common.relative_to(box).slices]
            self._copy(first, itemsize, common, into)
            for piece in copies:
                again = torch.empty(common.extent, dtype=into.dtype)
                self._copy(piece, itemsize, common, again)
                if not same_bits(again, into):
                    raise CorruptCheckpoint(
                        f"{self.url}: {key} {common}: {first.file} and {piece.file} hold different bits; copy the "
                        "damaged one again"
                    )
        return found

    def _copy(self, piece: _Piece, itemsize: int, common: Box, into: torch.Tensor) -> None:
        within = common.relative_to(piece.box)
        inner = Box(tuple(a + b for a, b in zip(within.offset, piece.inner.offset, strict=True)), within.extent)
        strides = [itemsize]
        for size in reversed(piece.shape[1:]):
            strides.insert(0, strides[0] * size)
        self._files.copy(into, piece.file, piece.start, piece.shape, tuple(strides[: len(piece.shape)]), inner)

    def _add(self, file: str) -> Layout:
        """Notes what a file holds."""
        path = self._folder / file
        try:
            with safe_open(path, framework="pt") as opened:  # which checks that header and file fit one another
                about = json.loads((opened.metadata() or {})[ABOUT])
            with path.open("rb") as raw:
                length = int.from_bytes(raw.read(8), "little")
                header: dict[str, Any] = json.loads(raw.read(length))
            check_format(about, str(path))
            layout = layout_of(about)
            del header["__metadata__"]
            if header.keys() != about["tensors"].keys():
                raise ValueError(
                    f"{min(header.keys() ^ about['tensors'].keys())} is described in only one of two places"
                )
            for key, local in header.items():
                self._note(file, key, local, about["tensors"][key], 8 + length)
        except SafetensorError as error:
            raise CorruptCheckpoint(f"{path}: not a whole safetensors file: {error}") from None
        except OSError as error:
            raise StoreError(f"{path}: cannot be read: {error.strerror}") from error
        except (KeyError, TypeError, ValueError, AttributeError, StateMismatch) as error:
            raise CorruptCheckpoint(f"{path}: not a rank's file of ckpt-reshard: {error}") from None
        return layout

    def _note(self, file: str, key: str, local: Mapping[str, Any], about: Mapping[str, Any], base: int) -> None:
        if local["dtype"] not in NAMES:
            raise Unsupported(f"{self._folder / file}: {key} has the dtype {local['dtype']}, which ckpt does not carry")
        dtype = NAMES[local["dtype"]]
        spec = TensorSpec(key, _ints(about["shape"]), dtype, STORED[dtype].itemsize)
        if self._specs.setdefault(key, spec) != spec:
            raise ValueError(f"{key} has another shape or dtype than in another file")
        shape = _ints(local["shape"])
        held = 0
        for offset, extent, inner_offset in about["boxes"]:
            box, inner = Box(_ints(offset), _ints(extent)), Box(_ints(inner_offset), _ints(extent))
            if len(box.extent) != len(shape) or not Box.whole(shape).contains(inner):
                raise ValueError(f"{key}: the box {box} does not fit its local tensor of shape {list(shape)}")
            held += box.volume
            self._pieces[key].append(_Piece(box, file, inner, shape, base + local["data_offsets"][0]))
        if held != Box.whole(shape).volume:
            raise ValueError(f"{key}: its boxes are not all of its local tensor")

    def _checked(self, key: str, spec: TensorSpec) -> Holdings:
        """Which boxes the pieces, by number, have of a tensor, all of which they must cover."""
        held = Holdings.of((number, piece.box) for number, piece in enumerate(self._pieces[key]))
        try:
            held.check_cover(key, spec.shape)
        except StateMismatch as error:
            raise CorruptCheckpoint(f"{self._folder}: the files do not make up the state: {error}") from None
        return held


def _listed(folder: Path) -> tuple[dict[tuple[int, int, int], list[int]], dict[str, str]]:
    """The ranks of each distinct file, by device, inode, and when it was changed; and what else lies there."""
    found: dict[tuple[int, int, int], list[int]] = defaultdict(list)
    further = {}
    try:
        for path in sorted(folder.iterdir()):
            match = re.fullmatch(r"rank_(\d{5,})\.safetensors", path.name)
            if match:
                stat = path.stat()
                found[stat.st_dev, stat.st_ino, stat.st_mtime_ns].append(int(match[1]))
            elif path.name != NAME:
                further[path.name] = "lies beside the tensors; copy it"
    except OSError as error:
        raise StoreError(f"{folder}: cannot be read: {error.strerror}") from error
    if not found:
        raise StoreError(f"{folder}: no files {file_name(0)} and so on there")
    ranks = {rank for of_file in found.values() for rank in of_file}
    missing = set(range(max(ranks))) - ranks
    if missing:
        raise CorruptCheckpoint(f"{folder / file_name(min(missing))}: missing; copy all files of one conversion")
    return found, further


def _ints(values: Any) -> tuple[int, ...]:
    if not all(type(v) is int and v >= 0 for v in values):
        raise ValueError(f"{values!r} are no sizes")
    return tuple(values)
