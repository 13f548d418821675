"""Case 32: faults of an object store. What passes is sat out; what does not pass fails all ranks; no commit is wrong.

Requests go through a proxy to the real server. Two ranks save and load; the proxy knows them apart by their keys.
"""

import random
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

import pytest
import torch

import ckpt
from ckpt.store import remote
from tests.support.fault_proxy import (
    Fault,
    FaultProxy,
    answer,
    gets,
    hang,
    hang_after,
    lost_reply,
    puts,
    reset_reply,
    reset_request,
    short_reply,
    twice,
)
from tests.support.ranks import Crew, Outcome
from tests.support.raw import random_bits, raw
from tests.support.roots import Root
from tests.support.s3 import S3Server

pytestmark = [pytest.mark.s3, pytest.mark.ranks, pytest.mark.slow]

WORLD = 2
BOUND = 60.0  # seconds after which a save or load counts as hung
# Everything that a save writes, in its order.
WRITTEN = ("intent.json", "run.json", "/state/", "receipts/", "/manifest.json", "ranks/manifest.json", "/log/")


@dataclass
class Job:
    """Two ranks with a checkpointer each on a fresh root, and what was committed there."""

    crew: Crew
    proxy: FaultProxy
    root: Root
    options: list[dict[str, str]]  # one for each rank: through the proxy, with keys of its own
    committed: list[int] = field(default_factory=list)

    def save(self, step: int) -> list[Outcome]:
        found: list[Outcome] = self.crew.run(_save, self.root.url, step, timeout=BOUND, expect_failures=True)
        assert not any(o.hung or o.exitcode is not None for o in found), [o.summary() for o in found]
        return found

    def saved(self, step: int) -> None:
        found = self.save(step)
        assert all(o.ok for o in found), [o.summary() for o in found]
        self.committed.append(step)

    def fails(self, step: int, *words: str) -> None:
        """All ranks raise a StoreError that says why and what to do, and nothing is committed."""
        found = self.save(step)
        for outcome in found:
            assert outcome.error_type == "StoreError", outcome.summary()
            for word in words:
                assert word in outcome.error_message, outcome.summary()
        self.check()

    def check(self) -> None:
        """Another job, on the server itself: all that was committed, and its newest bit for bit."""
        found = self.crew.run(_load, self.root, timeout=BOUND)
        newest = self.committed[-1] if self.committed else None
        assert found == [(self.committed, newest)] * WORLD


@pytest.fixture(scope="module")
def proxy(s3: S3Server) -> Iterator[FaultProxy]:
    with FaultProxy(s3.endpoint) as proxy:
        yield proxy


@pytest.fixture(scope="module")
def keys(s3: S3Server, proxy: FaultProxy) -> list[dict[str, str]]:
    return [{**s3.add_key("Admin"), "endpoint": proxy.endpoint} for _ in range(WORLD)]


@pytest.fixture(scope="module")
def crew() -> Iterator[Crew]:
    with Crew(WORLD) as crew:
        yield crew


@pytest.fixture
def job(crew: Crew, s3: S3Server, proxy: FaultProxy, keys: list[dict[str, str]]) -> Iterator[Job]:
    root = Root(s3.url(f"faults-{uuid4().hex[:8]}"), s3.storage_options)
    job = Job(crew, proxy, root, keys)
    crew.run(_open, root.url, keys)
    job.saved(1)
    yield job
    proxy.heal()
    if not crew.broken:
        crew.run(_close, root.url)


# --- In the rank's process ---

_open_here: dict[str, ckpt.Checkpointer] = {}


def _open(rank: int, world: int, url: str, options: list[dict[str, str]]) -> None:
    from ckpt.store import arrays, log

    arrays._STALLED["TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS"] = "1"
    remote.FIRST_WAIT, remote.READ_SECONDS, remote.PATIENCE = 0.02, 1, 3.0
    log._TRIES, log._PATIENCE = 3, 4.0
    made = ckpt.Checkpointer(url, storage_options=options[rank], timeout=BOUND)
    # The driver's own patience, which is half a minute.
    made._session.kvstore["s3_request_retries"] = {  # type: ignore[index]
        "max_retries": 3,
        "initial_delay": "50ms",
        "max_delay": "500ms",
    }
    _open_here[url] = made


def _close(rank: int, world: int, url: str) -> None:
    _open_here.pop(url).close()


def _state(rank: int, step: int) -> dict[str, Any]:
    """A tensor cut over the ranks, whole ones for each rank to write, a packed one, and a value."""
    rows, columns = 256, 128
    cut = random_bits((rows, columns), torch.float32, 1000 * step)[rank * 128 : rank * 128 + 128]
    return {
        "cut": ckpt.ShardedTensor(cut, [((rank * 128, 0), (128, columns), (0, 0))], (rows, columns)),
        **{f"whole/{i}": random_bits((300, 100), torch.float32, 1000 * step + i + 1) for i in range(4)},
        "small": random_bits((5,), torch.float32, 1000 * step + 9),
        "step": step,
    }


def _bits(state: dict[str, Any]) -> list[Any]:
    return [raw(getattr(v, "local", v)) if not isinstance(v, int) else v for v in state.values()]


def _save(rank: int, world: int, url: str, step: int) -> None:
    state = random.getstate()
    try:
        _open_here[url].save(step, _state(rank, step))
    finally:
        assert random.getstate() == state, "a save drew from the trainer's random stream"


def _load(rank: int, world: int, root: Root) -> tuple[list[int], int | None]:
    with ckpt.Checkpointer(root.url, storage_options=root.storage_options, read_only=True) as ck:
        return ck.steps(), _loaded(rank, ck)


def _loaded(rank: int, ck: ckpt.Checkpointer) -> int | None:
    state = _state(rank, 0)
    restored = ck.load(state)
    if restored is None:
        return None
    assert _bits(state) == _bits(_state(rank, restored.step))
    return restored.step


def _load_again(rank: int, world: int, url: str) -> int | None:
    return _loaded(rank, _open_here[url])


# --- What passes ---

PASSING = {
    "503": (answer(503), 3),
    "500": (answer(500), 2),
    "429": (answer(429, "TooManyRequests"), 2),
    "reset in the request": (reset_request, 2),
    "reset in the reply": (reset_reply, 2),
    "short reply": (short_reply, 2),
    "lost reply": (lost_reply, 2),
    "sent twice": (twice, 2),
    "silent": (hang(), 1),
    "done and silent": (hang_after(), 1),
}


@pytest.mark.parametrize("name", PASSING)
def test_what_passes_is_sat_out(job: Job, name: str) -> None:
    """The fault hits the first of each kind of request of a save and of a load; saves and loads have the same bits."""
    fault, times = PASSING[name]
    # To the array driver, which is slow to see it, the two kinds of silence are the same.
    parts = [part for part in WRITTEN if (name, part) != ("done and silent", "/state/")]
    for part in parts:
        job.proxy.on(puts(part), fault, times=times)
    job.saved(2)
    assert job.proxy.heal() >= len(parts)
    for match in (gets("list-type"), gets("/log/"), gets("manifest.json"), gets("run.json"), gets("/state/")):
        job.proxy.on(match, fault, times=times)
    assert job.crew.run(_load_again, job.root.url, timeout=BOUND) == [2, 2]
    assert job.proxy.heal() >= 3
    job.check()


@pytest.mark.parametrize("status", [409, 412])
def test_conflicts_of_conditional_puts_pass(job: Job, status: int) -> None:
    """Also one with an object that nobody can read yet (412)."""
    for part in WRITTEN:
        job.proxy.on(puts(part), answer(status), times=2)
    job.saved(2)
    assert job.proxy.heal() == 2 * len(WRITTEN)
    job.check()


# --- What does not pass ---

LASTING: dict[str, tuple[Fault, str]] = {
    "denied": (answer(403), "AccessDenied"),
    "expired": (answer(400, "ExpiredToken"), "ExpiredToken"),
    "full": (answer(507, "XMinioStorageFull"), "XMinioStorageFull"),
    "busy": (answer(503), "SlowDown"),
}


@pytest.mark.parametrize("name", LASTING)
def test_what_lasts_fails_all_ranks(job: Job, name: str) -> None:
    """At each kind of object that a save writes; afterwards the same step can be saved on the same root."""
    fault, word = LASTING[name]
    for part in WRITTEN if name == "denied" else ("intent.json", "/state/", "receipts/"):
        job.proxy.on(puts(part), fault)
        job.fails(2, word)
        assert job.proxy.heal() > 0
    job.saved(2)
    job.check()


@pytest.mark.parametrize("name", LASTING)
def test_one_rank_alone_fails_all_ranks(job: Job, name: str) -> None:
    fault, word = LASTING[name]
    for number, options in enumerate(job.options):
        job.proxy.on(lambda request, key=options["access_key"]: request.access_key == key, fault)  # type: ignore[misc]
        job.fails(2, word)
        assert job.proxy.heal() > 0, number
    job.saved(2)
    job.check()


def test_success_with_an_error_inside_is_no_success(job: Job) -> None:
    for part in WRITTEN:
        if part != "/state/":
            job.proxy.on(puts(part), answer(200, "InternalError"), times=1)
    job.saved(2)
    assert job.proxy.heal() == len(WRITTEN) - 1
    job.proxy.on(puts("/state/"), answer(200, "InternalError"), times=1)
    job.fails(3, "writing failed")
    job.proxy.heal()
    job.saved(3)
    job.check()


def _no_retries_of_arrays(rank: int, world: int, url: str) -> None:
    _open_here[url]._session.kvstore["s3_request_retries"]["max_retries"] = 0


def test_a_server_that_falls_silent_is_given_up(job: Job) -> None:
    job.crew.run(_no_retries_of_arrays, job.root.url)
    for part in ("/state/", "/log/"):
        job.proxy.on(puts(part), hang())
        job.fails(2)
        assert job.proxy.heal() > 0
    job.saved(2)
    job.check()


def test_a_commit_whose_answer_is_lost_for_good_stands(job: Job) -> None:
    """The commit lands, and from then on the server fails: the save raises, and the next one follows that commit."""
    gone = threading.Event()

    def land(exchange: Any) -> None:
        exchange.ask()
        gone.set()
        exchange.reset()

    job.proxy.on(lambda request: gone.is_set(), answer(503))
    job.proxy.on(puts("/log/"), land, times=1)
    for outcome in job.save(2):
        assert outcome.error_type == "StoreError", outcome.summary()
    job.proxy.heal()
    job.committed.append(2)
    job.check()
    job.saved(3)
    job.check()


def test_a_put_that_lands_late_changes_nothing(job: Job) -> None:
    """The first PUT of the commit record arrives after its own repetition: the record has one creator."""
    landed: list[bytes] = []
    proxy = job.proxy

    def late(exchange: Any) -> None:
        exchange.body()
        time.sleep(3)  # and not until the client has given up, which is sooner
        landed.append(exchange.ask())

    proxy.on(puts("/log/"), late, times=1)
    job.saved(2)
    deadline = time.monotonic() + 20
    while not landed and time.monotonic() < deadline:
        time.sleep(0.1)
    assert landed and b" 412 " in landed[0].split(b"\r\n")[0]
    job.check()


def test_a_load_fails_with_nothing_changed(job: Job) -> None:
    for part in ("/log/", "manifest.json", "/state/"):
        job.proxy.on(gets(part), answer(403))
        found = job.crew.run(_refused_load, job.root.url, timeout=BOUND)
        assert all("AccessDenied" in said for said in found), found
        assert job.proxy.heal() > 0
    assert job.crew.run(_load_again, job.root.url, timeout=BOUND) == [1, 1]


def _refused_load(rank: int, world: int, url: str) -> str:
    state = _state(rank, 0)
    before = _bits(state)
    with pytest.raises(ckpt.StoreError) as caught:
        _open_here[url].load(state)
    assert _bits(state) == before
    return str(caught.value)
