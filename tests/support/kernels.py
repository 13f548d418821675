"""A ctypes door to the kernels of cuda_ext/, through their plain C interface (cuda_ext/include/ckpt/abi.h).

The library links to neither torch nor Python; ctypes releases the GIL for the time of a call.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

ABI = 1
MAX_NDIM = 16
LEVELS = ("scalar", "AVX2", "AVX-512 IFMA")

_FAULTS = {
    1: "more axes than the kernels take",
    2: "an item size other than 1, 2, 4, 8 or 16",
    3: "a negative size, or a box that leaves its tensor",
    4: "a null pointer",
    5: "sizes that overflow",
    6: "an output that overlaps itself or its input",
    7: "a dtype that the kernel does not take",
}
_DTYPES = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2, torch.float64: 3}
_Axes = ctypes.c_int64 * MAX_NDIM


class _Box(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("itemsize", ctypes.c_int64),
        ("ndim", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
        ("shape", _Axes),
        ("offset", _Axes),
        ("extent", _Axes),
        ("stride", _Axes),
    ]


class _Copy(ctypes.Structure):
    _fields_ = [
        ("dst", ctypes.c_void_p),
        ("src", ctypes.c_void_p),
        ("itemsize", ctypes.c_int64),
        ("ndim", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
        ("extent", _Axes),
        ("dst_stride", _Axes),
        ("src_stride", _Axes),
    ]


class Library:
    """An opened library. Methods may be called from any thread; tensors are on the CPU and keep their strides."""

    def __init__(self, path: Path) -> None:
        """Raises OSError where `path` is no library, RuntimeError where its interface has another version."""
        self.path = path
        self._lib = ctypes.CDLL(str(path))
        found = self._lib.ckpt_abi()
        if found != ABI:
            raise RuntimeError(f"{path}: interface version {found}, this ckpt needs {ABI}; build it again")

    def level(self, limit: int = -1) -> int:
        """Index into LEVELS of the instruction set in use; a limit of 0 or more allows no higher one from now on."""
        return int(self._lib.ckpt_host_level(ctypes.c_int(limit)))

    def fingerprint(
        self, boxes: Sequence[tuple[torch.Tensor, Sequence[int], Sequence[int]]], threads: int = 1
    ) -> list[tuple[int, int]]:
        """Digests of (view, offset in the logical tensor, shape of the logical tensor), in one call."""
        described = (_Box * len(boxes))()
        for one, (view, offset, shape) in zip(described, boxes, strict=True):
            _describe(one, view)
            one.data = view.data_ptr()
            _fill(one.shape, shape)
            _fill(one.offset, offset)
            _fill(one.stride, [s * view.element_size() for s in view.stride()])
        out = (ctypes.c_uint64 * (2 * len(boxes)))()
        _check(self._lib.ckpt_fingerprint(described, ctypes.c_int64(len(boxes)), ctypes.c_int(threads), out))
        return [(out[2 * i], out[2 * i + 1]) for i in range(len(boxes))]

    def box_copy(self, copies: Sequence[tuple[torch.Tensor, torch.Tensor]], threads: int = 1) -> None:
        """Copies the elements of each (destination, source) of equal shape and item size."""
        described = (_Copy * len(copies))()
        for one, (to, source) in zip(described, copies, strict=True):
            if to.shape != source.shape or to.element_size() != source.element_size():
                raise ValueError(f"cannot copy {tuple(source.shape)} into {tuple(to.shape)}")
            _describe(one, to)
            one.dst, one.src = to.data_ptr(), source.data_ptr()
            _fill(one.dst_stride, [s * to.element_size() for s in to.stride()])
            _fill(one.src_stride, [s * source.element_size() for s in source.stride()])
        _check(self._lib.ckpt_box_copy(described, ctypes.c_int64(len(copies)), ctypes.c_int(threads)))

    def tree_sum(self, leaves: torch.Tensor, threads: int = 1) -> torch.Tensor:
        """Sum over the first axis of a contiguous tensor of fp16, bf16, fp32 or fp64, over the fixed binary tree."""
        if not leaves.is_contiguous() or leaves.dim() == 0:
            raise ValueError("tree_sum takes a contiguous tensor with a leading axis of leaves")
        wide = torch.float64 if leaves.dtype == torch.float64 else torch.float32
        out = torch.empty(leaves.shape[1:], dtype=wide)
        count = out.numel()
        _check(
            self._lib.ckpt_tree_sum(
                ctypes.c_void_p(leaves.data_ptr()),
                ctypes.c_int(_DTYPES.get(leaves.dtype, -1)),
                ctypes.c_int64(leaves.shape[0]),
                ctypes.c_int64(count),
                ctypes.c_int64(count * leaves.element_size()),
                ctypes.c_void_p(out.data_ptr()),
                ctypes.c_int(threads),
            )
        )
        return out

    def philox(self, count: int, first: int, stream: int, key: int) -> torch.Tensor:
        """Words of elements first..first+count of a stream: int64 with values below 2^32."""
        out = torch.empty(count, dtype=torch.int32)
        _check(self._lib.ckpt_philox(*_stream(out, count, first, stream, key)))
        return out.long() & 0xFFFFFFFF

    def philox_uniform(self, count: int, first: int, stream: int, key: int) -> torch.Tensor:
        """The same words as fp32 in [0, 1): the top 24 bits times 2^-24."""
        out = torch.empty(count, dtype=torch.float32)
        _check(self._lib.ckpt_philox_uniform(*_stream(out, count, first, stream, key)))
        return out

    def philox_mask(self, count: int, first: int, stream: int, key: int, threshold: int) -> torch.Tensor:
        """uint8: 1 where the word is below `threshold` (0 to 2^32)."""
        out = torch.empty(count, dtype=torch.uint8)
        _check(self._lib.ckpt_philox_mask(*_stream(out, count, first, stream, key), ctypes.c_uint64(threshold)))
        return out


def _stream(out: torch.Tensor, count: int, first: int, stream: int, key: int) -> tuple[Any, ...]:
    numbers = (ctypes.c_uint64(first), ctypes.c_uint64(stream), ctypes.c_uint64(key))
    return (ctypes.c_void_p(out.data_ptr()), ctypes.c_int64(count), *numbers)


def _describe(one: Any, view: torch.Tensor) -> None:
    if view.device.type != "cpu":
        raise ValueError(f"a tensor on {view.device} given to a host kernel")
    if view.dim() > MAX_NDIM:
        raise ValueError(f"{_FAULTS[1]}: {view.dim()}")
    one.itemsize, one.ndim = view.element_size(), view.dim()
    _fill(one.extent, view.shape)


def _fill(array: Any, numbers: Sequence[int]) -> None:
    array[: len(numbers)] = list(numbers)


def _check(code: int) -> None:
    if code:
        raise ValueError(f"the kernel refused its arguments: {_FAULTS.get(code, f'error {code}')}")
