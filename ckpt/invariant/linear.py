"""Linear layers over virtual shards: one GEMM for each granule, and each sum over shards along the tree.

`column`: the output features are cut; their inputs' gradients are summed. `row`: the input features are cut; the
outputs are summed. Weights' gradients are delivered (see `gradients`), so that none goes through autograd.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ckpt.invariant.gradients import Parts
from ckpt.invariant.granules import Granules, aligned, cut


def column(
    x: torch.Tensor,
    weight: torch.nn.Parameter,
    bias: torch.nn.Parameter | None,
    granules: Granules,
    parts: Sequence[Parts],
    use: str = "",
) -> tuple[torch.Tensor, ...]:
    """The outputs of this rank's virtual shards, each [tokens, samples, features of the shard]. Collective.

    x: [tokens, samples, in]; with sequence parallelism this rank's run of tokens, which are gathered.
    weight: this rank's rows, [out of this rank, in]; bias: [out of this rank] or None.
    parts: for each shard of this rank, which of these rows it has.
    """
    outputs: tuple[torch.Tensor, ...] = _Column.apply(x, weight, bias, granules, parts, use)
    return outputs


def row(
    shards: Sequence[torch.Tensor], weight: torch.nn.Parameter, granules: Granules, parts: Sequence[Parts]
) -> torch.Tensor:
    """The sum over all virtual shards, [tokens, samples, out]; with sequence parallelism this rank's run of tokens.
    Collective.

    shards: inputs of this rank's virtual shards, [tokens, samples, features of the shard] each.
    weight: this rank's columns, [out, in of this rank].
    parts: for each shard of this rank, which of these columns it has.
    """
    result: torch.Tensor = _Row.apply(weight, granules, parts, *shards)
    return result


class _Column(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.nn.Parameter,
        bias: torch.nn.Parameter | None,
        granules: Granules,
        parts: Sequence[Parts],
        use: str,
    ) -> tuple[torch.Tensor, ...]:
        ctx.save_for_backward(x)
        ctx.of = weight, bias, granules, parts, use, granules.microbatch
        whole = granules.gather(x)
        flat = aligned(whole.reshape(-1, whole.shape[-1]))
        outputs = []
        for part in parts:
            out = flat @ cut(weight, part).t()
            if bias is not None:
                out += cut(bias, part)
            outputs.append(out.view(*whole.shape[:-1], -1))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *slopes: torch.Tensor) -> tuple[Any, ...]:
        (x,) = ctx.saved_tensors
        weight, bias, granules, parts, use, microbatch = ctx.of
        whole = granules.gather(x)
        flat = aligned(whole.reshape(-1, whole.shape[-1]))
        sums = granules.accumulator()
        for part, slope in zip(parts, slopes, strict=True):
            dy = aligned(slope.reshape(-1, slope.shape[-1]))
            if weight.requires_grad:
                granules.gradients.deliver(weight, dy.t() @ flat, microbatch, rows=part, use=use)
            if bias is not None and bias.requires_grad:
                granules.gradients.deliver(bias, dy.sum(0), microbatch, rows=part, use=use)
            sums.add((dy @ cut(weight, part)).view(whole.shape), owned=True)
        return granules.total(sums, x.dtype), None, None, None, None, None


class _Row(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, weight: torch.nn.Parameter, granules: Granules, parts: Sequence[Parts], *shards: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(*shards)
        ctx.of = weight, granules, parts, granules.microbatch
        sums = granules.accumulator()
        for part, x in zip(parts, shards, strict=True):
            out = aligned(x.reshape(-1, x.shape[-1])) @ cut(weight, part, 1).t()
            sums.add(out.view(*x.shape[:-1], -1), owned=True)
        return granules.total(sums, shards[0].dtype)

    @staticmethod
    def backward(ctx: Any, *slopes: torch.Tensor) -> tuple[Any, ...]:
        weight, granules, parts, microbatch = ctx.of
        dy = granules.gather(slopes[0])
        flat = aligned(dy.reshape(-1, dy.shape[-1]))
        found: list[torch.Tensor] = []
        for part, x in zip(parts, ctx.saved_tensors, strict=True):
            if weight.requires_grad:
                gradient = flat.t() @ aligned(x.reshape(-1, x.shape[-1]))
                granules.gradients.deliver(weight, gradient, microbatch, columns=part)
            found.append((flat @ cut(weight, part, 1)).view(x.shape))
        return None, None, None, *found
