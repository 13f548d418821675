"""What differs between two checkpoints: by state ids and fingerprints alone first, then by the elements that differ.

Only tensors whose fingerprints differ are read, on both sides piece by piece, so memory does not grow with a tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ckpt.errors import CorruptCheckpoint
from ckpt.fingerprint import Digest
from ckpt.geometry import Box, Catalogue, TensorSpec
from ckpt.geometry.box import Index
from ckpt.inspect.committed import Committed
from ckpt.inspect.elements import Distance, Element, differing, distance, element
from ckpt.state.values import Json
from ckpt.store.arrays import Arrays

PIECE = 16 << 20  # bytes read at a time of either side

Progress = Callable[[int, int], None]
"""Called with the bytes done so far, and of all that is to be read of one side."""


@dataclass(frozen=True)
class First:
    """The first differing element in row-major order. ulp: None where it has none."""

    index: Index
    a: Element
    b: Element
    ulp: int | None


@dataclass(frozen=True)
class TensorDiff:
    """A tensor of one shape and dtype on both sides whose bits differ. tied: other names of it, on both sides.
    differing: number of elements; distance: over all of them. slices: how many differ at each index of the first axis,
    where that stacks layers or experts, else None."""

    name: str
    tied: tuple[str, ...]
    shape: Index
    dtype: str
    elements: int
    differing: int
    first: First
    distance: Distance
    slices: tuple[int, ...] | None


@dataclass(frozen=True)
class Names:
    """Names in only one of two mappings, and those in both with other content."""

    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    changed: tuple[str, ...]

    def __bool__(self) -> bool:
        return bool(self.only_a or self.only_b or self.changed)


@dataclass(frozen=True)
class Compared:
    """What documents alone tell. tensors: `changed` are those of another shape or dtype. unequal: groups of names that
    are one tensor on both sides, of one shape and dtype, and have other fingerprints. equal: names that are the same.
    per_rank: names by rank, with `rank N: ` before each; None where the numbers of ranks differ."""

    same_state: bool
    tensors: Names
    unequal: tuple[tuple[str, ...], ...]
    equal: int
    values: Names
    per_rank: Names | None

    @property
    def same(self) -> bool:
        return self.same_state and not self.per_rank


def compare(a: Committed, b: Committed) -> Compared:
    """Compares two opened commits by their documents; reads nothing."""
    ours, theirs = _tensors(a), _tensors(b)
    shared = sorted(ours.keys() & theirs.keys())
    fits = {n: _kind(ours[n][0]) == _kind(theirs[n][0]) for n in shared}
    groups: dict[tuple[str, str], list[str]] = {}
    for name in shared:
        (spec_a, digest_a), (spec_b, digest_b) = ours[name], theirs[name]
        if fits[name] and digest_a != digest_b:
            groups.setdefault((spec_a.name, spec_b.name), []).append(name)
    changed = tuple(n for n in shared if not fits[n])
    names = Names(tuple(sorted(ours.keys() - theirs.keys())), tuple(sorted(theirs.keys() - ours.keys())), changed)
    per_rank = None
    if len(a.ranks) == len(b.ranks):
        per_rank = _names(_by_rank(a.ranks), _by_rank(b.ranks))
    unequal = tuple(tuple(group) for group in groups.values())
    return Compared(
        a.manifest.state_id == b.manifest.state_id,
        names,
        unequal,
        len(shared) - len(changed) - sum(map(len, unequal)),
        _names(a.manifest.values, b.manifest.values),
        per_rank,
    )


def locate(
    a: Committed, b: Committed, groups: Sequence[tuple[str, ...]], progress: Progress = lambda done, total: None
) -> list[TensorDiff]:
    """Reads the tensors of `Compared.unequal` on both sides, and says where they differ. Raises CorruptCheckpoint where
    stored bytes are damaged or are not what their fingerprint says, StoreError where a store cannot be read."""
    if not groups:
        return []
    sides = [_Side(a), _Side(b)]
    total = sum(sides[0].spec(group[0]).nbytes for group in groups)
    done, found = 0, []
    for group in groups:
        found.append(_locate(sides, group, lambda n, before=done: progress(before + n, total)))  # type: ignore[misc]
        done += sides[0].spec(group[0]).nbytes
    return found


class _Side:
    """The stored arrays of one checkpoint."""

    def __init__(self, committed: Committed) -> None:
        self._catalogue: Catalogue = committed.manifest.catalogue
        self._arrays: Arrays = committed.arrays(4)
        self._specs = {name: spec for name, (spec, _) in _tensors(committed).items()}
        self._places = {
            self._catalogue.tensors[t].name: (number, start)
            for number, array in enumerate(self._catalogue.arrays)
            for t, start in array.tensors
        }

    def spec(self, name: str) -> TensorSpec:
        return self._specs[name]

    def pieces(self, name: str) -> list[Box]:
        """The tensor as boxes of at most PIECE bytes, each within a stored object where that is possible."""
        spec = self.spec(name)
        array = self._catalogue.arrays[self._places[spec.name][0]]
        most = max(1, PIECE // spec.itemsize)
        if array.packed:
            return list(Box.whole(spec.shape).pieces(most))
        return [piece for _, cell in array.grid.cells() for piece in cell.pieces(most)]

    def read(self, name: str, box: Box) -> npt.NDArray[np.uint8]:
        """uint8 [elements, itemsize] of a box of a tensor; of a packed one the box is all of it."""
        spec = self.spec(name)
        number, start = self._places[spec.name]
        array = self._catalogue.arrays[number]
        where = (slice(start, start + box.volume),) if array.packed else box.slices
        try:
            found = self._arrays.handle(number)[where].read().result()
        except Exception as error:
            raise self._arrays.read_error(
                error, f"{self._arrays.describe(number)} (tensor {spec.name} {box})"
            ) from error
        return np.ascontiguousarray(found).reshape(-1).view(np.uint8).reshape(-1, spec.itemsize)


def _locate(sides: Sequence[_Side], group: tuple[str, ...], progress: Callable[[int], None]) -> TensorDiff:
    name = group[0]
    spec = sides[0].spec(name)
    count, done, apart = 0, 0, Distance()
    slices = np.zeros(spec.shape[0], np.int64) if any(side.spec(name).stack for side in sides) else None
    first: tuple[Index, npt.NDArray[np.uint8], npt.NDArray[np.uint8]] | None = None
    for box in sides[0].pieces(name):
        x, y = (side.read(name, box) for side in sides)
        unlike = differing(x, y)
        if len(unlike):
            count += len(unlike)
            apart = apart.join(distance(x[unlike], y[unlike], spec.dtype))
            if slices is not None:
                length = box.volume // box.extent[0]
                slices += np.bincount(box.offset[0] + unlike // length, minlength=len(slices))
            inside = np.unravel_index(unlike[0], box.extent) if box.extent else ()
            index = tuple(o + int(i) for o, i in zip(box.offset, inside, strict=True))
            if first is None or index < first[0]:
                first = index, x[unlike[0]], y[unlike[0]]
        done += box.volume * spec.itemsize
        progress(done)
    if first is None:
        raise CorruptCheckpoint(f"{name}: its fingerprints differ but its stored bits do not; run ckpt verify on both")
    index, p, q = first
    one = First(index, element(p, spec.dtype), element(q, spec.dtype), distance(p[None], q[None], spec.dtype).ulp)
    elements = spec.nbytes // spec.itemsize
    of_each = None if slices is None else tuple(slices.tolist())
    return TensorDiff(name, group[1:], spec.shape, spec.dtype, elements, count, one, apart, of_each)


def _tensors(committed: Committed) -> dict[str, tuple[TensorSpec, Digest]]:
    """Every name of a tensor, tied ones too, with the tensor that keeps it and its digest."""
    manifest = committed.manifest
    found = {t.name: (t, d) for t, d in zip(manifest.catalogue.tensors, manifest.digests, strict=True)}
    return found | {name: found[kept] for name, kept in manifest.aliases.items()}


def _kind(spec: TensorSpec) -> tuple[Index, str]:
    return spec.shape, spec.dtype


def _by_rank(ranks: Sequence[Mapping[str, Json]]) -> dict[str, Any]:
    return {f"rank {number}: {name}": value for number, own in enumerate(ranks) for name, value in own.items()}


def _names(a: Mapping[str, Any], b: Mapping[str, Any]) -> Names:
    changed = tuple(sorted(n for n in a.keys() & b.keys() if a[n] != b[n]))
    return Names(tuple(sorted(a.keys() - b.keys())), tuple(sorted(b.keys() - a.keys())), changed)
