"""Bytes that turn out wrong while they are placed, and other failures of phase 2.

They are `StateInvalid`, and there is no save until a load succeeds; `atomic=True` puts the old bits back instead.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from tests.engine.states import FOLDERS, flip_bit, refused_load, sample_state, state_bits, swap_chunks
from tests.support.raw import objects_of, random_bits, raw


def _flip_index(file: Path) -> None:
    """In the index of the inner chunks, at the end of the object."""
    data = bytearray(file.read_bytes())
    data[-9] ^= 1
    file.write_bytes(data)


def _zero(file: Path) -> None:
    file.write_bytes(bytes(file.stat().st_size))


BITS: dict[str, Callable[[Path], None]] = {"one bit": flip_bit, "a bit of the index": _flip_index, "zeros": _zero}


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("damage", BITS)
@pytest.mark.parametrize("tensor", FOLDERS)
def test_flipped_bits_leave_the_state_invalid_until_a_load_heals_it(
    tensor: str, damage: str, verify: bool, ck: ckpt.Checkpointer, tmp_path: Path
) -> None:
    """CRC32C finds them also without verification."""
    ck.save(2, sample_state(30))
    BITS[damage](objects_of(tmp_path / "root", FOLDERS[tensor])[-1])
    target = sample_state(20)
    with pytest.raises(ckpt.StateInvalid) as caught:
        ck.load(target, verify=verify)
    for word in ("step 2", FOLDERS[tensor], "missing or damaged", "load an older step"):
        assert word in str(caught.value)
    with pytest.raises(ckpt.StateInvalid, match=r"not saved: loading step 2 failed .* load again, or an older step"):
        ck.save(3, target)
    assert ck.steps() == [1, 2]
    restored = ck.load(target, step=1)
    assert restored is not None and state_bits(target) == state_bits(sample_state(10))
    ck.save(3, target)
    assert ck.latest() == 3


def test_swapped_chunks_are_found_by_the_fingerprint(ck: ckpt.Checkpointer, tmp_path: Path) -> None:
    """Whole chunks with good checksums in the wrong place: only the verification of the live tensors can tell."""
    swap_chunks(tmp_path / "root")
    target = sample_state(20)
    with pytest.raises(ckpt.StateInvalid, match="big: the fingerprint of the live tensor is not the saved one"):
        ck.load(target)
    with pytest.raises(ckpt.StateInvalid, match="not saved"):
        ck.save(2, target)
    swap_chunks(tmp_path / "root")
    ck.load(target)
    assert state_bits(target) == state_bits(sample_state(10))
    ck.save(2, target)


def test_a_chunk_of_an_older_step_is_found_by_the_fingerprint(ck: ckpt.Checkpointer, tmp_path: Path) -> None:
    old = objects_of(tmp_path / "root", "packed/float32")[0].read_bytes()
    ck.save(2, sample_state(30))
    objects_of(tmp_path / "root", "packed/float32")[0].write_bytes(old)
    with pytest.raises(ckpt.StateInvalid, match="small: the fingerprint of the live tensor is not the saved one"):
        ck.load(sample_state(20))


def test_without_verification_the_load_says_so(ck: ckpt.Checkpointer, tmp_path: Path) -> None:
    """verify=False trusts the store: a swap goes unseen, and `verified` is false. Values are applied all the same."""
    swap_chunks(tmp_path / "root")
    target = sample_state(20)
    restored = ck.load(target, verify=False)
    assert restored is not None and not restored.verified
    assert raw(target["big"]) != raw(sample_state(10)["big"])
    assert state_bits(target) | {"big": b""} == state_bits(sample_state(10)) | {"big": b""}
    assert target["epoch"] == 10


def test_values_are_applied_only_after_verification(ck: ckpt.Checkpointer, tmp_path: Path) -> None:
    swap_chunks(tmp_path / "root")
    target = sample_state(20)
    with pytest.raises(ckpt.StateInvalid):
        ck.load(target)
    assert (target["epoch"], target["note"]) == (20, sample_state(20)["note"])


class _Bomb:
    """An object whose load_state_dict fails: the last thing that a load does."""

    def state_dict(self) -> dict[str, Any]:
        return {"fuse": 3}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        raise RuntimeError("bang")


def test_an_object_that_refuses_its_state_leaves_the_state_invalid(tmp_path: Path) -> None:
    with ckpt.Checkpointer(tmp_path) as ck:
        ck.save(1, sample_state(10, bomb=_Bomb()))
        for atomic in (False, True):  # a half-applied object cannot be undone
            target = sample_state(20, bomb=_Bomb())
            with pytest.raises(ckpt.StateInvalid, match=r"step 1 failed .*: bang"):
                ck.load(target, atomic=atomic)
            with pytest.raises(ckpt.StateInvalid, match="not saved"):
                ck.save(2, target)


def test_atomic_puts_the_old_tensors_back(ck: ckpt.Checkpointer, tmp_path: Path) -> None:
    """Strided targets and casts too; the error is the cause itself, and saving goes on."""
    strided = random_bits((100, 600), torch.float32, 5).t()[::2]
    target = sample_state(20) | {"own": strided, "small": torch.ones(5, 3, dtype=torch.float64)}
    before = state_bits(target)
    for damage, words in (
        (swap_chunks, "big: the fingerprint"),
        (lambda r: flip_bit(objects_of(r, "tensors/own")[0]), "own"),
    ):
        damage(tmp_path / "root")
        with pytest.raises(ckpt.CorruptCheckpoint, match=words):
            ck.load(target, cast=["small"], atomic=True)
        assert state_bits(target) == before and target["own"] is strided
        damage(tmp_path / "root")  # the same again undoes it
        ck.save(2, sample_state(20))
        ck.load(target, cast=["small"], atomic=True)
        assert raw(target["own"]) == raw(sample_state(20)["own"])
        target = sample_state(20) | {"own": strided, "small": torch.ones(5, 3, dtype=torch.float64)}
        before = state_bits(target)


@pytest.mark.parametrize("point", ["load.read", "load.placed", "load.verified"])
def test_atomic_undoes_a_failure_at_any_point_of_phase_2(point: str, tmp_path: Path) -> None:
    def fail(at: str) -> None:
        if at == point:
            raise ckpt.StoreError("injected")

    with ckpt.Checkpointer(tmp_path) as ck:
        ck.save(1, sample_state(10))
    with ckpt.Checkpointer(tmp_path, faults=fail) as ck:
        target = sample_state(20)
        with pytest.raises(ckpt.StoreError, match="injected"):
            ck.load(target, atomic=True)
        assert state_bits(target) == state_bits(sample_state(20))
        ck.save(2, target)
        with pytest.raises(ckpt.StateInvalid, match="injected"):
            ck.load(target)


@pytest.mark.parametrize("point", ["load.claimed", "load.opened"])
def test_a_failure_before_phase_2_changes_nothing(point: str, tmp_path: Path) -> None:
    def fail(at: str) -> None:
        if at == point:
            raise ckpt.StoreError("injected")

    with ckpt.Checkpointer(tmp_path, faults=fail) as ck:
        ck.save(1, sample_state(10))
        refused_load(ck, sample_state(20), ckpt.StoreError, ["injected"])
        ck.save(2, sample_state(10))
