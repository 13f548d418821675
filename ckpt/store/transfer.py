"""Moving the stored objects of one state from root to root, and proving that what arrived is the state.

An object is read whole, its CRC32Cs are checked, it is digested, written, and read back. In the end the digests of all
objects must add up to the fingerprints of the manifest. So neither a bit that changed at rest or on the way, nor an
object in another's place, goes unseen.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, field

import torch

from ckpt.errors import CorruptCheckpoint
from ckpt.fingerprint import ZERO, Digest, add, box_digests
from ckpt.geometry.catalogue import StoredObject
from ckpt.state.dtypes import opaque
from ckpt.store.arrays import metadata_objects, object_key
from ckpt.store.objects import NotFound, ObjectStore
from ckpt.store.records import Manifest
from ckpt.store.shards import decode


class Stopped(Exception):
    """A copy ended early because it was asked to. What it has moved is found by the next one."""


@dataclass
class Moved:
    """What a transfer did. written: objects that it wrote, with their bytes; found: objects that an earlier one had
    written, and that are right."""

    written: int = 0
    nbytes: int = 0
    found: int = 0
    _digests: dict[int, Digest] = field(default_factory=lambda: defaultdict(lambda: ZERO))
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, nbytes: int | None, digests: Mapping[int, Digest]) -> None:
        """nbytes: of an object that was written; None for one that was there."""
        with self._lock:
            if nbytes is None:
                self.found += 1
            else:
                self.written += 1
                self.nbytes += nbytes
            for tensor, digest in digests.items():
                self._digests[tensor] = add(self._digests[tensor], digest)

    def check(self, manifest: Manifest, where: str) -> None:
        """Raises CorruptCheckpoint where the objects are not those of the state."""
        for number, (spec, wanted) in enumerate(zip(manifest.catalogue.tensors, manifest.digests, strict=True)):
            if self._digests[number] != wanted:
                raise CorruptCheckpoint(
                    f"{where}: {spec.name}: its stored objects are whole, but not those of its fingerprint: they were "
                    "swapped; copy an older step"
                )


@dataclass(frozen=True)
class Transfer:
    """source, target: the roots; here, there: prefix of the attempt in each, ending in "/". progress: told the bytes
    of each object that is done, from any thread. fault: called after each object. stop: asked before each object."""

    source: ObjectStore
    here: str
    target: ObjectStore
    there: str
    manifest: Manifest
    progress: Callable[[int], None]
    fault: Callable[[str], None]
    stop: Callable[[], bool]

    def run(self, threads: int) -> Moved:
        """Moves all objects of the `state/` tree, `threads` at a time, each of which holds up to two objects in memory.

        Raises CorruptCheckpoint naming what is damaged at either end, StoreError, or Stopped.
        """
        moved, sizes = Moved(), self.target.list(f"{self.there}state/")
        pool = ThreadPoolExecutor(threads, thread_name_prefix="ckpt copy")
        try:
            going = [pool.submit(self._move, stored, sizes, moved) for stored in self.manifest.catalogue.objects()]
            going += [
                pool.submit(self._describe, f"state/{key}", data, sizes, moved)
                for key, data in metadata_objects(self.manifest.catalogue).items()
            ]
            done, _ = wait(going, return_when=FIRST_EXCEPTION)
            for one in done:
                one.result()
        finally:
            pool.shutdown(cancel_futures=True)
        moved.check(self.manifest, f"{self.source.url}/{self.here}")
        return moved

    def put(self, name: str, data: bytes) -> None:
        """Writes a whole object, and reads it back. Raises CorruptCheckpoint where something else is there then."""
        self.target.put(self.there + name, data)
        if self.target.get(self.there + name) != data:
            raise CorruptCheckpoint(
                f"{self.target.url}/{self.there}{name}: what was written reads back as something else; check that store"
            )

    def _move(self, stored: StoredObject, sizes: Mapping[str, int], moved: Moved) -> None:
        self._check_stop()
        catalogue = self.manifest.catalogue
        array = catalogue.arrays[stored.array]
        name = f"state/{object_key(catalogue, array, stored.index)}"
        size = array.grid.object_bytes(stored.box, array.itemsize)
        digests = self._found(stored, name) if sizes.get(self.there + name) == size else None
        written = None
        if digests is None:
            data, written = self._read(name), size
            try:
                digests = self._digest(stored, data)
            except CorruptCheckpoint as error:
                raise CorruptCheckpoint(
                    f"{self.source.url}/{self.here}{name}: a stored object is damaged: {error}; copy an older step"
                ) from None
            self.put(name, data)
        moved.add(written, digests)
        self.progress(size)
        self.fault("copy.object")

    def _describe(self, name: str, data: bytes, sizes: Mapping[str, int], moved: Moved) -> None:
        """A `zarr.json`, whose bytes follow from the manifest. It is small: what is there is written again."""
        self._check_stop()
        self.put(name, data)
        moved.add(len(data), {})

    def _check_stop(self) -> None:
        if self.stop():
            raise Stopped

    def _read(self, name: str) -> bytes:
        try:
            return self.source.get(self.here + name)
        except NotFound:
            raise CorruptCheckpoint(
                f"{self.source.url}/{self.here}{name}: missing, though the step is committed; copy an older step"
            ) from None

    def _found(self, stored: StoredObject, name: str) -> dict[int, Digest] | None:
        """Digests of an object that an earlier copy has left; None where it is to be written anew."""
        try:
            return self._digest(stored, self.target.get(self.there + name))
        except (CorruptCheckpoint, NotFound):
            return None

    def _digest(self, stored: StoredObject, data: bytes) -> dict[int, Digest]:
        """Digest of each tensor's part of an object, by the tensor's number. Raises CorruptCheckpoint."""
        catalogue = self.manifest.catalogue
        array = catalogue.arrays[stored.array]
        elements = torch.empty(stored.box.extent, dtype=opaque(array.itemsize))
        decode(data, array.grid, stored.box, elements.numpy())
        parts = []
        for tensor, box, start in stored.pieces:
            part = elements[start : start + box.volume].reshape(box.extent) if array.packed else elements
            parts.append((part, box, catalogue.tensors[tensor].shape))
        digests = box_digests(parts)
        return {tensor: digest for (tensor, _, _), digest in zip(stored.pieces, digests, strict=True)}
