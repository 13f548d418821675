"""One committed checkpoint, opened for reading without a job: its pinned documents, and a lease while it is used."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ckpt.errors import CorruptCheckpoint, StoreError
from ckpt.inspect.address import Address, find
from ckpt.state.values import Json, parse_json
from ckpt.store.arrays import Arrays, context
from ckpt.store.leases import lease
from ckpt.store.log import Log, Record, check_format
from ckpt.store.objects import ObjectStore, kvstore_spec
from ckpt.store.records import Manifest, attempt_prefix, pinned


@dataclass(frozen=True)
class Committed:
    """record: the commit; manifest: the state; ranks: plain values of each saving rank; run: provenance."""

    store: ObjectStore
    record: Record
    manifest: Manifest
    ranks: list[Mapping[str, Json]]
    run: Mapping[str, Any]

    @property
    def prefix(self) -> str:
        return attempt_prefix(self.record.claim, self.record.attempt)

    def arrays(self, threads: int) -> Arrays:
        """Handles on the stored arrays, for this process. Raises StoreError where TensorStore has no driver."""
        kvstore = kvstore_spec(self.store.url)
        return Arrays(kvstore, self.prefix + "state/", self.manifest.catalogue, context(threads))


def open_committed(store: ObjectStore, record: Record) -> Committed:
    """Reads and checks what a commit pins. Raises CorruptCheckpoint naming the file."""
    where = f"{store.url}/{attempt_prefix(record.claim, record.attempt)}"
    manifest = Manifest.parse(pinned(store, record, "manifest.json"), where + "manifest.json")
    if manifest.state_id != record.document["state_id"]:
        raise CorruptCheckpoint(f"{where}manifest.json: its state id is not the committed one; use an older step")
    ranks = read_ranks(pinned(store, record, "ranks/manifest.json"), where + "ranks/manifest.json")
    run = parse_json(pinned(store, record, "run.json"), where + "run.json")
    if not isinstance(run, dict):
        raise CorruptCheckpoint(f"{where}run.json: not an object; use an older step")
    check_format(run, where + "run.json")
    return Committed(store, record, manifest, ranks, run)


def read_ranks(data: bytes, where: str) -> list[Mapping[str, Json]]:
    """The values of each rank from `ranks/manifest.json`. Raises CorruptCheckpoint."""
    document = parse_json(data, where)
    if not isinstance(document, dict):
        raise CorruptCheckpoint(f"{where}: not an object; use an older step")
    check_format(document, where)
    ranks = document.get("ranks")
    if not isinstance(ranks, list) or not all(isinstance(r, dict) for r in ranks) or document["world"] != len(ranks):
        raise CorruptCheckpoint(f"{where}: malformed; use an older step")
    return list(ranks)


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
