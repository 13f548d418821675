"""Random streams between layouts: which saved stream, if any, is the one that a rank of another layout goes on with.

A stream means the same on two layouts where it depends only on coordinates that both have: the checkpoint shows along
which axes it differed. Any other has no meaning there. It can be made anew, where the user asks for that: from what was
saved and the coordinates, so that the same checkpoint gives the same streams each time.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ckpt.errors import StateMismatch
from ckpt.geometry import Layout
from ckpt.state.values import Json, canonical_json, decode

_DENSE = ("tp", "cp", "dp", "pp")
_EXPERT = ("etp", "ep", "edp", "pp")
_DATA = ("dp", "edp")
_Key = tuple[int, ...]


@dataclass(frozen=True)
class Stream:
    """A random stream of this rank. label: its name within its RngState. same, differs: axes over which its streams are
    known to be one, or not to be, also where the saved layout had one rank on them. expert: whether it goes by expert
    coordinates (etp, ep, edp, pp), not by the dense ones. rederive: makes the state of a new stream from a seed below
    2^63; None where that is not asked for."""

    label: str
    same: frozenset[str] = frozenset()
    differs: frozenset[str] = frozenset()
    expert: bool = False
    rederive: Callable[[int], Any] | None = None


@dataclass(frozen=True)
class Streams:
    """One stream of all ranks of a saved layout, by rank (None for a rank without it), and the layout of this job."""

    name: str
    stream: Stream
    saved: Sequence[Json | None]
    before: Layout | None
    now: Layout | None

    def of(self, rank: int) -> tuple[Any, bool]:
        """State of the stream that `rank` of this job goes on with, and whether it was made anew.

        Raises StateMismatch where there is none and none may be made."""
        found = self._carried(rank)
        if found is not None:
            return decode(found, self.name), False
        if self.stream.rederive is None:
            self._refuse(rank)
        return self.stream.rederive(self._seed(rank)), True  # type: ignore[misc]

    def _carried(self, rank: int) -> Json | None:
        if any(self._grows(axis) and not self._known_same(axis) for axis in self._axes):
            return None
        common = [axis for axis in self._axes if not self._changes(axis)]
        wanted = _at(self.now, rank, common)
        found = [s for r, s in enumerate(self.saved) if _at(self.before, r, common) == wanted]
        return found[0] if found and all(s == found[0] for s in found) else None

    @property
    def _axes(self) -> tuple[str, ...]:
        """Without layouts, all ranks are one axis."""
        if self.before is None or self.now is None:
            return ("rank",)
        return _EXPERT if self.stream.expert else _DENSE

    def _changes(self, axis: str) -> bool:
        """Stages hold other layers where their number or that of their chunks is another."""
        if self.before is None or self.now is None:
            return True
        chunks = axis == "pp" and self.before.vpp != self.now.vpp
        return chunks or _size(self.before, axis) != _size(self.now, axis)

    def _grows(self, axis: str) -> bool:
        """Whether nothing that was saved can tell if the stream is the same along an axis."""
        if self.before is None or self.now is None:
            return len(self.saved) == 1
        return _size(self.before, axis) == 1 and _size(self.now, axis) > 1

    def _known_same(self, axis: str) -> bool:
        return axis in self.stream.same

    def _differs(self, axis: str) -> bool:
        """Whether new streams differ along an axis: as the saved ones did, or, where that had one rank, as is known, or
        else along data parallelism alone."""
        if axis in self.stream.differs or axis in self.stream.same:
            return axis in self.stream.differs
        if axis == "rank":
            return True
        assert self.before is not None
        return axis in _DATA if _size(self.before, axis) == 1 else self._differed(axis)

    def _differed(self, axis: str) -> bool:
        """Whether the saved streams of any two ranks that differ in this coordinate alone were different."""
        if self.before is None or axis == "rank":
            return any(state != self.saved[0] for state in self.saved)
        others = [a for a in self._axes if a != axis]
        groups = defaultdict(list)
        for rank, state in enumerate(self.saved):
            groups[_at(self.before, rank, others)].append(state)
        return any(state != group[0] for group in groups.values() for state in group)

    def _seed(self, rank: int) -> int:
        now = None if self._axes == ("rank",) else self.now
        at = [[axis, *_at(now, rank, [axis])] for axis in self._axes if self._differs(axis)]
        digest = hashlib.sha256(canonical_json([self.name, list(self.saved), at])).digest()
        return int.from_bytes(digest[:8], "little") >> 1

    def _refuse(self, rank: int) -> None:
        differed = [a for a in self._axes if self._changes(a) and self._differed(a)]
        why = (
            f"it differs along {', '.join(differed)}"
            if differed
            else "nothing tells whether it differs between its ranks"
        )
        raise StateMismatch(
            f"{self.name}: rank {rank} has no such random stream in the checkpoint, which {len(self.saved)} ranks "
            f"saved under layout {self.before or 'unknown'}; on layout {self.now or 'unknown'} it has no meaning: "
            f"{why}. Load on the saved layout, or take new streams, derived from the saved ones, by "
            f"RngState(rederive=[{self.stream.label!r}]), or leave the entry out of the state with "
            f"allow_extra=[{self.name!r}]; streams of ckpt.random need none of this"
        )


def _size(layout: Layout, axis: str) -> int:
    coords = layout.coords(layout.world - 1)  # the last rank is the last along every axis
    return int(getattr(coords, axis)) + 1


def _at(layout: Layout | None, rank: int, axes: Sequence[str]) -> _Key:
    """Coordinates of a rank along some axes."""
    if layout is None or not axes:
        return (rank,) * len(axes)
    coords = layout.coords(rank)
    return tuple(getattr(coords, axis) for axis in axes)
