"""Case 4, zarr-587: a lost chunk reads as zeros.

The fault: a format that takes absence for the fill value cannot tell a lost chunk from a chunk of zeros, and reads
zeros without an error. Here every chunk of every array is stored, zeros too; a missing, short, damaged or misplaced
one is an error that names the tensor and the chunk; and a tensor of zeros still loads.
"""

import struct
from collections.abc import Callable
from pathlib import Path

import google_crc32c
import pytest
import torch

import ckpt
from tests.support.raw import attempt_folder, labelled, objects_of, raw

SHAPES = {"wide": (1100, 1000), "zeros": (1100, 1000), "tiny": (5,)}
FOLDERS = {"wide": "tensors/wide", "zeros": "tensors/zeros", "tiny": "packed/float32"}


def _full() -> dict[str, torch.Tensor]:
    return {"wide": labelled(SHAPES["wide"]), "zeros": torch.zeros(SHAPES["zeros"]), "tiny": torch.zeros(5)}


def _other() -> dict[str, torch.Tensor]:
    return {name: torch.full(shape, 7.0) for name, shape in SHAPES.items()}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    with ckpt.Checkpointer(tmp_path) as ck:
        ck.save(1, _full())
    return tmp_path


def test_zeros_are_stored_like_anything_else_and_load(root: Path) -> None:
    assert len(objects_of(root, FOLDERS["zeros"])) == len(objects_of(root, FOLDERS["wide"])) > 1
    target = _other()
    with ckpt.Checkpointer(root) as ck:
        assert ck.load(target) is not None
    assert {n: raw(t) for n, t in target.items()} == {n: raw(t) for n, t in _full().items()}


def _cut_to(part: float) -> Callable[[Path], None]:
    return lambda file: file.write_bytes(file.read_bytes()[: int(file.stat().st_size * part)]) and None


def _remove_array(file: Path) -> None:
    array = next(p for p in file.parents if (p / "zarr.json").exists())
    for found in sorted(array.rglob("*"), reverse=True):
        found.unlink() if found.is_file() else found.rmdir()
    array.rmdir()


LOST: dict[str, Callable[[Path], None]] = {
    "deleted": Path.unlink,
    "cut to nothing": _cut_to(0),
    "cut to half": _cut_to(0.5),
    "array removed": _remove_array,
}


@pytest.mark.parametrize("number", [0, -1], ids=["first", "last"])
@pytest.mark.parametrize("lost", LOST)
@pytest.mark.parametrize("tensor", FOLDERS)
def test_a_lost_chunk_is_an_error_before_anything_changes(tensor: str, lost: str, number: int, root: Path) -> None:
    file = objects_of(root, FOLDERS[tensor])[number]
    LOST[lost](file)
    target = _other()
    with ckpt.Checkpointer(root) as ck, pytest.raises(ckpt.CorruptCheckpoint) as caught:
        ck.load(target, verify=False)
    named = "zarr.json" if lost == "array removed" else file.relative_to(attempt_folder(root)).as_posix()
    assert f"state/{FOLDERS[tensor]}" in str(caught.value) and named in str(caught.value)
    assert {n: raw(t) for n, t in target.items()} == {n: raw(t) for n, t in _other().items()}


def _mark_inner_chunk_missing(file: Path) -> None:
    """Zarr's own way to leave out an inner chunk: offset and length all ones in the index, whose checksum is right."""
    data = bytearray(file.read_bytes())
    slots = 0  # as many 16-byte entries before the last 4 bytes as give the checksum there
    while google_crc32c.value(bytes(data[-4 - 16 * slots : -4])) != int.from_bytes(data[-4:], "little") or not slots:
        slots += 1
    index = b"\xff" * 16 + bytes(data[-4 - 16 * slots + 16 : -4])
    data[-4 - 16 * slots :] = index + struct.pack("<I", google_crc32c.value(index))
    file.write_bytes(data)


def _flip_first_bit(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[0] ^= 1
    file.write_bytes(data)


def _all_zeros(file: Path) -> None:
    file.write_bytes(bytes(file.stat().st_size))


DAMAGE: dict[str, Callable[[Path], None]] = {
    "one bit flipped": _flip_first_bit,
    "overwritten with zeros": _all_zeros,
    "an inner chunk left out": _mark_inner_chunk_missing,
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("tensor", FOLDERS)
def test_a_damaged_chunk_is_an_error_that_names_it(tensor: str, damage: str, root: Path) -> None:
    """Of tensors of zeros too, where what comes in place of the chunk would be right by chance."""
    file = objects_of(root, FOLDERS[tensor])[-1]
    DAMAGE[damage](file)
    with ckpt.Checkpointer(root) as ck, pytest.raises(ckpt.StateInvalid) as caught:
        ck.load(_other(), verify=False)
    chunk = file.relative_to(attempt_folder(root) / "state" / FOLDERS[tensor] / "c").as_posix()
    assert f"{FOLDERS[tensor]} (tensor {tensor}, chunk {chunk})" in str(caught.value)
    assert "missing or damaged" in str(caught.value) and "older step" in str(caught.value)


def test_a_chunk_in_the_place_of_its_neighbour_is_an_error_that_names_the_tensor(root: Path) -> None:
    first, second = objects_of(root, FOLDERS["wide"])[:2]
    a, b = first.read_bytes(), second.read_bytes()
    assert len(a) == len(b)
    first.write_bytes(b)
    second.write_bytes(a)
    with ckpt.Checkpointer(root) as ck, pytest.raises(ckpt.StateInvalid, match="wide: the fingerprint"):
        ck.load(_other())
