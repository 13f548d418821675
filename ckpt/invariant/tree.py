"""The fixed binary tree over logical leaves: the one order in which anything is summed.

The tree over leaves lo..hi is that over the largest power of two of them, below their number, and that over the rest.
It depends on the number of leaves alone. A rank that holds any contiguous run of leaves can sum the *nodes* that lie
whole within it, and nothing else; whoever has the nodes of all ranks can finish. So the bits of a sum do not depend on
who holds what. The kernel `tree_sum` sums all leaves in one call over the same tree.

Sums are fp32 for fp16, bf16 and fp32 leaves, and fp64 for fp64 ones. The root is a canonical NaN where it is any NaN,
since which payload survives an addition is up to the processor.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import torch

from ckpt.errors import CkptError

Node: TypeAlias = tuple[int, int]  # its leaves, lo..hi

WIDE = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float32: torch.float32,
    torch.float64: torch.float64,
}


def middle(lo: int, hi: int) -> int:
    """Where the tree over two leaves or more is cut."""
    return lo + (1 << (hi - lo - 1).bit_length() - 1)


def is_node(node: Node, leaves: int) -> bool:
    """Whether these leaves are a subtree of the tree over `leaves` leaves."""
    lo, hi = 0, leaves
    while (lo, hi) != node:
        if not (lo <= node[0] < node[1] <= hi) or hi - lo == 1:
            return False
        cut = middle(lo, hi)
        if node[1] <= cut:
            hi = cut
        elif node[0] >= cut:
            lo = cut
        else:
            return False
    return True


def cover(start: int, stop: int, leaves: int) -> list[Node]:
    """The largest nodes that lie within a run of leaves, from left to right; they cover it. At most 2 log2(leaves)."""
    found: list[Node] = []

    def visit(lo: int, hi: int) -> None:
        if stop <= lo or hi <= start:
            return
        if start <= lo and hi <= stop:
            found.append((lo, hi))
            return
        cut = middle(lo, hi)
        visit(lo, cut)
        visit(cut, hi)

    if start < stop:
        visit(0, leaves)
    return found


class Accumulator:
    """Sums a contiguous run of leaves that come in order, keeping about log2 of their number of buffers.

    Leaves are tensors of one shape, dtype and device. `nodes` are then the largest nodes of the run with their sums.
    """

    def __init__(self, start: int, leaves: int) -> None:
        """start: the first leaf that will come; leaves: how many the whole tree has."""
        if not 0 <= start <= leaves:
            raise CkptError(f"leaf {start} of {leaves}: a run of leaves begins within the tree")
        self.leaves, self._next = leaves, start
        self._done: list[tuple[Node, torch.Tensor]] = []
        self._kind: tuple[torch.Size, torch.dtype, torch.device] | None = None

    def add(self, leaf: torch.Tensor, *, owned: bool = False) -> None:
        """The next leaf. Raises CkptError for one too many, or of another shape, dtype or device.

        owned: the leaf may be overwritten; otherwise it is copied.
        """
        kind = leaf.shape, leaf.dtype, leaf.device
        if self._kind is None:
            if leaf.dtype not in WIDE:
                raise CkptError(f"leaves of {leaf.dtype} have no canonical sum; give {', '.join(map(str, WIDE))}")
            check_denormals(leaf.device)
            self._kind = kind
        if kind != self._kind:
            raise CkptError(f"leaf {self._next} is {kind}, but those before are {self._kind}")
        if self._next == self.leaves:
            raise CkptError(f"all {self.leaves} leaves are there already")
        node = self._next, self._next + 1
        total = leaf.detach().to(WIDE[leaf.dtype], copy=not owned)
        self._next += 1
        while self._done and is_node((self._done[-1][0][0], node[1]), self.leaves):
            (lo, _), left = self._done.pop()
            node, total = (lo, node[1]), left.add_(total)
        self._done.append((node, total))

    @classmethod
    def of(cls, nodes: Mapping[Node, torch.Tensor], leaves: int) -> Accumulator:
        """What has summed these nodes, which follow each other."""
        made = cls(next(iter(nodes))[0], leaves)
        made._done = list(nodes.items())
        made._next = made._done[-1][0][1]
        first = made._done[0][1]
        made._kind = first.shape, first.dtype, first.device
        return made

    def sum(self) -> torch.Tensor:
        """The sum of all leaves. Raises CkptError where some have not come."""
        return finish(self.nodes, self.leaves)

    @property
    def nodes(self) -> dict[Node, torch.Tensor]:
        """The sums so far, from left to right; live buffers."""
        return dict(self._done)


def finish(nodes: Mapping[Node, torch.Tensor], leaves: int) -> torch.Tensor:
    """The sum of all leaves from nodes that cover them. Raises CkptError where they do not."""

    def total(lo: int, hi: int) -> torch.Tensor:
        if (lo, hi) in nodes:
            return nodes[lo, hi]
        if hi - lo == 1:
            raise CkptError(f"leaf {lo} of {leaves} is nowhere: no rank has it, or it lies in an odd node")
        cut = middle(lo, hi)
        return total(lo, cut) + total(cut, hi)

    if leaves < 1:
        raise CkptError("a sum of no leaves has no value")
    root = total(0, leaves)
    odd = root.isnan()
    # On a GPU it is cheaper not to ask.
    return torch.where(odd, torch.nan, root) if odd.is_cuda or bool(odd.any()) else root


def check_denormals(device: torch.device) -> None:
    """Raises CkptError where this thread's processor flushes denormal numbers to zero (`torch.set_flush_denormal`)."""
    if device.type == "cpu":
        tiny = torch.tensor([1], dtype=torch.int32).view(torch.float32)
        if not bool((tiny + tiny).view(torch.int32) == 2):
            raise CkptError("denormal numbers are flushed to zero here: call torch.set_flush_denormal(False)")
