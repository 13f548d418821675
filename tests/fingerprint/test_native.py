"""The arithmetic below the fingerprint, against known answers and Python integers."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckpt.fingerprint.coefficients import Digits, axis_coefficients, product
from ckpt.native import bytedot, field
from ckpt.native.philox import philox4x32
from tests.fingerprint import reference

P = 2**61 - 1

# Random123's kat_vectors, philox4x32 with 10 rounds: counter, key, result.
KNOWN = [
    ((0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN)
def test_philox_gives_the_published_answers(
    counter: tuple[int, ...], key: tuple[int, int], result: tuple[int, ...]
) -> None:
    many = np.array([counter] * 3, dtype=np.uint64).T
    assert philox4x32(many, key).T.tolist() == [list(result)] * 3
    assert reference.philox(counter, key) == result, "the reference of these tests"


word = st.integers(0, 2**32 - 1)


@given(st.lists(st.tuples(word, word, word, word), min_size=1, max_size=5), st.tuples(word, word))
def test_philox_agrees_with_plain_integers(counters: list[tuple[int, ...]], key: tuple[int, int]) -> None:
    found = philox4x32(np.array(counters, dtype=np.uint64).T, key)
    assert found.T.tolist() == [list(reference.philox(c, key)) for c in counters]


@pytest.mark.parametrize("axis", [0, 1, 2, 9])
@pytest.mark.parametrize("digit", [0, 1])
def test_coefficients_are_the_documented_ones(axis: int, digit: int) -> None:
    table = axis_coefficients(axis, digit)
    assert table.shape == (2, 65536)
    for index in (0, 1, 2, 255, 256, 40000, 65535):
        assert tuple(table[:, index].tolist()) == reference.coefficient(axis, digit, index)
    assert int(table.max()) < P


def test_coefficients_of_all_axes_and_digits_differ() -> None:
    rows = [axis_coefficients(axis, digit)[k, :4].tolist() for axis in range(4) for digit in (0, 1) for k in (0, 1)]
    assert len({value for row in rows for value in row}) == 4 * 2 * 2 * 4


def test_products_of_runs_are_in_row_major_order_and_go_beyond_65536() -> None:
    runs = (Digits(0, 1, 65534, 65539), Digits(2, 0, 7, 10))
    found = product(runs).T.tolist()
    expected = []
    for i in range(65534, 65539):
        for j in range(7, 10):
            a, b = reference.coefficient(0, 1, i), reference.coefficient(2, 0, j)
            expected.append([a[0] * b[0] % P, a[1] * b[1] % P])
    assert found == expected


below = st.one_of(st.integers(0, P - 1), st.sampled_from([0, 1, 2**32 - 1, 2**32, 2**60, P - 2, P - 1]))
anything = st.one_of(st.integers(0, 2**64 - 1), st.sampled_from([P - 1, P, P + 1, 2 * P, 2**61, 2**64 - 1]))


@given(st.lists(st.tuples(below, below), min_size=1, max_size=20))
def test_field_products(pairs: list[tuple[int, int]]) -> None:
    a, b = np.array(pairs, dtype=np.uint64).T
    assert field.multiply(a, b).tolist() == [x * y % P for x, y in pairs]


@given(st.lists(anything, min_size=1, max_size=20))
def test_field_reduction(values: list[int]) -> None:
    assert field.reduce(np.array(values, dtype=np.uint64)).tolist() == [v % P for v in values]


@given(st.lists(below, max_size=40))
def test_field_sums(values: list[int]) -> None:
    array = np.array([values, values[::-1]], dtype=np.uint64)
    assert field.total(array).tolist() == [sum(values) % P] * 2
    assert field.prefix_sums(array)[0].tolist() == [sum(values[:n]) % P for n in range(len(values) + 1)]


def test_field_sums_of_many_large_numbers() -> None:
    many = np.full((1, 100_000), P - 1, dtype=np.uint64)
    assert field.total(many).tolist() == [100_000 * (P - 1) % P]
    assert field.prefix_sums(many)[0, -3:].tolist() == [n * (P - 1) % P for n in (99_998, 99_999, 100_000)]


def in_digits(digits: list[int]) -> int:
    return sum(d << (7 * i) for i, d in enumerate(digits))


# The least and greatest sums of balanced digits that are coefficients, and the ends of the field.
EXTREME = [0, 1, P - 1, 2**60, in_digits([63] * 9), in_digits([-64] * 8 + [1]), in_digits([63, -64] * 4 + [63])]


@pytest.fixture(params=["int8 product", "numpy"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "numpy":
        monkeypatch.setattr(bytedot, "_int8_product_is_exact", lambda: False)
    elif not bytedot._int8_product_is_exact():
        pytest.skip("the int8 product of this torch is missing or not exact on this machine")
    return str(request.param)


def dot(rows: np.ndarray, coefficients: np.ndarray) -> list[list[int]]:
    """Sums of (byte - 128) times coefficient in Python integers."""
    return [
        [sum((int(b) - 128) * c for b, c in zip(row, line, strict=True)) % P for row in rows]
        for line in coefficients.tolist()
    ]


def test_the_extreme_coefficients_have_extreme_digits() -> None:
    table = bytedot.digit_table(np.array([EXTREME, EXTREME[::-1]], dtype=np.uint64)).reshape(-1, 2, 9)
    assert table.dtype == torch.int8
    for index, value in enumerate(EXTREME):
        assert in_digits(table[index, 0].tolist()) == value
        assert in_digits(table[-1 - index, 1].tolist()) == value
    assert (int(table.min()), int(table.max())) == (-64, 63)


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("width", [1, 2, 3, 4, 7, 16, 33, 64, 300])
@pytest.mark.parametrize("rows", [1, 2, 5, 33])
def test_byte_dots_of_random_bytes_are_exact(rows: int, width: int) -> None:
    random = np.random.default_rng(rows * 1000 + width)
    coefficients = random.integers(0, P, (2, width), dtype=np.uint64)
    data = random.integers(0, 256, (rows, width), dtype=np.uint8)
    found = bytedot.byte_dot(torch.from_numpy(data), bytedot.digit_table(coefficients))
    assert found.dtype == np.uint64
    assert found.tolist() == dot(data, coefficients)


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("width", [1, 8, 31, 512])
def test_byte_dots_of_extreme_bytes_and_digits_are_exact(width: int) -> None:
    patterns = [[0], [255], [128], [127], [0, 255], [255, 0], [0, 127, 128, 255]]
    data = np.array([(p * width)[:width] for p in patterns], dtype=np.uint8)
    for a in EXTREME:
        for b in EXTREME:
            coefficients = np.array([([a, b] * width)[:width], [b] * width], dtype=np.uint64)
            found = bytedot.byte_dot(torch.from_numpy(data), bytedot.digit_table(coefficients))
            assert found.tolist() == dot(data, coefficients), (a, b)


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("byte", [0, 255])
@pytest.mark.parametrize("value", [in_digits([-64] * 8 + [1]), in_digits([63] * 9), P - 1])
def test_the_longest_row_of_extremes_does_not_overflow(value: int, byte: int) -> None:
    n = bytedot.MAX_BYTES
    table = bytedot.digit_table(np.full((2, n), value, dtype=np.uint64))
    found = bytedot.byte_dot(torch.full((2, n), byte, dtype=torch.uint8), table)
    assert found.tolist() == [[n * (byte - 128) * value % P] * 2] * 2


@pytest.mark.usefixtures("path")
def test_rows_that_are_a_slice_of_longer_rows() -> None:
    random = np.random.default_rng(3)
    data = random.integers(0, 256, (6, 50), dtype=np.uint8)
    coefficients = random.integers(0, P, (2, 21), dtype=np.uint64)
    found = bytedot.byte_dot(torch.from_numpy(data)[:, 9:30], bytedot.digit_table(coefficients))
    assert found.tolist() == dot(data[:, 9:30], coefficients)
