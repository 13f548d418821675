"""Outputs of other libraries in pieces: killed at any point they go on, and any number of processes write the same."""

import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

from ckpt.adapters.foreign.formats import READERS, detect
from ckpt.adapters.foreign.witness import state_id_of
from ckpt.adapters.foreign.work_folder import WORK
from ckpt.engine.comm import Comm
from ckpt.errors import CkptError, CorruptCheckpoint, StoreError
from tests.adapters.foreign.in_pieces import (
    LAST,
    PIECE,
    WRITE,
    Countdown,
    Counting,
    bytes_read,
    go_on,
    records,
    state,
    to_read,
    write,
)
from tests.support.at_rest import committed
from tests.support.ranks import run_ranks
from tests.support.raw import raw, tree

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


@pytest.fixture
def root(pieces_root: Path) -> Path:
    return pieces_root


# Processes


def _write_all(rank: int, world: int, root: str, folder: str) -> dict[str, int]:
    """The bytes that this process read, by format."""
    read = {}
    for form, writer in WRITE.items():
        source = Counting(committed(Path(root)))
        writer(source, Path(folder) / form, Comm(timeout=60))
        read[form] = source.nbytes
    return read


@pytest.mark.ranks
@pytest.mark.parametrize("world", [2, 3])
def test_any_number_of_processes_writes_the_same_bytes(
    root: Path, tmp_path: Path, whole: dict[str, dict[str, bytes]], world: int
) -> None:
    read = run_ranks(world, _write_all, str(root), str(tmp_path), timeout=60)
    for form in WRITE:
        assert tree(tmp_path / form) == whole[form], form
        assert not (tmp_path / form / WORK).exists()
        shares = [of_one[form] for of_one in read]
        assert sum(shares) == to_read(root) and max(shares) - min(shares) <= PIECE + (600 * 704 * 4)


def test_the_libraries_read_it(root: Path, tmp_path: Path, whole: dict[str, dict[str, bytes]]) -> None:
    """And the pieces do not change what is written as safetensors."""
    wanted = {name: t for name, t in state().items() if isinstance(t, torch.Tensor)}
    write("hf", committed(root), tmp_path / "hf")
    assert tree(tmp_path / "hf") == whole["hf"]
    found = load_file(tmp_path / "hf" / "model.safetensors")
    assert {name: raw(t) for name, t in found.items()} == {name: raw(t) for name, t in wanted.items()}
    WRITE["dcp"](committed(root), tmp_path / "dcp")
    into: dict[str, Any] = {name: torch.zeros_like(t) for name, t in wanted.items()} | {"epoch": 0}
    dcp.load(into, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert into.pop("epoch") == 3
    assert {name: raw(t) for name, t in into.items()} == {name: raw(t) for name, t in wanted.items()}


def _one_fails(rank: int, world: int, root: str, folder: str, kind: type[CkptError]) -> str:
    def fail(point: str) -> None:
        if rank:
            raise kind("this disk is gone")

    try:
        WRITE["dcp"](Counting(committed(Path(root)), fail), Path(folder), Comm(timeout=60))
    except kind as error:
        return str(error)
    raise AssertionError("no error was raised")


@pytest.mark.ranks
@pytest.mark.parametrize(("kind", "stays"), [(StoreError, True), (CorruptCheckpoint, False)])
def test_processes_fail_together(root: Path, tmp_path: Path, kind: type[CkptError], stays: bool) -> None:
    said = run_ranks(2, _one_fails, str(root), str(tmp_path / "a"), kind, timeout=60)
    assert said == ["rank 1 failed during files: write: this disk is gone", "this disk is gone"]
    assert (tmp_path / "a").exists() == stays and bool(records(tmp_path / "a")) == stays


# Killed


def _killed(rank: int, world: int, root: str, folder: str, form: str, point: str, left: int) -> None:
    """The last process dies."""
    die = Countdown(point, left, partial(os.kill, os.getpid(), signal.SIGKILL))
    at = die if rank == world - 1 else (lambda reached: None)
    WRITE[form](Counting(committed(Path(root)), at), Path(folder), Comm(timeout=60), faults=at)


@pytest.mark.ranks
@pytest.mark.parametrize("form", WRITE)
@pytest.mark.parametrize(("point", "left"), [("read", 12), ("files.piece", 3), ("files.placed", 0), ("files.last", 0)])
def test_after_a_kill_only_what_is_not_finished_is_written(
    root: Path, tmp_path: Path, whole: dict[str, dict[str, bytes]], form: str, point: str, left: int
) -> None:
    folder = tmp_path / "a"
    left = 2 if point == "files.placed" and form != "hf" else left  # some of the tensors' files are in their places
    (outcome,) = run_ranks(1, _killed, str(root), str(folder), form, point, left, timeout=60, expect_failures=True)
    assert outcome.exitcode == -signal.SIGKILL, outcome
    last, done = LAST.get(form, ".metadata"), records(folder)
    assert (folder / last).exists() == (point == "files.last")
    if point != "files.last":
        check_no_reader_takes_it(form, folder)
    inodes = {p.name.removesuffix(".part"): p.stat() for p in folder.rglob("*") if p.is_file()}
    read = go_on(form, root, folder)
    assert tree(folder) == whole[form] and not (folder / WORK).exists()
    assert len(done) >= 2 and read == to_read(root) - sum(map(bytes_read, done.values()))
    assert (read == 0) == (point in ("files.placed", "files.last"))
    for number, record in done.items():
        if form in ("dcp", "megatron"):
            file = folder / f"__{number}_0.distcp"
            was, now = inodes[file.name], file.stat()
            assert (was.st_ino, was.st_mtime_ns) == (now.st_ino, now.st_mtime_ns), record
    assert state_id_of(READERS[form.split(",")[0]](folder)) == committed(root).content.state_id


def check_no_reader_takes_it(form: str, folder: Path) -> None:
    with pytest.raises(CkptError):
        READERS[form.split(",")[0]](folder)
    if not list(folder.glob("*.safetensors")):
        with pytest.raises(CkptError, match="not finished"):
            detect(folder)
    if form in ("dcp", "megatron"):
        with pytest.raises(FileNotFoundError):
            dcp.FileSystemReader(folder).read_metadata()
    elif form == "hf":
        assert not list(folder.rglob("*.safetensors"))


@pytest.mark.ranks
@pytest.mark.parametrize("form", ["hf", "megatron"])
def test_others_go_on_when_one_process_of_two_was_killed(
    root: Path, tmp_path: Path, whole: dict[str, dict[str, bytes]], form: str
) -> None:
    folder = tmp_path / form
    first, second = run_ranks(
        2, _killed, str(root), str(folder), form, "files.piece", 2, timeout=60, expect_failures=True
    )
    assert second.exitcode == -signal.SIGKILL and first.error_type == "RankFailed" and "rank 1" in first.error_message
    done = records(folder)
    assert len(done) > 3
    read = run_ranks(2, _go_on, str(root), str(folder), form, timeout=60)
    assert sum(read) == to_read(root) - sum(map(bytes_read, done.values())) > 0
    assert tree(folder) == whole[form]


def _go_on(rank: int, world: int, root: str, folder: str, form: str) -> int:
    source = Counting(committed(Path(root)))
    WRITE[form](source, Path(folder), Comm(timeout=60))
    return source.nbytes


@pytest.mark.parametrize("form", ["hf", "dcp"])
def test_killed_while_the_work_folder_goes_it_is_whole(
    root: Path, tmp_path: Path, whole: dict[str, dict[str, bytes]], form: str
) -> None:
    with pytest.raises(KeyboardInterrupt):
        WRITE[form](committed(root), tmp_path / "a", faults=Countdown("files.ending", 0, _interrupt))
    assert (tmp_path / "a" / WORK).exists()
    with pytest.raises(StoreError, match="not empty"):
        WRITE[form](committed(root), tmp_path / "a")
    assert tree(tmp_path / "a") == whole[form]


def _interrupt() -> None:
    raise KeyboardInterrupt
