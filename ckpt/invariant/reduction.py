"""Sums over ranks along the fixed tree: integers and bits travel, and each rank adds for itself.

A floating-point SUM collective adds in an order of its own. Here each rank gives the largest nodes that it can sum;
they are exchanged, all to all, each rank getting its slice of the elements; it finishes the tree for its slice; and for
an all-reduce the slices are gathered. Where every rank holds one node (an even partition of a power of two, say) the
bytes are those of a ring.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ckpt.errors import CkptError
from ckpt.invariant.tree import Accumulator, Node, cover, finish

BUCKET = 64 << 20
SMALL = 1 << 20
"""Bytes over all ranks up to which an all-reduce gathers everything at once: it is then the waiting that counts."""


@dataclass(frozen=True)
class Partition:
    """Which run of `leaves` leaves each rank of a group has: `bounds[rank]` is (first, one past the last)."""

    leaves: int
    bounds: tuple[tuple[int, int], ...]

    @classmethod
    def even(cls, leaves: int, ranks: int) -> Partition:
        """Contiguous runs as equal as can be, the longer ones first."""
        short, longer = divmod(leaves, ranks)
        ends = [rank * short + min(rank, longer) for rank in range(ranks + 1)]
        return cls(leaves, tuple(itertools.pairwise(ends)))

    def __post_init__(self) -> None:
        """Raises CkptError where leaves are missing or twice, or a rank has none."""
        at = 0
        for start, stop, rank in sorted((*bound, rank) for rank, bound in enumerate(self.bounds)):
            if start != at:
                what = "is missing" if start > at else "is there twice"
                raise CkptError(f"leaf {min(at, start)} of {self.leaves} {what}: rank {rank} begins with leaf {start}")
            if stop <= start:
                raise CkptError(f"rank {rank} has no leaves: give it at least one, or leave it out of the group")
            at = stop
        if at != self.leaves:
            raise CkptError(f"leaf {at} of {self.leaves} is missing: no rank has it")

    def nodes(self, rank: int) -> list[Node]:
        return cover(*self.bounds[rank], self.leaves)


def canonical_all_reduce(
    mine: Accumulator,
    group: dist.ProcessGroup | None = None,
    *,
    partition: Partition | None = None,
    bucket_bytes: int = BUCKET,
) -> torch.Tensor:
    """Collective over `group`. The sum of all leaves, of their shape, fp32 or fp64, the same bits on every rank and for
    every partition of the leaves over ranks.

    mine: this rank's leaves, a contiguous run of at least one. Together the ranks must have each leaf once.
    partition: what each rank has, where all ranks know it alike; otherwise they tell each other first.
    bucket_bytes: what is exchanged at a time; it does not change the bits.

    Raises CkptError on every rank where leaves are missing or twice, or differ in size or dtype.
    """
    exchange = _Exchange(mine, group, partition)
    if exchange.world == 1:
        return finish(mine.nodes, mine.leaves)
    if exchange.gathered_bytes <= min(SMALL, bucket_bytes):
        return exchange.gather().reshape(exchange.shape)
    pieces = [exchange.share(start, stop) for start, stop in exchange.buckets(bucket_bytes)]
    return (pieces[0] if len(pieces) == 1 else torch.cat(pieces)).reshape(exchange.shape)


def canonical_reduce_scatter(
    mine: Accumulator, group: dist.ProcessGroup | None = None, *, partition: Partition | None = None
) -> torch.Tensor:
    """Collective over `group`. This rank's slice of the sum of all leaves, flattened: of n elements and w ranks, rank r
    has elements r*ceil(n/w) to (r+1)*ceil(n/w), as far as there are any. Otherwise as `canonical_all_reduce`."""
    exchange = _Exchange(mine, group, partition)
    if exchange.world == 1:
        return finish(mine.nodes, mine.leaves).reshape(-1)
    return exchange.reduce(0, exchange.count)


def world(group: dist.ProcessGroup | None) -> int:
    """Ranks of a group; 1 without torch.distributed."""
    return dist.get_world_size(group) if group is not None or dist.is_initialized() else 1


class _Exchange:
    """The nodes of all ranks, and this rank's own as flat tensors."""

    def __init__(self, mine: Accumulator, group: dist.ProcessGroup | None, partition: Partition | None) -> None:
        self.group, self.world = group, world(group)
        self.rank = dist.get_rank(group) if self.world > 1 else 0
        self.leaves, nodes = mine.leaves, mine.nodes
        if not nodes:
            raise CkptError("a rank without leaves: give every rank of the group at least one, or leave it out of it")
        first = next(iter(nodes.values()))
        self.shape, self.dtype, self.device, self.count = first.shape, first.dtype, first.device, first.numel()
        self._own = [t.reshape(-1) for t in nodes.values()]
        if partition is None and self.world > 1:
            partition = self._agree(list(nodes))
        elif partition is None:
            partition = Partition(self.leaves, ((next(iter(nodes))[0], list(nodes)[-1][1]),))
        self.nodes = [partition.nodes(rank) for rank in range(self.world)]
        if self.nodes[self.rank] != list(nodes):
            raise CkptError(f"rank {self.rank} of the group has summed {list(nodes)}, not {self.nodes[self.rank]}")

    def _agree(self, own: list[Node]) -> Partition:
        """What every rank has. All ranks see the same numbers, and so raise alike."""
        told = [own[0][0], own[-1][1], self.leaves, self.count, self.dtype.itemsize]
        numbers = torch.tensor(told, dtype=torch.int64, device=self.device)
        everybody = torch.empty(self.world * len(told), dtype=torch.int64, device=self.device)
        dist.all_gather_into_tensor(everybody, numbers, group=self.group)
        rows = everybody.reshape(self.world, -1).tolist()
        for rank, row in enumerate(rows):
            if row[2:] != rows[0][2:]:
                raise CkptError(
                    f"ranks 0 and {rank} of the group reduce different things: {rows[0][2:]} and {row[2:]} "
                    "(leaves in all, elements, bytes of each)"
                )
        return Partition(self.leaves, tuple((row[0], row[1]) for row in rows))

    def buckets(self, bucket_bytes: int) -> Iterator[tuple[int, int]]:
        step = max(self.world, bucket_bytes // self.dtype.itemsize)
        for start in range(0, self.count, step):
            yield start, min(start + step, self.count)

    def slice_size(self, start: int, stop: int) -> int:
        return -(-(stop - start) // self.world)

    @property
    def gathered_bytes(self) -> int:
        return self.world * max(map(len, self.nodes)) * self.count * self.dtype.itemsize

    def gather(self) -> torch.Tensor:
        """The sum of all leaves, by one exchange of all nodes; ranks with fewer of them send zeros that nobody adds."""
        rows = max(map(len, self.nodes))
        own = torch.zeros(rows, self.count, dtype=self.dtype, device=self.device)
        for row, node in zip(own, self._own, strict=False):
            row.copy_(node)
        whole = own.new_empty(self.world * rows, self.count)
        dist.all_gather_into_tensor(whole, own, group=self.group)
        found = {node: whole[r * rows + i] for r, nodes in enumerate(self.nodes) for i, node in enumerate(nodes)}
        return finish(found, self.leaves)

    def share(self, start: int, stop: int) -> torch.Tensor:
        """The sum of all leaves for elements start..stop, of which each rank finishes a slice."""
        size = self.slice_size(start, stop)
        whole = torch.empty(size * self.world, dtype=self.dtype, device=self.device)
        mine = whole[self.rank * size : (self.rank + 1) * size]
        own = self.reduce(start, stop)
        mine[: own.numel()] = own
        if whole.device.type == "cpu":  # in place; gloo's all-gather copies everything twice
            for rank, part in enumerate(whole.split(size)):
                dist.broadcast(part, group=self.group, group_src=rank)
        else:
            dist.all_gather_into_tensor(whole, mine, group=self.group)
        return whole[: stop - start]

    def reduce(self, start: int, stop: int) -> torch.Tensor:
        """The sum of all leaves for this rank's slice of elements start..stop."""
        size = self.slice_size(start, stop)
        lengths = [max(0, min(size, stop - start - r * size)) for r in range(self.world)]
        sent = [len(self._own) * n for n in lengths]
        received = [len(nodes) * lengths[self.rank] for nodes in self.nodes]
        begins = [start + r * size for r in range(self.world)]
        parts = [t[b : b + n] for b, n in zip(begins, lengths, strict=True) for t in self._own]
        outgoing = self._own[0][start:stop] if len(self._own) == 1 else torch.cat(parts)
        incoming = torch.empty(sum(received), dtype=self.dtype, device=self.device)
        dist.all_to_all_single(incoming, outgoing, received, sent, group=self.group)
        pieces = incoming.reshape(-1, lengths[self.rank]) if lengths[self.rank] else incoming.reshape(0, 0)
        names = [node for nodes in self.nodes for node in nodes]
        if not lengths[self.rank]:
            return incoming
        found: Mapping[Node, torch.Tensor] = dict(zip(names, pieces, strict=True))
        return finish(found, self.leaves)
