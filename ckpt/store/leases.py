"""Leases: who is using a commit, so that its data is not deleted meanwhile. The only objects that are overwritten.

`leases/<id>.json` names a commit, a purpose and when it expires; whoever holds it renews it. Without an expiry it is a
mark, which keeps the commit until somebody takes it away. Nobody needs a claim for either.

A reader makes its lease first and then reads the log; a collector appends the retire first and then reads the leases.
So the reader sees the retire and takes another commit, or the collector sees the lease and leaves the data alone:
whatever their clocks say, as long as they differ by less than MARGIN.
"""

from __future__ import annotations

import calendar
import contextlib
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ckpt.errors import CorruptCheckpoint, NothingCommitted, StoreError
from ckpt.state.values import canonical_json, parse_json
from ckpt.store.log import FORMAT, Log, Record, check_format, no_step
from ckpt.store.objects import NotFound, ObjectStore

MARGIN = 60.0  # seconds by which the clocks of two machines may differ
SECONDS = 300.0  # that a lease lasts unless it is renewed; it is, five times as often
_TIME = "%Y-%m-%dT%H:%M:%SZ"


@dataclass(frozen=True)
class Lease:
    """key: its object. commit: number of the record. expires: seconds since 1970, or None for a mark."""

    key: str
    commit: int
    purpose: str
    expires: float | None

    def holds(self, now: float) -> bool:
        """Whether it still counts, were this clock ahead of its holder's by MARGIN."""
        return self.expires is None or now <= self.expires + MARGIN


def stamp(seconds: float) -> str:
    """A time as it stands in records: UTC, whole seconds, rounded up."""
    return time.strftime(_TIME, time.gmtime(-(-seconds // 1)))


def moment(text: object) -> float | None:
    """Inverse of `stamp`; None for anything else."""
    try:
        return float(calendar.timegm(time.strptime(str(text), _TIME)))
    except ValueError:
        return None


def read_leases(store: ObjectStore) -> list[Lease]:
    """All leases, expired ones too. Raises CorruptCheckpoint for an object that is none: it might hold anything."""
    found = []
    for key in store.list("leases/"):
        with contextlib.suppress(NotFound):  # given back meanwhile
            data = store.get(key)
            if data or not store.blanks:  # a blank was never a lease
                found.append(_parse(data, key, store.url))
    return found


def held(leases: list[Lease], now: float) -> dict[int, str]:
    """Commits that leases hold, with what for."""
    return {lease.commit: lease.purpose for lease in leases if lease.holds(now)}


@contextlib.contextmanager
def lease(
    store: ObjectStore,
    commit: int,
    purpose: str,
    *,
    seconds: float = SECONDS,
    clock: Callable[[], float] = time.time,
) -> Iterator[Lease]:
    """Holds a commit while the body runs, renewing from a thread. The body must read the log once more before it relies
    on the commit, and leave it if that is retired.

    Raises StoreError where the lease cannot be made. A renewal that fails is tried again until the lease has expired;
    then the data may go, and whoever reads it finds that out as a missing object.
    """
    key = f"leases/{secrets.token_hex(16)}.json"
    made = _put(store, key, commit, purpose, clock() + seconds)
    over = threading.Event()

    def renew() -> None:
        while not over.wait(seconds / 5):
            with contextlib.suppress(StoreError):
                _put(store, key, commit, purpose, clock() + seconds)

    renewing = threading.Thread(target=renew, name="ckpt lease", daemon=True)
    renewing.start()
    try:
        yield made
    finally:
        over.set()
        renewing.join()
        with contextlib.suppress(StoreError):  # it expires
            store.delete([key])


def mark(store: ObjectStore, log: Log, step: int) -> Record:
    """Keeps the commit of a step of the newest lineage until `unmark`; may be called again. Returns the commit.

    Raises NothingCommitted where there is no such step, or it was retired meanwhile. A collector that is retiring this
    very commit at this moment may still do so; its data is kept then, but the step is not offered."""
    record = _of_step(log, step, store.url)
    _put(store, _mark_key(record), record.number, f"marked by {socket.gethostname()}", None)
    if record.number in log.read().retired:
        store.delete([_mark_key(record)])
        raise NothingCommitted(f"{store.url}: step {step} was retired before it was marked; mark another step")
    return record


def unmark(store: ObjectStore, log: Log, step: int) -> Record:
    """Takes the mark of a step of the newest lineage away; nothing happens if it has none. Returns the commit."""
    record = _of_step(log, step, store.url)
    store.delete([_mark_key(record)])
    return record


def _of_step(log: Log, step: int, url: str) -> Record:
    history = log.read()
    record = history.newest(step)
    if record is None:
        raise no_step(url, step, history.lineage())
    return record


def _mark_key(record: Record) -> str:
    return f"leases/mark-{record.number:012d}.json"


def _put(store: ObjectStore, key: str, commit: int, purpose: str, expires: float | None) -> Lease:
    document = {
        "format": FORMAT,
        "commit": commit,
        "purpose": purpose,
        "expires": None if expires is None else stamp(expires),
        "host": socket.gethostname(),
        "pid": os.getpid(),
    }
    store.put(key, canonical_json(document))
    return Lease(key, commit, purpose, expires)


def _parse(data: bytes, key: str, url: str) -> Lease:
    where = f"{url}/{key}"
    document = parse_json(data, where)
    if not isinstance(document, dict) or not re.fullmatch(r"leases/[0-9a-z-]+\.json", key):
        raise CorruptCheckpoint(f"{where}: not a lease; delete it unless somebody is reading")
    check_format(document, where)
    commit, expires = document.get("commit"), document.get("expires")
    if type(commit) is not int or (expires is not None and moment(expires) is None):
        raise CorruptCheckpoint(f"{where}: a malformed lease; delete it unless somebody is reading")
    return Lease(key, commit, str(document.get("purpose", "in use")), None if expires is None else moment(expires))
