"""Agents of real ranks: what was staged is committed whatever happens to the trainers, and nothing else is."""

import multiprocessing
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt.agent import registry
from tests.support.ranks import Crew
from tests.support.raw import log_records, random_bits, raw, tree
from tests.support.roots import Root

pytestmark = [pytest.mark.ranks]

WORLD = 4


@pytest.fixture(scope="module")
def crew() -> Iterator[Crew]:
    with Crew(WORLD) as crew:
        yield crew


def state(rank: int, seed: int) -> dict[str, Any]:
    """Rows and columns of large tensors, which must be exchanged to be written, a replica, and values."""
    rows, columns = random_bits((600, 300), torch.float32, seed), random_bits((257, 404), torch.bfloat16, seed + 1)
    return {
        "rows": ckpt.ShardedTensor(rows[rank::WORLD].clone(), _every_fourth(rank), (600, 300)),
        "columns": ckpt.ShardedTensor(
            columns[:, 101 * rank : 101 * (rank + 1)].clone(), [((0, 101 * rank), (257, 101), (0, 0))], (257, 404)
        ),
        "shared": random_bits((9,), torch.int64, seed + 2),
        "seed": seed,
        "own": ckpt.per_rank(rank + seed),
    }


def _every_fourth(rank: int) -> list[Any]:
    return [((rank + WORLD * i, 0), (1, 300), (i, 0)) for i in range(600 // WORLD)]


def bits(held: dict[str, Any]) -> list[Any]:
    tensors = [held["rows"].local, held["columns"].local, held["shared"]]
    return [*(raw(t) for t in tensors), held["seed"], held["own"].value]


def spoil(held: dict[str, Any]) -> None:
    for tensor in (held["rows"].local, held["columns"].local, held["shared"]):
        tensor.fill_(3)
    held["seed"] = -1


def agents(of: int) -> list[int]:
    """Agents that a process has started."""
    found = subprocess.run(["pgrep", "-P", str(of), "-f", "ckpt.agent"], capture_output=True, text=True, check=False)
    return [int(pid) for pid in found.stdout.split()]


def save_many(rank: int, world: int, root: Root, nodes: int) -> list[Any]:
    os.environ["CKPT_NODE"] = f"node {rank * nodes // world}"
    found = []
    with ckpt.Checkpointer(root.url, ckpt.Layout(dp=world), storage_options=root.storage_options, timeout=60) as ck:
        for step in (1, 2, 3):
            held = state(rank, 10 * step)
            pending = ck.save_async(step, held)
            spoil(held)
            found.append(pending)
        receipts = [p.result(60) for p in found]
        assert [r.step for r in receipts] == [1, 2, 3] and ck.steps() == [1, 2, 3]
        blocking = ck.save(4, state(rank, 30))
        assert blocking.state_id == receipts[-1].state_id
    return [r.state_id for r in receipts]


def load_all(rank: int, world: int, root: Root, steps: dict[int, int]) -> None:
    with ckpt.Checkpointer(
        root.url, ckpt.Layout(dp=world), storage_options=root.storage_options, read_only=True, timeout=60
    ) as ck:
        for step, seed in steps.items():
            held = state(rank, 0)
            spoil(held)
            assert ck.load(held, step=step) is not None
            assert bits(held) == bits(state(rank, seed))


@pytest.mark.parametrize("nodes", [1, 2, 4])
def test_saves_on_one_node_and_on_several(crew: Crew, tmp_path: Path, nodes: int) -> None:
    root = Root(str(tmp_path / "root"))
    ids = crew.run(save_many, root, nodes, timeout=120)
    assert all(one == ids[0] for one in ids) and len(set(ids[0])) == 3
    crew.run(load_all, root, {1: 10, 2: 20, 3: 30, 4: 30}, timeout=60)
    commits = [r for r in log_records(tmp_path / "root").values() if r["kind"] == "commit"][2:]
    trees = [tree(tmp_path / "root" / "attempts" / c["claim"] / c["attempt"] / "state") for c in commits]
    assert trees[0] == trees[1]  # agents write the very files that a blocking save writes


def test_saves_to_an_object_store(crew: Crew, s3: Any) -> None:
    root = Root(s3.url("agents"), s3.storage_options)
    crew.run(save_many, root, 2, timeout=120)
    crew.run(load_all, root, {1: 10, 3: 30}, timeout=60)


def save_and_die(rank: int, world: int, root: Root, nodes: int) -> None:
    os.environ["CKPT_NODE"] = f"node {rank * nodes // world}"
    ck = ckpt.Checkpointer(root.url, ckpt.Layout(dp=world), timeout=60)
    ck.save_async(1, state(rank, 10))
    torch.distributed.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("nodes", [1, 2])
def test_trainers_killed_after_the_call_lose_nothing(tmp_path: Path, nodes: int) -> None:
    """The next job waits for agents that have not even begun when the trainers die, and loads what they wrote."""
    root = Root(str(tmp_path / "root"))
    with Crew(WORLD) as dying:
        outcomes = dying.run(save_and_die, root, nodes, timeout=60, expect_failures=True)
    assert all(o.exitcode == -signal.SIGKILL for o in outcomes)
    with Crew(WORLD) as crew:
        crew.run(resume, root, timeout=90)
    deadline = time.monotonic() + 20
    while _running(root) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not _running(root), "an agent outlives its work"


def _running(root: Root) -> list[registry.Entry]:
    return [entry for entry in registry.running() if entry.url.endswith(root.url)]


def resume(rank: int, world: int, root: Root) -> None:
    with ckpt.Checkpointer(root.url, ckpt.Layout(dp=world), timeout=60) as ck:
        held = state(rank, 0)
        restored = ck.load(held)
        assert restored is not None and restored.step == 1
        assert bits(held) == bits(state(rank, 10))


def kill_an_agent(rank: int, world: int, root: Root, warm: bool) -> str:
    os.environ["CKPT_NODE"] = f"node {rank // 2}"
    with ckpt.Checkpointer(root.url, ckpt.Layout(dp=world), timeout=20) as ck:
        ck.save(1, state(rank, 10))
        if warm:
            ck.save_async(1, state(rank, 10)).result(60)
        pending = ck.save_async(2, state(rank, 20))
        torch.distributed.barrier()
        if rank == 2:
            for pid in agents(os.getpid()):
                os.kill(pid, signal.SIGKILL)
        error = pending.exception(60)
        assert ck.save_async(4, state(rank, 40)).result(60).step == 4  # by new agents: all have asked for the error
        assert ck.steps() in ([1, 4], [1, 2, 4])
    return f"{type(error).__name__}: {error}" if error else ""


@pytest.mark.parametrize("warm", [False, True])
def test_an_agent_that_is_killed_is_an_error_and_the_next_save_has_a_new_one(
    crew: Crew, tmp_path: Path, warm: bool
) -> None:
    """Killed as it starts, or most likely as it writes."""
    root = Root(str(tmp_path / "root"))
    said = crew.run(kill_an_agent, root, warm, timeout=120)
    if not warm:
        assert all(one.startswith("RankFailed") and "agent" in one for one in said)
        assert all("step 2 is gone" in one for one in said[2:])
    crew.run(load_all, root, {1: 10, 4: 40}, timeout=60)


def die_before_staging(rank: int, world: int, root: Root) -> str:
    ck = ckpt.Checkpointer(root.url, ckpt.Layout(dp=world), timeout=20)
    ck.save_async(1, state(rank, 10)).result(60)
    if rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(ckpt.RankFailed) as error:
        ck.save_async(2, state(rank, 20))
    return str(error.value)


def test_a_step_that_not_all_have_staged_is_not_committed(tmp_path: Path) -> None:
    root = Root(str(tmp_path / "root"))
    with Crew(WORLD) as dying:
        outcomes = dying.run(die_before_staging, root, timeout=90, expect_failures=True)
    assert outcomes[3].exitcode == -signal.SIGKILL
    assert all(o.exitcode is None and "3" in o.value for o in outcomes[:3])
    with ckpt.Checkpointer(root.url, read_only=True) as ck:
        assert ck.steps() == [1]


def fail_in_the_background(rank: int, world: int, root: Root, how: str) -> list[str]:
    """The root is gone when the agents come to write. Who asks for the error is told, and nobody misses it."""
    said = []
    ck = ckpt.Checkpointer(root.url, ckpt.Layout(dp=world), timeout=60)
    ck.save(1, state(rank, 10))
    torch.distributed.barrier()
    if rank == 0:
        shutil.rmtree(root.url)
        Path(root.url).write_text("no folder")
    torch.distributed.barrier()
    pending = ck.save_async(2, state(rank, 20))
    if how == "asked":
        said.append(repr(pending.exception(60)))
        ck.close()
    elif how == "next":
        with pytest.raises(ckpt.CkptError) as error:
            ck.save_async(3, state(rank, 30))
        said.append(repr(error.value))
        ck.close()
    else:
        with pytest.raises(ckpt.CkptError) as error:
            ck.close()
        said.append(repr(error.value))
    torch.distributed.barrier()
    return said


@pytest.mark.parametrize("how", ["asked", "next", "close"])
def test_errors_in_the_background_are_raised_where_they_can_be_met(crew: Crew, tmp_path: Path, how: str) -> None:
    for said in crew.run(fail_in_the_background, Root(str(tmp_path / "root")), how, timeout=90):
        assert len(said) == 1 and said[0].startswith("StoreError") and "step 2 in the background failed" in said[0]


def refuse(rank: int, world: int, root: Root) -> None:
    with ckpt.Checkpointer(root.url, ckpt.Layout(dp=world), timeout=60, when_busy="refuse") as ck:
        first = ck.save_async(1, state(rank, 10))
        with pytest.raises(ckpt.CkptError, match="step 2 not saved: the save before is still being written"):
            ck.save_async(2, state(rank, 20))
        first.result(60)
        torch.distributed.barrier()
        ck.save_async(3, state(rank, 30)).result(60)
        assert ck.steps() == [1, 3]
        with pytest.raises(ckpt.Unsupported, match="x"):  # at the call, not later
            ck.save_async(4, {"x": object()})
        assert ck.save_async(5, state(rank, 50)).result(60).step == 5


def test_a_save_while_one_is_under_way_may_be_refused(crew: Crew, tmp_path: Path) -> None:
    crew.run(refuse, Root(str(tmp_path / "root")), timeout=90)


def _knock(name: str) -> None:
    """As another user: connects to an agent and says hello."""
    import socket

    from ckpt.agent import wire
    from ckpt.errors import CkptError

    os.setuid(65534)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.connect(f"\0{name}")
        sock.settimeout(20)
        try:
            wire.send(sock, {"kind": "wait"})
            wire.receive(sock)
        except CkptError:
            os._exit(17)


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to become another user")
def test_another_user_is_not_heard(tmp_path: Path) -> None:
    with ckpt.Checkpointer(tmp_path / "root") as ck:
        ck.save_async(1, {"x": torch.zeros(3)}).result(60)
        (entry,) = [e for e in registry.running() if e.url == ck.url]
        assert registry.idle(entry, 20)
        process = multiprocessing.get_context("spawn").Process(target=_knock, args=(entry.name,))
        process.start()
        process.join(60)
        assert process.exitcode == 17
