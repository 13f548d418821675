"""A committed checkpoint as a loader sees it: its pinned records, read and checked before anything is touched."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ckpt.engine.session import Session
from ckpt.errors import CkptError, CorruptCheckpoint
from ckpt.state.values import Json, canonical_json, parse_json
from ckpt.store.arrays import expected_objects, metadata_objects
from ckpt.store.log import History, Record, check_format
from ckpt.store.objects import NotFound
from ckpt.store.records import Manifest, attempt_prefix, sha256


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


def open_commit(session: Session, record: Record | None) -> Opened:
    """Collective. Rank 0 gives the commit (the others None) and reads its records; every rank checks and parses them.

    Raises CorruptCheckpoint where a record is missing or not the one that the commit pins.
    """
    comm = session.comm
    packet: list[bytes] = []
    with comm.phase("load: read manifests"):
        if comm.rank == 0:
            assert record is not None
            packet = _read_records(session, record)
            packet.insert(0, canonical_json([record.number, record.document]))
    parts = [comm.broadcast(packet[i] if packet else None, "load: manifests") for i in range(4)]
    with comm.phase("load: check manifests"):
        number, document = parse_json(parts[0], "commit record")
        where = f"{session.store.url}/{attempt_prefix(document['claim'], document['attempt'])}"
        manifest = Manifest.parse(parts[1], where + "manifest.json")
        if manifest.state_id != document["state_id"]:
            raise CorruptCheckpoint(f"{where}manifest.json: its state id is not the committed one")
        ranks = parse_json(parts[2], where + "ranks/manifest.json")
        run = parse_json(parts[3], where + "run.json")
        for name, one in (("ranks/manifest.json", ranks), ("run.json", run)):
            check_format(one, where + name)
        opened = Opened(Record(number, document), manifest, ranks["ranks"], run)
    return opened


def _read_records(session: Session, record: Record) -> list[bytes]:
    prefix = attempt_prefix(record.claim, record.attempt)
    check_format(record.document, f"{session.store.url}/log record {record.number}")
    found = []
    for key, pinned in (("manifest.json", "manifest"), ("ranks/manifest.json", "ranks"), ("run.json", "run")):
        where = f"{session.store.url}/{prefix}{key}"
        try:
            data = session.store.get(prefix + key)
        except NotFound:
            raise CorruptCheckpoint(f"{where}: missing, though step {record.step} is committed; {OLDER}") from None
        if sha256(data) != record.document[pinned]:
            raise CorruptCheckpoint(f"{where}: not the bytes that the commit of step {record.step} pins; {OLDER}")
        found.append(data)
    return found


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


OLDER = "restore the file, or load an older step"


def pick(history: History, step: int | None, url: str) -> Record | None:
    """The commit to load: the newest of the lineage, or the newest of it with this step. None for an empty log.

    Raises CkptError naming the steps there are when `step` is not among them.
    """
    record = history.newest(step)
    if record is None and step is not None:
        steps = sorted({r.step for r in history.lineage()})
        raise CkptError(f"{url}: no committed step {step}; there are {steps or 'none'}")
    return record
