"""Roots that most tests of the store begin with."""

from pathlib import Path

import pytest

from ckpt.store.objects import ObjectStore, open_store
from tests.support.roots import Root


@pytest.fixture
def store(root: Root) -> ObjectStore:
    return open_store(root.url, root.storage_options)


@pytest.fixture
def folder(tmp_path: Path) -> Root:
    return Root(str(tmp_path / "root"))
