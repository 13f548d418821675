"""SIGKILL at each named point of a save and a load, on two gloo ranks.

One root lives through all of it. Each launch loads the newest step and compares its bits, saves the next one, and then
dies at its point; so every launch is also the proof of what the one before it left behind. Ranks are fresh processes
from a fork server that has imported torch, and never TensorStore: an interpreter's start costs more than all else.
"""

import json
import multiprocessing
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from tests.support.ports import free_ports
from tests.support.roots import Root
from tests.support.s3 import S3Server

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(900)]

WORLD = 2
LAUNCH_SECONDS = 120.0  # a launch that takes longer hangs

# In the order of ckpt.engine.faults.POINTS, which this file cannot import without importing torch.
SAVE_POINTS = (
    "save.begin",
    "save.intent",
    "save.object",
    "save.written",
    "save.receipt",
    "commit.manifest",
    "commit.append",
    "commit.done",
)
LOAD_POINTS = ("load.claimed", "load.opened", "load.read", "load.placed", "load.verified")
ONLY_RANK_0 = ("save.intent", "commit.manifest", "commit.append", "commit.done")


@dataclass(frozen=True)
class Doom:
    """Who dies where, after a first load and save of `step`: in the save of `step` + 1, or in another load."""

    victims: tuple[int, ...]
    point: str
    step: int

    @property
    def may_be_committed(self) -> bool:
        """Whether the ranks that live on, or the next job, may find all that was to be written. At save.receipt the
        other rank may have lost the victim just before its own receipt, or just after."""
        return self.point == "save.receipt" or self.must_be_committed

    @property
    def must_be_committed(self) -> bool:
        return self.point.startswith("commit.")

    @property
    def in_phase_2(self) -> bool:
        """Whether tensors may have begun to change, as far as the others know."""
        return self.point in LOAD_POINTS and self.point != "load.claimed"


def run_ranks_once(root: Root, doom: Doom | None, scratch: Path) -> list[dict[str, Any]]:
    """One launch. What each rank noted, with its exit code; a rank that hangs is killed and named."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed.tensor", "ml_dtypes", "numpy"])
    port = free_ports(1)[0]
    started = []
    for rank in range(WORLD):
        notes = scratch / f"{port}-{rank}.jsonl"
        process = context.Process(target=_rank, args=(rank, port, root, doom, str(notes)), name=f"rank {rank}")
        process.start()
        started.append((process, notes))
    deadline = time.monotonic() + LAUNCH_SECONDS
    found = []
    for rank, (process, notes) in enumerate(started):
        process.join(max(0.0, deadline - time.monotonic()))
        if process.exitcode is None:
            process.kill()
            process.join()
            pytest.fail(f"{doom}: rank {rank} hung")
        lines = notes.read_text().splitlines() if notes.exists() else []
        noted: dict[str, Any] = {"exitcode": process.exitcode}
        for line in lines:
            noted |= json.loads(line)
        process.close()
        found.append(noted)
    return found


# --- In the rank's process ---


def _rank(rank: int, port: int, root: Root, doom: Doom | None, notes: str) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(WORLD)}
    os.environ |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    with open(notes, "w", buffering=1) as file:

        def note(**facts: Any) -> None:
            file.write(json.dumps(facts) + "\n")

        try:
            _live(rank, root, doom, note)
        except BaseException as error:
            note(error=f"{type(error).__name__}: {error}")
            os._exit(3)
    os._exit(0)


def _live(rank: int, root: Root, doom: Doom | None, note: Any) -> None:
    import torch
    import torch.distributed as dist

    import ckpt
    from ckpt.engine import comm

    comm._GRACE = 1.0  # there is only one other rank to wait for
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method="env://")
    armed: list[bool] = []

    def fault(point: str) -> None:
        if armed and doom is not None and rank in doom.victims and point == doom.point:
            note(died_at=point)
            os.kill(os.getpid(), signal.SIGKILL)

    with ckpt.Checkpointer(root.url, storage_options=root.storage_options, faults=fault, timeout=60) as checkpointer:
        state = _state(rank, -1)
        restored = checkpointer.load(state)
        loaded = None if restored is None else restored.step
        if loaded is not None:
            assert _bits(state) == _bits(_state(rank, loaded)), f"step {loaded} has other bits"
        note(loaded=loaded, steps=checkpointer.steps())
        if doom is None:
            return
        receipt = checkpointer.save(doom.step, _state(rank, doom.step))
        note(saved=receipt.step)
        armed.append(True)
        try:
            if doom.point in SAVE_POINTS:
                checkpointer.save(doom.step + 1, _state(rank, doom.step + 1))
            else:
                checkpointer.load(_state(rank, -1))
        except ckpt.CkptError as error:
            note(survivor=type(error).__name__, message=str(error))
        else:
            note(survivor="nothing raised")


def _state(rank: int, step: int) -> dict[str, Any]:
    """Bits that follow from the step and the place: a tensor cut over the ranks, whole ones for each rank to write, a
    packed one, a value."""
    import torch

    import ckpt

    def words(rows: int, first: int) -> torch.Tensor:
        return ((torch.arange(rows * 128, dtype=torch.int32) + first) * 2654435 + step * 97).reshape(rows, 128)

    half = words(160, rank * 160 * 128)
    cut = ckpt.ShardedTensor(half, [((rank * 160, 0), (160, 128), (0, 0))], (320, 128))
    whole = {f"whole/{i}": words(200, i << 20) for i in range(WORLD)}
    return {"cut": cut, **whole, "small": torch.full((5,), float(step)), "step": step}


def _bits(state: dict[str, Any]) -> list[Any]:
    import torch

    tensors = [state["cut"].local, *(v for v in state.values() if isinstance(v, torch.Tensor))]
    return [state["step"], *(t.contiguous().view(torch.uint8).numpy().tobytes() for t in tensors)]


# --- The tests ---


def _dooms(victims: tuple[int, ...], points: tuple[str, ...]) -> list[Doom]:
    return [Doom(victims, point, 10 * (number + 1)) for number, point in enumerate(points)]


def _kill_at(root: Root, dooms: list[Doom], scratch: Path) -> None:
    committed: list[int] = []
    for before, doom in zip([None, *dooms], [*dooms, None], strict=True):
        ranks = run_ranks_once(root, doom, scratch)
        committed = _after_the_kill(before, committed, ranks)
        if doom is not None:
            _the_launch(doom, ranks)
            committed.append(doom.step)


def _after_the_kill(before: Doom | None, committed: list[int], ranks: list[dict[str, Any]]) -> list[int]:
    """Checks what the launch after a kill found: all that was committed, and the broken save wholly or not at all.
    Returns the committed steps."""
    for noted in ranks:
        assert "error" not in noted, f"after {before}: {noted['error']}"
    found = ranks[0]["steps"]
    assert all(noted["steps"] == found and noted["loaded"] == (found or [None])[-1] for noted in ranks), before
    broken = [] if before is None or before.point in LOAD_POINTS else [before.step + 1]
    if before is None or not before.may_be_committed:
        assert found == committed, f"after {before}"
    elif before.must_be_committed:
        assert found == committed + broken, f"after {before}"
    else:
        assert found in (committed, committed + broken), f"after {before}"
    return list(found)


def _the_launch(doom: Doom, ranks: list[dict[str, Any]]) -> None:
    """Checks that the next save succeeded, that the victims died at their point, and what the others raised."""
    for rank, noted in enumerate(ranks):
        assert noted["saved"] == doom.step, f"{doom}: rank {rank}"
        if noted["exitcode"] == -signal.SIGKILL:
            assert rank in doom.victims and noted["died_at"] == doom.point
        else:
            assert rank != doom.victims[0], f"{doom}: was not killed: {noted}"
            assert noted["exitcode"] == 0 and noted["survivor"] == ("StateInvalid" if doom.in_phase_2 else "RankFailed")
            named = f"rank {doom.victims[0]} stopped answering" in noted["message"]
            assert named or (doom.victims[0] == 0 and "usually rank 0) is gone" in noted["message"]), noted["message"]


def test_the_points_are_the_engines() -> None:
    from ckpt.engine.faults import POINTS

    # Those of a conversion are killed at in test_stream.py.
    assert (*SAVE_POINTS, *LOAD_POINTS) == tuple(p for p in POINTS if not p.startswith("stream."))


def test_kill_rank_0_at_every_point(tmp_path: Path) -> None:
    root = Root(str(tmp_path / "root"))
    _kill_at(root, _dooms((0,), (*SAVE_POINTS, *LOAD_POINTS)), tmp_path)


def test_kill_rank_1_at_every_point_that_it_passes(tmp_path: Path) -> None:
    points = tuple(p for p in (*SAVE_POINTS, *LOAD_POINTS) if p not in ONLY_RANK_0)
    _kill_at(Root(str(tmp_path / "root")), _dooms((1,), points), tmp_path)


def test_kill_both_ranks(tmp_path: Path) -> None:
    """The second one dies where it takes over the commit of the first."""
    points = ("save.object", "save.receipt", "commit.manifest", "commit.append", "commit.done", "load.placed")
    _kill_at(Root(str(tmp_path / "root")), _dooms((0, 1), points), tmp_path)


@pytest.mark.s3
@pytest.mark.slow
@pytest.mark.parametrize("victim", range(WORLD))
def test_kill_at_every_point_on_s3(s3: S3Server, tmp_path: Path, victim: int) -> None:
    points = tuple(p for p in (*SAVE_POINTS, *LOAD_POINTS) if victim == 0 or p not in ONLY_RANK_0)
    _kill_at(Root(s3.url(f"kill-{uuid4().hex[:8]}"), s3.storage_options), _dooms((victim,), points), tmp_path)
