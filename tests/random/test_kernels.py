"""The compiled kernels and torch's integer operations draw the same bits, however the work is cut between them."""

import shutil
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckpt.native import logical
from ckpt.native.library import Library, find
from ckpt.random import LogicalRng, Stream, dropout
from ckpt.random.regions import At
from tests.random.test_streams import raw
from tests.support.native_build import build


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    if found := find():
        return found
    if shutil.which("cmake") is None or shutil.which("c++") is None:
        pytest.skip("no CMake or no C++ compiler")
    return Library(build(tmp_path_factory.mktemp("native")))


class Counting:
    """The library, and how often it was called."""

    def __init__(self, library: Library) -> None:
        self.library, self.calls = library, 0

    def __getattr__(self, name: str) -> object:
        self.calls += name.startswith("philox")
        return getattr(self.library, name)


@pytest.fixture
def compiled(library: Library, monkeypatch: pytest.MonkeyPatch) -> Iterator[Counting]:
    counting = Counting(library)
    monkeypatch.setattr(logical, "find", lambda: counting)
    yield counting


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks so small that runs are cut; float64 draws go through the library in pieces."""
    monkeypatch.setattr(logical, "chunk_limit", lambda device: 6)


def draws(stream: Stream, shape: tuple[int, ...], at: At | None) -> list[bytes]:
    found = [stream.bits(shape, at), stream.keep_mask(0.3, shape, at), stream.uniform(shape, at)]
    found += [stream.uniform(shape, at, torch.float64), stream.normal(shape, at)]
    return [raw(tensor) for tensor in found]


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 2**64 - 1),
    rows=st.lists(st.integers(0, 2**50), max_size=4),
    row=st.integers(1, 30),
    data=st.data(),
)
def test_same_bits(
    compiled: Counting, small_chunks: None, seed: int, rows: list[int], row: int, data: st.DataObject
) -> None:
    low = data.draw(st.integers(0, row - 1))
    at = (rows, range(low, data.draw(st.integers(low + 1, row))))
    stream, before = LogicalRng(seed).stream("kernels"), compiled.calls
    found = draws(stream, (2**50 + 1, row), at)
    assert compiled.calls > before or not rows
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logical, "find", lambda: None)
        patch.setattr(logical, "chunk_limit", lambda device: 1 << 18)
        assert draws(stream, (2**50 + 1, row), at) == found


def test_same_bits_of_large_draws(compiled: Counting) -> None:
    """One long run, many rows that are worth a call each, and rows that are not."""
    stream = LogicalRng(1).stream("large")
    cases: list[tuple[tuple[int, ...], At | None, bool]] = [
        ((700001,), None, True),
        ((100, 5000), (None, range(1001, 4004)), True),
        ((3000, 100), (None, range(1, 98)), False),
    ]
    for shape, at, worth in cases:
        compiled.calls = 0
        mask = raw(stream.keep_mask(0.3, shape, at))
        assert (compiled.calls > 0) == worth
        found = [mask, *draws(stream, shape, at)]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(logical, "find", lambda: None)
            assert [raw(stream.keep_mask(0.3, shape, at)), *draws(stream, shape, at)] == found


def test_dropout(compiled: Counting) -> None:
    x = torch.ones(64, 2048)
    stream = LogicalRng(2).stream("dropout")
    found = raw(dropout(x, 0.1, stream))
    assert compiled.calls
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logical, "find", lambda: None)
        assert raw(dropout(x, 0.1, stream)) == found


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_gpu_draws_the_same_bits() -> None:
    """With its kernels where they are built, and with torch's operations."""
    stream = LogicalRng(3).stream("gpu")
    for shape, at in (((700001,), None), ((30, 5000), (None, range(1001, 4004))), ((3000, 100), (None, range(1, 98)))):
        for kind in ("bits", "uniform", "normal"):
            draw = getattr(stream, kind)
            wanted = raw(draw(shape, at))
            assert raw(draw(shape, at, device="cuda").cpu()) == wanted
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(logical, "find", lambda: None)
                assert raw(draw(shape, at, device="cuda").cpu()) == wanted
    x = stream.normal((64, 512), dtype=torch.bfloat16)
    assert raw(dropout(x.cuda(), 0.1, stream).cpu()) == raw(dropout(x, 0.1, stream))
