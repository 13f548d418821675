"""The files of the format `ranks`: one safetensors file for each rank of a layout, with the rank's local tensors.

`rank_00000.safetensors` and so on. Keys are those of `foreign_names`. The header's `__metadata__` has, under
`ckpt.ranks`, JSON: `format`, the `layout`, and for each key in `tensors` the global `shape` and the `boxes`: a list of
(global offset, extent, offset in the local tensor). Ranks that hold the same have the same file: a hard link.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

from ckpt.adapters.foreign.parts import Part
from ckpt.adapters.foreign.rank_rules import Placer
from ckpt.adapters.foreign.safetensors_read import DTYPES
from ckpt.adapters.foreign.safetensors_write import header_bytes
from ckpt.adapters.foreign.sidecar import foreign_names
from ckpt.engine.stream import Content
from ckpt.errors import StateMismatch, Unsupported
from ckpt.geometry import Holdings, Layout, TensorSpec
from ckpt.store.log import FORMAT

ABOUT = "ckpt.ranks"  # the key in a header's metadata


@dataclass(frozen=True)
class Entry:
    """One local tensor of a file. spec: of the logical tensor that it is a part of; start: its first byte there."""

    key: str
    spec: TensorSpec
    part: Part
    start: int


@dataclass(frozen=True)
class RankFile:
    """What a file holds, and the ranks whose file it is. header: all bytes before the first tensor."""

    ranks: tuple[int, ...]
    entries: tuple[Entry, ...]
    header: bytes

    @property
    def nbytes(self) -> int:
        return len(self.header) + self.tensor_bytes

    @property
    def tensor_bytes(self) -> int:
        return sum(e.part.volume * e.spec.itemsize for e in self.entries)


def file_name(rank: int) -> str:
    return f"rank_{rank:05d}.safetensors"


def plan_files(content: Content, placer: Placer) -> list[RankFile]:
    """The distinct files of a state on a layout, by their lowest rank.

    Raises Unsupported for a dtype that safetensors lack, for an axis that does not divide, and where the ranks
    together would not hold every element.
    """
    keys = foreign_names(content)
    for name, spec in placer.specs.items():
        if spec.dtype not in DTYPES:
            raise Unsupported(f"{name}: safetensors have no {spec.dtype}; leave it out, or cast it")
    same: dict[tuple[tuple[str, Part], ...], list[int]] = {}
    for rank in range(placer.layout.world):
        placed = [(name, placer.part(name, rank)) for name in placer.specs]
        same.setdefault(tuple((name, part) for name, part in placed if part is not None), []).append(rank)
    _check_cover(placer, [dict(parts) for parts in same])
    return [_file(tuple(ranks), parts, placer, keys) for parts, ranks in same.items()]


def _check_cover(placer: Placer, files: list[dict[str, Part]]) -> None:
    for name, spec in placer.specs.items():
        held = [(number, box) for number, parts in enumerate(files) if name in parts for box, _ in parts[name].boxes]
        try:
            Holdings.of(held).check_cover(name, spec.shape)
        except StateMismatch as error:
            raise Unsupported(f"{error}; with {placer.rules[name].what}, not all of it would be written") from None


def _file(
    ranks: tuple[int, ...], parts: tuple[tuple[str, Part], ...], placer: Placer, keys: dict[str, str]
) -> RankFile:
    """Wide elements first, so that all are aligned."""
    order = sorted(parts, key=lambda p: (-placer.specs[p[0]].itemsize, keys[p[0]]))
    about: dict[str, Any] = {}
    described: dict[str, Any] = {}
    at = 0
    starts = []
    for name, part in order:
        spec, key = placer.specs[name], keys[name]
        nbytes = part.volume * spec.itemsize
        boxes = [[list(box.offset), list(box.extent), list(inner.offset)] for box, inner in part.boxes]
        about[key] = {"shape": list(spec.shape), "boxes": boxes}
        described[key] = {
            "dtype": DTYPES[spec.dtype],
            "shape": list(part.shape),
            "data_offsets": [at, at + nbytes],
        }
        starts.append(at)
        at += nbytes
    told = {"format": FORMAT, "layout": dataclasses.asdict(placer.layout), "tensors": about}
    metadata = {"format": "pt", ABOUT: json.dumps(told, sort_keys=True, separators=(",", ":"))}
    header = header_bytes({"__metadata__": metadata} | described)
    entries = [
        Entry(keys[name], placer.specs[name], part, len(header) + start)
        for (name, part), start in zip(order, starts, strict=True)
    ]
    return RankFile(ranks, tuple(entries), header)


def layout_of(about: Any) -> Layout:
    """The layout in a header's metadata. Raises KeyError, TypeError or StateMismatch where there is none."""
    return Layout(**about["layout"])
