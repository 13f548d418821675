"""Vocabulary-parallel embedding and cross-entropy, by virtual shards of the vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ckpt.errors import CkptError
from ckpt.invariant.granules import Granules, aligned


def embed(tokens: torch.Tensor, weight: torch.nn.Parameter, granules: Granules, use: str = "embedding") -> torch.Tensor:
    """Rows of the table, [tokens, samples, features], all tokens on every rank. Collective.

    tokens: int64 [tokens, samples]; weight: this rank's rows of the table. Raises CkptError for a token beyond it.
    """
    result: torch.Tensor = _Embed.apply(weight, tokens, granules, use)
    return result


def embed_positions(positions: torch.Tensor, weight: torch.nn.Parameter, granules: Granules) -> torch.Tensor:
    """Rows of a table that is whole on every rank. positions: int64 [tokens, samples]."""
    result: torch.Tensor = _EmbedPositions.apply(weight, positions, granules)
    return result


def split_tokens(x: torch.Tensor, granules: Granules) -> torch.Tensor:
    """With sequence parallelism this rank's run of the tokens (axis 0) that all ranks have; else x itself."""
    if not granules.sequence_parallel:
        return x
    result: torch.Tensor = _Split.apply(x, granules)
    return result


def cross_entropy(logits: Sequence[torch.Tensor], targets: torch.Tensor, granules: Granules) -> torch.Tensor:
    """The loss of each token, fp32 [tokens, samples], the same on all ranks. Collective.

    logits: of this rank's virtual shards of the vocabulary, [tokens, samples, words of the shard] each.
    targets: int64 [tokens, samples]. Raises CkptError for one beyond the vocabulary.
    """
    result: torch.Tensor = _CrossEntropy.apply(targets, granules, *logits)
    return result


class _Embed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, weight: torch.nn.Parameter, tokens: torch.Tensor, granules: Granules, use: str
    ) -> torch.Tensor:
        size = weight.shape[0] // len(granules.shards)
        _check_words(tokens, size * granules.contract.shards)
        ctx.of = weight, tokens, granules, use, granules.microbatch, size
        local = tokens - granules.shards.start * size
        here = (local >= 0) & (local < weight.shape[0])
        rows = weight[local.clamp(0, weight.shape[0] - 1)]
        return granules.the_one(torch.where(here[..., None], rows, torch.zeros_like(rows)))

    @staticmethod
    def backward(ctx: Any, *slopes: torch.Tensor) -> tuple[Any, ...]:
        weight, tokens, granules, use, microbatch, size = ctx.of
        if weight.requires_grad:
            dy = aligned(slopes[0])
            for index, shard in enumerate(granules.shards):
                gradient = _table_gradient(dy, tokens - shard * size, size)
                rows = (slice(index * size, (index + 1) * size),)
                granules.gradients.deliver(weight, gradient, microbatch, rows=rows, use=use)
        return None, None, None, None


class _EmbedPositions(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: torch.nn.Parameter, positions: torch.Tensor, granules: Granules) -> torch.Tensor:
        ctx.of = weight, positions, granules, granules.microbatch
        return weight[positions]

    @staticmethod
    def backward(ctx: Any, *slopes: torch.Tensor) -> tuple[Any, ...]:
        weight, positions, granules, microbatch = ctx.of
        if weight.requires_grad:
            gradient = _table_gradient(aligned(slopes[0]), positions, weight.shape[0])
            granules.gradients.deliver(weight, gradient, microbatch)
        return None, None, None


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, granules: Granules) -> torch.Tensor:
        ctx.granules = granules
        return granules.own(x)

    @staticmethod
    def backward(ctx: Any, *slopes: torch.Tensor) -> tuple[Any, ...]:
        return ctx.granules.gather(slopes[0]), None


class _CrossEntropy(torch.autograd.Function):
    """Softmax with the largest logit taken off; log of the sum over the tree of shards."""

    @staticmethod
    def forward(ctx: Any, targets: torch.Tensor, granules: Granules, *logits: torch.Tensor) -> torch.Tensor:
        size = logits[0].shape[-1]
        _check_words(targets, size * granules.contract.shards)
        highest = granules.maximum(torch.stack([z.amax(-1) for z in logits]).amax(0).float())
        sums, chosen, powers = granules.accumulator(), torch.zeros_like(highest), []
        for shard, z in zip(granules.shards, logits, strict=True):
            shifted = aligned(z).float() - highest[..., None]
            local = targets - shard * size
            here = (local >= 0) & (local < size)
            own = shifted.gather(-1, local.clamp(0, size - 1)[..., None])[..., 0]
            chosen = torch.where(here, own, chosen)
            power = shifted.exp()
            sums.add(power.sum(-1), owned=True)
            powers.append(power)
        total = granules.sum(sums)
        ctx.save_for_backward(targets, total, *powers)
        ctx.of = granules, size, logits[0].dtype
        return total.log() - granules.the_one(chosen)

    @staticmethod
    def backward(ctx: Any, *slopes: torch.Tensor) -> tuple[Any, ...]:
        targets, total, *powers = ctx.saved_tensors
        granules, size, dtype = ctx.of
        found = []
        for shard, power in zip(granules.shards, powers, strict=True):
            d = power / total[..., None]
            local = targets - shard * size
            here = (local >= 0) & (local < size)
            d.scatter_add_(-1, local.clamp(0, size - 1)[..., None], -here.to(d.dtype)[..., None])
            found.append((d * slopes[0][..., None]).to(dtype))
        return None, None, *found


def _table_gradient(dy: torch.Tensor, rows: torch.Tensor, size: int) -> torch.Tensor:
    """dy [tokens, samples, features] added up by row of a table of `size`, in the order of tokens; others drop out."""
    spare = torch.where((rows >= 0) & (rows < size), rows, torch.full_like(rows, size))
    gradient = torch.ops.aten.embedding_dense_backward(dy, spare, size + 1, size, False)
    return gradient[:size].contiguous()


def _check_words(tokens: torch.Tensor, vocabulary: int) -> None:
    if tokens.numel() and not 0 <= int(tokens.min()) <= int(tokens.max()) < vocabulary:
        raise CkptError(
            f"tokens from {int(tokens.min())} to {int(tokens.max())} with a vocabulary of {vocabulary} words"
        )
