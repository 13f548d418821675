"""Which commits of a history are kept, and why. Pure: no store, no clock; what it says of a history never changes.

The rules look at the lineage of the newest commit, one commit for each step. Commits of other branches are left alone
unless asked for, since nobody but a person knows whether a branch was given up.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from ckpt.errors import CkptError
from ckpt.store.log import History, Record


@dataclass(frozen=True)
class Keep:
    """What to keep of a run. A commit is kept if any rule keeps it; the newest always is. Without `last`, `every` and
    `best` nothing is retired.

    last: so many of the newest steps. every: steps that are multiples of this. best: so many of the best by `metric`,
    the name of a number in the saved state (such as "loss"); the lowest are best, or the `highest`; NaN is worst, and
    a commit without that number is kept. steps: kept for ever. branches: whether commits that the newest one does not
    descend from are retired. grace: seconds from a commit's retirement to the deletion of its data.

    Raises CkptError for a rule that makes no sense.
    """

    last: int | None = None
    every: int | None = None
    best: int | None = None
    metric: str | None = None
    highest: bool = False
    steps: tuple[int, ...] = ()
    branches: bool = False
    grace: float = 3600.0

    def __post_init__(self) -> None:
        for name in ("last", "every", "best"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise CkptError(f"Keep({name}={value!r}): give an int of at least 1, or leave it out")
        if (self.best is None) != (self.metric is None):
            raise CkptError("Keep: best and metric go together; give both, or neither")
        if not (self.grace >= 0 and math.isfinite(self.grace)):
            raise CkptError(f"Keep(grace={self.grace!r}): give seconds, at least 0")

    @property
    def retires(self) -> bool:
        """Whether there is a rule by which a commit may go."""
        return self.branches or any(rule is not None for rule in (self.last, self.every, self.best))


@dataclass(frozen=True)
class Verdict:
    """A commit that is not retired, and why it is kept; without a reason it may be retired."""

    record: Record
    reasons: tuple[str, ...]

    @property
    def kept(self) -> bool:
        return bool(self.reasons)


def judge(
    history: History, keep: Keep, held: Mapping[int, str], metrics: Mapping[int, float | None] | None = None
) -> list[Verdict]:
    """A verdict on each commit that is not retired, in the order of the log.

    held: numbers of commits that somebody is using, and what for: none of them may go. metrics: by number, the value of
    `keep.metric` of each commit of the lineage; None where it has none.
    """
    retired = history.retired
    alive = [r for r in history.records if r.kind == "commit" and r.number not in retired]
    lineage = history.lineage()
    first: dict[int, Record] = {}
    for record in lineage:
        first.setdefault(record.step, record)
    steps = list(first.values())  # newest first
    best = {r.number for r in _best(steps, keep, metrics or {})}
    newest = {r.number for r in steps[: keep.last or 0]}
    shown, ours = {r.number for r in steps}, {r.number for r in lineage}
    verdicts = []
    for record in alive:
        number, reasons = record.number, []
        if number == lineage[0].number:
            reasons.append("the newest")
        if not keep.retires:
            reasons.append("no rule retires it")
        if number in newest:
            reasons.append(f"last {keep.last}")
        if keep.every is not None and number in shown and record.step % keep.every == 0:
            reasons.append(f"every {keep.every}")
        if number in best:
            reasons.append(f"best {keep.best} of {keep.metric}")
        if keep.best is not None and number in shown and (metrics or {}).get(number) is None:
            reasons.append(f"has no {keep.metric}")
        if record.step in keep.steps and (number in shown or number not in ours):
            reasons.append("for ever")
        if number not in ours and not keep.branches:
            reasons.append("another branch")
        if number in held:
            reasons.append(held[number])
        verdicts.append(Verdict(record, tuple(reasons)))
    return verdicts


def _best(steps: Sequence[Record], keep: Keep, metrics: Mapping[int, float | None]) -> list[Record]:
    """The best of the commits that have the metric; of equal ones the newer."""

    def worth(record: Record) -> tuple[bool, float, int]:
        value = metrics[record.number]
        assert value is not None
        if math.isnan(value):
            return True, 0.0, -record.number
        return False, -value if keep.highest else value, -record.number

    return sorted((r for r in steps if metrics.get(r.number) is not None), key=worth)[: keep.best or 0]


def retirable(verdicts: Collection[Verdict]) -> list[Record]:
    """The commits that no rule keeps, oldest first."""
    return [v.record for v in verdicts if not v.kept]
