"""The event log: what a job did to its checkpoints, one line of JSON for each event.

The schema is in docs/operations.md. Rank 0 appends; a line goes to the system in one write, so a kill can cut the last
line at most, and the next job begins a new one.
"""

from __future__ import annotations

import datetime
import json
import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ckpt.errors import CkptError

log = logging.getLogger("ckpt")


class EventLog:
    """A file that events are appended to; None drops them. Any thread may write.

    The log only tells of the run, and never stops it: where a line cannot be written, that is logged as an error
    (logger `ckpt`), and the line is lost.
    """

    def __init__(self, path: str | os.PathLike[str] | None) -> None:
        """Makes the file and its folder if need be. Raises CkptError where it cannot be opened."""
        self._lock = threading.Lock()
        self._file = -1
        if path is None:
            return
        try:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
            size = os.fstat(self._file).st_size
            if size and os.pread(self._file, 1, size - 1) != b"\n":  # the last job was killed in the middle of a line
                os.write(self._file, b"\n")
        except OSError as error:
            self.close()
            raise CkptError(f"events: cannot append to {path}: {error.strerror}; give a path that can be") from error

    def write(self, event: str, step: int | None, **facts: Any) -> None:
        """Appends a line with the time, the event's name, its step, and what else is known."""
        line = json.dumps({"time": _now(), "event": event, "step": step, **facts}).encode() + b"\n"
        with self._lock:
            if self._file < 0:
                return
            try:
                written = os.write(self._file, line)
                if written < len(line):  # no more room: what comes next must not be joined to it
                    os.ftruncate(self._file, os.fstat(self._file).st_size - written)
                    raise OSError(None, "only a part of the line was taken")
            except OSError as error:
                log.error("the event %s of step %s could not be logged: %s", event, step, error.strerror)

    def close(self) -> None:
        """May be called twice; later events are dropped."""
        with self._lock:
            if self._file >= 0:
                os.close(self._file)
                self._file = -1


def read_events(path: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """The events of a log, oldest first, without lines that a kill has cut."""
    with open(path, "rb") as file:
        for line in file:
            try:
                yield json.loads(line)
            except ValueError:
                continue


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
