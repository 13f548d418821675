"""What a checkpoint holds, tensor by tensor, with where each lies: a function of its manifest."""

from __future__ import annotations

import fnmatch
import math
from dataclasses import dataclass

from ckpt.fingerprint import to_hex
from ckpt.geometry import StoredArray, TensorSpec
from ckpt.geometry.box import Index
from ckpt.store.arrays import array_folder
from ckpt.store.records import Manifest


@dataclass(frozen=True)
class Described:
    """A tensor. array: folder of its array below `state/`. cell, chunk: extents of the array's objects and of their
    chunks. objects, chunks: how many hold the tensor. start: its first element in a packed array, None where the array
    is its own. tied: other names of it."""

    name: str
    shape: Index
    dtype: str
    bytes: int
    stack: int
    fingerprint: str
    array: str
    cell: Index
    chunk: Index
    objects: int
    chunks: int
    start: int | None
    tied: tuple[str, ...]


def describe(manifest: Manifest, pattern: str = "*") -> list[Described]:
    """The tensors of which a name fits the pattern (`*` any text, `/` too; `?` one character; `[abc]`), by name."""
    catalogue = manifest.catalogue
    tied: dict[str, list[str]] = {}
    for name, kept in sorted(manifest.aliases.items()):
        tied.setdefault(kept, []).append(name)
    places = {t: (array, start) for array in catalogue.arrays for t, start in array.tensors}
    found = []
    for number, spec in enumerate(catalogue.tensors):
        names = [spec.name, *tied.get(spec.name, [])]
        if not any(fnmatch.fnmatchcase(name, pattern) for name in names):
            continue
        array, start = places[number]
        grid = array.grid
        found.append(
            Described(
                spec.name,
                spec.shape,
                spec.dtype,
                spec.nbytes,
                spec.stack,
                to_hex(manifest.digests[number]),
                array_folder(catalogue, array),
                grid.cell,
                grid.chunk,
                _count(array, spec, start, grid.cell),
                _count(array, spec, start, grid.chunk),
                start if array.packed else None,
                tuple(names[1:]),
            )
        )
    return found


def _count(array: StoredArray, spec: TensorSpec, start: int, step: Index) -> int:
    """Cells, or chunks, that hold elements of a tensor. Chunks tile an object and objects the array, so both are grids
    that begin at its first element."""
    if not spec.nbytes:
        return 0
    if not array.packed:
        return math.prod(-(-n // s) for n, s in zip(spec.shape, step, strict=True))
    return (start + spec.nbytes // spec.itemsize - 1) // step[0] - start // step[0] + 1
