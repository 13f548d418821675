"""How asynchronous saves end, and what a job makes of it: no error is lost, and the ranks stay in step."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ckpt
from ckpt.agent import registry
from ckpt.agent.client import AgentLink
from tests.support.ranks import Crew
from tests.support.raw import log_records
from tests.trainer.tiered import state

WORLD = 2


def agent_of(url: str) -> int:
    (entry,) = [e for e in registry.running() if e.url == url]
    return entry.pid


def test_an_error_counts_as_asked_for_once_it_was_given(tmp_path: Path) -> None:
    """Who waited in vain has not seen it."""
    root = tmp_path / "root"
    ck = ckpt.Checkpointer(root, timeout=60)
    ck.save(1, state(1))
    shutil.rmtree(root)
    root.write_text("no folder")
    pending = ck.save_async(2, state(2))
    with pytest.raises(TimeoutError):
        pending.result(0.0)
    with pytest.raises(TimeoutError):
        pending.exception(0.0)
    with pytest.raises(ckpt.StoreError, match="the save of step 2 in the background failed"):
        ck.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR2], ids=["TERM", "USR2"])
def test_signals_to_all_processes_of_a_job_end_no_agent_not_even_as_it_starts(tmp_path: Path, number: int) -> None:
    with ckpt.Checkpointer(tmp_path / "root", timeout=60) as ck:
        pending = ck.save_async(1, state(1))
        os.kill(agent_of(ck.url), number)
        assert pending.result(60).step == 1
        os.kill(agent_of(ck.url), number)
        assert ck.save_async(2, state(2)).result(60).step == 2


def test_the_last_save_is_made_though_the_one_before_has_failed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ck = ckpt.Checkpointer(tmp_path / "root", timeout=60, every_steps=2)
    with pytest.raises(ckpt.Preempted), ck:
        for step in range(1, 9):
            pending = ck.after_step(step, state(step))
            if step == 2:
                assert pending is not None
                os.kill(agent_of(ck.url), signal.SIGKILL)
                while not pending.done():
                    time.sleep(0.01)
                os.kill(os.getpid(), signal.SIGTERM)
    assert "before the last save: the agent that was to write step 2 is gone" in caplog.text
    with ckpt.Checkpointer(tmp_path / "root", read_only=True) as reader:
        assert reader.steps() == [4]


@pytest.mark.parametrize("how", ["save", "save_async"])
def test_a_step_that_was_saved_already_is_not_saved_again_at_the_end(tmp_path: Path, how: str) -> None:
    """But one that was saved before an older step was loaded is: it is another state."""
    for again in (False, True):
        root = tmp_path / f"{again}"
        ck = ckpt.Checkpointer(root, timeout=60)
        with pytest.raises(ckpt.Preempted) as end, ck:
            ck.save(1, state(1))
            ck.after_step(1, state(1))
            os.kill(os.getpid(), signal.SIGTERM)
            ck.after_step(2, state(2))
            getattr(ck, how)(3, state(3))
            if again:
                assert ck.load(state(0), 1) is not None
            ck.after_step(3, state(3))
        assert end.value.step == 3
        saved = [record["step"] for record in log_records(root).values() if record["kind"] == "commit"]
        assert saved == ([1, 3, 3] if again else [1, 3])


@pytest.mark.parametrize("how", ["save", "save_async"])
def test_a_step_that_was_saved_already_is_not_saved_again_by_the_schedule(tmp_path: Path, how: str) -> None:
    """Unless an older step was loaded since: it is another state."""
    with ckpt.Checkpointer(tmp_path, timeout=60, every_steps=2) as ck:
        for step in (1, 2):
            getattr(ck, how)(step, state(step))
            assert ck.after_step(step, state(step)) is None
        assert ck.load(state(0), 1) is not None
        assert ck.after_step(2, state(2)) is not None
    saved = [record["step"] for record in log_records(tmp_path).values() if record["kind"] == "commit"]
    assert saved == [1, 2, 2]


@pytest.mark.parametrize("more", [{"every_steps": 0}, {"every_steps": -5}, {"every_seconds": 0.0}])
def test_an_interval_that_is_none_is_refused(tmp_path: Path, more: Any) -> None:
    with pytest.raises(ckpt.CkptError, match=r"every_\w+=\S+ must be positive"):
        ckpt.Checkpointer(tmp_path, **more)


@pytest.mark.parametrize(("grace", "warned"), [(1e-3, 1), (600.0, 0)])
def test_a_grace_that_is_too_short_is_told_once_and_early(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, grace: float, warned: int
) -> None:
    with ckpt.Checkpointer(tmp_path / "root", timeout=60, every_steps=1, grace=grace) as ck:
        for step in range(1, 4):
            ck.after_step(step, state(step))
    assert caplog.text.count("a job that is told to end needs twice that") == warned


FORKING = """
import os, sys, time, torch, ckpt
ck = ckpt.Checkpointer(sys.argv[1])
ck.save_async(1, {"x": torch.zeros(3)}).result(60)
if not os.fork():
    time.sleep(120)
    os._exit(0)
print("forked", flush=True)
os.kill(os.getpid(), 9)
"""


def test_an_agent_ends_though_a_child_of_its_trainer_lives(tmp_path: Path) -> None:
    """A forked child, such as a loader of data, has a copy of each descriptor of the trainer."""
    done = subprocess.Popen(
        [sys.executable, "-c", FORKING, str(tmp_path / "root")], stdout=subprocess.PIPE, text=True, process_group=0
    )
    assert done.stdout is not None
    try:
        assert done.stdout.readline() == "forked\n"
        deadline = time.monotonic() + 20
        url = (tmp_path / "root").as_uri()
        while any(e.url == url for e in registry.running()) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not any(e.url == url for e in registry.running())
        os.killpg(done.pid, 0)  # the child is still there
    finally:
        os.killpg(done.pid, signal.SIGKILL)
        done.stdout.close()
        done.wait()


# --- ranks ---


@pytest.fixture(scope="module")
def crew() -> Iterator[Crew]:
    with Crew(WORLD) as crew:
        yield crew


def an_answer_is_lost(rank: int, world: int, url: str) -> tuple[list[str], list[int]]:
    """Step 2 is committed, and the agent of rank 1 dies before it says so. Both ranks have asked."""
    os.environ["CKPT_NODE"] = f"node {rank}"
    real = AgentLink._answer

    def answer(self: AgentLink, message: Any, progress: Any) -> Any:
        found = real(self, message, progress)
        if rank == 1 and message["step"] == 2:
            raise self._gone(message, ConnectionError("reset"))
        return found

    AgentLink._answer = answer  # type: ignore[method-assign]
    ends = []
    try:
        with ckpt.Checkpointer(url, ckpt.Layout(dp=world), timeout=20, keep=ckpt.Keep(last=9)) as ck:
            for step in (1, 2, 3):
                ends.append(type(ck.save_async(step, state(step)).exception(30)).__name__)
            ck.save(4, state(4))
            assert ck.load(state(0)).step == 4  # type: ignore[union-attr]
            return ends, ck.steps()
    finally:
        AgentLink._answer = real  # type: ignore[method-assign]


@pytest.mark.ranks
def test_ranks_stay_in_step_where_an_answer_is_lost(crew: Crew, tmp_path: Path) -> None:
    found = crew.run(an_answer_is_lost, str(tmp_path / "root"), timeout=90)
    assert found == [
        (["NoneType", "NoneType", "NoneType"], [1, 2, 3, 4]),
        (["NoneType", "RankFailed", "NoneType"], [1, 2, 3, 4]),
    ]
