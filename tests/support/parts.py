"""Declares any local tensor to ckpt, given for each of its elements which one of the logical tensor it is.

    numbers = labelled(shape, torch.int64)    # row-major numbers of a logical tensor, cut as its values are
    entry = declared(cut(values), cut(numbers), shape)

The boxes follow from the numbers alone, so fused, interleaved and flat pieces need no rule of their own.
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch

import ckpt

Piece = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""Global offset, extent, local offset."""


def declared(local: torch.Tensor, numbers: torch.Tensor, shape: Sequence[int], stack: int = 0) -> ckpt.ShardedTensor:
    """The part `local` of a logical tensor of a shape, whose elements have these row-major numbers in it."""
    assert local.shape == numbers.shape
    return ckpt.ShardedTensor(local, pieces(numbers.numpy(), tuple(shape)), shape, stack)


def pieces(numbers: np.ndarray, shape: tuple[int, ...]) -> list[Piece]:
    """The boxes of a local tensor: runs of elements that follow each other in both, rows of equal runs taken together
    where the local tensor has rows."""
    found: list[Piece] = []
    for lead in np.ndindex(*numbers.shape[:-1]):
        for first, count in _runs(numbers[lead], shape[-1]):
            begin = tuple(int(i) for i in np.unravel_index(int(numbers[(*lead, first)]), shape))
            piece = (begin, (1,) * (len(shape) - 1) + (count,), (*lead, first))
            if not (found and numbers.ndim > 1 and _joins(found[-1], piece)):
                found.append(piece)
                continue
            offset, extent, local = found[-1]
            found[-1] = (offset, (*extent[:-2], extent[-2] + 1, count), local)
    return found


def _runs(row: np.ndarray, width: int) -> list[tuple[int, int]]:
    """(first, length) of the runs of numbers in a row that lie in one row of the logical tensor."""
    breaks = np.flatnonzero((np.diff(row) != 1) | (row[1:] % width == 0)) + 1
    edges = [0, *breaks.tolist(), len(row)]
    return [(a, b - a) for a, b in pairwise(edges) if a < b]


def _joins(above: Piece, below: Piece) -> bool:
    """Whether a run of one row is the next row of a piece, in the logical tensor and in memory."""
    offset, extent, local = above
    down = extent[-2]
    return (
        extent[-1] == below[1][-1]
        and below[0] == (*offset[:-2], offset[-2] + down, offset[-1])
        and below[2] == (*local[:-2], local[-2] + down, local[-1])
    )
