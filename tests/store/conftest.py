"""Roots that most tests of the store begin with."""

import shutil
from pathlib import Path

import pytest

from ckpt.store.objects import ObjectStore, open_store
from tests.store.copies import save
from tests.support.roots import Root


@pytest.fixture
def store(root: Root) -> ObjectStore:
    return open_store(root.url, root.storage_options)


@pytest.fixture
def folder(tmp_path: Path) -> Root:
    return Root(str(tmp_path / "root"))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Root:
    """Steps 1 to 3, in a folder that no test changes."""
    root = Root(str(tmp_path_factory.mktemp("made") / "root"))
    save(root, 1, 2, 3)
    return root


@pytest.fixture
def source(made: Root, tmp_path: Path) -> Root:
    """The same, to be changed."""
    shutil.copytree(made.url, tmp_path / "source")
    return Root(str(tmp_path / "source"))


@pytest.fixture
def there(tmp_path: Path) -> Root:
    return Root(str(tmp_path / "there"))
