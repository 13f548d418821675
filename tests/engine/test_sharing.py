"""Work shared by bytes, and done in threads."""

import signal
import threading
import time
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt.engine.sharing import in_threads, share


@given(st.lists(st.integers(0, 1000)), st.integers(1, 9))
def test_everything_is_done_once_and_loads_are_near(sizes: list[int], world: int) -> None:
    found = share(sizes, world)
    assert len(found) == world and sorted(n for mine in found for n in mine) == list(range(len(sizes)))
    assert all(mine == sorted(mine) for mine in found)
    loads = [sum(sizes[n] for n in mine) for mine in found]
    assert max(loads) - min(loads) <= max(sizes, default=0)


@pytest.mark.parametrize("jobs", [1, 2, 5])
def test_each_worker_does_one_item_at_a_time(jobs: int) -> None:
    busy: set[int] = set()
    done: list[int] = []
    lock = threading.Lock()

    def do(worker: int, item: int) -> None:
        with lock:
            assert worker not in busy
            busy.add(worker)
        with lock:
            busy.remove(worker)
            done.append(item)

    in_threads(range(jobs), iter(range(200)), do)
    assert sorted(done) == list(range(200)) and (jobs > 1 or done == list(range(200)))


@pytest.mark.parametrize("jobs", [1, 3])
def test_an_error_ends_it_once_what_is_under_way_is_done(jobs: int) -> None:
    begun: list[int] = []
    ended: list[int] = []
    together = threading.Barrier(jobs, timeout=30)

    def do(worker: int, item: int) -> None:
        begun.append(item)
        together.wait()
        if item == 0:
            raise OSError("no")
        failing.wait(30)
        ended.append(item)

    failing = threading.Event()
    timer = threading.Timer(0.2, failing.set)
    timer.start()
    with pytest.raises(OSError, match="no"):
        in_threads(range(jobs), range(100), do)
    assert sorted(begun) == list(range(jobs)) and sorted(ended) == list(range(1, jobs))
    timer.join()


@pytest.fixture
def interruptible() -> Iterator[None]:
    """A process that a shell has started in the background ignores interrupts."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_an_interrupt_ends_it_once_what_is_under_way_is_done(interruptible: None) -> None:
    begun: list[int] = []
    main = threading.get_ident()

    def do(worker: int, item: int) -> None:
        begun.append(item)
        if item == 10:
            signal.pthread_kill(main, signal.SIGINT)
        time.sleep(0.01)

    with pytest.raises(KeyboardInterrupt):
        in_threads(range(2), range(1000), do)
    assert 10 < len(begun) < 1000
