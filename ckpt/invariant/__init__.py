"""Numerics that no layout enters: the same bits wherever a piece of the work is done.

May import geometry, native and random. Start reading at `tree` (the one order in which anything is summed), then
`reduction` (that order over ranks, without a floating-point collective), `contract`, `granules` and `gradients`. Layers
are in `linear`, `embedding`, `norm`, `attention` and `residual`; `clip` and `adamw` end a step; `pipeline` runs stages.
docs/determinism.md says what is promised.
"""

from ckpt.invariant.adamw import AdamW
from ckpt.invariant.attention import attend
from ckpt.invariant.clip import SquaredNorm, clip_coefficient
from ckpt.invariant.contract import Contract
from ckpt.invariant.embedding import cross_entropy, embed, embed_positions, split_tokens
from ckpt.invariant.gradients import Gradients, Total
from ckpt.invariant.granules import Granules
from ckpt.invariant.linear import column, row
from ckpt.invariant.norm import add_bias, fork, norm
from ckpt.invariant.pipeline import Stage, one_forward_one_backward
from ckpt.invariant.reduction import Partition, canonical_all_reduce, canonical_reduce_scatter
from ckpt.invariant.residual import bias_dropout_add, hidden_dropout
from ckpt.invariant.tree import Accumulator

__all__ = [
    "Accumulator",
    "AdamW",
    "Contract",
    "Gradients",
    "Granules",
    "Partition",
    "SquaredNorm",
    "Stage",
    "Total",
    "add_bias",
    "attend",
    "bias_dropout_add",
    "canonical_all_reduce",
    "canonical_reduce_scatter",
    "clip_coefficient",
    "column",
    "cross_entropy",
    "embed",
    "embed_positions",
    "fork",
    "hidden_dropout",
    "norm",
    "one_forward_one_backward",
    "row",
    "split_tokens",
]
