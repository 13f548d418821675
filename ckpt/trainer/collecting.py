"""Retention of one running job: after commits, rank 0 collects the root from a thread beside the training."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from ckpt.engine.group import Group
from ckpt.errors import Fenced
from ckpt.store.collect import Collected, Collector
from ckpt.store.log import Log
from ckpt.store.objects import open_store
from ckpt.store.retention import Keep


class Collecting:
    """What a Checkpointer keeps, and the thread that sees to it. keep: None collects nothing.

    The thread has a store and a log of its own, holds no tensors, and takes no part in collectives. It may be killed
    with the process at any moment: whoever collects next finds the rest.
    """

    def __init__(
        self,
        comm: Group,
        keep: Keep | None,
        url: str,
        storage_options: Mapping[str, Any] | None,
        told: Callable[[Collected | Exception, float], None] = lambda outcome, seconds: None,
    ) -> None:
        """told: is given, in the thread, what each run did or why it failed, and its seconds."""
        self._comm, self._keep, self._told = comm, keep, told
        self._url, self._options = url, storage_options
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._collector: Collector | None = None
        self._asked = False
        self._stopping = threading.Event()
        self._error: Exception | None = None

    def collect(self, claim: str) -> None:
        """Collective; call it after a commit of this job, whose claim is given. Returns at once: rank 0 begins to
        collect, or goes on to do so once more where it still is. Raises on every rank what went wrong since the last
        call, Fenced for one."""
        if self._keep is None:
            return
        with self._comm.phase("collect"):
            if self._comm.rank == 0:
                self._raise()
                self._begin(claim, self._keep)

    def wait(self) -> None:
        """Not collective. Waits until nothing is being collected; called before a load, which may want what a rule
        would let go."""
        thread = self._thread
        if thread is not None:
            thread.join()

    def close(self, claim: str | None = None) -> Exception | None:
        """Not collective; safe to call twice. Ends the thread, and gives its error if nobody has met it.

        claim: of this job, which then collects once more for its last commit, unless another job has taken the root
        over by now and sees to that itself. None if there is no time for it: the thread ends after the batch under
        way."""
        if claim is not None and self._keep is not None and self._comm.rank == 0 and not self._stopping.is_set():
            self._begin(claim, self._keep)
            self.wait()
            if isinstance(self._error, Fenced):
                self._error = None
        self._stopping.set()
        self.wait()
        error, self._error = self._error, None
        return error

    def _raise(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _begin(self, claim: str, keep: Keep) -> None:
        if self._collector is None:
            store = open_store(self._url, self._options)
            self._collector = Collector(store, Log(store), claim, keep, stop=self._stopping.is_set)
        with self._lock:
            self._asked = True
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, args=(self._collector,), name="ckpt collect")
                self._thread.daemon = True
                self._thread.start()

    def _work(self, collector: Collector) -> None:
        begun = time.perf_counter()
        try:
            while self._again():
                begun = time.perf_counter()
                done = collector.run()
                self._told(done, time.perf_counter() - begun)
        except Exception as error:  # raised where the trainer next asks
            self._told(error, time.perf_counter() - begun)
            with self._lock:
                self._error, self._thread = error, None

    def _again(self) -> bool:
        """Whether there is more to do; if not, the thread counts as ended."""
        with self._lock:
            more, self._asked = self._asked and not self._stopping.is_set(), False
            if not more:
                self._thread = None
            return more
