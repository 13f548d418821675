"""Causal self-attention, one call for each virtual shard of heads."""

from __future__ import annotations

import math

import torch

from ckpt.errors import CkptError
from ckpt.invariant.granules import Granules, aligned
from ckpt.random import dropout


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    shard: int,
    granules: Granules,
    *,
    layer: int,
    p: float = 0.0,
    scale: float | None = None,
) -> torch.Tensor:
    """Softmax of the scaled products, in fp32, with dropout, times the values: [tokens, samples, heads, head dim].

    query: [tokens, samples, heads of the shard, head dim]; key, value: the same with the shard's groups of heads, which
    divide the heads. All tokens.
    shard: which virtual shard's heads they are; layer: the layer's number in the whole model. Both name the random
    numbers of the dropout, whose probability is p.
    scale: of the products; 1 / sqrt(head dim) by default.
    """
    tokens, samples, heads, size = query.shape
    groups = key.shape[2]
    if heads % groups:
        raise CkptError(f"layer {layer}: {heads} heads of a virtual shard for {groups} groups of keys and values")
    q, k, v = (_by_head(x, heads) for x in (query, key, value))
    scores = torch.bmm(q, k.transpose(1, 2)) * (1 / math.sqrt(size) if scale is None else scale)
    future = torch.ones(tokens, tokens, dtype=torch.bool, device=q.device).triu(1)
    weights = scores.float().masked_fill(future, -torch.inf).softmax(-1)
    weights = weights.view(samples, heads, tokens, tokens)
    if p:
        stream = granules.rng.stream("attention", layer)
        shape = (granules.contract.batch, heads * granules.contract.shards, tokens, tokens)
        at = (granules.samples, range(shard * heads, (shard + 1) * heads), None, None)
        weights = dropout(weights, p, stream, shape=shape, at=at)
    out = torch.bmm(weights.view(-1, tokens, tokens).to(v.dtype), v)
    return out.view(samples, heads, tokens, size).permute(2, 0, 1, 3).contiguous()


def _by_head(x: torch.Tensor, heads: int) -> torch.Tensor:
    """[samples * heads, tokens, head dim]; a group's keys and values are repeated for its heads."""
    tokens, samples, groups, size = x.shape
    x = x.permute(1, 2, 0, 3)[:, :, None].expand(samples, groups, heads // groups, tokens, size)
    return aligned(x.reshape(samples * heads, tokens, size))
