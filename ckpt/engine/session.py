"""What one rank needs to work on one checkpoint root, and the clock of an operation's phases."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import tensorstore as ts
import torch

from ckpt.engine.faults import FaultPoint, no_faults
from ckpt.engine.group import Group
from ckpt.geometry import Plan
from ckpt.store.log import Log
from ckpt.store.objects import ObjectStore

MIB = 1 << 20


def no_progress(done: int, total: int) -> None:
    """The default: nobody wants to know."""


@dataclass
class Session:
    """store, kvstore: the root, for small objects and for TensorStore. budget: bytes that a rank may own, send or
    receive in a round of a plan; a save or load holds a small multiple of it. progress: told how many bytes of stored
    objects this rank has written or read, of how many it will, in the thread that does so; it must not raise."""

    store: ObjectStore
    kvstore: Mapping[str, Any]
    log: Log
    comm: Group
    context: ts.Context
    faults: FaultPoint = no_faults
    budget: int = 16 * MIB
    progress: Callable[[int, int], None] = no_progress


class Phases:
    """Seconds spent in each named phase of an operation."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._begin = time.perf_counter()

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    @property
    def total(self) -> float:
        return time.perf_counter() - self._begin


class Buffers:
    """Host buffers that are used again: fresh memory costs a page fault for every 4 KiB."""

    def __init__(self) -> None:
        self._free: list[torch.Tensor] = []
        self._lent: dict[int, torch.Tensor] = {}  # by address

    def take(self, nbytes: int) -> torch.Tensor:
        """A buffer of exactly this many bytes (uint8), with any content."""
        fitting = [i for i, b in enumerate(self._free) if nbytes <= b.numel() <= 2 * nbytes]
        whole = self._free.pop(fitting[0]) if fitting else torch.empty(nbytes, dtype=torch.uint8)
        self._lent[whole.data_ptr()] = whole
        return whole[:nbytes]

    def give(self, buffer: torch.Tensor) -> None:
        """Hands a buffer back, or any view that starts where it starts; nothing may refer to it any more. What was not
        taken here is left alone."""
        whole = self._lent.pop(buffer.data_ptr(), None)
        if whole is not None:
            self._free.append(whole)


class Done:
    """How many bytes of the objects that a rank owns in a plan are done, as its session is told."""

    def __init__(self, session: Session, plan: Plan) -> None:
        self._session, self._done = session, 0
        self._total = sum(u.nbytes for units in plan.rounds for u in units if u.owner == session.comm.rank)
        session.progress(0, self._total)

    def add(self, nbytes: int) -> None:
        self._done += nbytes
        self._session.progress(self._done, self._total)


@dataclass
class InFlight:
    """Started reads or writes, bounded by the bytes they hold: adding waits for the oldest until there is room."""

    limit: int
    _queue: list[tuple[int, Callable[[], Any]]] = field(default_factory=list)
    _held: int = 0

    def add(self, nbytes: int, finish: Callable[[], Any]) -> None:
        while self._queue and self._held + nbytes > self.limit:
            self._finish_one()
        self._queue.append((nbytes, finish))
        self._held += nbytes

    def drain(self) -> None:
        while self._queue:
            self._finish_one()

    def _finish_one(self) -> None:
        nbytes, finish = self._queue.pop(0)
        self._held -= nbytes
        finish()
