"""Outputs of other libraries in pieces: killed at any point they go on, and any number of processes write the same."""

import json
import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

import ckpt
from ckpt.adapters.foreign.dcp_write import write_dcp
from ckpt.adapters.foreign.formats import READERS, detect
from ckpt.adapters.foreign.megatron_write import write_megatron
from ckpt.adapters.foreign.safetensors_write import SafetensorsOutput, write_safetensors
from ckpt.adapters.foreign.witness import state_id_of
from ckpt.adapters.foreign.work_folder import WORK
from ckpt.engine.comm import Comm
from ckpt.engine.rest import CommittedState
from ckpt.errors import CkptError, CorruptCheckpoint, StoreError
from ckpt.geometry import Box
from tests.support.at_rest import committed
from tests.support.ranks import run_ranks
from tests.support.raw import random_bits, raw, tree

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

PIECE = 1 << 20
WRITE: dict[str, Callable[..., str]] = {
    "hf": partial(write_safetensors, piece_bytes=PIECE),
    "hf, several": partial(write_safetensors, piece_bytes=PIECE, file_bytes=3 * PIECE, beside={"config.json": b"{}"}),
    "dcp": partial(write_dcp, file_bytes=PIECE),
    "megatron": partial(write_megatron, file_bytes=PIECE),
}
LAST = {"hf": "model.safetensors", "hf, several": "model.safetensors.index.json"}  # .metadata elsewhere


def state() -> dict[str, Any]:
    tensors = {f"w{n}": random_bits((600, 700 + n), torch.float32, n) for n in range(5)}
    tensors |= {f"t{n}": random_bits((9, n), torch.bfloat16, n) for n in range(5)}
    tensors["decoder.layers.mlp.linear_fc1.weight"] = random_bits((2, 300, 400), torch.bfloat16, 7)
    return {**tensors, "tied": tensors["w1"], "epoch": 3, "lr": {"now": 0.5}, "rank": ckpt.per_rank({"a": 1})}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A state of about nine pieces, with ties and values."""
    path = tmp_path_factory.mktemp("pieces") / "root"
    with ckpt.Checkpointer(path) as ck:
        ck.save(4, state())
    return path


@pytest.fixture(scope="module")
def whole(root: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, bytes]]:
    """What one process writes undisturbed, by format."""
    folder = tmp_path_factory.mktemp("whole")
    for form, write in WRITE.items():
        assert write(committed(root), folder / form) == committed(root).content.state_id
    return {form: tree(folder / form) for form in WRITE}


class Counting:
    """A source that counts the bytes that are read of it, and may do something at each box."""

    def __init__(self, true: CommittedState, at_read: Callable[[str], None] = lambda point: None) -> None:
        self.url, self.content, self._true, self._at_read = true.url, true.content, true, at_read
        self.nbytes = 0

    def read(self, name: str, box: Box) -> torch.Tensor:
        self._at_read("read")
        found = self._true.read(name, box)
        self.nbytes += found.nbytes
        return found


class Countdown:
    """Does something when a point is reached for the n-th time."""

    def __init__(self, point: str, left: int, then: Callable[[], Any]) -> None:
        self._point, self._left, self._then = point, left, then

    def __call__(self, reached: str) -> None:
        self._left -= reached == self._point
        if self._left < 0:
            self._then()


def stop() -> None:
    raise StoreError("stop")


def stopped(form: str, root: Path, folder: Path, left: int = 3) -> None:
    with pytest.raises(StoreError, match="stop"):
        WRITE[form](committed(root), folder, faults=Countdown("files.piece", left, stop))


def records(folder: Path) -> dict[int, dict[str, Any]]:
    """Of the finished pieces: what they say, and when."""
    found = {}
    for path in (folder / WORK / "pieces").glob("*.json"):
        found[int(path.stem)] = {**json.loads(json.loads(path.read_bytes())[1]), "at": path.stat().st_mtime_ns}
    return found


def bytes_read(record: dict[str, Any]) -> int:
    """Bytes of the state in a piece, by the boxes that its record names."""
    two = ("t0", "t1", "t2", "t3", "t4", "decoder.layers.mlp.linear_fc1.weight")
    return sum((2 if name in two else 4) * torch.Size(extent).numel() for name, _, extent, _ in record["seen"])


def to_read(root: Path) -> int:
    """Bytes that are read for all pieces: a tied tensor twice."""
    tensors = committed(root).content.tensors
    return sum(t.nbytes for t in tensors) + next(t.nbytes for t in tensors if t.name == "tied")


# Processes


def _write_all(rank: int, world: int, root: str, folder: str) -> dict[str, int]:
    """The bytes that this process read, by format."""
    read = {}
    for form, write in WRITE.items():
        source = Counting(committed(Path(root)))
        write(source, Path(folder) / form, Comm(timeout=60))
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
    write_safetensors(committed(root), tmp_path / "hf")
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


def go_on(form: str, root: Path, folder: Path) -> int:
    """Bytes that were read to make the rest."""
    source = Counting(committed(root))
    assert WRITE[form](source, folder) == source.content.state_id
    return source.nbytes


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


# What lies there


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[min(len(data) - 1, 5000)] ^= 1
    path.write_bytes(data)


def forge(path: Path) -> None:
    """A record that says another thing than it did."""
    told = json.loads(path.read_bytes())
    told[1] = told[1].replace('"start":0', '"start":8')
    path.write_text(json.dumps(told, separators=(",", ":")))


DAMAGE: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "a flipped bit": ("files/{file}", flip),
    "a missing file": ("files/{file}", Path.unlink),
    "an empty file": ("files/{file}", lambda path: path.write_bytes(b"")),
    "a missing record": ("pieces/000000.json", Path.unlink),
    "a record cut short": ("pieces/000000.json", lambda path: os.truncate(path, 50)),
    "a forged record": ("pieces/000000.json", forge),
    "an empty record": ("pieces/000000.json", lambda path: path.write_bytes(b"[]")),
}


@pytest.mark.parametrize("what", DAMAGE)
@pytest.mark.parametrize("form", ["hf, several", "dcp"])
def test_what_is_damaged_is_made_anew(
    root: Path, tmp_path: Path, whole: dict[str, dict[str, bytes]], form: str, what: str
) -> None:
    folder = tmp_path / "a"
    stopped(form, root, folder, 4)
    done = records(folder)
    name, damage = DAMAGE[what]
    file = min((folder / WORK / "files").iterdir()).name
    damage(folder / WORK / name.format(file=file))
    options = {"beside": {"config.json": b"{}"}, "file_bytes": 3 * PIECE, "piece_bytes": PIECE}
    pieces = SafetensorsOutput(committed(root).content, **options).plan.pieces
    whole_file = form == "hf, several" and what in ("a missing file", "an empty file")
    gone = [n for n, piece in enumerate(pieces) if f"{piece.file}.part" == file] if whole_file else [0]
    read = go_on(form, root, folder)
    kept = [record for number, record in done.items() if number not in gone]
    assert kept and read == to_read(root) - sum(map(bytes_read, kept))
    assert tree(folder) == whole[form]


def test_bytes_behind_the_end_go(root: Path, tmp_path: Path, whole: dict[str, dict[str, bytes]]) -> None:
    for form, file in (("dcp", "__0_0.distcp"), ("hf", "model.safetensors")):
        stopped(form, root, tmp_path / form)
        with (tmp_path / form / WORK / "files" / f"{file}.part").open("ab") as opened:
            opened.write(bytes(20 << 20))
        go_on(form, root, tmp_path / form)
        assert tree(tmp_path / form) == whole[form]


def test_another_conversion_is_refused_and_changes_nothing(
    root: Path, tmp_path: Path, whole: dict[str, dict[str, bytes]]
) -> None:
    folder = tmp_path / "a"
    stopped("dcp", root, folder)
    before = tree(folder)
    source = committed(root)
    other = committed(root)
    other.content = replace(other.content, identity="another")
    fp16 = replace(source.content, values={})
    for call in (
        lambda: WRITE["dcp"](other, folder),
        lambda: WRITE["dcp"](source, folder, with_sidecar=False),
        lambda: write_dcp(source, folder, file_bytes=2 * PIECE),
        lambda: WRITE["megatron"](source, folder),
        lambda: WRITE["hf"](source, folder),
        lambda: setattr(other, "content", fp16) or WRITE["dcp"](other, folder),
    ):
        with pytest.raises(CkptError, match=r"unfinished conversion of file://.*root@4 to dcp") as caught:
            call()
        assert type(caught.value) is CkptError and tree(folder) == before
    go_on("dcp", root, folder)
    assert tree(folder) == whole["dcp"]


def test_pieces_of_another_conversion_are_not_mixed_in(
    root: Path, tmp_path: Path, whole: dict[str, dict[str, bytes]]
) -> None:
    """Of a state of the same form, whose files and records somebody copied."""
    with ckpt.Checkpointer(tmp_path / "other") as ck:
        ck.save(4, {**state(), "epoch": 4})
    stopped("hf", tmp_path / "other", tmp_path / "b")
    stopped("hf", root, tmp_path / "a", 0)
    for part in ("files", "pieces"):
        shutil.rmtree(tmp_path / "a" / WORK / part)
        shutil.copytree(tmp_path / "b" / WORK / part, tmp_path / "a" / WORK / part)
    assert go_on("hf", root, tmp_path / "a") == to_read(root)
    assert tree(tmp_path / "a") == whole["hf"]


def test_a_damaged_plan_is_refused(root: Path, tmp_path: Path) -> None:
    stopped("hf", root, tmp_path / "a")
    (tmp_path / "a" / WORK / "plan.json").write_bytes(b"{")
    with pytest.raises(CkptError, match="delete"):
        WRITE["hf"](committed(root), tmp_path / "a")


def test_a_state_that_is_not_what_it_says_leaves_nothing_even_after_a_stop(root: Path, tmp_path: Path) -> None:
    for there in (False, True):
        if there:
            (tmp_path / "a").mkdir()
        lying = committed(root)
        lying.content = replace(lying.content, state_id="0" * 64)
        with pytest.raises(StoreError, match="stop"):
            WRITE["dcp"](lying, tmp_path / "a", faults=Countdown("files.piece", 3, stop))
        assert records(tmp_path / "a")
        with pytest.raises(CorruptCheckpoint, match="says that it is"):
            WRITE["dcp"](lying, tmp_path / "a")
        assert (tmp_path / "a").exists() == there and not list(tmp_path.glob("a/*"))
