"""Fixtures that several of the tests here need."""

from pathlib import Path

import pytest

from tests.adapters.foreign.in_pieces import saved, undisturbed


@pytest.fixture(scope="session")
def pieces_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with the state of `in_pieces`, which no test changes."""
    return saved(tmp_path_factory.mktemp("pieces"))


@pytest.fixture(scope="session")
def whole(pieces_root: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, bytes]]:
    """What one process writes of it, undisturbed, by format."""
    return undisturbed(pieces_root, tmp_path_factory.mktemp("whole"))
