"""Copying on to the durable root what a job has committed to its fast one, from a thread of rank 0."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from ckpt.errors import NothingCommitted
from ckpt.store.copying import Copied, Side, copy_commit
from ckpt.store.log import Log, Record
from ckpt.store.objects import open_store
from ckpt.store.transfer import Stopped

Told: TypeAlias = Callable[[Copied | Exception, float], None]

_THREADS = 2  # beside the training, whose processors these are


class Draining:
    """The thread, and the one commit that waits for it: a newer one takes its place. For rank 0.

    It has stores and logs of its own for each copy, holds no tensors of the job, and takes no part in collectives. It
    may be killed with the process at any moment: what it has not committed is not there.
    """

    def __init__(self, fast: str, durable: str, storage_options: Mapping[str, Any] | None, told: Told) -> None:
        """fast, durable: the roots; storage_options: of the durable one. told: is given, in the thread, what each copy
        did or why it failed, and its seconds."""
        self._fast, self._durable, self._options, self._told = fast, durable, storage_options, told
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._following: threading.Thread | None = None
        self._waiting: int | None = None
        self._asked: int | None = None
        self._copied: int | None = None
        self._error: Exception | None = None

    def drain(self, number: int, claim: str) -> None:
        """Has commit `number` of the fast log copied under this job's claim; returns at once. Should another one still
        wait, it is not copied any more. May be called again for the same commit: it is copied once, or tried again."""
        with self._lock:
            known = self._asked is not None and number <= self._asked
            if known and (number != self._asked or self._thread is not None or self._copied == number):
                return
            self._waiting = self._asked = number
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, args=(claim,), name="ckpt drain", daemon=True)
                self._thread.start()

    def follow(self, committed: Callable[[], Record | None], claim: str) -> None:
        """Has a commit copied once it is there: `committed` waits for it, and gives None if there will be none."""

        def wait() -> None:
            record = committed()
            if record is not None:
                self.drain(record.number, claim)

        self._following = threading.Thread(target=wait, name="ckpt drain next", daemon=True)
        self._following.start()

    def error(self) -> Exception | None:
        """What went wrong since this was last asked."""
        with self._lock:
            error, self._error = self._error, None
        return error

    def wait(self, seconds: float | None = None) -> bool:
        """Waits until nothing is being written or copied, well or not, or for so many seconds. Says whether it has
        ended. What is followed must end by itself."""
        end = None if seconds is None else time.monotonic() + seconds
        # What is followed asks for a copy as it ends, so that thread is looked for after it.
        return _ended(self._following, end) and _ended(self._thread, end)

    @property
    def done(self) -> bool:
        """Whether the commit that was last asked for is in the durable root."""
        return self._copied == self._asked

    def stop(self) -> None:
        """Has the thread end after the objects that it is moving."""
        self._stopping.set()

    def _work(self, claim: str) -> None:
        while (number := self._next()) is not None:
            begun = time.perf_counter()
            try:
                source, target = self._side(self._fast, None), self._side(self._durable, self._options)
                done = copy_commit(
                    source, number, target, claim, branch=True, threads=_THREADS, stop=self._stopping.is_set
                )
                self._copied = number
            except Stopped:
                continue
            except Exception as error:  # raised where the trainer next asks
                with self._lock:
                    if isinstance(error, NothingCommitted) and self._waiting is not None:
                        continue
                    self._error = error
                self._told(error, time.perf_counter() - begun)
            else:
                self._told(done, time.perf_counter() - begun)

    @staticmethod
    def _side(url: str, options: Mapping[str, Any] | None) -> Side:
        store = open_store(url, options)
        return Side(store, Log(store))

    def _next(self) -> int | None:
        """What to copy now; if nothing, the thread counts as ended."""
        with self._lock:
            number, self._waiting = self._waiting, None
            if number is None or self._stopping.is_set():
                self._thread = None
                return None
            return number


def _ended(thread: threading.Thread | None, end: float | None) -> bool:
    if thread is not None:
        thread.join(None if end is None else max(0.0, end - time.monotonic()))
    return thread is None or not thread.is_alive()
