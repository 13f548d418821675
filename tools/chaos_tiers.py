"""What must be true of two roots after a kill, and the loss of a node; for `tools/chaos --tiers`.

Saves are committed to a fast directory, and copied on; a commit that waits for its copy gives way to a newer one, and
the fast root keeps the last few steps. So a step may be gone if it was retired where it was: from the fast root by the
commits that came after it, and from the durable one, if it got there, by the rules of that. The newest may never go,
unless the node goes that it was on.
"""

from __future__ import annotations

import random
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckpt.store.log import History, Log
from ckpt.store.objects import open_store
from ckpt.trainer.tiers import lineage
from tools import chaos_job

COPIED, UNCOPIED, LOST = "steps copied on", "kills before the newest step was copied on", "nodes lost"


@dataclass(frozen=True)
class Roots:
    """url, options: the durable root; fast: the other, if there is one; keeping: whether the durable one retires; loss:
    how likely the node is lost after a launch that nobody has survived."""

    url: str
    options: Any
    fast: Path | None
    keeping: bool
    loss: float

    @property
    def all(self) -> list[tuple[str, Any]]:
        """Every root, where saves are committed first of all."""
        fast = [] if self.fast is None else [(str(self.fast), None)]
        return [*fast, (self.url, self.options)]

    def histories(self) -> tuple[History, History]:
        """Of the durable root and the fast one."""
        assert self.fast is not None
        durable, fast = open_store(self.url, self.options), open_store(str(self.fast))
        return Log(durable).read(), Log(fast).read()

    def count(self, counts: Counter[str]) -> None:
        """Notes after a kill what came of the copies."""
        durable, fast = self.histories()
        counts[COPIED] = len({record.step for record in durable.records if record.kind == "commit"})
        counts[UNCOPIED] += any(place.durable is None for place in lineage(durable, fast)[:1])

    def steps(self) -> list[int]:
        """What the next job can load."""
        return sorted({place.record.step for place in lineage(*self.histories())})

    def lose_node(self, chance: random.Random) -> set[int] | None:
        """Now and then removes the fast root; gives the steps that must still be there then."""
        assert self.fast is not None
        if chance.random() >= self.loss:
            return None
        shutil.rmtree(self.fast, ignore_errors=True)
        return set(self.steps())


def rightly_gone(
    roots: Roots, gone: set[int], committed: set[int], may_retire: Callable[[set[int]], set[int]]
) -> set[int]:
    """Which of the steps that are gone had to be expected to go. committed: all that must have been there once;
    may_retire: which steps the durable root's rules let go."""
    durable, fast = roots.histories()
    newest = set(sorted(committed)[-chaos_job.FAST_LAST :])
    retired = {fast.records[number - 1].step for number in fast.retired}
    here = {record.step for record in fast.records if record.kind == "commit" and record.number not in fast.retired}
    there = {record.step for record in durable.records if record.kind == "commit"}
    only_fast = (gone & retired) - there
    return (only_fast | may_retire(gone & there)) - here - newest
