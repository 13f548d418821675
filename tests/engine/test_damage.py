"""Files that are missing, of another size, not the pinned ones or of another format: phase 1 finds them.

Nothing is changed then, and saving goes on.
"""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ckpt
from tests.engine.states import FOLDERS, refused_load, sample_state, state_bits
from tests.support.raw import attempt_folder, forge_commit, forge_pinned, objects_of


def _truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def _halve(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def _empty(file: Path) -> None:
    file.write_bytes(b"")


def _append(file: Path) -> None:
    file.write_bytes(file.read_bytes() + b"\0")


def _replace_by_a_link(file: Path) -> None:
    other = file.parent / "other"
    shutil.copy(file, other)
    file.unlink()
    file.symlink_to(other)


SIZES: dict[str, Callable[[Path], None]] = {
    "truncated": _truncate,
    "halved": _halve,
    "emptied": _empty,
    "longer": _append,
    "deleted": Path.unlink,
    "a link": _replace_by_a_link,
}


@pytest.mark.parametrize("damage", SIZES)
@pytest.mark.parametrize("tensor", FOLDERS)
def test_a_chunk_of_another_size_is_found_before_anything_changes(
    tensor: str, damage: str, ck: ckpt.Checkpointer, tmp_path: Path
) -> None:
    file = objects_of(tmp_path / "root", FOLDERS[tensor])[-1]
    SIZES[damage](file)
    key = file.relative_to(tmp_path / "root").as_posix()
    refused_load(ck, sample_state(20), ckpt.CorruptCheckpoint, [key, "restore the file, or load an older step"])
    ck.save(2, sample_state(30))  # phase 1: saving goes on, and what it writes loads
    target = sample_state(20)
    assert ck.load(target) is not None
    assert state_bits(target) == state_bits(sample_state(30))


@pytest.mark.parametrize("key", ["zarr.json", "tensors/zarr.json", "tensors/own/zarr.json", "packed/float32/zarr.json"])
@pytest.mark.parametrize("gone", [True, False], ids=["deleted", "changed"])
def test_array_metadata_must_follow_from_the_manifest(
    key: str, gone: bool, ck: ckpt.Checkpointer, tmp_path: Path
) -> None:
    file = attempt_folder(tmp_path / "root") / "state" / key
    if gone:
        file.unlink()
    else:
        file.write_bytes(file.read_bytes().replace(b'"zarr_format":3', b'"zarr_format": 3'))
    words = [f"state/{key}", "missing" if gone else "does not follow from the manifest", "load an older step"]
    refused_load(ck, sample_state(20), ckpt.CorruptCheckpoint, words)


@pytest.mark.parametrize("name", ["manifest.json", "ranks/manifest.json", "run.json"])
@pytest.mark.parametrize("how", ["changed", "deleted", "emptied", "of another step"])
def test_records_must_be_those_that_the_commit_pins(name: str, how: str, ck: ckpt.Checkpointer, tmp_path: Path) -> None:
    file = attempt_folder(tmp_path / "root") / name
    if how == "deleted":
        file.unlink()
    elif how == "emptied":
        file.write_bytes(b"")
    elif how == "changed":
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
    else:
        kept = file.read_bytes()
        ck.save(2, sample_state(30, rank=ckpt.per_rank(4)))
        newest = attempt_folder(tmp_path / "root") / name
        assert newest.read_bytes() != kept
        newest.write_bytes(kept)
    words = [name, "load an older step", "missing" if how == "deleted" else "not the bytes that the commit of step"]
    refused_load(ck, sample_state(20), ckpt.CorruptCheckpoint, words)


def _other_fingerprint(d: dict[str, Any]) -> None:
    d["tensors"][0]["fingerprint"] = "0" * 31 + "1"


def _other_shape(d: dict[str, Any]) -> None:
    next(t for t in d["tensors"] if t["name"] == "own")["shape"] = [100, 300]


def _other_value(d: dict[str, Any]) -> None:
    d["values"]["epoch"] = {"int": "99"}


def _other_grid(d: dict[str, Any]) -> None:
    d["arrays"][0]["cell"] = [2 * n for n in d["arrays"][0]["cell"]]


def _escaping_folder(d: dict[str, Any]) -> None:
    d["arrays"][0]["folder"] = "../../../../outside"


def _absolute_folder(d: dict[str, Any]) -> None:
    d["arrays"][0]["folder"] = "/etc"


def _escaping_name(d: dict[str, Any]) -> None:
    d["tensors"][0]["name"] = "../../../../outside"


def _unknown_dtype(d: dict[str, Any]) -> None:
    d["tensors"][0]["dtype"] = "float128"


def _no_aliases(d: dict[str, Any]) -> None:
    d["aliases"] = [1]


def _no_tensors(d: dict[str, Any]) -> None:
    del d["tensors"]


def _foreign_array(d: dict[str, Any]) -> None:
    d["tensors"][0]["array"] = 77


FORGED = [
    _other_fingerprint,
    _other_shape,
    _other_value,
    _other_grid,
    _escaping_folder,
    _absolute_folder,
    _escaping_name,
    _unknown_dtype,
    _no_aliases,
    _no_tensors,
    _foreign_array,
]


@pytest.mark.parametrize("change", FORGED, ids=lambda f: f.__name__.strip("_"))
def test_a_manifest_that_contradicts_itself(
    change: Callable[[dict[str, Any]], None], ck: ckpt.Checkpointer, tmp_path: Path
) -> None:
    """Forged so that the commit pins it: its own state id, and the commit's, still tell."""
    forge_pinned(tmp_path / "root", "manifest.json", change)
    with ckpt.Checkpointer(tmp_path / "root", read_only=True) as fresh:
        message = refused_load(fresh, sample_state(20), ckpt.CorruptCheckpoint, ["manifest"])
    assert "older step" in message or "newer ckpt" in message


@pytest.mark.parametrize("name", ["manifest.json", "ranks/manifest.json", "run.json", "log"])
@pytest.mark.parametrize("version", [2, 0, "1", None, True])
def test_an_unknown_format_version(name: str, version: Any, ck: ckpt.Checkpointer, tmp_path: Path) -> None:
    if name == "log":
        forge_commit(tmp_path / "root", lambda d: d.update(format=version))
    else:
        forge_pinned(tmp_path / "root", name, lambda d: d.update(format=version))
    with ckpt.Checkpointer(tmp_path / "root", read_only=True) as fresh:
        words = [f"format version {version!r}", "reads version 1", "use a newer ckpt", name]
        refused_load(fresh, sample_state(20), ckpt.CkptError, words)
