"""Writes any state at rest as safetensors files with Hugging Face's index.

Format (https://github.com/huggingface/safetensors#format): eight bytes with the length of a JSON header, the header,
then the elements of all tensors without gaps. It is written here, slab by slab, because the library's own writer wants
whole tensors in memory.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch

from ckpt.adapters.foreign.pieces import PIECE, Out, Piece, Plan
from ckpt.adapters.foreign.safetensors_read import DTYPES, INDEX
from ckpt.adapters.foreign.sidecar import NAME, foreign_names, sidecar
from ckpt.adapters.foreign.slabs import slabs
from ckpt.engine.stream import Content, Source
from ckpt.errors import Unsupported
from ckpt.geometry import Box, TensorSpec

FILE_BYTES = 5 * 10**9  # as Hugging Face cuts them
SLAB = 8 << 20

Entry: TypeAlias = tuple[str, TensorSpec]  # its key, and the tensor that is stored under it
Run: TypeAlias = list[tuple[str, TensorSpec, Box]]  # slabs that follow one another in a file


class SafetensorsOutput:
    """The files of one state, and how they are cut into pieces (`ckpt.adapters.foreign.pieces.Output`). The index, or
    where there is one file that, gets its place last. Tied tensors are written under each of their names. Plain values,
    ties and stacking go into the sidecar."""

    def __init__(
        self,
        content: Content,
        with_sidecar: bool = True,
        beside: Mapping[str, bytes] = {},
        file_bytes: int = FILE_BYTES,
        piece_bytes: int = PIECE,
    ) -> None:
        """beside: further files, such as config.json. Raises Unsupported for a dtype that the format lacks."""
        self._content, self._with_sidecar, self._beside = content, with_sidecar, beside
        divided = _divide(content, file_bytes)
        several = len(divided) > 1
        names = [f"model-{n:05d}-of-{len(divided):05d}.safetensors" for n in range(1, len(divided) + 1)]
        self._files = dict(zip(names if several else ["model.safetensors"], divided, strict=True))
        pieces: list[Piece] = []
        self._work: list[tuple[bytes, Run]] = []  # of each piece: what precedes its slabs, and these
        keys = foreign_names(content)
        for name, entries in self._files.items():
            header, at = _header(entries), 0
            for run in _runs(entries, piece_bytes):
                reads = sum(_size(spec, box) for _, spec, box in run)
                counts = sum(_size(spec, box) for key, spec, box in run if keys[spec.name] == key)
                pieces.append(Piece(name, at, reads, counts))
                self._work.append((header, run))
                at, header = at + len(header) + reads, b""
        further = [*beside, *([NAME] if with_sidecar else []), *([INDEX] if several else [])]
        told = {name: hashlib.sha256(data).hexdigest() for name, data in beside.items()}
        last = INDEX if several else "model.safetensors"
        self.plan = Plan("hf", {"beside": told, "file_bytes": file_bytes}, tuple(pieces), tuple(further), last)

    def write(self, number: int, source: Source, out: Out) -> None:
        header, run = self._work[number]
        out.write(header)
        for _, spec, box in run:
            out.write(source.read(spec.name, box).reshape(-1).view(torch.uint8).numpy())

    def further(self, state_id: str, told: Sequence[Any], scratch: Path) -> dict[str, bytes]:
        found = dict(self._beside)
        if self._with_sidecar:
            found[NAME] = sidecar(self._content, state_id)
        if len(self._files) > 1:
            weights = {key: name for name, entries in self._files.items() for key, _ in entries}
            total = sum(spec.nbytes for entries in self._files.values() for _, spec in entries)
            document = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weights.items()))}
            found[INDEX] = (json.dumps(document, indent=2) + "\n").encode()
        return found


def _divide(content: Content, file_bytes: int) -> list[list[Entry]]:
    """The tensors of each file, wide elements first, so that all are aligned."""
    keys = foreign_names(content)
    specs = {t.name: t for t in content.tensors}
    entries = [(keys[name], spec) for name, spec in specs.items()]
    entries += [(keys[name], specs[kept]) for name, kept in content.aliases.items()]
    files: list[list[Entry]] = [[]]
    size = 0
    for key, spec in sorted(entries):
        if spec.dtype not in DTYPES:
            raise Unsupported(f"{spec.name}: safetensors have no {spec.dtype}; leave it out, or cast it")
        if files[-1] and size + spec.nbytes > file_bytes:
            files.append([])
            size = 0
        files[-1].append((key, spec))
        size += spec.nbytes
    return [sorted(entries, key=lambda e: (-e[1].itemsize, e[0])) for entries in files]


def _runs(entries: Sequence[Entry], piece_bytes: int) -> list[Run]:
    """All slabs of a file in their order, in runs of at most so many bytes, or one slab; one run where there are none,
    since the file has a header."""
    runs: list[Run] = [[]]
    size = 0
    for key, spec in entries:
        for box in slabs(spec.shape, spec.itemsize, min(SLAB, piece_bytes)):
            if runs[-1] and size + _size(spec, box) > piece_bytes:
                runs.append([])
                size = 0
            runs[-1].append((key, spec, box))
            size += _size(spec, box)
    return runs


def _size(spec: TensorSpec, box: Box) -> int:
    return box.volume * spec.itemsize


def _header(entries: Sequence[Entry]) -> bytes:
    described: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for key, spec in entries:
        described[key] = {
            "dtype": DTYPES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [at, at + spec.nbytes],
        }
        at += spec.nbytes
    return header_bytes(described)


def header_bytes(described: Mapping[str, object]) -> bytes:
    """All bytes before the first element, which is aligned to eight."""
    data = json.dumps(described, separators=(",", ":")).encode()
    data += b" " * (-len(data) % 8)
    return len(data).to_bytes(8, "little") + data
