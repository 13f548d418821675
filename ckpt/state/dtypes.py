"""The dtypes that ckpt carries, and how each is stored.

Types that Zarr's core names are stored as themselves, all others as unsigned integers of the same width with a
`logical_dtype` attribute, so that every Zarr reader opens them. Conversions are views of bits, never casts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ckpt.errors import Unsupported


@dataclass(frozen=True, slots=True)
class StoredType:
    """name: torch's name of the dtype, without the prefix; zarr: the Zarr data type that holds its bits."""

    name: str
    itemsize: int
    zarr: str


_CORE = {
    "int8": (1, "int8"),
    "int16": (2, "int16"),
    "int32": (4, "int32"),
    "int64": (8, "int64"),
    "uint8": (1, "uint8"),
    "uint16": (2, "uint16"),
    "uint32": (4, "uint32"),
    "uint64": (8, "uint64"),
    "float16": (2, "float16"),
    "float32": (4, "float32"),
    "float64": (8, "float64"),
    "complex64": (8, "complex64"),
    "complex128": (16, "complex128"),
}
_CONTAINED = {
    "bool": (1, "uint8"),  # Zarr readers refuse bytes other than 0 and 1, which a torch bool can hold
    "bfloat16": (2, "uint16"),
    "complex32": (4, "uint32"),
    "float8_e4m3fn": (1, "uint8"),
    "float8_e4m3fnuz": (1, "uint8"),
    "float8_e5m2": (1, "uint8"),
    "float8_e5m2fnuz": (1, "uint8"),
    "float8_e8m0fnu": (1, "uint8"),
    "float4_e2m1fn_x2": (1, "uint8"),
}
STORED: dict[str, StoredType] = {
    name: StoredType(name, size, zarr) for name, (size, zarr) in (_CORE | _CONTAINED).items()
}

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


def dtype_name(dtype: torch.dtype, where: str) -> str:
    """torch's name of a dtype that ckpt carries. Raises Unsupported naming `where` for any other."""
    name = str(dtype).removeprefix("torch.")
    if name not in STORED:
        raise Unsupported(
            f"{where}: dtype {name} is not carried by ckpt; carried are {', '.join(STORED)}; "
            "convert it, or leave it out of the state"
        )
    return name


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a carried name. Raises Unsupported where this torch does not have it."""
    found = getattr(torch, name, None)
    if name not in STORED or not isinstance(found, torch.dtype):
        raise Unsupported(f"dtype {name} is unknown to torch {torch.__version__}; use a newer torch")
    return found


def opaque(itemsize: int) -> torch.dtype:
    """The dtype in which elements of this many bytes are moved."""
    return _BITS[itemsize]


def bits(view: torch.Tensor) -> torch.Tensor:
    """The same memory, shape and strides with an opaque dtype of the same width, so that copies move bits."""
    return view.view(_BITS[view.element_size()])
