"""One build of the compiled kernels for all tests of this folder, at each instruction set this machine has."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckpt.native.library import LEVELS, Library
from tests.support.native_build import build


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    """CKPT_TEST_LIBRARY names a library that is built already: test_kernel_builds.py tests its own build so."""
    if given := os.environ.get("CKPT_TEST_LIBRARY"):
        return Library(Path(given))
    if shutil.which("cmake") is None or shutil.which("c++") is None:
        pytest.skip("no CMake or no C++ compiler")
    return Library(build(tmp_path_factory.mktemp("native")))


@pytest.fixture(params=range(len(LEVELS)), ids=LEVELS)
def kernels(library: Library, request: pytest.FixtureRequest) -> Iterator[Library]:
    """The library at one instruction set; skipped where the machine does not have it."""
    best = library.level(len(LEVELS))
    if request.param > best:
        pytest.skip(f"this machine has {LEVELS[best]}")
    library.level(request.param)
    yield library
    library.level(len(LEVELS))
