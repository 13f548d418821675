"""Gradients by leaves: they leave autograd before it could add anything up, and are summed over the fixed trees.

A layer hands over each granule's gradient with `deliver`. The pieces of one microbatch are put together; microbatches
of one leaf are added in order; leaves go into the tree, of which a rank keeps about log2 of its number of leaves in
fp32. `reduce` finishes the trees over the data-parallel ranks. What is the same on every tensor-parallel rank and is
applied token by token (weights of norms, biases of row-parallel layers) has a tree over fixed runs of tokens besides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
import torch.distributed as dist

from ckpt.errors import CkptError
from ckpt.invariant.contract import Contract
from ckpt.invariant.reduction import BUCKET, Partition, canonical_all_reduce
from ckpt.invariant.tree import WIDE, Accumulator, Node

Parts: TypeAlias = Sequence[slice]
Named: TypeAlias = tuple[str, torch.nn.Parameter]


@dataclass
class Total:
    """The sum of one parameter's gradients over all microbatches of a step, from one place that uses it."""

    name: str
    parameter: torch.nn.Parameter
    use: str
    gradient: torch.Tensor


@dataclass
class _Use:
    """One place of the model that a parameter is used in, and its gradients so far."""

    leaves: Accumulator
    tokens: range | None
    leaf: torch.Tensor | None = None  # under way
    pieces: torch.Tensor | None = None  # of the microbatch under way
    missing: int = 0  # elements of those
    count: int = 0  # microbatches that are in


@dataclass
class _Bucket:
    uses: list[tuple[str, torch.nn.Parameter, str, _Use]] = field(default_factory=list)
    nbytes: int = 0


class Gradients:
    """The gradients of one step: `begin` it, run this rank's microbatches forward and backward, then `reduce`."""

    def __init__(self, contract: Contract) -> None:
        self._contract = contract
        self._uses: dict[tuple[torch.nn.Parameter, str], _Use] = {}
        self._microbatches = range(0)

    def begin(self, microbatches: range) -> None:
        """Forgets everything. microbatches: this rank's run of the step's global microbatches, whole leaves of them.

        Raises CkptError for another run.
        """
        leaf, every = self._contract.leaf, self._contract.microbatches
        if microbatches.step != 1 or not microbatches or not 0 <= microbatches.start < microbatches.stop <= every:
            raise CkptError(f"{microbatches} is no run of the {every} microbatches of a step")
        if microbatches.start % leaf or microbatches.stop % leaf:
            raise CkptError(f"{microbatches} is not made of whole leaves of {leaf} microbatches")
        self._microbatches = microbatches
        self._uses.clear()

    def deliver(
        self,
        parameter: torch.nn.Parameter,
        gradient: torch.Tensor,
        microbatch: int,
        *,
        rows: Parts | None = None,
        columns: Parts | None = None,
        use: str = "",
        tokens: range | None = None,
    ) -> None:
        """The gradient of a parameter, or of these rows or columns of it, from one microbatch; it may be overwritten.

        use: tells apart the places that use one parameter.
        tokens: the gradient has an axis before the parameter's: for each of these of the V runs of tokens.
        Raises CkptError where microbatches do not come in order.
        """
        if (parameter, use) not in self._uses:
            first = self._microbatches.start // self._contract.leaf
            self._uses[parameter, use] = _Use(Accumulator(first, self._contract.leaves), tokens)
        found = self._uses[parameter, use]
        if microbatch != self._microbatches.start + found.count:
            raise CkptError(
                f"a gradient of microbatch {microbatch} comes where that of {self._microbatches.start + found.count} "
                "is due: run backward passes in order, each layer once in each, and call Granules.begin before the "
                "forward pass of each microbatch"
            )
        if rows is not None or columns is not None:
            axis, parts = (0, rows) if rows is not None else (1, columns)
            whole = _put(found, parameter, gradient, parts or (), axis)
            if whole is None:
                return
            gradient = whole
        self._add(found, gradient)

    def _add(self, use: _Use, gradient: torch.Tensor) -> None:
        wide = gradient if self._contract.leaf == 1 else gradient.to(WIDE[gradient.dtype])
        use.leaf = wide if use.leaf is None else use.leaf.add_(wide)
        use.count += 1
        if use.count % self._contract.leaf == 0:
            use.leaves.add(use.leaf, owned=True)
            use.leaf = None

    def reduce(
        self,
        parameters: Sequence[Named],
        data: dist.ProcessGroup | None,
        tensor: dist.ProcessGroup | None,
        shards: Partition,
        *,
        bucket_bytes: int = BUCKET,
    ) -> list[Total]:
        """Collective over the data-parallel and the tensor-parallel group. Sums over all microbatches of the step.

        data, tensor: the groups; None for a rank that has all microbatches, or all virtual shards.
        parameters: all that take part, by name, in an order that the ranks of both groups share.
        shards: which runs of tokens the tensor-parallel ranks have under sequence parallelism.
        bucket_bytes: about what is exchanged at a time; it does not change the bits.
        Raises CkptError for a parameter that lacks a gradient from some microbatch.
        """
        totals: list[Total] = []
        for bucket in self._buckets(parameters, bucket_bytes):
            for (name, parameter, what, use), gradient in zip(
                bucket.uses, self._over_leaves(bucket, data), strict=True
            ):
                if use.tokens is not None:
                    gradient = self._over_tokens(gradient, use.tokens, tensor, shards)
                totals.append(Total(name, parameter, what, gradient))
        self._uses.clear()
        return totals

    def _buckets(self, parameters: Sequence[Named], limit: int) -> list[_Bucket]:
        buckets: dict[tuple[torch.dtype, torch.device], list[_Bucket]] = {}
        known = dict(self._uses)
        for name, parameter in parameters:
            uses = sorted(use for found, use in known if found is parameter)
            if not uses:
                raise CkptError(f"{name} got no gradient; freeze it (requires_grad=False), or use it in the model")
            for what in uses:
                use = known.pop((parameter, what))
                if use.count != len(self._microbatches) or use.missing:
                    raise CkptError(
                        f"{name} got gradients from {use.count} of this rank's {len(self._microbatches)} microbatches; "
                        "every microbatch must use every parameter"
                    )
                total = next(iter(use.leaves.nodes.values()))
                row = buckets.setdefault((total.dtype, total.device), [_Bucket()])
                if row[-1].nbytes >= limit:
                    row.append(_Bucket())
                row[-1].uses.append((name, parameter, what, use))
                row[-1].nbytes += total.nbytes
        if known:
            shapes = [list(parameter.shape) for parameter, _ in known]
            raise CkptError(f"parameters of shapes {shapes} got gradients, but are not among those to reduce")
        return [bucket for row in buckets.values() for bucket in row]

    def _over_leaves(self, bucket: _Bucket, data: dist.ProcessGroup | None) -> Sequence[torch.Tensor]:
        """The sums of all uses of a bucket, in one exchange."""
        trees = [use.leaves for *_, use in bucket.uses]
        if data is None or dist.get_world_size(data) == 1:
            return [tree.sum() for tree in trees]
        shapes = [next(iter(tree.nodes.values())).shape for tree in trees]
        joined = Accumulator.of(_joined(trees), self._contract.leaves)
        pieces = canonical_all_reduce(joined, data).split([shape.numel() for shape in shapes])
        return [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]

    def _over_tokens(
        self, gradient: torch.Tensor, tokens: range, group: dist.ProcessGroup | None, shards: Partition
    ) -> torch.Tensor:
        leaves = Accumulator(tokens.start, self._contract.shards)
        for leaf in gradient:
            leaves.add(leaf)
        everything = len(tokens) == self._contract.shards
        return leaves.sum() if everything else canonical_all_reduce(leaves, group, partition=shards)


def _put(
    use: _Use, parameter: torch.nn.Parameter, gradient: torch.Tensor, parts: Parts, axis: int
) -> torch.Tensor | None:
    """Puts rows or columns of a gradient where they belong; the whole of it once nothing is missing."""
    if use.pieces is None:
        use.pieces = torch.empty(parameter.shape, dtype=gradient.dtype, device=gradient.device)
        use.missing = parameter.numel()
    lengths = [part.stop - part.start for part in parts]
    for part, piece in zip(parts, gradient.split(lengths, axis), strict=True):
        use.pieces.narrow(axis, part.start, part.stop - part.start).copy_(piece)
        use.missing -= piece.numel()
    if use.missing:
        return None
    whole, use.pieces = use.pieces, None
    return whole


def _joined(trees: Sequence[Accumulator]) -> dict[Node, torch.Tensor]:
    """The nodes of several trees over the same leaves as those of one, flat."""
    nodes = [{node: total.reshape(-1) for node, total in tree.nodes.items()} for tree in trees]
    return nodes[0] if len(nodes) == 1 else {node: torch.cat([tree[node] for tree in nodes]) for node in nodes[0]}
