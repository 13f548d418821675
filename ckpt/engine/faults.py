"""Named points of a save and a load at which a test may act: kill the process, pause it, raise.

A point does nothing unless a test passes an action in. The points, in order:

    save.begin      merged and planned, nothing written
    save.intent     intent.json and run.json are there (rank 0)
    save.object     this rank's first object is written
    save.written    all objects of this rank are written, its receipt is not
    save.receipt    this rank's receipt is there
    commit.manifest manifest.json is there
    commit.append   both manifests are there, the commit is not
    commit.done     the commit is there
    load.claimed    this job has claimed the root (rank 0)
    load.opened     manifests are read and checked, nothing placed
    load.read       this rank has read its first unit, nothing placed yet
    load.placed     all tensors are placed, not verified
    load.verified   tensors are verified, values not applied

and of a state at rest that is written as a step (`ckpt.engine.stream`), before those of the commit:

    stream.object   the write of an object has started
    stream.piece    the record of a piece is there
    stream.receipts all receipts are there
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

POINTS = (
    "save.begin",
    "save.intent",
    "save.object",
    "save.written",
    "save.receipt",
    "commit.manifest",
    "commit.append",
    "commit.done",
    "load.claimed",
    "load.opened",
    "load.read",
    "load.placed",
    "load.verified",
    "stream.object",
    "stream.piece",
    "stream.receipts",
)

FaultPoint: TypeAlias = Callable[[str], None]


def no_faults(point: str) -> None:
    """The default: nothing happens."""
