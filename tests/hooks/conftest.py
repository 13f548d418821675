"""The process that has imported the frameworks."""

from collections.abc import Iterator

import pytest

from tests.hooks.warm import Warm


@pytest.fixture(scope="session")
def warm() -> Iterator[Warm]:
    with Warm() as process:
        yield process
