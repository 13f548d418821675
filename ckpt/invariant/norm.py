"""Layer norm and RMS norm over fixed runs of tokens, and what else is applied token by token.

The gradient of a weight that every token uses is a sum over tokens. It is taken over V equal runs of them, the leaves
of a tree, with or without sequence parallelism; so ranks that share the tokens sum what one that has all does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal, TypeAlias

import torch

from ckpt.errors import CkptError
from ckpt.invariant.granules import Granules, aligned

Kind: TypeAlias = Literal["LayerNorm", "RMSNorm"]


def norm(
    x: torch.Tensor,
    weight: torch.nn.Parameter,
    bias: torch.nn.Parameter | None,
    granules: Granules,
    *,
    kind: Kind = "LayerNorm",
    eps: float = 1e-5,
) -> torch.Tensor:
    """x normalised over its last axis, times the weight, plus the bias; statistics in fp32.

    x: [tokens, samples, features], all tokens or, with sequence parallelism, this rank's run. The number of all tokens
    is a multiple of V.
    """
    result: torch.Tensor = _Norm.apply(x, weight, bias, granules, kind, eps)
    return result


def add_bias(x: torch.Tensor, bias: torch.nn.Parameter, granules: Granules) -> torch.Tensor:
    """x plus a bias that is whole on every rank. x: [tokens, samples, features], as for `norm`."""
    result: torch.Tensor = _AddBias.apply(x, bias, granules)
    return result


def fork(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x twice, so that the sum of both gradients is written down: that of the first, plus that of the second."""
    first, second = _Fork.apply(x)
    return first, second


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.nn.Parameter,
        bias: torch.nn.Parameter | None,
        granules: Granules,
        kind: Kind,
        eps: float,
    ) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.of = weight, bias, granules, kind, eps, granules.microbatch

        def leaf(rows: torch.Tensor) -> torch.Tensor:
            unit, _ = _normalised(rows, kind, eps)
            scaled = unit * weight.float()
            return (scaled if bias is None else scaled + bias.float()).to(x.dtype)

        return _by_leaves(leaf, granules, x)

    @staticmethod
    def backward(ctx: Any, *slopes: torch.Tensor) -> tuple[Any, ...]:
        (x,) = ctx.saved_tensors
        weight, bias, granules, kind, eps, microbatch = ctx.of
        weights, biases = [], []

        def leaf(rows: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
            unit, scale = _normalised(rows, kind, eps)
            dy = dy.float()
            weights.append((dy * unit).sum(0))
            biases.append(dy.sum(0))
            d = dy * weight.float()
            along = (d * unit).mean(-1, keepdim=True)
            d = d - unit * along if kind == "RMSNorm" else d - d.mean(-1, keepdim=True) - unit * along
            return (d * scale).to(x.dtype)

        dx = _by_leaves(leaf, granules, x, slopes[0])
        where = {"microbatch": microbatch, "tokens": granules.token_leaves}
        if weight.requires_grad:
            granules.gradients.deliver(weight, torch.stack(weights), **where)
        if bias is not None and bias.requires_grad:
            granules.gradients.deliver(bias, torch.stack(biases), **where)
        return dx, None, None, None, None, None


class _AddBias(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, bias: torch.nn.Parameter, granules: Granules) -> torch.Tensor:
        ctx.of = bias, granules, granules.microbatch
        return x + bias

    @staticmethod
    def backward(ctx: Any, *slopes: torch.Tensor) -> tuple[Any, ...]:
        bias, granules, microbatch = ctx.of
        if bias.requires_grad:
            sums = torch.stack([dy.float().sum(0) for (dy,) in _leaves(granules, slopes[0])])
            granules.gradients.deliver(bias, sums, microbatch, tokens=granules.token_leaves)
        return slopes[0], None, None


class _Fork(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.view_as(x), x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *slopes: torch.Tensor) -> torch.Tensor:
        return slopes[0] + slopes[1]


def _normalised(rows: torch.Tensor, kind: Kind, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows (fp32) with mean 0, but for RMS norm, and mean square 1; and what they were multiplied by, [rows, 1].

    1 / sqrt, not rsqrt: both are rounded correctly everywhere.
    """
    rows = rows.float()
    if kind == "LayerNorm":
        rows = rows - rows.mean(-1, keepdim=True)
    scale = 1 / (rows.square().mean(-1, keepdim=True) + eps).sqrt()
    return rows * scale, scale


def _by_leaves(run: Callable[..., torch.Tensor], granules: Granules, *inputs: torch.Tensor) -> torch.Tensor:
    """`run` on each run of tokens, and its results together."""
    return torch.cat([run(*rows) for rows in _leaves(granules, *inputs)]).view(inputs[0].shape)


def _leaves(granules: Granules, *inputs: torch.Tensor) -> Iterator[list[torch.Tensor]]:
    """Of each run of tokens the rows of each input, [tokens of the run * samples, features]."""
    here, shape = len(granules.token_leaves), inputs[0].shape
    if shape[0] % here:
        raise CkptError(
            f"{shape[0]} tokens on a rank with {here} of the {granules.contract.shards} runs of tokens: give sequences "
            "whose length is a multiple of the virtual shards"
        )
    for runs in zip(*(x.split(shape[0] // here) for x in inputs), strict=True):
        yield [aligned(x.reshape(-1, shape[-1])) for x in runs]
