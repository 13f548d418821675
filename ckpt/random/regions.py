"""Regions: which elements of a logical tensor a rank draws, as runs of consecutive element numbers.

Element numbers are row-major in the logical shape, so they do not depend on who draws them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch

from ckpt.errors import CkptError, StateMismatch
from ckpt.geometry import Box
from ckpt.native.logical import I64, Runs

Along: TypeAlias = range | Sequence[int] | I64 | torch.Tensor | None
At: TypeAlias = Box | Sequence[Along]

MOST_ELEMENTS = 1 << 62  # a 64-bit draw takes two words an element, and word numbers stay below 2^63


@dataclass(frozen=True, slots=True)
class Region:
    """Elements of a logical tensor of `shape`: along each axis a range of step 1 or a list of indices."""

    shape: tuple[int, ...]
    axes: tuple[range | I64, ...]

    @property
    def extent(self) -> tuple[int, ...]:
        """Shape of what is drawn."""
        return tuple(map(len, self.axes))

    def runs(self, words: int = 1) -> Runs:
        """The region in row-major order, where each element of the tensor takes `words` words of its stream."""
        shape, axes = (*self.shape, words), (*self.axes, range(words))
        pitches = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
        first, length, inner = 0, 1, len(axes)
        while inner and isinstance(axis := axes[inner - 1], range):
            inner -= 1
            first += axis.start * pitches[inner]
            length *= len(axis)
            if len(axis) != shape[inner]:
                break
        starts = np.full((), first, dtype=np.int64)
        for axis, pitch in zip(axes[:inner], pitches, strict=False):
            starts = starts[..., None] + np.asarray(axis, dtype=np.int64) * pitch
        return Runs(starts.reshape(-1), length)


def region(shape: Sequence[int], at: At | None = None) -> Region:
    """The elements of a tensor of `shape` that lie `at` a box, or at these places along each axis.

    at: a Box; or one entry per axis: a range, integers (a sequence or a 1-D tensor; any order, repeats allowed), or
    None for the whole axis. None: the whole tensor. Raises StateMismatch where `at` does not fit the shape, and
    CkptError for more than 2^62 elements.
    """
    sizes = tuple(map(int, shape))
    if any(n < 0 for n in sizes):
        raise StateMismatch(f"logical shape {list(sizes)} has a negative extent")
    if math.prod(max(n, 1) for n in sizes) > MOST_ELEMENTS:
        raise CkptError(
            f"logical shape {list(sizes)} has more than 2^62 elements; number samples within the step's global batch, "
            "or draw from one stream per sample"
        )
    if at is None:
        return Region(sizes, tuple(map(range, sizes)))
    along = [range(s.start, s.stop) for s in at.slices] if isinstance(at, Box) else at
    if len(along) != len(sizes):
        raise StateMismatch(f"{len(along)} axes given for a logical tensor of shape {list(sizes)}; give one per axis")
    axes = tuple(_places(where, size, i, sizes) for i, (where, size) in enumerate(zip(along, sizes, strict=True)))
    return Region(sizes, axes)


def part_of(x: torch.Tensor, shape: Sequence[int] | None, at: At | None) -> Region:
    """The region of a logical tensor of `shape` that x is, by default the whole of x's own shape.

    Raises StateMismatch or CkptError where it is not, and for a DTensor.
    """
    if hasattr(x, "to_local"):
        raise CkptError(
            "a DTensor is not taken here: pass its local tensor, the global shape, and the box it lies `at`"
        )
    if shape is None and at is not None:
        raise CkptError("`at` is given without `shape`: give the shape of the whole logical tensor too")
    part = region(x.shape if shape is None else shape, at)
    if tuple(x.shape) != part.extent:
        raise StateMismatch(
            f"a tensor of shape {list(x.shape)} for a region of extent {list(part.extent)} of a logical tensor of "
            f"shape {list(part.shape)}; give the whole tensor's shape, and where this one lies `at`"
        )
    return part


def _places(along: Along, size: int, axis: int, shape: tuple[int, ...]) -> range | I64:
    """Indices along one axis, as a range of step 1 where they are one."""
    if along is None:
        return range(size)
    if isinstance(along, range) and along.step == 1:
        low, high = along.start, along.stop - 1
    else:
        indices = _integers(along, axis, shape)
        if not len(indices):
            return range(0)
        low, high = int(indices.min()), int(indices.max())
        if high - low != len(indices) - 1 or np.any(np.diff(indices) != 1):
            _check_bounds(low, high, axis, shape)
            return indices
    if high < low:
        return range(0)
    _check_bounds(low, high, axis, shape)
    return range(low, high + 1)


def _integers(along: range | Sequence[int] | I64 | torch.Tensor, axis: int, shape: tuple[int, ...]) -> I64:
    found = along.detach().cpu().numpy() if isinstance(along, torch.Tensor) else np.asarray(along)
    if found.ndim != 1 or (found.size and found.dtype.kind not in "iu"):
        raise StateMismatch(
            f"axis {axis} of a logical tensor of shape {list(shape)}: places must be a range, a 1-D list of integers "
            f"or None, not {found.dtype}{list(found.shape)}"
        )
    return found.astype(np.int64)


def _check_bounds(low: int, high: int, axis: int, shape: tuple[int, ...]) -> None:
    if low < 0 or high >= shape[axis]:
        raise StateMismatch(
            f"places {low} to {high} along axis {axis} leave the logical shape {list(shape)}; give the shape of the "
            "whole tensor, not of this rank's part"
        )
