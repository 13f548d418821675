"""How much of a matrix of cases a test run covers: a covering part, or everything.

`./tools/test --full` runs everything, by setting CKPT_TEST_FULL=1.
"""

import os
from collections.abc import Iterable
from typing import TypeVar

Case = TypeVar("Case")

FULL = os.environ.get("CKPT_TEST_FULL") == "1"


def covering(cases: Iterable[Case], *, more: Iterable[Case]) -> tuple[Case, ...]:
    """`cases`, and in a full run those of `more` too."""
    return (*cases, *(more if FULL else ()))
