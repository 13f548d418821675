"""Every dtype that torch has is carried with all its bits, or refused by name."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ckpt.errors import Unsupported
from ckpt.state.dtypes import STORED, bits, dtype_name, opaque, torch_dtype

ALL = sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype)}, key=str)
NEVER = ("q", "bits")  # quantized and opaque types
SUB_BYTE = {f"{sign}int{n}" for sign in ("", "u") for n in range(1, 8)}


def named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


CARRIED = [d for d in ALL if not named(d).startswith(NEVER) and named(d) not in SUB_BYTE]
REFUSED = [d for d in ALL if d not in CARRIED]


def test_the_table_is_all_of_torch_but_quantized_opaque_and_sub_byte_types() -> None:
    """A dtype that a newer torch adds lands in CARRIED and fails here until somebody decides about it."""
    assert set(STORED) == {named(d) for d in CARRIED}
    assert len(CARRIED) >= 22
    assert {named(d) for d in REFUSED} >= {"qint8", "quint8", "qint32", "quint4x2"}


@pytest.mark.parametrize("dtype", CARRIED, ids=named)
def test_carried_dtypes_are_stored_in_types_of_their_width(dtype: torch.dtype) -> None:
    name = dtype_name(dtype, "w")
    stored = STORED[name]
    assert (name, stored.name) == (named(dtype), named(dtype))
    assert stored.itemsize == dtype.itemsize == np.dtype(stored.zarr).itemsize == opaque(stored.itemsize).itemsize
    assert torch_dtype(name) is dtype
    if stored.zarr != name:
        assert np.dtype(stored.zarr).kind == "u", "what Zarr does not name is kept as unsigned integers"


def test_types_that_zarr_names_are_stored_as_themselves() -> None:
    """A bool is not: readers refuse bytes other than 0 and 1, which a torch bool can hold."""
    own = {name for name, stored in STORED.items() if stored.zarr == name}
    ints = {f"{sign}int{n}" for sign in ("", "u") for n in (8, 16, 32, 64)}
    assert own == ints | {"float16", "float32", "float64", "complex64", "complex128"}


@pytest.mark.parametrize("dtype", REFUSED, ids=named)
def test_other_dtypes_are_refused_by_name_and_place(dtype: torch.dtype) -> None:
    with pytest.raises(Unsupported, match=rf"^model/w: dtype {named(dtype)} is not carried"):
        dtype_name(dtype, "model/w")


@pytest.mark.parametrize("name", ["float3", "float", "Tensor", "qint8", "__name__", ""])
def test_unknown_names_are_refused(name: str) -> None:
    with pytest.raises(Unsupported, match=f"dtype {name} is unknown to torch"):
        torch_dtype(name)


@pytest.mark.parametrize("dtype", CARRIED, ids=named)
def test_copies_through_bits_keep_every_bit_and_the_memory(dtype: torch.dtype) -> None:
    """Every byte pattern, from and into strided views."""
    size = dtype.itemsize
    raw = torch.arange(256 * size, dtype=torch.int32).to(torch.uint8).reshape(256, size).roll(5, 0).contiguous()
    source = raw.view(-1).view(dtype).view(16, 16).t()
    view = bits(source)
    assert (view.shape, view.stride(), view.data_ptr()) == (source.shape, source.stride(), source.data_ptr())
    target = torch.zeros(16 * 2 * 16 * size, dtype=torch.uint8).view(dtype).view(16, 32)[:, ::2]
    bits(target).copy_(view)
    expected = raw.reshape(16, 16, size).transpose(0, 1).numpy().tobytes()
    found = bits(target).contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    assert found == expected


def test_bits_of_a_scalar_and_of_an_empty_tensor() -> None:
    scalar = torch.tensor(-0.0)
    assert bits(scalar).shape == ()
    assert int(bits(scalar)) == -(2**31)
    assert bits(torch.zeros(3, 0, dtype=torch.bfloat16)).shape == (3, 0)
