"""What lies in the folder of an unfinished output: damage is made good, and nothing of another one is mixed in."""

import errno
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import ckpt
from ckpt.adapters.foreign.safetensors_write import SafetensorsOutput
from ckpt.adapters.foreign.work_folder import WORK
from ckpt.errors import CkptError, CorruptCheckpoint, StoreError
from tests.adapters.foreign.in_pieces import (
    PIECE,
    WRITE,
    Countdown,
    bytes_read,
    go_on,
    records,
    state,
    stop,
    stopped,
    to_read,
    write,
)
from tests.support.at_rest import committed
from tests.support.raw import tree

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


@pytest.fixture
def root(pieces_root: Path) -> Path:
    return pieces_root


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
        lambda: write("dcp", source, folder, file_bytes=2 * PIECE),
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


@pytest.mark.parametrize("form", ["hf", "dcp"])
def test_a_full_disk_costs_the_piece_at_hand(
    root: Path, tmp_path: Path, whole: dict[str, dict[str, bytes]], monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    left, pwrite = 4 << 20, os.pwrite

    def limited(opened: int, data: memoryview, at: int) -> int:
        nonlocal left
        if not left:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        done = pwrite(opened, data[:left], at)
        left -= done
        return done

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", limited)
        with pytest.raises(StoreError, match="No space left on device; what is done stays"):
            WRITE[form](committed(root), tmp_path / "a")
    done = records(tmp_path / "a")
    assert len(done) > 2
    assert go_on(form, root, tmp_path / "a") == to_read(root) - sum(map(bytes_read, done.values()))
    assert tree(tmp_path / "a") == whole[form]
