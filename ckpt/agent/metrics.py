"""Metrics of one agent, for Prometheus: what it has written, how long that took, and how it ended.

The names are in docs/operations.md. Counters begin at 0 with each agent; Prometheus knows such resets.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Info, Summary, start_http_server

_RETRY = 1.0  # seconds between two tries to listen
_SAY_AFTER = 30.0  # seconds after which it is said that the port is taken


class Metrics:
    """Any thread may call. Where several ranks of a node write one save, that is counted once, as the first of them
    sees it; bytes are those of all of them."""

    def __init__(self, url: str, first: int) -> None:
        """url: the root; first: the rank of this node that counts saves."""
        self.registry = CollectorRegistry(auto_describe=True)
        self._first = first

        def made(kind: Any, name: str, says: str, *labels: str) -> Any:
            return kind(f"ckpt_{name}", says, labels, registry=self.registry)

        made(Info, "agent", "The root that this agent writes to.").info({"url": url})
        self._bytes = made(Counter, "written_bytes", "Bytes of stored arrays that ranks of this node have written.")
        self._phases = made(Summary, "save_phase_seconds", "Seconds that saves spent in each phase.", "phase")
        self._committed = made(Counter, "saves_committed", "Asynchronous saves that were committed.")
        self._failed = made(Counter, "saves_failed", "Asynchronous saves that failed.")
        self._step = made(Gauge, "last_committed_step", "Step of the newest commit of this agent.")
        self._when = made(Gauge, "last_commit_timestamp_seconds", "When that was committed, in Unix time.")
        self._staged = made(Gauge, "staged_bytes", "Bytes of staged states of this node that are being written.")

    def wrote(self, nbytes: int) -> None:
        """So many more bytes are in the store."""
        self._bytes.inc(nbytes)

    @contextlib.contextmanager
    def saving(self, rank: int, staged: int) -> Iterator[dict[str, Any]]:
        """Around a rank's save of so many staged bytes; the body puts the answer to the trainer into what it gets."""
        answer: dict[str, Any] = {}
        self._staged.inc(staged)
        try:
            yield answer
        finally:
            self._staged.dec(staged)
            if rank == self._first:
                self._count(answer)

    def _count(self, answer: Mapping[str, Any]) -> None:
        if "record" not in answer:
            self._failed.inc()
            return
        self._committed.inc()
        self._step.set(answer["record"][1]["step"])
        self._when.set(time.time())
        for phase, seconds in answer["phases"].items():
            self._phases.labels(phase).observe(seconds)

    def serve(self, host: str, port: int) -> None:
        """Listens from now on, as long as the process lives. Waits in the background for a port that is taken, as by
        the agent of the job before; after a while it says so on standard error, and goes on waiting."""
        threading.Thread(target=self._listen, args=(host, port), name="metrics", daemon=True).start()

    def _listen(self, host: str, port: int) -> None:
        begun, said = time.monotonic(), False
        while True:
            try:
                start_http_server(port, host, self.registry)
                return
            except OSError as error:
                if not said and time.monotonic() - begun > _SAY_AFTER:
                    said = True
                    print(f"ckpt agent: no metrics at {host}:{port} yet: {error}", file=sys.stderr, flush=True)
            time.sleep(_RETRY)
