"""Work of known sizes shared by processes, and by the threads of each."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
W = TypeVar("W")


def share(sizes: Sequence[int], world: int) -> list[list[int]]:
    """Which of the items, by number and in order, each of `world` processes takes: one after the other goes to whoever
    has the fewest bytes so far, the lowest of equals, so that no two differ by more than the largest item."""
    found: list[list[int]] = [[] for _ in range(world)]
    loads = [0] * world
    for number, size in enumerate(sizes):
        least = loads.index(min(loads))
        found[least].append(number)
        loads[least] += size
    return found


def in_threads(workers: Sequence[W], items: Iterable[T], do: Callable[[W, T], None]) -> None:
    """Calls `do` with each item and a worker, in as many threads as there are workers; each does one item at a time.
    After an error, or an interrupt, no item is begun any more, and it is raised when those under way are done."""
    if len(workers) == 1:
        for item in items:
            do(workers[0], item)
        return
    left, failed = deque(items), threading.Event()

    def work(worker: W) -> None:
        while not failed.is_set():
            try:
                item = left.popleft()
            except IndexError:
                return
            try:
                do(worker, item)
            except BaseException:
                failed.set()
                raise

    with ThreadPoolExecutor(len(workers), "ckpt-jobs") as pool:
        try:
            for done in [pool.submit(work, worker) for worker in workers]:
                done.result()
        finally:
            failed.set()
