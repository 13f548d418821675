"""Where the granules of a run are: what this rank computes of it, and the sums and exchanges between ranks.

A granule is one microbatch in one layer in one virtual tensor shard. Every kernel is called on a granule, so its shapes
follow from the contract and not from the layout. `Granules` is what all layers of a model share.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from ckpt.errors import CkptError
from ckpt.invariant.contract import Contract
from ckpt.invariant.gradients import Gradients, Named, Parts, Total
from ckpt.invariant.reduction import Partition, canonical_all_reduce, canonical_reduce_scatter
from ckpt.invariant.tree import Accumulator
from ckpt.random import LogicalRng

ALIGNMENT = 64  # a BLAS may take another path for memory that begins elsewhere


class Granules:
    """This rank's virtual shards, the microbatch it is at, its random numbers, and its gradients.

    rng: its state is the run's; save it with the checkpoint and `advance()` it after every step.
    gradients: of all parameters, by leaves; see `Gradients`.
    shards: this rank's virtual tensor shards.
    microbatch: which of the step's global microbatches runs forward now; set by `begin`.
    """

    def __init__(
        self, contract: Contract, group: dist.ProcessGroup | None = None, *, sequence_parallel: bool = False
    ) -> None:
        """group: the tensor-parallel ranks, in order of their shards; None for a rank that has all.

        sequence_parallel: between the tensor-parallel regions each rank holds a run of the tokens.
        Raises CkptError where the contract has too few shards for the ranks, or they do not divide by them.
        """
        self.contract, self.group = contract, group
        self.ranks, self.rank = (1, 0) if group is None else (dist.get_world_size(group), dist.get_rank(group))
        if contract.shards < self.ranks:
            raise CkptError(
                f"{self.ranks} tensor-parallel ranks share {contract.shards} virtual shards; use fewer ranks"
            )
        self.sequence_parallel = sequence_parallel and self.ranks > 1
        if self.sequence_parallel and contract.shards % self.ranks:
            raise CkptError(
                f"sequence parallelism over {self.ranks} ranks needs a multiple of as many virtual shards, not "
                f"{contract.shards}"
            )
        self.partition = Partition.even(contract.shards, self.ranks)
        self.shards = range(*self.partition.bounds[self.rank])
        self.rng = LogicalRng(contract.seed)
        self.gradients = Gradients(contract)
        self.microbatch = 0

    def begin(self, microbatch: int) -> None:
        """Says which of the step's global microbatches, counted over all ranks, the next forward pass is for."""
        every = self.contract.microbatches
        if not 0 <= microbatch < every:
            raise CkptError(f"microbatch {microbatch} of {every}: count them over all ranks, from 0")
        self.microbatch = microbatch

    @property
    def samples(self) -> range:
        """The samples of this microbatch, as places in the step's global batch."""
        first = self.microbatch * self.contract.microbatch
        return range(first, first + self.contract.microbatch)

    @property
    def token_leaves(self) -> range:
        """Which of the V equal runs of tokens this rank has outside of the tensor-parallel regions."""
        return self.shards if self.sequence_parallel else range(self.contract.shards)

    def per_shard(self, extent: int, what: str) -> int:
        """How much of an axis one virtual shard has. Raises CkptError where it does not divide."""
        if extent % self.contract.shards:
            raise CkptError(f"{what} is {extent}, not a multiple of the {self.contract.shards} virtual shards")
        return extent // self.contract.shards

    def reduce(self, parameters: Sequence[Named], data: dist.ProcessGroup | None) -> list[Total]:
        """Collective over the data-parallel and the tensor-parallel group: see `Gradients.reduce`."""
        return self.gradients.reduce(parameters, data, self.group, self.partition)

    def runs(self, extent: int, blocks: int = 1) -> list[Parts]:
        """Where each of this rank's virtual shards lies in an axis of a tensor of this rank: a run in each of some
        equal blocks of it, one after the other."""
        block = extent // blocks
        size = block // len(self.shards)
        starts = [i * size for i in range(len(self.shards))]
        return [[slice(s + b * block, s + b * block + size) for b in range(blocks)] for s in starts]

    # --- Between tensor-parallel ranks; all collective over the group ---

    def accumulator(self) -> Accumulator:
        """For one leaf from each of this rank's virtual shards."""
        return Accumulator(self.shards.start, self.contract.shards)

    def total(self, shards: Accumulator, dtype: torch.dtype) -> torch.Tensor:
        """The sum over all virtual shards, rounded once; with sequence parallelism this rank's run of its axis 0."""
        shape = next(iter(shards.nodes.values())).shape
        if not self.sequence_parallel:
            return self.sum(shards).to(dtype)
        own = canonical_reduce_scatter(shards, self.group, partition=self.partition)
        return own.reshape(shape[0] // self.ranks, *shape[1:]).to(dtype)

    def sum(self, shards: Accumulator) -> torch.Tensor:
        """The sum over all virtual shards, the same on every rank, in the tree's dtype."""
        if self.ranks == 1:
            return shards.sum()
        return canonical_all_reduce(shards, self.group, partition=self.partition)

    def gather(self, tokens: torch.Tensor) -> torch.Tensor:
        """All tokens (axis 0), of which this rank may hold a run."""
        if not self.sequence_parallel:
            return tokens
        whole = tokens.new_empty(tokens.shape[0] * self.ranks, *tokens.shape[1:])
        dist.all_gather_into_tensor(whole, tokens.contiguous(), group=self.group)
        return whole

    def own(self, tokens: torch.Tensor) -> torch.Tensor:
        """This rank's run of all tokens (axis 0)."""
        if not self.sequence_parallel:
            return tokens
        size = tokens.shape[0] // self.ranks
        return tokens[self.rank * size : (self.rank + 1) * size].contiguous()

    def maximum(self, values: torch.Tensor) -> torch.Tensor:
        """The largest over ranks; exact, so any order will do."""
        if self.ranks > 1:
            values = values.clone()
            dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self.group)
        return values

    def the_one(self, values: torch.Tensor) -> torch.Tensor:
        """Values that one rank has and that are zero (all bits) on the others. Bits are added as integers."""
        if self.ranks == 1:
            return values
        narrow = _BITS[values.element_size()]
        bits = values.contiguous().view(narrow).to(torch.int64 if narrow == torch.int64 else torch.int32, copy=True)
        dist.all_reduce(bits, group=self.group)
        return bits.to(narrow).view(values.dtype)


_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, contiguous and at an aligned address: what a kernel's bits may depend on besides."""
    tensor = tensor.contiguous()
    return tensor.clone() if tensor.data_ptr() % ALIGNMENT else tensor


def cut(tensor: torch.Tensor, parts: Sequence[slice], axis: int = 0) -> torch.Tensor:
    """These runs of an axis, one after the other, as one granule."""
    pieces = [tensor.narrow(axis, part.start, part.stop - part.start) for part in parts]
    return aligned(pieces[0] if len(pieces) == 1 else torch.cat(pieces, axis))
