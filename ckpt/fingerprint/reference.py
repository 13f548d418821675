"""The fingerprint in plain torch and NumPy: its definition, and the twin that the compiled kernel must equal.

Mathematics. Let p = 2^61 - 1. A tensor of shape (n_0, ..., n_{d-1}) is read as unsigned integers, little-endian:

* elements of 1 or 2 bytes count along the last axis in 32-bit words: element j lies in word j // m at bit
  (32 / m) * (j mod m), m = 4 / itemsize; the words are what the last axis counts;
* elements of 4 bytes are one word each;
* elements of 8 or 16 bytes are 2 or 4 words (lowest first) on one more axis, number d.

Every unit u (an element of up to 4 bytes, a word of a wider one) has value v(u), its bits, and weight
    W_k(u) = 2^(bit position in its word) * product over the axes i of C_k(i, index along i)   (mod p), k = 0, 1
and the digest of a set of units is  D_k = sum of (v(u) + 1) * W_k(u)  (mod p)  for k = 0 and k = 1.

C_k(i, x) is c_k(i, 0, x) for an axis of at most 2^16 words, and c_k(i, 0, x mod 2^16) * c_k(i, 1, x // 2^16) for a
longer one; `coefficients` tells how Philox gives c_k. A 0-dim tensor has no axes: the empty product is 1.

The sum over disjoint boxes is the digest of their union, in any order. Two tensors of one shape that differ get
equal digests with probability about (d / p)^2 over the coefficients, d the number of factors (a multilinear hash
over a field: Carter and Wegman, "Universal classes of hash functions", 1979, and its multilinear form). The plus
one makes a lost or doubled zero count. It guards against faults, not against somebody who chooses the bits.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import numpy as np
import torch

from ckpt.fingerprint.coefficients import DIGIT, Columns, Digits, axis_coefficients, product, table
from ckpt.geometry.box import Box, Index
from ckpt.native import bytedot, field

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # copies of a bool would not keep its bits
_FEW_WORDS = 64  # rows shorter than this are merged with the axis before
_BLOCK_BYTES = 2 << 20
_PIECE_WORDS = 8192  # words of a row in one product


def box_digest(view: torch.Tensor, box: Box, shape: Index) -> tuple[int, int]:
    """Digest of the part `box` of a logical tensor of shape `shape`.

    view: the elements of the box, shape `box.extent`, any strides, any device, itemsize 1, 2, 4, 8 or 16 bytes.
    """
    if tuple(view.shape) != box.extent:
        raise ValueError(f"view of shape {tuple(view.shape)} given for box {box}")
    if not box.volume:
        return 0, 0
    itemsize = view.element_size()
    view = view.view(_BITS.get(itemsize, view.dtype))
    if itemsize > 4 and view.dim():
        return _planes_digest(view, box, shape)
    sums = np.zeros(2, dtype=np.uint64)
    for part, runs in _split_long_axes(box, shape, itemsize):
        inside = view[part.relative_to(box).slices] if view.dim() else view
        sums = field.reduce(sums + _product_digest(inside, runs, part, itemsize))
    return int(sums[0]), int(sums[1])


def _planes_digest(view: torch.Tensor, box: Box, shape: Index) -> tuple[int, int]:
    """Wide elements as planes of words: each plane is a tensor of 4-byte elements, times its word's coefficient."""
    dense = view if view.stride(-1) == 1 else torch.empty(view.shape, dtype=view.dtype).copy_(view)
    words = dense.view(torch.int32).unflatten(-1, (view.shape[-1], view.element_size() // 4))
    factors = axis_coefficients(len(shape), 0)
    total = [0, 0]
    for w in range(words.shape[-1]):
        plane = box_digest(words[..., w], box, shape)
        total = [(t + int(f) * x) % field.P for t, f, x in zip(total, factors[:, w], plane, strict=True)]
    return total[0], total[1]


def _split_long_axes(box: Box, shape: Index, itemsize: int) -> Iterator[tuple[Box, list[tuple[Digits, ...]]]]:
    """Parts of the box in which every axis is a product of digit runs: for each axis one run, or (high, low).

    The last axis of elements under 4 bytes counts words; its run covers the words that the box touches.
    """
    per_word = max(1, 4 // itemsize)
    choices = []
    for axis, (offset, extent, size) in enumerate(zip(box.offset, box.extent, shape, strict=True)):
        unit = per_word if axis == len(shape) - 1 else 1
        choices.append(list(_axis_parts(axis, offset, offset + extent, size, unit)))
    for chosen in itertools.product(*choices):
        first = tuple(start for start, _, _ in chosen)
        held = tuple(stop - start for start, stop, _ in chosen)
        yield Box(first, held), [runs for _, _, runs in chosen]


def _axis_parts(
    axis: int, start: int, stop: int, size: int, unit: int
) -> Iterator[tuple[int, int, tuple[Digits, ...]]]:
    def run(digit: int, first: int, last: int) -> Digits:
        return Digits(axis, digit, first, last)

    if -(-size // unit) <= DIGIT:
        yield start, stop, (run(0, start // unit, -(-stop // unit)),)
        return
    step = DIGIT * unit
    first_whole, last_whole = -(-start // step), stop // step
    if first_whole > last_whole:  # both ends inside one run of the low digit
        yield start, stop, _long_runs(axis, start, stop, unit)
        return
    if start < first_whole * step:
        yield start, first_whole * step, _long_runs(axis, start, first_whole * step, unit)
    if first_whole < last_whole:
        yield first_whole * step, last_whole * step, (run(1, first_whole, last_whole), run(0, 0, DIGIT))
    if last_whole * step < stop:
        yield last_whole * step, stop, _long_runs(axis, last_whole * step, stop, unit)


def _long_runs(axis: int, start: int, stop: int, unit: int) -> tuple[Digits, ...]:
    high = start // (DIGIT * unit)
    base = high * DIGIT
    low = Digits(axis, 0, start // unit - base, -(-stop // unit) - base)
    return Digits(axis, 1, high, high + 1), low


def _product_digest(view: torch.Tensor, runs: list[tuple[Digits, ...]], part: Box, itemsize: int) -> np.ndarray:
    """uint64 [2]: digest of a part in which rows and columns factorise."""
    if not runs:
        return _scalar(view)
    digits = [run for axis in runs for run in axis]
    lead = (part.offset[-1] % max(1, 4 // itemsize)) * itemsize
    row_bytes = part.extent[-1] * itemsize
    if len(runs[-1]) == 2:
        row_bytes //= runs[-1][0].size
    if lead or row_bytes % 4:  # bytes of the last axis start or end inside a word: keep that axis alone
        columns = [digits.pop()]
    else:
        columns = _merge(digits)
    return _rows_times_columns(view, tuple(digits), tuple(columns), lead, row_bytes, itemsize)


def _merge(digits: list[Digits]) -> list[Digits]:
    """Takes trailing runs off `digits` until a row has enough words and still fits one product."""
    columns = [digits.pop()]
    words = columns[0].size
    while digits and words < _FEW_WORDS and words * digits[-1].size <= _PIECE_WORDS:
        words *= digits[-1].size
        columns.insert(0, digits.pop())
    return columns


def _rows_times_columns(
    view: torch.Tensor,
    rows: tuple[Digits, ...],
    columns: tuple[Digits, ...],
    lead: int,
    row_bytes: int,
    unit: int,
) -> np.ndarray:
    width = row_bytes if len(columns) == 1 else 4 * math.prod(c.size for c in columns)
    weights = product(rows)
    row_sum = field.total(weights)
    sums = np.zeros(2, dtype=np.uint64)
    pieces = list(_column_pieces(columns, lead, width))
    tables = [(at, table(piece, unit)) for at, piece in pieces]
    for _, entry in tables:
        constant = field.multiply(entry.byte_sum, np.array(128, dtype=np.uint64))
        sums = field.reduce(sums + field.multiply(field.reduce(constant + entry.unit_sum), row_sum))
    scratch = torch.empty(0, dtype=torch.uint8)
    for first, block in _row_blocks(view, weights.shape[1], width):
        if scratch.numel() == 0:
            scratch = torch.empty(len(block) * max(len(entry.digits) for _, entry in tables), dtype=torch.uint8)
        factor = weights[:, first : first + len(block)]
        for at, entry in tables:
            found = bytedot.byte_dot(block[:, at : at + len(entry.digits)], entry.digits, scratch)
            sums = field.reduce(sums + field.total(field.multiply(found, factor)))
    return sums


def _column_pieces(columns: tuple[Digits, ...], lead: int, width: int) -> Iterator[tuple[int, Columns]]:
    """Cuts a long row into pieces that fit one product: (first byte of the row, piece)."""
    if len(columns) > 1 or lead + width <= 4 * _PIECE_WORDS:
        yield 0, Columns(columns, lead, lead + width)
        return
    run = columns[0]
    for first in range(0, run.size, _PIECE_WORDS):
        last = min(run.size, first + _PIECE_WORDS)
        lo, hi = max(lead, 4 * first), min(lead + width, 4 * last)
        piece = Digits(run.axis, run.digit, run.start + first, run.start + last)
        yield lo - lead, Columns((piece,), lo - 4 * first, hi - 4 * first)


def _row_blocks(view: torch.Tensor, rows: int, width: int) -> Iterator[tuple[int, torch.Tensor]]:
    """The view as uint8 [rows, width] on the CPU, in blocks of bounded size: (first row, block)."""
    per_block = max(1, _BLOCK_BYTES // min(width, 4 * _PIECE_WORDS))
    if view.is_contiguous() and view.device.type == "cpu":
        flat = as_bytes(view).reshape(rows, width)
        for first in range(0, rows, per_block):
            yield first, flat[first : first + per_block]
        return
    done = 0
    for slab in _slabs(view, per_block * width):
        flat = as_bytes(slab.cpu()).reshape(-1, width)
        yield done, flat
        done += len(flat)


def _slabs(view: torch.Tensor, limit: int) -> Iterator[torch.Tensor]:
    """Contiguous runs of the view's leading axes, each of at most about `limit` bytes, in row-major order.

    A slab always holds whole rows: the last two axes are not cut.
    """
    nbytes = view.numel() * view.element_size()
    if nbytes <= limit or view.dim() <= 2:
        if nbytes > limit and view.dim() == 2:
            step = max(1, limit // (view.shape[1] * view.element_size()))
            yield from view.split(step)
        else:
            yield view
        return
    for one in view:
        yield from _slabs(one, limit)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor, uint8 [numel * itemsize], row-major; no copy when it is contiguous."""
    flat = tensor.reshape(-1)
    if flat.stride() != (1,):
        flat = torch.empty(flat.shape, dtype=flat.dtype).copy_(flat)
    return flat.view(torch.uint8)


def _scalar(view: torch.Tensor) -> np.ndarray:
    """Digest of a 0-dim tensor; its words, if wide, have the coefficients of axis 0."""
    raw = bytes(as_bytes(view.cpu()).tolist())
    words = [raw] if len(raw) <= 4 else [raw[i : i + 4] for i in range(0, len(raw), 4)]
    factors = axis_coefficients(0, 0)[:, : len(words)].tolist() if len(raw) > 4 else [[1], [1]]
    values = [int.from_bytes(w, "little") + 1 for w in words]
    sums = [sum(v * f for v, f in zip(values, row, strict=True)) % field.P for row in factors]
    return np.array(sums, dtype=np.uint64)
