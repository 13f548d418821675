"""Which agents of this user run on this machine, and for which root, so that a new job waits for what the last staged.

One file for each agent, named by its process id, with the name of its socket and its root. A file whose agent is gone
is deleted by whoever meets it.
"""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ckpt.agent import wire
from ckpt.errors import CkptError, RankFailed
from ckpt.state.values import canonical_json, parse_json

_ANSWER = 2.0  # seconds in which an agent says what it is doing


@dataclass(frozen=True)
class Entry:
    """A running agent: its process id, its root, and the abstract Unix socket that it listens to."""

    pid: int
    url: str
    name: str


def add(entry: Entry) -> None:
    """Notes an agent that was started."""
    folder = _folder()
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise CkptError(f"{folder} belongs to another user; remove it, or set TMPDIR to a folder of yours")
    (folder / str(entry.pid)).write_bytes(canonical_json([entry.url, entry.name]))


def running() -> Iterator[Entry]:
    """The agents that run, of all roots. Forgets those that are gone."""
    for file in sorted(_folder().glob("*")):
        with contextlib.suppress(OSError, ValueError, CkptError):
            url, name = parse_json(file.read_bytes(), str(file))
            sock = _connected(name, _ANSWER)
            if sock is None:
                file.unlink(missing_ok=True)
                continue
            sock.close()
            yield Entry(int(file.name), url, name)


def idle(entry: Entry, timeout: float) -> bool:
    """Waits until an agent has nothing to write, or is gone; False if it has after `timeout` seconds."""
    sock = _connected(entry.name, timeout)
    if sock is None:
        return True
    with sock:
        try:
            wire.send(sock, {"kind": "wait"})
            wire.receive(sock)
        except wire.Closed as error:
            return not isinstance(error.__cause__, TimeoutError)
    return True


def wait_for_others(url: str, timeout: float) -> None:
    """Waits until no agent of this machine that an earlier job started is writing to a root.

    Raises RankFailed naming its process when that takes longer than `timeout` seconds."""
    deadline = time.monotonic() + timeout
    for entry in running():
        if entry.url == url and not idle(entry, max(0.01, deadline - time.monotonic())):
            raise RankFailed(
                f"{url}: an agent of an earlier job (process {entry.pid}) has been writing for more than "
                f"{timeout:.0f} s; wait for it, or end it: what it has not committed is lost then"
            )


def _connected(name: str, timeout: float) -> socket.socket | None:
    """A connection to an agent; None if it is gone."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(timeout)
    try:
        sock.connect(f"\0{name}")
    except OSError:
        sock.close()
        return None
    return sock


def _folder() -> Path:
    return Path(tempfile.gettempdir()) / f"ckpt-agents-{os.getuid()}"
