"""The structures that the compiled kernels take (cuda_ext/include/ckpt/abi.h), filled in bulk: a plan may have many
thousands of small boxes, and setting the fields of each by itself would cost more than copying it.
"""

from __future__ import annotations

import ctypes
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch

MAX_NDIM = 16

_Axes = ctypes.c_int64 * MAX_NDIM


class BoxDescriptor(ctypes.Structure):
    """ckpt_box."""

    _fields_ = [
        ("data", ctypes.c_uint64),
        ("itemsize", ctypes.c_int64),
        ("ndim", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
        ("shape", _Axes),
        ("offset", _Axes),
        ("extent", _Axes),
        ("stride", _Axes),
    ]


class CopyDescriptor(ctypes.Structure):
    """ckpt_copy."""

    _fields_ = [
        ("dst", ctypes.c_uint64),
        ("src", ctypes.c_uint64),
        ("itemsize", ctypes.c_int64),
        ("ndim", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
        ("extent", _Axes),
        ("dst_stride", _Axes),
        ("src_stride", _Axes),
    ]


_Kind = tuple[int, int]  # item size and number of axes


def describe_boxes(boxes: Sequence[tuple[torch.Tensor, Sequence[int], Sequence[int]]]) -> np.ndarray:
    """One descriptor for each (view, offset in the logical tensor, shape of the logical tensor)."""
    described = np.zeros(len(boxes), np.dtype(BoxDescriptor))
    rows = ((_kind(v), (v.data_ptr(), *shape, *offset, *v.shape, *v.stride())) for v, offset, shape in boxes)
    for (itemsize, ndim), at, table in _tables(rows):
        one = _common(described, at, itemsize, ndim)
        one["data"] = table[:, 0]
        for field, column in (("shape", 0), ("offset", 1), ("extent", 2)):
            one[field][:, :ndim] = _columns(table, 1, column, ndim)
        one["stride"][:, :ndim] = _columns(table, 1, 3, ndim) * itemsize
        described[at] = one
    return described


def describe_copies(copies: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> np.ndarray:
    """One descriptor for each (destination, source). Raises ValueError where shapes or item sizes differ."""
    described = np.zeros(len(copies), np.dtype(CopyDescriptor))
    for (itemsize, ndim), at, table in _tables(map(_copy_row, copies)):
        one = _common(described, at, itemsize, ndim)
        one["dst"], one["src"] = table[:, 0], table[:, 1]
        one["extent"][:, :ndim] = _columns(table, 2, 0, ndim)
        one["dst_stride"][:, :ndim] = _columns(table, 2, 1, ndim) * itemsize
        one["src_stride"][:, :ndim] = _columns(table, 2, 2, ndim) * itemsize
        described[at] = one
    return described


def _copy_row(copy: tuple[torch.Tensor, torch.Tensor]) -> tuple[_Kind, tuple[int, ...]]:
    to, source = copy
    kind, shape = _kind(to), to.shape
    if shape != source.shape or kind[0] != source.element_size():
        raise ValueError(f"cannot copy {source.dtype}{list(source.shape)} into {to.dtype}{list(shape)}")
    return kind, (to.data_ptr(), source.data_ptr(), *shape, *to.stride(), *source.stride())


def _kind(view: torch.Tensor) -> _Kind:
    ndim = view.dim()
    if ndim > MAX_NDIM:
        raise ValueError(f"more axes than the kernels take: {ndim}")
    return view.element_size(), ndim


def _tables(rows: Iterable[tuple[_Kind, tuple[int, ...]]]) -> Iterator[tuple[_Kind, list[int], np.ndarray]]:
    """(item size and axes, numbers of the rows of that kind, these rows as a table)."""
    found: dict[_Kind, tuple[list[int], list[tuple[int, ...]]]] = defaultdict(lambda: ([], []))
    for number, (kind, row) in enumerate(rows):
        numbers, table = found[kind]
        numbers.append(number)
        table.append(row)
    for kind, (numbers, table) in found.items():
        yield kind, numbers, np.array(table, dtype=np.int64)


def _common(described: np.ndarray, at: list[int], itemsize: int, ndim: int) -> np.ndarray:
    one = described[at]
    one["itemsize"], one["ndim"] = itemsize, ndim
    return one


def _columns(table: np.ndarray, first: int, group: int, ndim: int) -> np.ndarray:
    start = first + group * ndim
    return table[:, start : start + ndim]
