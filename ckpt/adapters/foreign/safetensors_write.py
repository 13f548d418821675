"""Writes any state at rest as safetensors files with Hugging Face's index.

Format (https://github.com/huggingface/safetensors#format): eight bytes with the length of a JSON header, the header,
then the elements of all tensors without gaps. It is written here, slab by slab, because the library's own writer wants
whole tensors in memory.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from ckpt.adapters.foreign.folders import new_folder
from ckpt.adapters.foreign.safetensors_read import DTYPES, INDEX
from ckpt.adapters.foreign.sidecar import NAME, foreign_names, sidecar
from ckpt.adapters.foreign.slabs import slabs
from ckpt.adapters.foreign.witness import Witness
from ckpt.engine.stream import Advance, Source
from ckpt.errors import Unsupported
from ckpt.geometry import TensorSpec

FILE_BYTES = 5 * 10**9  # as Hugging Face cuts them
SLAB = 8 << 20
PART = ".part"  # ends the name of a file that is not whole

Entry = tuple[str, TensorSpec]  # its key, and the tensor that is stored under it


def write_safetensors(
    source: Source,
    folder: Path,
    *,
    with_sidecar: bool = True,
    file_bytes: int = FILE_BYTES,
    beside: Mapping[str, bytes] = {},
    advance: Advance = lambda n: None,
) -> str:
    """Writes into a folder that is new or empty, and gives the state id. Files get their names once all are whole and
    on the device; the index comes last. Tied tensors are written under each of their names. Plain values, ties and
    stacking go into the sidecar. beside: further files, such as config.json.

    Raises Unsupported for a dtype that the format lacks, StoreError where the folder cannot be written or is not empty,
    and what the source raises; nothing is there then.
    """
    seen = Witness(source)
    files = _divide(source, file_bytes)
    names = [
        "model.safetensors" if len(files) == 1 else f"model-{n:05d}-of-{len(files):05d}.safetensors"
        for n in range(1, len(files) + 1)
    ]
    with new_folder(folder):
        for name, entries in zip(names, files, strict=True):
            _write_file(seen, folder / f"{name}{PART}", entries, advance)
        state_id = seen.state_id()
        for name, data in beside.items():
            (folder / name).write_bytes(data)
        if with_sidecar:
            (folder / NAME).write_bytes(sidecar(source.content, state_id))
        for name in names:
            (folder / f"{name}{PART}").rename(folder / name)
        if len(files) > 1:
            weights = {key: name for name, entries in zip(names, files, strict=True) for key, _ in entries}
            total = sum(spec.nbytes for entries in files for _, spec in entries)
            document = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weights.items()))}
            (folder / INDEX).write_text(json.dumps(document, indent=2) + "\n")
    return state_id


def _divide(source: Source, file_bytes: int) -> list[list[Entry]]:
    """The tensors of each file, wide elements first, so that all are aligned."""
    keys = foreign_names(source.content)
    specs = {t.name: t for t in source.content.tensors}
    entries = [(keys[name], spec) for name, spec in specs.items()]
    entries += [(keys[name], specs[kept]) for name, kept in source.content.aliases.items()]
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


def _write_file(source: Source, path: Path, entries: Sequence[Entry], advance: Advance) -> None:
    kept = foreign_names(source.content)
    with path.open("xb") as file:
        file.write(_header(entries))
        for key, spec in entries:
            for box in slabs(spec.shape, spec.itemsize, SLAB):
                file.write(source.read(spec.name, box).contiguous().numpy().data)
                if kept[spec.name] == key:
                    advance(box.volume * spec.itemsize)
        file.flush()
        os.fsync(file.fileno())


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
    data = json.dumps(described, separators=(",", ":")).encode()
    data += b" " * (-len(data) % 8)
    return len(data).to_bytes(8, "little") + data
