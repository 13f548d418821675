"""Parallel layouts: which coordinates a rank has."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ckpt.errors import StateMismatch

_AXES = ("tp", "cp", "ep", "dp", "pp")


@dataclass(frozen=True, slots=True)
class Coords:
    """Where a rank sits: dense axes (tp, cp, dp, pp) and, over the same ranks, expert axes (etp, ep, edp)."""

    tp: int
    cp: int
    dp: int
    pp: int
    etp: int
    ep: int
    edp: int


@dataclass(frozen=True, slots=True)
class Layout:
    """Sizes of a parallel layout and the order in which ranks count through the axes.

    The world size is tp * cp * dp * pp (dp without cp). Expert layers regroup the tp * cp * dp ranks of one
    pipeline stage as etp * ep * edp; `etp` is `tp` unless given. `order` lists the axes from the fastest
    running one, as Megatron Core does (`parallel_state.RankGenerator`): dense coordinates take the axes without
    ep, expert coordinates read tp as etp and dp as edp and skip cp. `vpp` is the number of model chunks per
    pipeline stage; it places no rank.

    Raises StateMismatch when a size is below 1, the expert sizes do not divide, the order is not a permutation of
    tp, cp, ep, dp, pp, or it gives a rank different pipeline stages for dense and expert layers.
    """

    tp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int | None = None
    dp: int = 1
    pp: int = 1
    vpp: int = 1
    order: str = "tp-cp-ep-dp-pp"

    def __post_init__(self) -> None:
        for axis in ("tp", "cp", "ep", "dp", "pp", "vpp"):
            if getattr(self, axis) < 1:
                raise StateMismatch(f"layout: {axis}={getattr(self, axis)} must be at least 1")
        if tuple(sorted(self.order.split("-"))) != tuple(sorted(_AXES)):
            raise StateMismatch(f"layout: order {self.order!r} must name each of {', '.join(_AXES)} once")
        stage = self.tp * self.cp * self.dp
        if self.expert_tp < 1 or stage % (self.expert_tp * self.ep):
            raise StateMismatch(
                f"layout: etp={self.expert_tp} x ep={self.ep} must divide tp x cp x dp = {stage}; "
                "set etp (it defaults to tp)"
            )
        axes = self.order.split("-")
        faster = axes[: axes.index("pp")]
        strides = {math.prod(sizes[axis] for axis in faster) for sizes in (self._dense, self._expert)}
        if self.pp > 1 and len(strides) > 1:
            raise StateMismatch(
                f"layout: order {self.order!r} with etp={self.expert_tp}, ep={self.ep} gives ranks different pipeline "
                "stages for dense and expert layers; put pp last"
            )

    @property
    def expert_tp(self) -> int:
        return self.tp if self.etp is None else self.etp

    @property
    def _dense(self) -> dict[str, int]:
        return {"tp": self.tp, "cp": self.cp, "ep": 1, "dp": self.dp, "pp": self.pp}

    @property
    def _expert(self) -> dict[str, int]:
        edp = self.tp * self.cp * self.dp // (self.expert_tp * self.ep)
        return {"tp": self.expert_tp, "cp": 1, "ep": self.ep, "dp": edp, "pp": self.pp}

    @property
    def world(self) -> int:
        return self.tp * self.cp * self.dp * self.pp

    def coords(self, rank: int) -> Coords:
        """Coordinates of a global rank. Raises StateMismatch when the rank is outside of the layout."""
        if not 0 <= rank < self.world:
            raise StateMismatch(f"rank {rank} is outside of layout {self} of {self.world} ranks")
        dense, expert = self._unravel(rank, self._dense), self._unravel(rank, self._expert)
        return Coords(
            tp=dense["tp"],
            cp=dense["cp"],
            dp=dense["dp"],
            pp=dense["pp"],
            etp=expert["tp"],
            ep=expert["ep"],
            edp=expert["dp"],
        )

    def rank(self, *, tp: int = 0, cp: int = 0, dp: int = 0, pp: int = 0) -> int:
        """Global rank of dense coordinates: the inverse of `coords`."""
        sizes = self._dense
        at = {"tp": tp, "cp": cp, "ep": 0, "dp": dp, "pp": pp}
        rank, stride = 0, 1
        for axis in self.order.split("-"):
            if not 0 <= at[axis] < sizes[axis]:
                raise StateMismatch(f"layout {self}: {axis} coordinate {at[axis]} is out of range")
            rank += at[axis] * stride
            stride *= sizes[axis]
        return rank

    def _unravel(self, rank: int, sizes: dict[str, int]) -> dict[str, int]:
        found = {}
        for axis in self.order.split("-"):
            rank, found[axis] = divmod(rank, sizes[axis])
        return found

    def __str__(self) -> str:
        sizes = {axis: getattr(self, axis) for axis in ("tp", "cp", "ep", "dp", "pp", "vpp")}
        shown = [f"{axis}{size}" for axis, size in sizes.items() if size > 1]
        if self.expert_tp != self.tp:
            shown.append(f"etp{self.expert_tp}")
        return "-".join(shown) or "single"
