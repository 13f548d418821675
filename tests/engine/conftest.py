"""Fixtures that several of the tests here need."""

from collections.abc import Iterator
from pathlib import Path

import pytest

import ckpt
from tests.engine.states import sample_state
from tests.support.ranks import Crew


@pytest.fixture
def ck(tmp_path: Path) -> Iterator[ckpt.Checkpointer]:
    """A checkpointer on a root that holds `sample_state(10)` as step 1."""
    with ckpt.Checkpointer(tmp_path / "root") as made:
        made.save(1, sample_state(10))
        yield made


@pytest.fixture(scope="module")
def crew() -> Iterator[Crew]:
    """Four ranks for the tests of one file; a file that needs another number has a crew of its own."""
    with Crew(4) as made:
        yield made
