"""Signals and polls that say that this job must end soon."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

from ckpt.errors import CkptError

CODE = 75  # EX_TEMPFAIL of sysexits.h: try again later


class Preempted(SystemExit):
    """Raised by `Checkpointer.after_step` once the last step is committed, so that the process ends with code 75."""

    def __init__(self, step: int) -> None:
        super().__init__(CODE)
        self.step = step

    def __str__(self) -> str:
        return f"preempted; step {self.step} is committed"


class Notice:
    """Whether this rank has been told to end, by a signal or by the user's poll; and since when."""

    def __init__(self, signals: Sequence[signal.Signals], poll: Callable[[], bool] | None) -> None:
        self._signals, self._poll = signals, poll
        self._before: dict[signal.Signals, Any] = {}
        self._since: float | None = None

    def install(self) -> None:
        """Takes the signals over, once. Raises CkptError outside of the main thread, where Python cannot."""
        if self._before or not self._signals:
            return
        if threading.current_thread() is not threading.main_thread():
            raise CkptError(
                "after_step must be called from the main thread to catch signals; or give the Checkpointer signals=()"
            )
        for number in self._signals:
            self._before[number] = signal.signal(number, self._caught)

    def _caught(self, number: int, frame: FrameType | None) -> None:
        self._since = self._since or time.monotonic()

    def given(self) -> bool:
        """Looks, and remembers."""
        if self._since is None and self._poll is not None and self._poll():
            self._since = time.monotonic()
        return self._since is not None

    def elapsed(self) -> float:
        """Seconds since this rank was told; 0 if it was not."""
        return 0.0 if self._since is None else time.monotonic() - self._since

    def restore(self) -> None:
        """Gives the signals back to whoever had them."""
        while self._before:
            number, handler = self._before.popitem()
            if threading.current_thread() is threading.main_thread():
                signal.signal(number, handler if handler is not None else signal.SIG_DFL)
