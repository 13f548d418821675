"""One committed checkpoint, opened for reading without a job: its pinned documents, and a lease while it is used."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from ckpt.errors import StoreError
from ckpt.inspect.address import Address, find
from ckpt.store.arrays import Arrays, context
from ckpt.store.leases import lease
from ckpt.store.log import Log, Record
from ckpt.store.objects import ObjectStore, kvstore_spec
from ckpt.store.opened import Opened, parse_opened
from ckpt.store.records import PINNED, pinned


@dataclass(frozen=True)
class Committed(Opened):
    """A commit opened by one process, with the store that it is in."""

    store: ObjectStore

    def arrays(self, threads: int) -> Arrays:
        """Handles on the stored arrays, for this process. Raises StoreError where TensorStore has no driver."""
        kvstore = kvstore_spec(self.store.url)
        return Arrays(kvstore, self.prefix + "state/", self.manifest.catalogue, context(threads))


def open_committed(store: ObjectStore, record: Record) -> Committed:
    """Reads and checks what a commit pins. Raises CorruptCheckpoint naming the file."""
    found = parse_opened(record, [pinned(store, record, name) for name in PINNED], store.url)
    return Committed(found.record, found.manifest, found.ranks, found.run, store)


@contextlib.contextmanager
def in_use(store: ObjectStore, log: Log, address: Address, purpose: str) -> Iterator[tuple[Record, bool]]:
    """Finds a commit, and holds a lease on it while the body runs, so that no collector deletes its data. Gives the
    commit, and whether there is a lease: there is none where the store cannot be written.

    Raises NothingCommitted, or StoreError where the log cannot be read."""
    while True:
        record = find(log.read(), address, store.url)
        with contextlib.ExitStack() as holding:
            leased = True
            try:
                holding.enter_context(lease(store, record.number, purpose))
            except StoreError:
                leased = False
            if record.number in log.read().retired:  # after the lease: see `ckpt.store.leases`
                continue
            yield record, leased
            return
