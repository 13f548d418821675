"""Whether every rank can write, found out before there is anything to lose.

There are two ways to the store, and they find credentials, certificates and permissions each in its own way: the verbs
of `ObjectStore`, and TensorStore. Ranks differ too: a node has another mount, another user, an older secret.
"""

from __future__ import annotations

import contextlib
import secrets
import socket

import numpy as np

from ckpt.engine.session import Session
from ckpt.errors import CkptError, StoreError
from ckpt.geometry import Box, Catalogue, StoredArray, TensorSpec
from ckpt.store.arrays import Arrays, object_key
from ckpt.store.objects import probe

_BYTES = 64


def preflight(session: Session) -> None:
    """Collective. Every rank writes, reads and deletes one small object and one array of a few bytes under `probe/`.

    Raises StoreError on every rank, naming a rank that cannot, its host, the cause and the remedy. A disk that has room
    for the probe may still be too full for a checkpoint."""
    comm = session.comm
    with comm.phase("preflight"):
        try:
            probe(session.store, lambda folder: _probe_array(session, folder))
        except StoreError as error:
            raise StoreError(f"rank {comm.rank} on {socket.gethostname()} cannot write checkpoints: {error}") from error


def _probe_array(session: Session, folder: str) -> None:
    catalogue = Catalogue.of([TensorSpec("probe", (_BYTES,), "uint8", 1)])
    arrays = Arrays(session.kvstore, folder, catalogue, session.context)
    key = folder + object_key(catalogue, catalogue.arrays[0], (0,))
    try:
        _write_and_read(session, arrays, catalogue.arrays[0], key)
    except BaseException:
        with contextlib.suppress(StoreError):  # which would hide the first; takes the folders with it
            session.store.delete([key])
        raise


def _write_and_read(session: Session, arrays: Arrays, array: StoredArray, key: str) -> None:
    """Writes an array as a save does, and reads it back as a load does."""
    where = f"{session.store.url}/{key}"
    values = np.frombuffer(secrets.token_bytes(_BYTES), np.uint8)
    arrays.finish_write(arrays.handle(0).write(values).commit, where)
    if key not in session.store.list(key):
        raise StoreError(
            f"{where}: TensorStore has written this array, and it is not there for others; give both the same endpoint "
            "in storage_options or AWS_ENDPOINT_URL"
        )
    found = np.empty_like(values)
    try:
        arrays.read_object(0, (0,)).decode(array.grid, Box.whole(array.grid.shape), found)
    except CkptError as error:
        raise StoreError(f"{where}: an array that was just written cannot be read: {error}; check the store") from error
    if found.tobytes() != values.tobytes():
        raise StoreError(f"{where}: an array that was just written reads as other bytes; check the store")
