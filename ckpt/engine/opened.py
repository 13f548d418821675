"""A committed checkpoint as a loader sees it: its pinned records, read and checked before anything is touched."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ckpt.engine.session import Session
from ckpt.errors import CorruptCheckpoint, NothingCommitted
from ckpt.state.values import Json, canonical_json, parse_json
from ckpt.store.arrays import expected_objects, metadata_objects
from ckpt.store.log import Record, check_format
from ckpt.store.objects import NotFound
from ckpt.store.records import PINNED, Manifest, attempt_prefix, pinned
from ckpt.store.remedies import OLDER


@dataclass(frozen=True)
class Opened:
    """record: the commit; manifest: the state; ranks: plain values of each saving rank; run: provenance."""

    record: Record
    manifest: Manifest
    ranks: list[Mapping[str, Json]]
    run: Mapping[str, Any]

    @property
    def prefix(self) -> str:
        return attempt_prefix(self.record.claim, self.record.attempt)


def open_commit(session: Session, record: Record) -> Opened:
    """Collective. Opens a commit, the same on every rank: rank 0 reads its records; every rank checks and parses them.

    Raises CorruptCheckpoint where a record is missing or not the one that the commit pins.
    """
    comm = session.comm
    packet: list[bytes] = []
    with comm.phase("load: read manifests"):
        if comm.rank == 0:
            check_format(record.document, f"{session.store.url}/log record {record.number}")
            packet = [pinned(session.store, record, name) for name in PINNED]
    parts = [comm.broadcast(packet[i] if packet else None, "load: manifests") for i in range(len(PINNED))]
    with comm.phase("load: check manifests"):
        where = f"{session.store.url}/{attempt_prefix(record.claim, record.attempt)}"
        manifest = Manifest.parse(parts[0], where + "manifest.json")
        if manifest.state_id != record.document["state_id"]:
            raise CorruptCheckpoint(f"{where}manifest.json: its state id is not the committed one")
        ranks = parse_json(parts[1], where + "ranks/manifest.json")
        run = parse_json(parts[2], where + "run.json")
        for name, one in (("ranks/manifest.json", ranks), ("run.json", run)):
            check_format(one, where + name)
        opened = Opened(record, manifest, ranks["ranks"], run)
    return opened


def check_objects(session: Session, opened: Opened) -> None:
    """On each rank: checks that every stored object of the state exists with its exact size (rank 0 lists for all), and
    this rank's share of the zarr.json files. Raises CorruptCheckpoint naming the object."""
    store, prefix = session.store, opened.prefix + "state/"
    catalogue = opened.manifest.catalogue
    documents = metadata_objects(catalogue)
    for number, (key, data) in enumerate(documents.items()):
        if number % session.comm.world == session.comm.rank:
            try:
                found = store.get(prefix + key)
            except NotFound:
                raise CorruptCheckpoint(f"{store.url}/{prefix}{key}: missing; {OLDER}") from None
            if found != data:
                raise CorruptCheckpoint(f"{store.url}/{prefix}{key}: does not follow from the manifest; {OLDER}")
    if session.comm.rank == 0:
        sizes = store.list(prefix)
        for key, size in expected_objects(catalogue).items():
            if prefix + key not in sizes:
                raise CorruptCheckpoint(f"{store.url}/{prefix}{key}: stored chunk is missing; {OLDER}")
            if sizes[prefix + key] != size:
                raise CorruptCheckpoint(
                    f"{store.url}/{prefix}{key}: has {sizes[prefix + key]} bytes instead of {size}; {OLDER}"
                )


def pick(session: Session, step: int | None) -> Record | None:
    """Collective: the commit to load, the same on every rank: the newest of the lineage, or the newest of it with this
    step. None for an empty log.

    Raises NothingCommitted naming the steps there are when `step` is not among them.
    """
    found: bytes | None = None
    with session.comm.phase("load: pick a step"):
        if session.comm.rank == 0:
            history = session.log.read()
            record = history.newest(step)
            if record is None and step is not None:
                raise no_step(session.store.url, step, history.lineage())
            found = canonical_json(record and [record.number, record.document])
    document = parse_json(session.comm.broadcast(found, "load: pick a step"), "commit record")
    return None if document is None else Record(*document)


def no_step(url: str, step: int, lineage: Iterable[Record]) -> NothingCommitted:
    """The error where a step is not among the commits that there are."""
    steps = sorted({record.step for record in lineage})
    return NothingCommitted(f"{url}: no committed step {step}; there are {steps or 'none'}")
