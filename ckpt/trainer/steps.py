"""What happens after each step of training: saves by schedule, and one last save when the job must end.

All ranks decide alike. Each tells the others after a step what it has seen, without waiting for them, and acts after
the next step on what all had seen: a signal that reaches some ranks only, or at different times, is acted on by all of
them after the same step.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from ckpt.engine.comm import Comm, Ticket
from ckpt.errors import CkptError
from ckpt.state import State
from ckpt.trainer.background import PendingSave
from ckpt.trainer.preemption import Notice, Preempted
from ckpt.trainer.results import Receipt

log = logging.getLogger("ckpt")


@dataclass(frozen=True)
class Schedule:
    """When to save: every so many steps, or seconds by rank 0's clock, or both. grace: seconds from a notice to the end
    of the process."""

    every_steps: int | None
    every_seconds: float | None
    grace: float

    def __post_init__(self) -> None:
        """Raises CkptError for an interval that is none."""
        for name, every in (("every_steps", self.every_steps), ("every_seconds", self.every_seconds)):
            if every is not None and not every > 0:
                raise CkptError(f"{name}={every!r} must be positive; leave it out to save by no such interval")


@dataclass
class Steps:
    """The schedule of one Checkpointer on this rank. save: stages a step and hands it over; settle: waits for the save
    under way, raises its error, and if told to lets retention go on; failed: whether that save has failed and nobody
    has asked yet; told: is given the last step of a job that must end, and the seconds that it has left; saved: whether
    a step is the last that was committed, or is being written, by whatever call."""

    comm: Comm
    schedule: Schedule
    notice: Notice
    save: Callable[[int, State], PendingSave]
    settle: Callable[[bool], Receipt | None]
    failed: Callable[[], bool]
    told: Callable[[int, float], None]
    saved: Callable[[int], bool]
    _ticket: Ticket | None = None
    _last: float = field(default_factory=time.monotonic)
    _slow: bool = False

    def after(self, step: int, state: State) -> PendingSave | None:
        """Collective; see `Checkpointer.after_step`."""
        self.notice.install()
        ticket, self._ticket = self._ticket, None
        told = [False] * 3 if ticket is None else self.comm.finish_any(ticket, "after_step")
        preempted, due, failed = told
        if preempted:
            self._end(step, state)
        if failed:
            self.settle(True)
        every = self.schedule.every_steps
        wanted = due or (every is not None and step % every == 0)
        pending = self._save(step, state) if wanted and not self.saved(step) else None
        self._ticket = self.comm.start_any([self.notice.given(), self._due(), self.failed()])
        return pending

    def _due(self) -> bool:
        every = self.schedule.every_seconds
        return every is not None and self.comm.rank == 0 and time.monotonic() - self._last >= every

    def _save(self, step: int, state: State) -> PendingSave:
        receipt = self.settle(True)
        if receipt is not None:
            self._judge(receipt)
        self._last = time.monotonic()
        return self.save(step, state)

    def _end(self, step: int, state: State) -> None:
        """The last save, and the end. What retention has to say must not come between, and no more what became of the
        save before: that is logged."""
        left = max(0.0, self.schedule.grace - self.notice.elapsed())
        log.warning("told to end: saving step %d with %.0f s of %.0f s left", step, left, self.schedule.grace)
        self.told(step, left)
        try:
            self.settle(False)
        except CkptError as error:
            if not self.comm.agreed(error):
                raise
            log.error("before the last save: %s", error)
        if not self.saved(step):
            self._save(step, state)
            self.settle(False)
        raise Preempted(step)

    def _judge(self, receipt: Receipt) -> None:
        """Says early, and once, that the grace is too short: a job may be told to end when a save has just begun, which
        must be over before the last one begins."""
        if 2 * receipt.seconds > self.schedule.grace and not self._slow:
            self._slow = True
            log.warning(
                "the save of step %d took %.1f s: a job that is told to end needs twice that where a save is under way "
                "and has a grace of %.0f s; it may be killed before its last step is committed: ask the scheduler for "
                "more, or save more often",
                receipt.step,
                receipt.seconds,
                self.schedule.grace,
            )
