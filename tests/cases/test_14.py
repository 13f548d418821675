"""Case 14: the newest complete checkpoint is chosen, whatever lies about, and a step cut off can be saved again."""

import json
import os
import random
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from tests.engine.states import sample_state, state_bits
from tests.support.ranks import Crew
from tests.support.raw import attempt_folder, log_records, objects_of, random_bits, raw, tree

WORLD = 2
KILLS = 10

# --- In the rank's process ---


def _state(rank: int, step: int) -> dict[str, Any]:
    """A tensor cut over the ranks, whole ones for each rank to write, a packed one, and a value."""
    cut = random_bits((512, 128), torch.float32, 1000 * step)[rank * 256 : rank * 256 + 256]
    return {
        "cut": ckpt.ShardedTensor(cut, [((rank * 256, 0), (256, 128), (0, 0))], (512, 128)),
        **{f"whole/{i}": random_bits((300, 100), torch.float32, 1000 * step + i + 1) for i in range(6)},
        "small": random_bits((5,), torch.float32, 1000 * step + 9),
        "step": step,
    }


def _bits(state: dict[str, Any]) -> list[Any]:
    return [raw(getattr(v, "local", v)) if not isinstance(v, int) else v for v in state.values()]


def _resume(rank: int, world: int, root: str) -> tuple[int | None, list[int]]:
    """Loads the newest step and checks its bits."""
    state = _state(rank, 0)
    with ckpt.Checkpointer(root) as ck:
        restored = ck.load(state)
        if restored is not None:
            assert _bits(state) == _bits(_state(rank, restored.step)), f"step {restored.step} has other bits"
        return (None if restored is None else restored.step), ck.steps()


def _resume_and_save(rank: int, world: int, root: str, notes: str) -> None:
    """Loads the newest step and saves the ones after it until it is killed, with a note of each that was committed."""
    state = _state(rank, 0)
    with ckpt.Checkpointer(root, timeout=60) as ck, open(f"{notes}-{rank}", "a", buffering=1) as file:
        restored = ck.load(state)
        step = 0 if restored is None else restored.step
        if restored is not None:
            assert _bits(state) == _bits(_state(rank, step)), f"step {step} has other bits"
        file.write(f"loaded {step} of {ck.steps()}\n")
        while True:
            step += 1
            ck.save(step, _state(rank, step))
            file.write(f"saved {step}\n")


# --- The tests ---


def _lines(notes: Path) -> list[str]:
    found = [Path(f"{notes}-{rank}") for rank in range(WORLD)]
    return [line for f in found if f.exists() for line in f.read_text().splitlines()]


@pytest.mark.ranks
@pytest.mark.slow
def test_killed_at_random_times(tmp_path: Path) -> None:
    """Each launch resumes from the newest commit, saves the very step at which the one before was cut off, and is
    killed in a save at a random time: one rank or all."""
    root, choose = str(tmp_path / "root"), random.Random(14)
    reported = 0  # the newest step that a rank was told is committed
    for launch in range(KILLS):
        notes = tmp_path / f"launch-{launch}"
        victims = choose.choice([[0], [1], [0, 1]])
        with Crew(WORLD) as crew:
            pids = crew.pids()
            found = _killed_in_a_save(crew, root, notes, [pids[v] for v in victims], choose.uniform(0, 0.12))
        for rank in victims:
            assert found[rank].exitcode == -signal.SIGKILL, found[rank].summary()
        for rank in set(range(WORLD)) - set(victims):
            assert found[rank].error_type == "RankFailed", found[rank].summary()
        lines = _lines(notes)
        loaded = {line for line in lines if line.startswith("loaded")}
        assert len(loaded) == 1, f"the ranks resumed from different steps: {loaded}"
        step = int(loaded.pop().split()[1])
        assert step in (reported, reported + 1), f"resumed from {step}, but {reported} was reported as committed"
        reported = max([step, *(int(line.split()[1]) for line in lines if line.startswith("saved"))])
        assert reported > step
    with Crew(WORLD) as crew:
        ((newest, steps), other) = crew.run(_resume, root)
        assert other == (newest, steps)
        assert newest in (reported, reported + 1) and steps == list(range(1, newest + 1))
    outcomes = [r["attempt"] for r in log_records(Path(root)).values() if r["kind"] in ("commit", "void")]
    begun = [f.parent.name for f in (Path(root) / "attempts").rglob("intent.json")]
    assert len(set(outcomes)) == len(outcomes) and set(begun) - set(outcomes), "no save was cut off"


def _killed_in_a_save(crew: Crew, root: str, notes: Path, victims: list[int], delay: float) -> list[Any]:
    """Runs the launch, and kills these processes so many seconds after their second commit."""

    def kill() -> None:
        while sum(line.startswith("saved") for line in _lines(notes)) < 2 * WORLD and not done.is_set():
            time.sleep(0.005)
        time.sleep(delay)
        for pid in victims:
            os.kill(pid, signal.SIGKILL)

    done = threading.Event()
    killer = threading.Thread(target=kill)
    killer.start()
    try:
        found: list[Any] = crew.run(_resume_and_save, root, str(notes), timeout=60, expect_failures=True)
    finally:
        done.set()
        killer.join()
    return found


JUNK = (
    "step_abc",
    "step_0010",
    "10",
    "step_10.tmp",
    ".tmp",
    "tmp.orbax-checkpoint-tmp-1",
    "global_step11",
    "iter_0000012",
)


def litter(root: Path) -> None:
    """What other tools, and killed ones, leave: empty directories with the names of steps, stray files, pointers."""
    for name in JUNK:
        (root / name).mkdir(parents=True, exist_ok=True)
    (root / "step_0010" / "model.pt").write_bytes(b"not a checkpoint")
    (root / "latest").write_text("step_abc")
    (root / "latest_checkpointed_iteration.txt").write_text("12")
    (root / "attempts" / ("f" * 32) / ("e" * 32) / "receipts").mkdir(parents=True, exist_ok=True)
    (root / "attempts" / "step_99").mkdir(exist_ok=True)
    for folder in (root / "log", root / "attempts"):
        folder.mkdir(exist_ok=True)
        (folder / ".tmp-0123456789abcdef").write_bytes(b"{")
        (folder / ".nfs000000001").write_bytes(b"")


def test_junk_beside_changes_nothing(tmp_path: Path) -> None:
    root = tmp_path / "root"
    litter(root)
    with ckpt.Checkpointer(root) as ck:
        target = sample_state(9)
        assert (ck.load(target), ck.latest(), ck.steps()) == (None, None, [])
        assert state_bits(target) == state_bits(sample_state(9))
        for step in (9, 10):
            ck.save(step, sample_state(step))
    litter(root)
    before = {name: data for name, data in tree(root).items() if not name.startswith(("log/0", "attempts/"))}
    with ckpt.Checkpointer(root) as ck:
        target = sample_state(1)
        restored = ck.load(target)
        assert restored is not None and (restored.step, ck.steps()) == (10, [9, 10])
        assert state_bits(target) == state_bits(sample_state(10))
        ck.save(10, sample_state(11))
        assert ck.steps() == [9, 10]
        assert ck.load(target) is not None
        assert state_bits(target) == state_bits(sample_state(11))
    after = {name: data for name, data in tree(root).items() if not name.startswith(("log/0", "attempts/"))}
    assert after == before, "what is not ours was touched"
    assert all((root / name).is_dir() for name in JUNK)


@pytest.mark.parametrize("missing", ["chunk", "manifest.json", "run.json", "receipts", "intent.json", "nothing"])
def test_an_attempt_with_a_manifest_and_not_its_all_is_not_chosen(tmp_path: Path, missing: str) -> None:
    """A copy of a committed attempt under a name of its own, with its manifest, looks whole to a reader of names."""
    root = tmp_path / "root"
    with ckpt.Checkpointer(root) as ck:
        ck.save(1, sample_state(1))
        whole = attempt_folder(root)
        copy = whole.parent / ("0" * 32)
        shutil.copytree(whole, copy)
        if missing == "chunk":
            name = objects_of(root, "tensors/big")[0].relative_to(whole)
            (copy / name).unlink()
        elif missing == "receipts":
            shutil.rmtree(copy / "receipts")
        elif missing != "nothing":
            (copy / missing).unlink()
    for _ in range(2):
        with ckpt.Checkpointer(root) as ck:
            target = sample_state(9)
            restored = ck.load(target)
            assert restored is not None and (restored.step, ck.steps()) == (1, [1])
            assert state_bits(target) == state_bits(sample_state(1))
    commits = [r["attempt"] for r in log_records(root).values() if r["kind"] == "commit"]
    assert commits == [whole.name]


def test_a_committed_step_that_lost_a_chunk_is_named_and_the_one_before_loads(tmp_path: Path) -> None:
    root = tmp_path / "root"
    with ckpt.Checkpointer(root) as ck:
        for step in (1, 2):
            ck.save(step, sample_state(step))
        lost = objects_of(root, "tensors/big")[0]
        lost.unlink()
        target = sample_state(9)
        with pytest.raises(ckpt.CorruptCheckpoint, match=f"{lost.name}: stored chunk is missing; .*load an older step"):
            ck.load(target)
        assert state_bits(target) == state_bits(sample_state(9))
        restored = ck.load(target, step=1)
        assert restored is not None and state_bits(target) == state_bits(sample_state(1))
        ck.save(2, sample_state(3))  # the same step again
        assert ck.load(target) is not None and state_bits(target) == state_bits(sample_state(3))


@pytest.mark.parametrize("name", ["000000000003.json.tmp", "latest", "3.json", "000000000000.json"])
def test_a_foreign_file_in_the_log_is_named(tmp_path: Path, name: str) -> None:
    """Nothing there is guessed at: a copy that was cut off could hide a record."""
    root = tmp_path / "root"
    with ckpt.Checkpointer(root) as ck:
        ck.save(1, sample_state(1))
    (root / "log" / name).write_text(json.dumps({"step": 3}))
    with ckpt.Checkpointer(root) as ck, pytest.raises(ckpt.CorruptCheckpoint, match=f"log/{name}: a foreign file"):
        ck.load(sample_state(9))
    (root / "log" / name).unlink()
    with ckpt.Checkpointer(root) as ck:
        assert ck.load(sample_state(9)) is not None
