"""Differences of elements, against plain arithmetic on every dtype that ckpt carries."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ckpt.inspect import elements
from ckpt.inspect.elements import Distance, differing, distance, element
from ckpt.state.dtypes import STORED

FLOATS = [n for n in STORED if n.startswith(("float", "bfloat")) and n != "float4_e2m1fn_x2"]
NARROW = [n for n in FLOATS if STORED[n].itemsize < 4]
INTEGERS = [n for n in STORED if n.startswith(("int", "uint"))]
COMPLEX = {"complex32": "float16", "complex64": "float32", "complex128": "float64"}


def rows(data: bytes, dtype: str) -> np.ndarray:
    return np.frombuffer(data, np.uint8).reshape(-1, STORED[dtype].itemsize)


def decoded(data: bytes, dtype: str) -> list[float]:
    tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(getattr(torch, dtype))
    return [float(x) for x in tensor.to(torch.float64)]


@pytest.mark.parametrize("dtype", STORED)
@given(data=st.data())
@settings(max_examples=20)
def test_elements_differ_by_their_bits(dtype: str, data: st.DataObject) -> None:
    size = STORED[dtype].itemsize
    a = data.draw(st.binary(min_size=size, max_size=20 * size).map(lambda b: b[: len(b) // size * size]))
    b = bytearray(a)
    for at in data.draw(st.sets(st.integers(0, len(a) - 1), max_size=4)):
        b[at] ^= data.draw(st.integers(1, 255))
    wrong = [i for i in range(len(a) // size) if a[size * i : size * (i + 1)] != b[size * i : size * (i + 1)]]
    assert differing(rows(a, dtype), rows(bytes(b), dtype)).tolist() == wrong


@pytest.mark.parametrize("dtype", NARROW)
def test_ulp_counts_the_numbers_between(dtype: str) -> None:
    """All numbers of the dtype in their order: neighbours are one apart, and any two as far as their places."""
    size = STORED[dtype].itemsize
    codes = b"".join(c.to_bytes(size, "little") for c in range(1 << 8 * size))
    values = decoded(codes, dtype)
    place = {v: i for i, v in enumerate(sorted({v for v in values if not math.isnan(v)}))}  # 0.0 and -0.0 are one
    rng = np.random.default_rng(0)
    raw = rows(codes, dtype)
    for i, j in rng.integers(0, 1 << 8 * size, (400, 2)):
        x, y = values[i], values[j]
        found = distance(raw[i : i + 1], raw[j : j + 1], dtype)
        if math.isnan(x) or math.isnan(y):
            assert found == Distance(None, None, 1)
        else:
            apart = 0.0 if x == y else abs(x - y)
            assert found == Distance(apart, abs(place[x] - place[y]), 0), (x, y)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@given(start=st.floats(width=32, allow_nan=False, allow_infinity=False), steps=st.integers(1, 40))
def test_ulp_counts_steps_to_the_next_number(dtype: str, start: float, steps: int) -> None:
    kind = np.dtype(dtype).type
    at = kind(start)
    with np.errstate(over="ignore"):
        for _ in range(steps):
            at = np.nextafter(at, kind(np.inf))
    assume(not np.isinf(at))
    a, b = (rows(np.array(x, dtype).tobytes(), dtype) for x in (start, at))
    assert distance(a, b, dtype).ulp == distance(b, a, dtype).ulp == steps
    assert distance(a, b, dtype).largest == float(abs(Fraction(float(at)) - Fraction(float(kind(start)))))


@pytest.mark.parametrize("dtype", INTEGERS)
@given(data=st.data())
def test_integers_are_apart_exactly(dtype: str, data: st.DataObject) -> None:
    info = np.iinfo(dtype)
    lowest, highest = int(info.min), int(info.max)
    numbers = st.lists(st.integers(lowest, highest) | st.sampled_from([lowest, highest]), min_size=1)
    a = data.draw(numbers)
    b = data.draw(st.permutations(a))
    found = distance(rows(np.array(a, dtype).tobytes(), dtype), rows(np.array(b, dtype).tobytes(), dtype), dtype)
    assert found == Distance(max(abs(x - y) for x, y in zip(a, b, strict=True)), None, 0)
    assert isinstance(found.largest, int)


@pytest.mark.parametrize("dtype", COMPLEX)
@given(data=st.data())
def test_complex_numbers(dtype: str, data: st.DataObject) -> None:
    size = STORED[dtype].itemsize
    a, b = (data.draw(st.binary(min_size=size, max_size=size)) for _ in range(2))
    found = distance(rows(a, dtype), rows(b, dtype), dtype)
    pairs = list(zip(decoded(a, COMPLEX[dtype]), decoded(b, COMPLEX[dtype]), strict=True))
    known = [p for p in pairs if not (math.isnan(p[0]) or math.isnan(p[1]))]
    assert found.nan == (len(known) < 2)
    if len(known) == 2:
        parts = [0.0 if x == y else abs(x - y) for x, y in pairs]
        assert found.largest == pytest.approx(math.hypot(*parts))
    else:
        assert found.largest is None
    part = COMPLEX[dtype]
    assert found.ulp == distance(rows(a, part), rows(b, part), part).ulp


@pytest.mark.parametrize(
    ("dtype", "data", "value", "bits"),
    [
        ("float32", "0000803f", "1.0", "3f800000"),
        ("float32", "00000080", "-0.0", "80000000"),
        ("float32", "0100c07f", "nan", "7fc00001"),
        ("float64", "000000000000f0ff", "-inf", "fff0000000000000"),
        ("bfloat16", "c03f", "1.5", "3fc0"),
        ("float16", "0100", "5.960464477539063e-08", "0001"),
        ("float8_e4m3fn", "7f", "nan", "7f"),
        ("float8_e5m2", "fc", "-inf", "fc"),
        ("float8_e4m3fnuz", "80", "nan", "80"),
        ("float8_e8m0fnu", "7f", "1.0", "7f"),
        ("float4_e2m1fn_x2", "a7", "(6.0, -1.0)", "a7"),
        ("complex64", "0000803f00000080", "(1.0, -0.0j)", "3f800000 80000000"),
        ("bool", "02", "True", "02"),
        ("int8", "80", "-128", "80"),
        ("uint64", "ffffffffffffffff", "18446744073709551615", "ffffffffffffffff"),
    ],
)
def test_an_element_as_text(dtype: str, data: str, value: str, bits: str) -> None:
    found = element(np.frombuffer(bytes.fromhex(data), np.uint8), dtype)
    assert (found.value, found.bits) == (value, bits)


@pytest.mark.parametrize("dtype", ["bool", "float4_e2m1fn_x2"])
def test_what_has_no_distance(dtype: str) -> None:
    assert distance(rows(b"\x00", dtype), rows(b"\x01", dtype), dtype) == Distance(None, None, 0)


def test_special_values() -> None:
    def between(x: float, y: float) -> Distance:
        a, b = (rows(np.array(v, np.float32).tobytes(), "float32") for v in (x, y))
        return distance(a, b, "float32")

    largest = float(np.finfo(np.float32).max)
    assert between(0.0, -0.0) == Distance(0.0, 0, 0)
    assert between(largest, math.inf) == Distance(math.inf, 1, 0)
    assert between(math.inf, -math.inf) == Distance(math.inf, 2 * 0x7F800000, 0)
    assert between(math.nan, 1.0) == between(1.0, math.nan) == Distance(None, None, 1)


def test_blocks_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(1)
    a, b = (rng.integers(0, 256, (1000, 4), dtype=np.uint8) for _ in range(2))
    whole = distance(a, b, "float32")
    monkeypatch.setattr(elements, "_BLOCK", 7)
    assert distance(a, b, "float32") == whole and whole.nan > 0
