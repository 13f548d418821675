"""Who holds what: for one logical tensor, the distinct boxes and the ranks that hold each; and exact coverage."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from ckpt.errors import StateMismatch
from ckpt.geometry.box import Box, Index

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Holdings:
    """The distinct non-empty boxes of one tensor, sorted, and for each the sorted ranks that hold it (replicas)."""

    boxes: tuple[Box, ...]
    ranks: tuple[tuple[int, ...], ...]

    @staticmethod
    def of(held: Iterable[tuple[int, Box]]) -> Holdings:
        """From (rank, box) pairs in any order; empty boxes hold nothing and are dropped.

        Raises StateMismatch when one rank gives the same box twice.
        """
        found: dict[tuple[Index, Index], list[int]] = {}
        for rank, box in held:
            if box.volume:
                found.setdefault((box.offset, box.extent), []).append(rank)
        keys = sorted(found)
        ranks = tuple(tuple(sorted(found[key])) for key in keys)
        for key, holders in zip(keys, ranks, strict=True):
            if len(set(holders)) != len(holders):
                twice = next(r for r in holders if holders.count(r) > 1)
                raise StateMismatch(f"rank {twice} gives box {Box(*key)} twice; give each part of a tensor once")
        return Holdings(tuple(Box(*key) for key in keys), ranks)

    @cached_property
    def bounds(self) -> tuple[Ints, Ints]:
        """First and past-the-end corners of the boxes, each int64 [boxes, ndim]."""
        ndim = len(self.boxes[0].offset) if self.boxes else 0
        lo = np.array([b.offset for b in self.boxes], dtype=np.int64).reshape(len(self.boxes), ndim)
        return lo, lo + np.array([b.extent for b in self.boxes], dtype=np.int64).reshape(lo.shape)

    def meeting(self, box: Box) -> list[tuple[Box, tuple[int, ...]]]:
        """The non-empty intersections of `box` with the held boxes, each with its holders, sorted by place."""
        if not self.boxes:
            return []
        if len(self.boxes) == 1:
            common = self.boxes[0].intersect(box)
            return [(common, self.ranks[0])] if common else []
        lo, hi = self.bounds
        first = np.maximum(lo, np.array(box.offset, dtype=np.int64))
        last = np.minimum(hi, np.array(box.stop, dtype=np.int64))
        hits = np.flatnonzero((last > first).all(axis=1))
        return [
            (Box(tuple(first[i].tolist()), tuple((last[i] - first[i]).tolist())), self.ranks[i]) for i in hits.tolist()
        ]

    def check_cover(self, name: str, shape: Index) -> None:
        """Checks that the boxes cover every element of the tensor exactly once.

        Raises StateMismatch naming the tensor, the first gap or overlap, and the ranks that hold it.
        """
        whole = Box.whole(shape)
        for box, ranks in zip(self.boxes, self.ranks, strict=True):
            if len(box.offset) != len(shape) or not whole.contains(box):
                raise StateMismatch(
                    f"{name}: rank {ranks[0]} gives box {box}, outside of shape {shape}; correct its box, or the shape"
                )
        if not whole.volume or (len(self.boxes) == 1 and self.boxes[0] == whole):
            return
        lo, hi = self.bounds
        if len(self.boxes) and _is_product_grid(lo, hi, shape):
            return
        fault = _first_fault(lo, hi, np.arange(len(self.boxes)), shape) if self.boxes else ("gap", whole, [])
        if fault is None:
            return
        kind, where, who = fault
        holders = sorted({r for i in who for r in self.ranks[i]})
        if kind == "gap":
            raise StateMismatch(
                f"{name}: no rank holds the elements {where} of shape {shape}; "
                "check the layout, or that every rank passed its part of the state"
            )
        boxes = " and ".join(str(self.boxes[i]) for i in who[:2])
        raise StateMismatch(
            f"{name}: boxes {boxes} of ranks {_names(holders)} overlap in {where} without being the same box; "
            "replicas must hold identical boxes"
        )


def _names(ranks: Sequence[int], most: int = 8) -> str:
    shown = ", ".join(map(str, ranks[:most]))
    return shown if len(ranks) <= most else f"{shown} and {len(ranks) - most} more"


def _is_product_grid(lo: Ints, hi: Ints, shape: Index) -> bool:
    """Whether the (distinct) boxes are exactly the cells of a grid of cut points: then they cover exactly."""
    cells = 1
    for axis, size in enumerate(shape):
        starts = np.unique(lo[:, axis])
        ends = np.append(starts[1:], size)
        if starts[0] != 0 or not np.array_equal(hi[:, axis], ends[np.searchsorted(starts, lo[:, axis])]):
            return False
        cells *= len(starts)
    return cells == len(lo)


def _first_fault(lo: Ints, hi: Ints, members: Ints, shape: Index) -> tuple[str, Box, list[int]] | None:
    """Sweeps axis by axis: the first (kind, place, boxes concerned) not covered exactly once, or None."""
    if not shape:
        if len(members) == 1:
            return None
        return ("gap" if not len(members) else "overlap"), Box((), ()), members.tolist()
    starts, stops = lo[members, 0], hi[members, 0]
    cuts = np.unique(np.concatenate([starts, stops, [0, shape[0]]]))
    order = np.argsort(starts, kind="stable")
    ordered, begins = members[order], starts[order]
    active = np.empty(0, dtype=np.int64)
    taken = 0
    for a, b in zip(cuts[:-1].tolist(), cuts[1:].tolist(), strict=True):
        upto = int(np.searchsorted(begins, a, side="right"))
        active = np.concatenate([active[hi[active, 0] > a], ordered[taken:upto]])
        taken = upto
        fault = _first_fault(lo[:, 1:], hi[:, 1:], active, shape[1:])
        if fault is not None:
            kind, where, who = fault
            return kind, Box((a, *where.offset), (b - a, *where.extent)), who
    return None
