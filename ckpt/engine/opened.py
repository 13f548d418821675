"""A committed checkpoint as a loader sees it: its pinned records, read and checked before anything is touched."""

from __future__ import annotations

from ckpt.engine.session import Session
from ckpt.errors import CorruptCheckpoint
from ckpt.state.values import canonical_json, parse_json
from ckpt.store.arrays import expected_objects, metadata_objects
from ckpt.store.log import Record, check_format, no_step
from ckpt.store.objects import NotFound
from ckpt.store.opened import Opened, parse_opened
from ckpt.store.records import PINNED, pinned
from ckpt.store.remedies import OLDER


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
        return parse_opened(record, parts, session.store.url)


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
