"""Verifies checkpoints from the stored bytes: every object, every chunk's CRC32C, every fingerprint, the state id.

Objects are read whole, some at a time, each once; what is held is a few objects (of 16 MiB at most) for each job.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import torch

from ckpt.errors import StoreError
from ckpt.fingerprint import ZERO, Digest, add, box_digests, to_hex
from ckpt.geometry import Box, StoredObject
from ckpt.inspect.committed import Committed
from ckpt.inspect.damage import Damage
from ckpt.inspect.documents import check_documents
from ckpt.state.dtypes import opaque
from ckpt.store.arrays import Arrays, expected_objects, object_key
from ckpt.store.log import History, Record
from ckpt.store.objects import ObjectStore
from ckpt.store.records import Manifest
from ckpt.store.shards import DamagedObject

A = TypeVar("A")
B = TypeVar("B")
Progress = Callable[[int, int], None]
"""Called with the bytes of objects done so far, and of all."""


@dataclass(frozen=True)
class Verified:
    """Outcome for one commit. objects, bytes: that were read; tensors: whose fingerprint was recomputed; state_id: from
    those, None where one could not be; damage: all that was found, empty if the checkpoint is whole."""

    record: Record
    objects: int
    bytes: int
    tensors: int
    state_id: str | None
    damage: tuple[Damage, ...]


def verify(
    store: ObjectStore, history: History, record: Record, *, jobs: int, progress: Progress = lambda done, total: None
) -> Verified:
    """Reads and checks one commit with `jobs` threads. Raises StoreError where the store fails; damage is no error."""
    with ThreadPoolExecutor(jobs) as pool:
        committed, damage = check_documents(store, history, record, pool)
        if committed is None:
            return Verified(record, 0, 0, 0, None, tuple(damage))
        check = _Check(committed, committed.arrays(jobs), damage)
        check.run(pool, 2 * jobs, progress)
    return check.outcome()


@dataclass
class _Read:
    """One object as it was found: digests by tensor, and what is wrong with it."""

    item: StoredObject
    digests: dict[int, Digest]
    damage: list[Damage]
    lost: set[int]


class _Check:
    """The data of one commit."""

    def __init__(self, committed: Committed, arrays: Arrays, damage: list[Damage]) -> None:
        self._committed, self._arrays, self._damage = committed, arrays, damage
        self._catalogue = committed.manifest.catalogue
        self._lost: set[int] = set()  # tensors of which something could not be read
        self._digests: list[Digest] = [ZERO] * len(self._catalogue.tensors)
        self._objects = self._bytes = 0

    def run(self, pool: ThreadPoolExecutor, window: int, progress: Progress) -> None:
        expected = expected_objects(self._catalogue)
        total = sum(expected.values())
        sizes = self._committed.store.list(self._committed.prefix + "state/")
        progress(0, total)
        done = 0
        for read in _ahead(pool, self._read, self._present(expected, sizes), window):
            done += expected[self._key(read.item)]
            self._objects += 1
            self._damage += read.damage
            self._lost |= read.lost
            for tensor, digest in read.digests.items():
                self._digests[tensor] = add(self._digests[tensor], digest)
            progress(done, total)
        self._bytes = done
        self._compare()

    def outcome(self) -> Verified:
        whole = not self._lost
        manifest = self._committed.manifest
        state_id = None
        if whole:
            digests = {t.name: d for t, d in zip(self._catalogue.tensors, self._digests, strict=True)}
            state_id = Manifest.of(self._catalogue, digests, manifest.aliases, manifest.values).state_id
            if state_id != self._committed.record.document["state_id"]:
                problem = f"the stored bytes give the state id {state_id}"
                self._damage.append(Damage("state id", self._committed.prefix + "manifest.json", problem))
        tensors = len(self._catalogue.tensors) - len(self._lost)
        record = self._committed.record
        return Verified(record, self._objects, self._bytes, tensors, state_id, tuple(self._damage))

    def _key(self, item: StoredObject) -> str:
        return object_key(self._catalogue, self._catalogue.arrays[item.array], item.index)

    def _present(self, expected: dict[str, int], sizes: dict[str, int]) -> Iterator[StoredObject]:
        """The objects that are there with their exact size; the others are noted as damage."""
        for item in self._catalogue.objects():
            key = self._key(item)
            file = f"{self._committed.prefix}state/{key}"
            if sizes.get(file) == expected[key]:
                yield item
                continue
            hit = {piece[0] for piece in item.pieces}
            self._lost |= hit
            if file in sizes:
                problem = f"has {sizes[file]} bytes instead of {expected[key]}"
                self._damage.append(Damage("size", file, problem, self._names(hit), None, item.box))
            else:
                self._damage.append(Damage("missing", file, "there is no such file", self._names(hit), None, item.box))

    def _read(self, item: StoredObject) -> _Read:
        """In a thread of the pool."""
        array = self._catalogue.arrays[item.array]
        file = f"{self._committed.prefix}state/{self._key(item)}"
        buffer = torch.empty(item.box.extent, dtype=opaque(array.itemsize))
        damage, lost = [], set()
        try:
            self._arrays.read_object(item.array, item.index).decode(array.grid, item.box, buffer.numpy())
        except DamagedObject as error:
            for chunk, problem in error.parts:
                box = item.box if chunk is None else self._chunk_box(item, chunk)
                hit = _hit(item, box, array.packed)
                lost |= hit
                kind = "object" if chunk is None else "chunk"
                damage.append(Damage(kind, file, problem, self._names(hit), chunk, box))  # type: ignore[arg-type]
        except StoreError as error:
            raise StoreError(f"{self._committed.store.url}/{file}: {error}") from error
        sound = [(t, box, start) for t, box, start in item.pieces if t not in lost]
        views = []
        for tensor, box, start in sound:
            part = buffer[start : start + box.volume].reshape(box.extent) if array.packed else buffer
            views.append((part, box, self._catalogue.tensors[tensor].shape))
        digests = dict(zip((t for t, _, _ in sound), box_digests(views), strict=True))
        return _Read(item, digests, damage, lost)

    def _chunk_box(self, item: StoredObject, chunk: tuple[int, ...]) -> Box:
        step = self._catalogue.arrays[item.array].grid.chunk
        offset = tuple(o + i * s for o, i, s in zip(item.box.offset, chunk, step, strict=True))
        found = item.box.intersect(Box(offset, step))
        assert found is not None
        return found

    def _names(self, tensors: Iterable[int]) -> tuple[str, ...]:
        return tuple(self._catalogue.tensors[t].name for t in sorted(tensors))

    def _compare(self) -> None:
        """The fingerprints of tensors that could be read whole."""
        manifest = self._committed.manifest
        for number, array in enumerate(self._catalogue.arrays):
            for tensor, _ in array.tensors:
                found, stated = self._digests[tensor], manifest.digests[tensor]
                if tensor not in self._lost and found != stated:
                    problem = f"fingerprint {to_hex(found)} instead of {to_hex(stated)}: chunks were swapped or forged"
                    file = self._arrays.describe(number)
                    self._damage.append(Damage("fingerprint", file, problem, self._names([tensor])))


def _hit(item: StoredObject, box: Box, packed: bool) -> set[int]:
    """The tensors that have elements in a box of an object's array."""
    if not packed:
        return {piece[0] for piece in item.pieces}
    first = item.box.offset[0]
    return {
        tensor
        for tensor, whole, start in item.pieces
        if first + start < box.stop[0] and box.offset[0] < first + start + whole.volume
    }


def _ahead(pool: ThreadPoolExecutor, do: Callable[[A], B], items: Iterable[A], window: int) -> Iterator[B]:
    """Results in order, with at most `window` begun and not taken."""
    begun: deque[Future[B]] = deque()
    try:
        for item in items:
            begun.append(pool.submit(do, item))
            if len(begun) >= window:
                yield begun.popleft().result()
        while begun:
            yield begun.popleft().result()
    finally:
        for future in begun:
            future.cancel()
