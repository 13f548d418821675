"""Fixtures for all tests."""

import re
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import hypothesis
import pytest

from tests.support.roots import Root
from tests.support.s3 import S3Server

hypothesis.settings.register_profile("ckpt", deadline=None, print_blob=True)
hypothesis.settings.load_profile("ckpt")


@pytest.fixture(scope="session")
def s3() -> Iterator[S3Server]:
    """The S3 server of this test run, started when the first test asks for it."""
    with S3Server() as server:
        yield server


@pytest.fixture(params=["file", pytest.param("s3", marks=pytest.mark.s3)])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Root:
    """A fresh root, once in a directory and once on the S3 server."""
    if request.param == "file":
        return Root(str(tmp_path / "root"))
    server: S3Server = request.getfixturevalue("s3")
    test = re.sub(r"\W+", "-", request.node.name)[:40]
    return Root(server.url(f"{test}-{uuid4().hex[:8]}"), server.storage_options)
