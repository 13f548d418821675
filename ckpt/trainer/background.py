"""Asynchronous saves of one Checkpointer on one rank: staged here, written by this node's agent, one at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from ckpt import errors
from ckpt.agent.client import AgentLink
from ckpt.engine.group import Group
from ckpt.engine.staging import SharedMemory, Staged, Staging
from ckpt.errors import CkptError
from ckpt.state.captured import Captured
from ckpt.state.values import Json, canonical_json, parse_json
from ckpt.store.log import Record
from ckpt.trainer.overlap import Overlap, owned
from ckpt.trainer.results import Receipt


@dataclass
class Written:
    """How much of a save is in the store, as its agent tells it."""

    fraction: float = 0.0

    def tell(self, fraction: float) -> None:
        self.fraction = fraction


class PendingSave:
    """A save that goes on in the background. step: that is saved; staged: bytes of tensors that this rank hands over;
    stall: seconds that the call took the trainer."""

    def __init__(
        self,
        step: int,
        staged: int,
        stall: float,
        future: Future[Json],
        written: Written,
        overlap: Overlap | None = None,
    ) -> None:
        self.step, self.staged, self.stall = step, staged, stall
        self._future, self._written, self._overlap = future, written, overlap
        self._seen = False

    def captured(self) -> None:
        """Waits until all of the state is copied and handed over; after that it may change at will. Only a save with
        overlap can make it wait. The steps of the state's optimizers do so by themselves; for whatever else changes
        their tensors. Not collective; raises nothing."""
        if self._overlap is not None:
            self._overlap.wait()

    def release(self) -> None:
        """Lets the optimizers go, once all is captured. For the thread that steps them."""
        if self._overlap is not None:
            self._overlap.wait()
            self._overlap.release()

    @property
    def progress(self) -> float:
        """The fraction, from 0.0 to 1.0, of the bytes that this rank writes that were in the store when its agent last
        told, some ten times a second. It is 1.0 when the save is committed, and stays where it was when the save fails.
        Not collective; does not wait."""
        committed = self._future.done() and self._error(None) is None
        return 1.0 if committed else self._written.fraction

    def done(self) -> bool:
        """Whether it has ended, well or not. Not collective."""
        return self._future.done()

    def result(self, timeout: float | None = None) -> Receipt:
        """Waits for the commit. Not collective. Raises what a blocking save would raise, or TimeoutError; an error that
        some rank has not asked for is raised again by the next save, load or close."""
        outcome = self._outcome(timeout)
        self._seen = True
        if isinstance(outcome, CkptError):
            raise outcome
        return outcome

    def when_done(self, tell: Callable[[Receipt | CkptError], None]) -> None:
        """Has a function called with the outcome, in this thread if it is there, else in another. It must not raise.
        Nobody counts as having asked for an error by that."""
        self._future.add_done_callback(lambda _: tell(self._outcome(None)))

    def _outcome(self, timeout: float | None) -> Receipt | CkptError:
        error = self._error(timeout)
        if error is not None:
            return error
        answer = self._answer(timeout)
        return Receipt(
            self.step,
            str(answer["record"][1]["state_id"]),
            answer["bytes"],
            answer["seconds"],
            {"stall": self.stall, **answer["phases"]},
            answer["plan"],
            lambda: list(answer["contents"]),
        )

    def exception(self, timeout: float | None = None) -> CkptError | None:
        """Waits for the end and gives the error, or None. Not collective."""
        error = self._error(timeout)
        self._seen = True
        return error

    def _error(self, timeout: float | None) -> CkptError | None:
        try:
            answer = self._answer(timeout)
        except CkptError as error:
            return error
        if "error" not in answer:
            return None
        kind, message = answer["error"]
        made: CkptError = getattr(errors, kind)(f"the save of step {self.step} in the background failed: {message}")
        return made

    def _answer(self, timeout: float | None) -> Any:
        return self._future.result(timeout)

    def unseen(self) -> CkptError | None:
        """Waits for the end; the error that nobody on this rank has asked for."""
        return None if self._seen else self._error(None)

    def record(self) -> Record | None:
        """The commit, once it is there."""
        return None if self._error(None) is not None else Record(*self._answer(None)["record"])


class Background:
    """Staging memory, the agent, and the save that is under way."""

    def __init__(
        self,
        comm: Group,
        url: str,
        storage_options: Mapping[str, Any] | None,
        threads: int,
        metrics: tuple[str, int] | None = None,
    ) -> None:
        """metrics: host and port at which each agent serves metrics, as `metrics_address` gives them."""
        self.url = url
        self._comm, self._options, self._threads, self._metrics = comm, storage_options, threads, metrics
        self._memory: SharedMemory | None = None
        self._link: AgentLink | None = None
        self._pending: PendingSave | None = None

    @property
    def busy(self) -> bool:
        """Whether a save is still being written, as far as this rank knows."""
        return self._pending is not None and not self._pending.done()

    @property
    def step(self) -> int | None:
        """The step that is being written, as far as this rank has asked."""
        return None if self._pending is None else self._pending.step

    def start(self) -> None:
        """Collective. Starts agents where there are none, so that the first save need not wait for them."""
        if self._link is None:
            self._link = AgentLink(
                self._comm,
                self.url,
                self._options,
                timeout=self._comm.timeout,
                threads=self._threads,
                metrics=self._metrics,
            )

    def submit(self, captured: Captured, begun: float, message: Mapping[str, Json], overlap: bool) -> PendingSave:
        """Collective. Stages a captured state and hands it to the agent. Nothing else may be under way. begun: when the
        call began, of `time.perf_counter`. overlap: whether what optimizers own is copied, and all handed over, later
        in a thread."""
        self.start()
        link, written = self._link, Written()
        assert link is not None and self._pending is None
        with self._comm.phase("save: stage"):
            self._memory = memory = self._memory or SharedMemory()
            staging = Staging(captured, memory, owned(captured) if overlap else lambda shard: False)
            staged = None if overlap else staging.finish()

        def hand_over(staged: Staged | CkptError) -> Future[Json]:
            return link.submit(message, staged, memory, written.tell)

        beside: Overlap | None = None
        if staged is None:
            beside = Overlap(staging, captured.optimizers, hand_over)
            future = beside.future
        else:
            future = hand_over(staged)
        stall = time.perf_counter() - begun
        self._pending = PendingSave(int(message["step"]), staging.nbytes, stall, future, written, beside)
        return self._pending

    @property
    def failed(self) -> bool:
        """Whether the save under way has failed, and nobody on this rank has asked for it."""
        return self._pending is not None and self._pending.done() and self._pending.unseen() is not None

    def settle(self) -> tuple[Record, Receipt | None] | None:
        """Collective. Waits for the save under way, and gives its commit, the same on every rank, and its receipt where
        this rank has one. Raises its error on every rank if any rank has not asked for it. After an error the next save
        has new agents.

        Ranks may have met different ends: an agent that dies when the commit is there leaves its own ranks without an
        answer."""
        pending, self._pending = self._pending, None
        if pending is None:
            return None
        pending.release()
        try:
            with self._comm.phase("save: wait for the one before"):
                error = pending.unseen()
                if error is not None:
                    raise error
                mine = pending.record()
            told = self._comm.all_gather(canonical_json(mine and [mine.number, mine.document]), "save: how it ended")
        except BaseException:
            self._drop()
            raise
        records = [parse_json(document, "save: how it ended") for document in told]
        if None in records:
            self._drop()
        committed = next((Record(*record) for record in records if record is not None), None)
        return None if committed is None else (committed, None if mine is None else pending.result())

    def _drop(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            link.close()

    def close(self) -> CkptError | None:
        """Not collective. Waits for the save under way and gives its error, if nobody here has asked for it."""
        error: CkptError | None = None
        if self._pending is not None:
            self._pending.release()
            error = self._pending.unseen()
        self._pending = None
        self._drop()
        if self._memory is not None:
            self._memory.close()
            self._memory = None
        return error


def metrics_address(host: str, port: int) -> tuple[str, int]:
    """Where agents serve metrics. Raises CkptError for what is no port."""
    if type(port) is not int or not 0 < port < 1 << 16:
        raise CkptError(f"metrics_port {port!r} is no port; give a number from 1 to 65535")
    return host, port
