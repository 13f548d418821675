"""Initial weights: in place, in any part of a logical tensor, the same bits however it is cut.

Every number is made in float64 from 64 random bits and rounded once to the tensor's dtype, so that a bfloat16 weight is
the rounded float32 weight. Draw from `LogicalRng.fixed("init", name)`, where `name` is the parameter's global name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from ckpt.errors import CkptError
from ckpt.random import gaussian
from ckpt.random.regions import At, part_of
from ckpt.random.streams import Stream, unit


def normal_(
    tensor: torch.Tensor,
    stream: Stream,
    mean: float = 0.0,
    std: float = 1.0,
    *,
    shape: Sequence[int] | None = None,
    at: At | None = None,
) -> torch.Tensor:
    """Fills a floating tensor of any strides with normal numbers and returns it.

    tensor: the part of a logical tensor of `shape` that lies `at` (see `regions.region`); by default the whole.
    Raises CkptError or StateMismatch, with nothing changed, where arguments do not fit.
    """
    if not (math.isfinite(mean) and math.isfinite(std) and std >= 0):
        raise CkptError(f"normal_: mean {mean} and std {std} must be finite, and std not negative")
    return _fill(tensor, stream, shape, at, lambda bits: gaussian.normals(bits).mul_(std).add_(mean))


def uniform_(
    tensor: torch.Tensor,
    stream: Stream,
    low: float = 0.0,
    high: float = 1.0,
    *,
    shape: Sequence[int] | None = None,
    at: At | None = None,
) -> torch.Tensor:
    """The same with numbers uniform from `low` to `high`, to which they may be rounded up."""
    width = high - low
    if not (math.isfinite(low) and math.isfinite(width) and width >= 0):
        raise CkptError(f"uniform_: low {low} and high {high} must be finite, and low not above high")
    return _fill(tensor, stream, shape, at, lambda bits: unit(bits).mul_(width).add_(low))


def trunc_normal_(
    tensor: torch.Tensor,
    stream: Stream,
    mean: float = 0.0,
    std: float = 1.0,
    low: float = -2.0,
    high: float = 2.0,
    *,
    shape: Sequence[int] | None = None,
    at: At | None = None,
) -> torch.Tensor:
    """The same with normal numbers given that they lie in [low, high] (in the tensor's units, not in deviations).

    By inversion, without rejection. Raises CkptError also where the interval is empty or lies more than 8 standard
    deviations from the mean.
    """
    try:
        a, b = gaussian.standard_bounds(mean, std, low, high)
    except ValueError as error:
        raise CkptError(f"trunc_normal_: {error}") from None

    def make(bits: torch.Tensor) -> torch.Tensor:
        return gaussian.truncated(bits, a, b).mul_(std).add_(mean).clamp_(low, high)

    return _fill(tensor, stream, shape, at, make)


def _fill(
    tensor: torch.Tensor,
    stream: Stream,
    shape: Sequence[int] | None,
    at: At | None,
    make: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    if not tensor.is_floating_point():
        raise CkptError(f"a tensor of dtype {tensor.dtype} cannot be filled with random numbers; it must be floating")
    stream.fill(tensor, part_of(tensor, shape, at), make)
    return tensor
