"""Loading from a root that somebody else may be collecting: a load that loses its data to a `retire` begins again."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TypeVar

from ckpt.engine.session import Session
from ckpt.errors import CkptError, CorruptCheckpoint, StateInvalid, StoreError
from ckpt.store.leases import lease
from ckpt.store.log import Record

T = TypeVar("T")


def load_surviving(
    session: Session, pick: Callable[[], Record | None], load: Callable[[Record], T], *, leased: bool
) -> T | None:
    """Collective. Loads what `pick` chooses, which must be the same commit on every rank; None if it chooses none.

    leased: rank 0 holds a lease on the commit meanwhile, so that a collector leaves its data alone; for jobs that have
    no claim. Where the store refuses to write one, the load goes on without. When a load fails and its commit turns out
    to be retired, another is picked and loaded from the start. Raises what `pick` and `load` raise; StateInvalid where
    an attempt has left the state a mix and no other commit could be picked.
    """
    mixed: StateInvalid | None = None
    while True:
        try:
            record = pick()
        except CkptError as error:
            if mixed is None:
                raise
            raise mixed from error
        if record is None:
            if mixed is not None:
                raise mixed
            return None
        with contextlib.ExitStack() as holding:
            if leased:
                if session.comm.rank == 0:
                    with contextlib.suppress(StoreError):
                        holding.enter_context(lease(session.store, record.number, "load"))
                if _is_retired(session, record):  # after the lease: see `ckpt.store.leases`
                    continue
            try:
                return load(record)
            except (CorruptCheckpoint, StateInvalid, StoreError) as error:
                if not session.comm.agreed(error) or not _is_retired(session, record):
                    raise
                mixed = error if isinstance(error, StateInvalid) else mixed


def _is_retired(session: Session, record: Record) -> bool:
    """Collective."""
    comm = session.comm
    found: bytes | None = None
    with comm.phase("load: is the step retired"):
        if comm.rank == 0:
            found = b"retired" if record.number in session.log.read().retired else b"live"
    return comm.broadcast(found, "load: is the step retired") == b"retired"
