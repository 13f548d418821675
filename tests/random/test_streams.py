"""Streams: derivation, words and numbers against the definition, golden values, and statistics."""

import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckpt.errors import CkptError
from ckpt.native import logical
from ckpt.native.library import find
from ckpt.random import LogicalRng, Stream, keep_threshold
from tests.random import reference

U64 = st.integers(0, 2**64 - 1)
TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=6)


@pytest.fixture(scope="module", params=["kernels", "torch"], autouse=True)
def drawn_by(request: pytest.FixtureRequest) -> Iterator[None]:
    """What is installed, and what is there without a compiler."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "torch":
            patch.setattr(logical, "find", lambda: None)
        elif find() is None:
            pytest.skip("no kernels are installed")
        yield


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def test_philox_known_answers() -> None:
    """The test vectors of Random123 (`kat_vectors`, philox4x32 with 10 rounds), for the reference."""
    assert reference.block((0, 0, 0, 0), 0) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    full = 0xFFFFFFFF
    assert reference.block((full,) * 4, 2**64 - 1) == (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)
    pi = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
    assert reference.block(pi, 0x299F31D0A4093822) == (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)


@given(seed=U64, step=U64, purpose=TEXT.filter(bool), indices=st.lists(st.one_of(U64, TEXT), max_size=3))
def test_derivation_follows_its_definition(seed: int, step: int, purpose: str, indices: list[int | str]) -> None:
    rng = LogicalRng(seed, step)
    found = rng.stream(purpose, *indices)
    assert (found.key, found.number) == reference.key_and_number(seed, step, purpose, *indices)
    fixed = rng.fixed(purpose, *indices)
    assert (fixed.key, fixed.number) == reference.key_and_number(seed, None, purpose, *indices)


def test_everything_in_the_key_counts() -> None:
    purposes: list[tuple[Any, ...]] = [
        ("a",),
        ("a", 1),
        ("a", "1"),
        ("a", 1, 0),
        ("a", 0, 1),
        ("a1",),
        ("a", ""),
        ("1",),
    ]
    purposes += [("ab", "c"), ("a", "bc"), ("a", "b", "c"), ("é",), ("e\u0301",)]
    made = [
        make(*purpose)
        for seed, step in itertools.product((0, 1, 2**63), (0, 1, 7))
        for purpose in purposes
        for make in (LogicalRng(seed, step).stream, LogicalRng(seed, step).fixed)
    ]
    assert len(set(made)) == 3 * (3 + 1) * len(purposes)  # `fixed` is the same at the three steps


def test_numbers_of_numpy_and_bools() -> None:
    rng = LogicalRng(np.uint64(5), np.int32(2))
    assert rng.state_dict() == {"seed": 5, "step": 2}
    assert type(rng.seed) is int and type(rng.step) is int
    assert rng.stream("a", np.int64(3)) == rng.stream("a", 3)
    for bad in (True, 1.0, -1, 2**64, None, b"x", torch.tensor(1), "\ud800"):
        with pytest.raises(CkptError, match="index 1 of a stream"):
            rng.stream("a", bad)  # type: ignore[arg-type]
    for bad in ("", 3, None):
        with pytest.raises(CkptError, match="purpose"):
            rng.stream(bad)  # type: ignore[arg-type]
    for bad in (True, 1.5, -1, 2**64, "0"):
        with pytest.raises(CkptError, match="seed"):
            LogicalRng(bad)  # type: ignore[arg-type]
        with pytest.raises(CkptError, match="step"):
            LogicalRng(0, bad)  # type: ignore[arg-type]


@given(key=U64, number=U64, row=st.integers(0, 2**57), length=st.integers(1, 13), lead=st.integers(0, 12))
def test_draws_follow_their_definition(key: int, number: int, row: int, length: int, lead: int) -> None:
    """13 numbers a row, 2^57 rows and more, so that the element numbers need both words of the counter."""
    length = min(length, 13 - lead)
    stream, shape, at = Stream(key, number), (2**57 + 1, 13), (range(row, row + 1), range(lead, lead + length))
    elements = [row * 13 + lead + i for i in range(length)]
    words = [reference.word(e, number, key) for e in elements]
    assert stream.bits(shape, at).tolist() == [words]
    assert stream.uniform(shape, at).tolist() == [[(w >> 8) / 2**24 for w in words]]
    for p in (0.0, 0.1, 0.5, 1.0):
        assert stream.keep_mask(p, shape, at).tolist() == [[w < keep_threshold(p) for w in words]]
    wide = [reference.wide(e, number, key) for e in elements]
    assert stream.uniform(shape, at, torch.float64).tolist() == [[(w >> 11) / 2**53 for w in wide]]


# Of LogicalRng(1234, 7): the stream, words of elements 0..5, and bytes of the numbers. They may never change.
GOLDEN = {
    ("stream", "dropout", 3, "mlp"): (
        (0x5167432D2E5DB9BA, 0xB593586BB05B0C88),
        [496263539, 129109, 1700376401, 1159837660, 1153626195, 2182494252],
        "08a3ec3d0000fc375eb3ca3e",
        "000046d95185ff3e6a5619f76d48d13f",
        "a0db4c87a10c1040dcfd9dd5079be33f08ae75a86a3703c00007a0cb4b32dc3f",
        "0c6580403fd81c3f55bb19c05e92e13e",
    ),
    ("fixed", "init", "layers.0.weight"): (
        (0x86615C6222E51BB9, 0x87ED7FC7BCEE1D37),
        [1806724124, 2625700656, 3948613897, 2112202346, 416219154, 1972453078],
        "d860d73e03811c3f115b6b3f",
        "0d760d662090e33fc4d6ba9a6979df3f",
        "b839911eb882f3bf9a2d66742716953f08e8f0424632ba3f438afc51625ce4bf",
        "c1159cbf3cb1a83c3292d13d13e322bf",
    ),
}


@pytest.mark.parametrize("name", GOLDEN, ids=lambda name: name[0])
def test_golden_values(name: tuple[Any, ...]) -> None:
    rng = LogicalRng(1234, 7)
    stream = getattr(rng, name[0])(*name[1:])
    assert GOLDEN[name] == (
        (stream.key, stream.number),
        stream.bits((6,)).tolist(),
        raw(stream.uniform((3,))).hex(),
        raw(stream.uniform((2,), dtype=torch.float64)).hex(),
        raw(stream.normal((4,), dtype=torch.float64)).hex(),
        raw(stream.normal((4,))).hex(),
    )


def test_dtypes_and_devices() -> None:
    stream = LogicalRng(0).stream("x")
    assert stream.bits((3,)).dtype == torch.int64
    assert stream.keep_mask(0.5, (3,)).dtype == torch.bool
    double = stream.normal((1000,), dtype=torch.float64)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        single = stream.normal((1000,), dtype=dtype)
        assert torch.equal(single.view(torch.uint8), double.to(torch.float32).to(dtype).view(torch.uint8))
    with pytest.raises(CkptError, match="could round up to 1"):
        stream.uniform((3,), dtype=torch.bfloat16)
    with pytest.raises(CkptError, match="int64"):
        stream.normal((3,), dtype=torch.int64)
    with torch.device("meta"):  # a default device is none of a stream's business
        assert stream.uniform((3,)).device.type == stream.normal((3,)).device.type == "cpu"


def test_keep_threshold_is_exact() -> None:
    assert [keep_threshold(p) for p in (0, 0.0, 0.5, 0.25, 1, 1.0)] == [2**32, 2**32, 2**31, 3 * 2**30, 0, 0]
    assert keep_threshold(0.1) == 3865470566  # 0.9 * 2^32 is 3865470566.4
    assert keep_threshold(2.0**-32) == 2**32 - 1
    assert keep_threshold(2.0**-33) == 2**32  # a half: to even
    assert keep_threshold(3 * 2.0**-33) == 2**32 - 2  # a half: to even
    assert keep_threshold(2.0**-33 + 2.0**-80) == 2**32 - 1  # where 1 - p in floating point would be a half
    for bad in (-0.1, 1.0000001, math.nan, math.inf):
        with pytest.raises(CkptError, match="from 0 to 1"):
            keep_threshold(bad)


def test_the_threshold_itself_is_not_kept() -> None:
    stream = LogicalRng(1).stream("edge")
    word = int(stream.bits((9,))[4])
    for kept, threshold in ((False, word), (True, word + 1)):
        p = 1 - threshold / 2**32  # exact
        assert keep_threshold(p) == threshold
        assert bool(stream.keep_mask(p, (9,))[4]) == kept


def test_bits_are_uniform_and_streams_unrelated() -> None:
    """Fixed seeds, so that the test is exact; the bounds are those of five standard deviations."""
    n = 1 << 18
    rng = LogicalRng(42)
    a, b = rng.stream("a", 0).bits((n,)), rng.stream("a", 1).bits((n,))
    for bit in range(32):
        assert abs(int(((a >> bit) & 1).sum()) - n / 2) < 5 * math.sqrt(n) / 2
        assert abs(int((((a ^ b) >> bit) & 1).sum()) - n / 2) < 5 * math.sqrt(n) / 2
    for cells in (a & 255, a >> 24, (a ^ b) & 255):
        counts = torch.bincount(cells, minlength=256).double()
        chi_square = float(((counts - n / 256).square() / (n / 256)).sum())
        assert abs(chi_square - 255) < 5 * math.sqrt(2 * 255)
    x, y = rng.stream("x").normal((n,), dtype=torch.float64), rng.stream("y").normal((n,), dtype=torch.float64)
    for lag in (0, 1, 2, 4, 512):
        assert abs(float((x[lag:] * y[: n - lag]).mean())) < 5 / math.sqrt(n)
        if lag:
            assert abs(float((x[lag:] * x[:-lag]).mean())) < 5 / math.sqrt(n)


def test_uniform_numbers_are_uniform() -> None:
    n = 1 << 18
    stream = LogicalRng(7).stream("u")
    for dtype in (torch.float32, torch.float64):
        u = stream.uniform((n,), dtype=dtype).double().sort().values
        steps = torch.arange(n, dtype=torch.float64) / n
        statistic = float(torch.maximum(u - steps, steps + 1 / n - u).max())
        assert statistic * math.sqrt(n) < 1.63  # Kolmogorov and Smirnov, 1 %
        assert float(u[0]) >= 0 and float(u[-1]) < 1
