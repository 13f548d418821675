"""What a save and a load give back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ckpt.trainer.levels import Level


@dataclass(frozen=True)
class Receipt:
    """A committed save. bytes: of the whole state; seconds: of the call on this rank, and `phases` of it by name; plan:
    what moved between ranks, in words."""

    step: int
    state_id: str
    bytes: int
    seconds: float
    phases: Mapping[str, float]
    plan: str
    details: Callable[[], list[str]] = field(repr=False)

    def summary(self) -> str:
        """What was captured, entry by entry, what was not, and why; some lines to be read by people."""
        return "\n".join([f"step {self.step}, state id {self.state_id}", *self.details()])


@dataclass(frozen=True)
class Restored:
    """A finished load. state_id: of the committed state, which the loaded tensors were compared with when `verified`;
    tensors, values: how many were loaded; saved_layout: of the job that saved, as it was given, or None; rederived:
    random streams of this rank that were made anew, because the saved ones have no meaning on this layout; differences:
    what of the saved numerics contract does not hold here, a line each."""

    step: int
    state_id: str
    bytes: int
    seconds: float
    phases: Mapping[str, float]
    plan: str
    tensors: int
    values: int
    verified: bool
    saved_layout: Mapping[str, Any] | None
    rederived: tuple[str, ...]
    differences: tuple[str, ...]

    @property
    def level(self) -> Level:
        """Whether training goes on with the bits that it would have had, or only the state has."""
        return "state-exact" if self.differences else "trajectory-exact"
