"""Dropout whose mask follows from a stream and the place of each element, not from who computes it or when."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ckpt.errors import CkptError
from ckpt.native import logical
from ckpt.random.regions import At, Region, part_of
from ckpt.random.streams import Stream, keep_threshold

_WIDE = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float32: torch.float32,
    torch.float64: torch.float64,
}


def dropout(
    x: torch.Tensor,
    p: float,
    stream: Stream,
    *,
    shape: Sequence[int] | None = None,
    at: At | None = None,
) -> torch.Tensor:
    """x with elements set to zero with probability p and the others scaled up, for training.

    x: float16, bfloat16, float32 or float64 of any strides: the part of a logical tensor of `shape` that lies `at` (see
    `regions.region`); by default the whole. An element is kept where its word is below T = `keep_threshold(p)`, and
    then multiplied by 2^32 / T, in float64 for float64 and in float32 otherwise, and rounded to x's dtype. What is
    dropped is +0.0, even an infinity or NaN. Where T is 2^32 (p = 0), x itself is returned.

    Differentiable any number of times; the mask is drawn again in the backward pass and never stored, so recomputed
    activations have the same one. Raises CkptError or StateMismatch where arguments do not fit.
    """
    threshold = keep_threshold(p)
    if x.dtype not in _WIDE:
        raise CkptError(f"dropout of dtype {x.dtype}; it must be float16, bfloat16, float32 or float64")
    part = part_of(x, shape, at)
    return x if threshold == 1 << 32 else _apply(x, stream, part, threshold)


class _Dropout(torch.autograd.Function):
    """Linear in x with a diagonal matrix, so that the backward pass is the forward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, stream: Stream, part: Region, threshold: int) -> torch.Tensor:
        ctx.drawn = stream, part, threshold
        wide = _WIDE[x.dtype]
        scale = (1 << 32) / threshold if threshold else 0.0
        if wide == torch.float32:
            scale = float(np.float32(scale))  # rounded here, not by whatever multiplies
        keep = logical.mask(stream.key, stream.number, part.runs(), x.device, threshold).view(part.extent)
        return (x.to(wide) * scale).masked_fill_(keep.logical_not_(), 0.0).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _apply(gradient, *ctx.drawn), None, None, None


def _apply(x: torch.Tensor, stream: Stream, part: Region, threshold: int) -> torch.Tensor:
    made: torch.Tensor = _Dropout.apply(x, stream, part, threshold)  # type: ignore[no-untyped-call]
    return made
