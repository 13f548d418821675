"""Ordinary numerics in the place of invariant ones: controls that must make runs differ, so that a proof can fail."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

CONTROLS = ("all-reduce", "rank-rng", "rank-gemm", "rank-tree")


@contextlib.contextmanager
def applied(control: str) -> Iterator[None]:
    """The library with one of its means switched off; the whole of it where `control` is empty."""
    if control not in ("", *CONTROLS):
        raise ValueError(f"control {control!r} is none of {', '.join(CONTROLS)}")
    if control == "rank-rng":
        torch.manual_seed(dist.get_rank())
    with contextlib.ExitStack() as stack:
        for where, replacement in _patches(control):
            stack.enter_context(patch(where, replacement))
        yield


def _patches(control: str) -> Iterator[tuple[str, Callable[..., Any]]]:
    if control == "all-reduce":
        yield "ckpt.invariant.gradients.canonical_all_reduce", _all_reduce
        yield "ckpt.invariant.granules.canonical_all_reduce", _all_reduce
        yield "ckpt.invariant.tree.Accumulator.sum", _left_to_right
    elif control == "rank-rng":
        yield "ckpt.invariant.residual.dropout", _dropout
        yield "ckpt.invariant.attention.dropout", _dropout
    elif control == "rank-gemm":
        yield "ckpt.invariant.linear._Row.forward", staticmethod(_row_in_one)
    elif control == "rank-tree":
        yield "ckpt.invariant.tree.Accumulator.sum", _left_to_right
        yield "ckpt.invariant.gradients.canonical_all_reduce", _tree_over_ranks


def _flat(mine: Any) -> torch.Tensor:
    """What a rank has summed, one node after the other."""
    total: torch.Tensor = sum(list(mine.nodes.values())[1:], next(iter(mine.nodes.values())).clone())
    return total


def _left_to_right(self: Any) -> torch.Tensor:
    return _flat(self)


def _all_reduce(mine: Any, group: Any = None, **_: Any) -> torch.Tensor:
    """The library's collective, as data-parallel training has it."""
    total = _flat(mine)
    dist.all_reduce(total, group=group)
    return total


def _dropout(x: torch.Tensor, p: float, *_: Any, **__: Any) -> torch.Tensor:
    """From the process's own generator."""
    return torch.nn.functional.dropout(x, p)


def _row_in_one(ctx: Any, weight: torch.Tensor, granules: Any, parts: Any, *shards: torch.Tensor) -> torch.Tensor:
    """One GEMM over all of a rank's input features, and the tree over ranks."""
    ctx.save_for_backward(*shards)
    ctx.of = weight, granules, parts, granules.microbatch
    x = torch.cat(shards, -1)
    out = (x.reshape(-1, x.shape[-1]) @ weight.t()).view(*x.shape[:-1], -1).float()
    if granules.ranks > 1:
        every = [torch.empty_like(out) for _ in range(granules.ranks)]
        dist.all_gather(every, out, group=granules.group)
        out = torch.stack(every).sum(0)
    return granules.own(out.to(x.dtype))


def _tree_over_ranks(mine: Any, group: Any = None, **_: Any) -> torch.Tensor:
    """A tree over the sums of ranks, padded with zeros to a power of two: its shape depends on how many there are."""
    total = _flat(mine)
    every = [torch.empty_like(total) for _ in range(dist.get_world_size(group))]
    dist.all_gather(every, total, group=group)
    while len(every) & (len(every) - 1):
        every.append(torch.zeros_like(total))
    while len(every) > 1:
        every = [a + b for a, b in zip(every[::2], every[1::2], strict=True)]
    return every[0]
