"""NumPy arrays are filled in place, whatever their strides; arrays that torch cannot hold are refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckpt
from tests.engine.states import round_trip
from tests.support.raw import labelled

NUMPY = ["?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16"]


@pytest.mark.parametrize("dtype", NUMPY)
def test_numpy_arrays_are_filled_in_place(dtype: str, tmp_path: Path) -> None:
    def build(seed: int) -> dict[str, Any]:
        size = np.dtype(dtype).itemsize
        flat = np.frombuffer(bytearray(np.random.default_rng(seed).bytes(60 * size)), dtype)
        return {
            "plain": flat[:12].reshape(3, 4),
            "fortran": np.asfortranarray(flat[12:24].reshape(3, 4)),
            "strided": flat[24:48].reshape(4, 6)[::2, 1::2],
            "scalar": flat[48:49].reshape(()),
            "empty": flat[:0].reshape(0, 3),
        }

    saved, target = build(1), build(2)
    held = {n: (a, a.ctypes.data, a.strides) for n, a in target.items()}
    round_trip(tmp_path, saved, target)
    for name, (array, address, strides) in held.items():
        assert target[name] is array and (array.ctypes.data, array.strides) == (address, strides)
        assert (array.dtype, array.shape) == (saved[name].dtype, saved[name].shape)
        assert array.tobytes() == saved[name].tobytes()


def test_a_memory_mapped_array_is_filled_in_place(tmp_path: Path) -> None:
    target = np.memmap(tmp_path / "file", np.float32, "w+", shape=(50, 7))
    saved = labelled((50, 7)).numpy()
    round_trip(tmp_path / "root", {"x": saved}, {"x": target})
    target.flush()
    assert (tmp_path / "file").read_bytes() == saved.tobytes()


NO_ARRAYS = {
    "strings": np.array(["a", "b"]),
    "objects": np.array([{}, None]),
    "dates": np.array(["2020-01-01"], "M8[D]"),
    "records": np.zeros(2, [("a", "i4"), ("b", "f8")]),
    "masked": np.ma.masked_array([1.0, 2.0], mask=[False, True]),
    "foreign byte order": np.arange(3, dtype=">i4"),
    "long double": np.zeros(3, np.longdouble),
    "a field of records": np.zeros(3, [("a", "i1"), ("b", "f8")])["b"],
}


@pytest.mark.parametrize("kind", NO_ARRAYS)
def test_arrays_that_torch_cannot_hold_are_refused_at_save(kind: str, tmp_path: Path) -> None:
    with ckpt.Checkpointer(tmp_path) as ck, pytest.raises(ckpt.Unsupported, match="x: a NumPy array"):
        ck.save(1, {"x": NO_ARRAYS[kind]})


def test_read_only_and_reversed_arrays_can_be_saved_but_not_filled(tmp_path: Path) -> None:
    fixed = np.arange(6.0)
    fixed.flags.writeable = False
    saved = {"fixed": fixed, "reversed": np.arange(6.0)[::-1], "spread": np.broadcast_to(np.float64(3), (2, 3))}
    target = {n: np.zeros(a.shape) for n, a in saved.items()}
    round_trip(tmp_path, saved, target)
    assert {n: a.tobytes() for n, a in target.items()} == {n: a.tobytes() for n, a in saved.items()}
    for name, array in saved.items():
        before = array.tobytes()
        with ckpt.Checkpointer(tmp_path) as ck, pytest.raises(ckpt.Unsupported, match=f"{name}: .*copy it"):
            ck.load({**target, name: array})
        assert array.tobytes() == before
