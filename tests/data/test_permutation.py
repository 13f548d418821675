"""The global order: a bijection for every size, the same for ever, even and independent between epochs."""

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ckpt
from ckpt.data import Permutation

SEEDS = st.integers(0, 2**64 - 1)
EPOCHS = st.integers(0, 2**32 - 1)


@given(SEEDS, EPOCHS, st.integers(1, 700))
def test_it_is_a_bijection_with_an_inverse(seed: int, epoch: int, size: int) -> None:
    order = Permutation(seed, epoch, size)
    samples = order(np.arange(size))
    assert samples.dtype == np.int64
    assert sorted(samples.tolist()) == list(range(size))
    assert order.inverse(samples).tolist() == list(range(size))
    assert order(order.inverse(np.arange(size))).tolist() == list(range(size))


@given(SEEDS, EPOCHS, st.integers(1, 2**62), st.data())
def test_huge_sizes(seed: int, epoch: int, size: int, data: st.DataObject) -> None:
    positions = data.draw(st.lists(st.integers(0, size - 1), max_size=20))
    order = Permutation(seed, epoch, size)
    samples = order(positions).tolist()
    assert len(set(samples)) == len(set(positions)) and all(0 <= s < size for s in samples)
    assert order.inverse(samples).tolist() == positions


@given(SEEDS, EPOCHS, st.integers(1, 2**62), st.data())
def test_it_agrees_with_the_definition_in_the_docs(seed: int, epoch: int, size: int, data: st.DataObject) -> None:
    position = data.draw(st.integers(0, size - 1))
    assert Permutation(seed, epoch, size)(position) == _by_definition(seed, epoch, size, position)


def test_golden_values() -> None:
    """These must never change: runs that began with an earlier release go on in this order."""
    golden = {
        (0, 0, 1): [0],
        (0, 0, 2): [1, 0],
        (0, 0, 10): [0, 7, 5, 1, 2, 9, 6, 8, 3, 4],
        (7, 0, 10): [6, 4, 1, 2, 5, 0, 7, 8, 9, 3],
        (7, 1, 10): [8, 4, 3, 0, 5, 9, 2, 7, 1, 6],
        (2**64 - 1, 2**32 - 1, 16): [6, 11, 9, 3, 4, 13, 1, 0, 2, 10, 14, 7, 8, 5, 12, 15],
        (1234567890123456789, 3, 1000003): [651257, 174324, 126732, 426238, 353855, 537128],
        (5, 2, 2**62): [3121880271941929004, 810195683383787750, 2806347941372907114],
    }
    for (seed, epoch, size), expected in golden.items():
        assert Permutation(seed, epoch, size)(np.arange(len(expected))).tolist() == expected


@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_all_orders_of_a_tiny_data_set_are_about_equally_frequent(size: int) -> None:
    """Chi-square over 30 seeds an order, with a bound of five standard deviations; the seeds are fixed."""
    orders, runs = math.factorial(size), 30 * math.factorial(size)
    counts = Counter(tuple(Permutation(seed, 0, size)(np.arange(size))) for seed in range(runs))
    chi_square = sum((counts[order] - 30) ** 2 / 30 for order in counts) + 30 * (orders - len(counts))
    assert chi_square < orders - 1 + 5 * math.sqrt(2 * (orders - 1))


def test_epochs_seeds_and_sizes_give_unrelated_orders() -> None:
    size = 4096
    base = Permutation(1, 0, size)(np.arange(size))
    for other in (Permutation(1, 1, size), Permutation(2, 0, size), Permutation(1 << 32, 0, size)):
        same = int((base == other(np.arange(size))).sum())
        assert same < 10  # one is expected
    smaller = Permutation(1, 0, size - 1)(np.arange(size - 1))
    assert int((base[:-1] == smaller).sum()) < 10


def test_neighbours_are_spread_out() -> None:
    """The steps between neighbours have the mean size that random ones have, (n + 1) / 3 or so."""
    size = 1 << 16
    steps = np.abs(np.diff(Permutation(3, 0, size)(np.arange(size))))
    assert abs(float(steps.mean()) / (size / 3) - 1) < 0.02


def test_shapes_are_kept_and_nothing_is_looked_up_for_nothing() -> None:
    order = Permutation(1, 1, 100)
    assert order(np.arange(12).reshape(3, 4)).shape == (3, 4)
    assert order([]).shape == (0,)
    assert order(7).shape == () and order(7) == order([7])[0]
    assert order(np.array([7], np.uint8)) == order(7)


@pytest.mark.parametrize("bad", [-1, 100, 2**63 - 1])
def test_positions_outside_are_refused(bad: int) -> None:
    order = Permutation(1, 1, 100)
    for call in (order, order.inverse):
        with pytest.raises(ckpt.CkptError, match="not all below 100"):
            call([3, bad])
    with pytest.raises(ckpt.CkptError, match="give integers"):
        order([0.5])


@pytest.mark.parametrize(
    "seed, epoch, size", [(-1, 0, 1), (2**64, 0, 1), (0, -1, 1), (0, 2**32, 1), (0, 0, 0), (0, 0, 2**62 + 1)]
)
def test_bad_numbers_are_refused(seed: int, epoch: int, size: int) -> None:
    with pytest.raises(ckpt.CkptError, match="permutation: "):
        Permutation(seed, epoch, size)


def _by_definition(seed: int, epoch: int, size: int, x: int) -> int:
    """docs/data.md, in plain Python; nothing of ckpt is used."""
    mask = 0xFFFFFFFF
    k0, k1, c2, c3 = _philox((size & mask, size >> 32, epoch, 0x0DA7A001), (seed & mask, seed >> 32))
    bits = (size - 1).bit_length()
    low, high = bits // 2, bits - bits // 2
    while True:
        right, left = x & ((1 << low) - 1), x >> low
        for number in range(0, 12, 2):
            right ^= _philox((left, number, c2, c3), (k0, k1))[0] & ((1 << low) - 1)
            left ^= _philox((right, number + 1, c2, c3), (k0, k1))[0] & ((1 << high) - 1)
        x = left << low | right
        if x < size:
            return x


def _philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    mask = 0xFFFFFFFF
    (a, b, c, d), (k, m) = counter, key
    for _ in range(10):
        p, q = 0xD2511F53 * a, 0xCD9E8D57 * c
        a, b, c, d = (q >> 32) ^ b ^ k, q & mask, (p >> 32) ^ d ^ m, p & mask
        k, m = (k + 0x9E3779B9) & mask, (m + 0xBB67AE85) & mask
    return a, b, c, d


def test_the_definition_uses_philox_as_published() -> None:
    """Known answers of the authors' Random123 library."""
    assert _philox((0, 0, 0, 0), (0, 0)) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    pi = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0)
    assert _philox(*pi) == (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)
