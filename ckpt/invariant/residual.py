"""What happens to a layer's output on its way into the residual stream."""

from __future__ import annotations

import torch

from ckpt.invariant.granules import Granules
from ckpt.invariant.norm import add_bias
from ckpt.random import dropout


def hidden_dropout(x: torch.Tensor, p: float, granules: Granules, purpose: str, layer: int = 0) -> torch.Tensor:
    """Dropout keyed by purpose, layer, token, sample and feature.

    x: [tokens, samples, features], all tokens or, with sequence parallelism, this rank's run of them.
    """
    if not p:
        return x
    tokens, _, features = x.shape
    run = len(granules.token_leaves)
    every = tokens // run * granules.contract.shards
    first = tokens // run * granules.token_leaves.start
    at = (range(first, first + tokens), granules.samples, None)
    shape = (every, granules.contract.batch, features)
    return dropout(x, p, granules.rng.stream(purpose, layer), shape=shape, at=at)


def bias_dropout_add(
    x: torch.Tensor,
    bias: torch.nn.Parameter | None,
    residual: torch.Tensor,
    p: float,
    granules: Granules,
    purpose: str,
    layer: int,
) -> torch.Tensor:
    """residual + dropout(x + bias). Shapes and p as for `hidden_dropout`; bias [features], whole on every rank."""
    if bias is not None:
        x = add_bias(x, bias, granules)
    return residual + hidden_dropout(x, p, granules, purpose, layer)
