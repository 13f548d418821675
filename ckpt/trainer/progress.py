"""How far a blocking save or load is: a bar where standard error is a terminal, and lines of logging elsewhere."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Callable, Iterator
from typing import TypeAlias

log = logging.getLogger("ckpt")

EVERY = 30.0  # seconds between two lines
Report: TypeAlias = Callable[[int, int], None]  # bytes done, and bytes in all


def showing(what: str) -> contextlib.AbstractContextManager[Report]:
    """Shows the progress of one operation while the body runs, which tells it what it gets. what: such as "save
    step 20"."""
    return _bar(what) if sys.stderr.isatty() else _lines(what)


@contextlib.contextmanager
def _bar(what: str) -> Iterator[Report]:
    # Here, so that a job that shows nothing does not import it.
    from rich import progress
    from rich.console import Console

    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.DownloadColumn(binary_units=True),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
    )
    with progress.Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextlib.contextmanager
def _lines(what: str) -> Iterator[Report]:
    begun = told = time.monotonic()
    done = total = 0

    def report(now_done: int, now_total: int) -> None:
        nonlocal told, done, total
        done, total = now_done, now_total
        if time.monotonic() - told >= EVERY:
            told = time.monotonic()
            _line(what, done, total, told - begun)

    yield report
    _line(what, done, total, time.monotonic() - begun)


def _line(what: str, done: int, total: int, seconds: float) -> None:
    share = 100 * done // total if total else 100
    log.info("%s: %d %% of %.1f MiB on rank 0 after %.1f s", what, share, total / 2**20, seconds)
