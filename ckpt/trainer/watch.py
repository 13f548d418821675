"""What is told about the saves and loads of one Checkpointer: events for a log, and progress on rank 0."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from typing import Any

from ckpt.engine.session import no_progress
from ckpt.errors import CkptError
from ckpt.store.collect import Collected
from ckpt.store.copying import Copied
from ckpt.trainer.background import PendingSave
from ckpt.trainer.events import EventLog
from ckpt.trainer.progress import Report, showing
from ckpt.trainer.results import Receipt, Restored

_SOON = 5.0  # seconds in which the thread that learned of a save's end has told of it


class Watch:
    """One rank's; those other than 0 tell nothing. Nothing here is collective."""

    def __init__(self, rank: int, events: str | os.PathLike[str] | None, progress: bool) -> None:
        """Raises CkptError where the log of events cannot be opened."""
        self._events = EventLog(events if rank == 0 else None)
        self._progress = progress and rank == 0
        self._report: Report = no_progress
        self._told = threading.Event()  # that the last asynchronous save has ended
        self._told.set()

    def close(self) -> None:
        """Call it when no save is under way; may be called twice."""
        self._told.wait(_SOON)
        self._events.close()

    def progress(self, done: int, total: int) -> None:
        """Bytes done of a save or load under way, and bytes in all; what a `Session` is given as its `progress`."""
        self._report(done, total)

    @contextlib.contextmanager
    def saving(self, step: int, *, blocking: bool) -> Iterator[None]:
        """Around a save, or the part of an asynchronous one that the trainer waits for."""
        self._events.write("save.begun", step, blocking=blocking)
        with self._failing("save.failed", step), self._shown(f"save step {step}", blocking):
            yield

    def saved(self, receipt: Receipt) -> Receipt:
        """A blocking save is committed."""
        self._committed(receipt, receipt.seconds)
        return receipt

    def staged(self, pending: PendingSave) -> PendingSave:
        """An asynchronous save goes on in the background; its end is told as soon as this rank learns of it."""
        self._events.write("save.staged", pending.step, bytes=pending.staged, stall=_round(pending.stall))
        self._told.clear()
        pending.when_done(lambda outcome: self._ended(pending, outcome))
        return pending

    def _ended(self, pending: PendingSave, outcome: Receipt | CkptError) -> None:
        if isinstance(outcome, CkptError):
            self._events.write("save.failed", pending.step, error=_error(outcome))
        else:
            self._committed(outcome, pending.stall)
        self._told.set()

    def _committed(self, receipt: Receipt, stall: float) -> None:
        self._events.write("save.committed", receipt.step, **_facts(receipt), stall=_round(stall))

    @contextlib.contextmanager
    def loading(self, step: int | None) -> Iterator[None]:
        """Around a load of a step, or of the newest."""
        with self._failing("load.failed", step), self._shown("load" if step is None else f"load step {step}", True):
            yield

    def loaded(self, restored: Restored | None) -> Restored | None:
        """A load has ended; None if there was nothing to load."""
        if restored is None:
            self._events.write("load.empty", None)
        else:
            self._events.write("load.finished", restored.step, **_facts(restored), verified=restored.verified)
        return restored

    def collected(self, outcome: Collected | Exception, seconds: float) -> None:
        """Retention has run once, or failed."""
        if isinstance(outcome, Exception):
            self._events.write("collect.failed", None, error=_error(outcome))
            return
        retired, removed = [record.step for record in outcome.retired], len(outcome.removed)
        self._events.write("collect.finished", None, retired=retired, removed=removed, seconds=_round(seconds))

    def copied(self, outcome: Copied | Exception, seconds: float) -> None:
        """A commit of the fast root is in the durable one, or its copy has failed."""
        if isinstance(outcome, Exception):
            self._events.write("copy.failed", None, error=_error(outcome), seconds=_round(seconds))
            return
        record, nbytes = outcome.record, outcome.record.document["bytes"]
        facts = {"state_id": record.document["state_id"], "bytes": nbytes, "written": outcome.nbytes}
        self._events.write("copy.finished", record.step, **facts, seconds=_round(seconds))

    def preempted(self, step: int, left: float) -> None:
        """The job has been told to end, and saves this step with so many seconds left."""
        self._events.write("preemption", step, seconds_left=_round(left))

    @contextlib.contextmanager
    def _failing(self, event: str, step: int | None) -> Iterator[None]:
        begun = time.perf_counter()
        try:
            yield
        except BaseException as error:
            self._events.write(event, step, seconds=_round(time.perf_counter() - begun), error=_error(error))
            raise

    @contextlib.contextmanager
    def _shown(self, what: str, blocking: bool) -> Iterator[None]:
        if not (self._progress and blocking):
            yield
            return
        with showing(what) as report:
            self._report = report
            try:
                yield
            finally:
                self._report = no_progress


def _facts(done: Receipt | Restored) -> dict[str, Any]:
    phases = {name: _round(seconds) for name, seconds in done.phases.items() if name != "stall"}
    return {"state_id": done.state_id, "bytes": done.bytes, "seconds": _round(done.seconds), "phases": phases}


def _error(error: BaseException) -> dict[str, str]:
    return {"kind": type(error).__name__, "message": str(error)}


def _round(seconds: float) -> float:
    return round(seconds, 6)
