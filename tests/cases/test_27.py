"""Case 27: full disks, quotas, lost permissions, read-only mounts and too few file descriptors.

All ranks raise the same kind of error within seconds, what was committed stays, and the same step can be saved again
once there is room. A full disk is a small file system in memory; one rank alone fails through its own limits.
"""

import os
import resource
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt.engine.faults import POINTS
from tests.support.ranks import Crew, Outcome
from tests.support.raw import random_bits, raw

pytestmark = [pytest.mark.ranks]

WORLD = 2
BOUND = 60.0  # seconds after which a save or load counts as hung
NOBODY = 65534
AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system, or acts as another user")


@dataclass
class Job:
    """Two ranks with a checkpointer each, and what was committed."""

    crew: Crew
    root: str
    committed: list[int] = field(default_factory=list)

    def save(self, step: int, *limits: Any) -> list[Outcome]:
        found: list[Outcome] = self.crew.run(_save, self.root, step, *limits, timeout=BOUND, expect_failures=True)
        assert not any(o.hung or o.exitcode is not None for o in found), [o.summary() for o in found]
        return found

    def saved(self, step: int) -> None:
        found = self.save(step)
        assert all(o.ok for o in found), [o.summary() for o in found]
        self.committed.append(step)
        self.check()

    def fails(self, step: int, *limits: Any, words: tuple[str, ...] = ()) -> list[Outcome]:
        """All ranks raise a StoreError with one of these words, and nothing is committed."""
        found = self.save(step, *limits)
        assert all(o.error_type == "StoreError" for o in found), [o.summary() for o in found]
        assert all(any(w in o.error_message for w in words) for o in found if words), [o.summary() for o in found]
        self.check()
        return found

    def check(self) -> None:
        """Another job that only reads: all that was committed, and its newest bit for bit."""
        newest = self.committed[-1] if self.committed else None
        assert self.crew.run(_load, self.root, timeout=BOUND) == [(self.committed, newest)] * WORLD


@pytest.fixture(scope="module")
def crew() -> Iterator[Crew]:
    with Crew(WORLD) as crew:
        yield crew


@contextmanager
def job_at(crew: Crew, root: Path) -> Iterator[Job]:
    job = Job(crew, str(root))
    crew.run(_open, job.root)
    job.saved(1)
    yield job
    if not crew.broken:
        crew.run(_close, job.root)


@pytest.fixture
def job(crew: Crew, tmp_path: Path) -> Iterator[Job]:
    with job_at(crew, tmp_path / "root") as job:
        yield job


class Disk:
    """A file system of 64 MiB in memory, whose free bytes and files can be set, and that can be made read-only."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def change(self, *options: str) -> None:
        subprocess.run(["mount", "-o", ",".join(["remount", *options]), str(self.path)], check=True)

    def leave_files(self, number: int) -> None:
        """Room for this many more files and directories."""
        found = os.statvfs(self.path)
        self.change(f"nr_inodes={found.f_files - found.f_ffree + number}")

    def leave_bytes(self, number: int) -> None:
        found = os.statvfs(self.path)
        self.change(f"size={(found.f_blocks - found.f_bfree) * found.f_frsize + number}")

    def free(self) -> None:
        self.change("size=64m", "nr_inodes=100000", "rw")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    path = tmp_path / "disk"
    path.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "none", str(path)], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no mounts here: {done.stderr.strip()}")
    yield Disk(path)
    subprocess.run(["umount", str(path)], check=True)


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every user can come to, unlike pytest's."""
    path = Path(tempfile.mkdtemp(prefix="ckpt-modes-"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


# --- In the rank's process ---

_open_here: dict[str, ckpt.Checkpointer] = {}
_armed: list[Callable[[str], None]] = []


def _open(rank: int, world: int, root: str) -> None:
    from ckpt.store import log

    log._TRIES = 3  # of an append that fails, over less than a second
    _open_here[root] = ckpt.Checkpointer(root, timeout=BOUND, faults=lambda at: _armed[0](at) if _armed else None)


def _close(rank: int, world: int, root: str) -> None:
    _open_here.pop(root).close()


def _state(rank: int, step: int) -> dict[str, Any]:
    """A tensor cut over the ranks, whole ones for each rank to write, a packed one, and a value."""
    cut = random_bits((256, 128), torch.float32, 1000 * step)[rank * 128 : rank * 128 + 128]
    return {
        "cut": ckpt.ShardedTensor(cut, [((rank * 128, 0), (128, 128), (0, 0))], (256, 128)),
        **{f"whole/{i}": random_bits((300, 100), torch.float32, 1000 * step + i + 1) for i in range(4)},
        "small": random_bits((5,), torch.float32, 1000 * step + 9),
        "step": step,
    }


def _bits(state: dict[str, Any]) -> list[Any]:
    return [raw(getattr(v, "local", v)) if not isinstance(v, int) else v for v in state.values()]


def _save(rank: int, world: int, root: str, step: int, limit: str = "", victim: int = 0, at: str = "") -> None:
    """limit: a name of `resource`, whose limit is lowered on one rank from the point `at` on; "user": it becomes
    another user then."""
    state = _state(rank, step)
    undo: list[Callable[[], None]] = []

    def fault(point: str) -> None:
        if rank == victim and point == at and not undo:
            undo.append(_lower(limit))

    if limit:
        _armed.append(fault)
    try:
        _open_here[root].save(step, state)
    finally:
        _armed.clear()
        for action in undo:
            action()


def _lower(limit: str) -> Callable[[], None]:
    if limit == "user":
        os.seteuid(NOBODY)
        return lambda: os.seteuid(0)
    kind = getattr(resource, limit)
    before = resource.getrlimit(kind)
    lowest = os.dup(0)  # the number that the next file would get
    os.close(lowest)
    resource.setrlimit(kind, (lowest if limit == "RLIMIT_NOFILE" else 0, before[1]))
    return lambda: resource.setrlimit(kind, before)


def _load(rank: int, world: int, root: str) -> tuple[list[int], int | None]:
    with ckpt.Checkpointer(root, read_only=True) as ck:
        state = _state(rank, 0)
        restored = ck.load(state)
        if restored is None:
            return ck.steps(), None
        assert _bits(state) == _bits(_state(rank, restored.step))
        return ck.steps(), restored.step


# --- The tests ---


@AS_ROOT
def test_no_room_for_each_file_in_turn(crew: Crew, disk: Disk) -> None:
    """Room for one file more each time, until the save succeeds: so each file of it has been the one too many."""
    with job_at(crew, disk.path / "root") as job:
        room, failures = 0, 0
        while True:
            disk.leave_files(room)
            found = job.save(2)
            if all(o.ok for o in found):
                break
            for outcome in found:
                assert outcome.error_type == "StoreError", outcome.summary()
                assert "No space left on device" in outcome.error_message, outcome.summary()
                assert "space" in outcome.error_message.split("No space left on device")[1]
            failures += 1
            room += 1
            if room % 8 == 0:
                job.check()
            assert room < 200
        assert failures > 20
        job.committed.append(2)
        job.check()
        disk.leave_files(0)
        job.fails(3, words=("No space left",))
        disk.free()
        job.saved(3)


@AS_ROOT
def test_no_room_for_all_bytes(crew: Crew, disk: Disk) -> None:
    with job_at(crew, disk.path / "root") as job:
        for room in range(0, 600, 60):
            disk.leave_bytes(room << 10)
            job.fails(2, words=("No space left on device",))
        disk.free()
        job.saved(2)


@AS_ROOT
def test_a_disk_that_turns_read_only(crew: Crew, disk: Disk) -> None:
    with job_at(crew, disk.path / "root") as job:
        disk.change("ro")
        job.fails(2, words=("Read-only file system; mount it writable",))
        disk.change("rw")
        job.saved(2)


@pytest.mark.parametrize("victim", range(WORLD))
def test_one_rank_alone_can_write_no_more(job: Job, victim: int) -> None:
    """A limit of its own, from each point of the save on: the other rank's disk is fine."""
    everywhere = ("save.begin", "save.object", "save.written")
    points = [p for p in POINTS if p in everywhere or (victim == 0 and p.startswith(("save.intent", "commit.")))]
    failed = []
    for point in points:
        found = job.save(2, "RLIMIT_FSIZE", victim, point)
        if all(o.ok for o in found):
            job.committed.append(2)
        else:
            assert all(o.error_type == "StoreError" for o in found), [o.summary() for o in found]
            assert all("too large" in o.error_message for o in found), [o.summary() for o in found]
            failed.append(point)
        job.check()
    assert set(points) - set(failed) <= {"commit.done"}
    job.saved(3)


@AS_ROOT
def test_one_rank_alone_may_write_no_more(crew: Crew, open_folder: Path) -> None:
    with job_at(crew, open_folder / "root") as job:
        for victim, point in ((1, "save.begin"), (1, "save.written"), (0, "save.begin"), (0, "commit.append")):
            job.fails(2, "user", victim, point, words=("Permission denied", "PERMISSION_DENIED"))
        job.saved(2)


@pytest.mark.parametrize("victim", range(WORLD))
def test_one_rank_alone_has_no_file_descriptors_left(job: Job, victim: int) -> None:
    for point in ("save.begin", "save.object", "save.written"):
        job.fails(2, "RLIMIT_NOFILE", victim, point, words=("Too many open files",))
    job.saved(2)


# --- Before training: what the first claim and a load say ---


def refused_at_once(root: Path, *words: str) -> None:
    """A job learns of it when it starts, from its first load."""
    with ckpt.Checkpointer(root) as ck:
        with pytest.raises(ckpt.StoreError) as caught:
            ck.load({"x": torch.zeros(2)})
        for word in (root.as_uri(), *words):
            assert word in str(caught.value), str(caught.value)


@contextmanager
def unprivileged() -> Iterator[None]:
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


@AS_ROOT
def test_a_folder_of_another_user_is_told_before_training(open_folder: Path) -> None:
    with ckpt.Checkpointer(open_folder / "warm") as ck:  # imports what it needs while it may
        ck.save(1, {"x": torch.zeros(2)})
    remedy = "Permission denied; check who owns it and its permissions"
    with unprivileged():
        refused_at_once(open_folder / "new", remedy)
        refused_at_once(open_folder / "warm", remedy)
        state = {"x": torch.ones(2)}
        with ckpt.Checkpointer(open_folder / "warm", read_only=True) as ck:
            assert ck.load(state) is not None
        assert not state["x"].any()
    (open_folder / "warm").chmod(0o700)
    with unprivileged():
        refused_at_once(open_folder / "warm", "Permission denied")
        with ckpt.Checkpointer(open_folder / "warm", read_only=True) as ck, pytest.raises(ckpt.StoreError) as caught:
            ck.load(state)
        assert "Permission denied; check who owns it" in str(caught.value)


@AS_ROOT
def test_a_full_or_read_only_disk_is_told_before_training(disk: Disk) -> None:
    disk.leave_files(0)
    refused_at_once(disk.path / "new", "No space left on device; free some space there")
    disk.free()
    (disk.path / "ballast").write_bytes(bytes(8192))
    disk.leave_bytes(0)
    refused_at_once(disk.path, "No space left on device; free some space there")
    disk.free()
    disk.change("ro")
    refused_at_once(disk.path / "new", "Read-only file system; mount it writable")


@AS_ROOT
def test_data_that_may_not_be_read_is_no_damage(open_folder: Path) -> None:
    state = {"x": random_bits((300, 100), torch.float32, 1), "y": random_bits((4,), torch.float32, 2)}
    with ckpt.Checkpointer(open_folder / "root") as ck:
        ck.save(1, state)
    objects = [f for f in (open_folder / "root" / "attempts").rglob("*") if f.is_file() and "c" in f.parts]
    assert len(objects) == 2
    for file in objects:
        file.chmod(0)
        target = {"x": torch.zeros(300, 100), "y": torch.zeros(4)}
        with unprivileged(), ckpt.Checkpointer(open_folder / "root", read_only=True) as ck:
            with pytest.raises(ckpt.StoreError, match=f"{file.name}.*Permission denied"):
                ck.load(target, atomic=True)
        assert not target["x"].any() and not target["y"].any()
        file.chmod(0o644)
