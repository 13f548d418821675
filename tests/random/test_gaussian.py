"""Normal numbers: accuracy, distribution, and bits that nothing but the drawn words decides."""

import hashlib
import math
import os
import statistics
import subprocess
import sys
from decimal import Decimal, localcontext

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckpt.random import LogicalRng, gaussian, trunc_normal_
from tests.random.test_streams import raw

STREAM = LogicalRng(11).stream("normal")
PI = Decimal("3.1415926535897932384626433832795028841971693993751058209749445923")


def upper_tail(z: Decimal) -> Decimal:
    """P(Z > z) by the Taylor series of the error function, alternating: another one than the code's."""
    term = total = z
    for k in range(1, 600):
        term = -term * z * z / (2 * k)
        total += term / (2 * k + 1)
    return Decimal("0.5") - total / (2 * PI).sqrt()


def true_quantile(p: float) -> Decimal:
    """Newton's method on the tail, from Python's own approximation."""
    z, wanted = Decimal(-statistics.NormalDist().inv_cdf(p)), Decimal(p)
    for _ in range(3):
        z += (upper_tail(z) - wanted) * (2 * PI).sqrt() * (z * z / 2).exp()
    return z


def test_quantiles_are_accurate_in_all_three_branches() -> None:
    tails = [
        2.0**-54,
        1.3e-11,
        1.3887943864964e-11,
        1.4e-11,
        1e-9,
        0.001,
        0.0749999,
        0.075,
        0.0750001,
        0.3,
        0.5 - 2.0**-30,
    ]
    tails += torch.rand(40, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).div(2).tolist()
    found = gaussian.upper_quantile(torch.tensor(tails, dtype=torch.float64)).tolist()
    with localcontext() as context:
        context.prec = 100
        for p, z in zip(tails, found, strict=True):
            true = true_quantile(p)
            assert abs(Decimal(z) - true) <= Decimal("1e-15") * true, p


def test_extreme_words() -> None:
    words = torch.tensor([0, -1, 2**63 - 1, -(2**63), 2047, 2048], dtype=torch.int64)
    z = gaussian.normals(words)
    assert z[4] == z[0] and z[5] < z[0]  # the lowest 11 bits are not used
    assert 8.2 < float(z[0]) < 8.3 and float(z[3]) == -float(z[0])
    assert 0 < float(z[2]) < 1e-15 and float(z[1]) == -float(z[2])
    assert torch.isfinite(z).all()


@given(words=st.lists(st.integers(-(2**63), 2**63 - 1), min_size=2, max_size=9))
def test_numbers_fall_as_their_tail_bits_rise_and_are_symmetric(words: list[int]) -> None:
    z = gaussian.normals(torch.tensor(words, dtype=torch.int64))
    mirrored = gaussian.normals(torch.tensor([w ^ -(2**63) for w in words], dtype=torch.int64))
    assert raw(mirrored) == raw(-z)
    order = sorted(range(len(words)), key=lambda i: words[i] & (2**63 - 1))
    sizes = z.abs()[torch.tensor(order)]
    assert (sizes[:-1] - sizes[1:] > -1e-15 * sizes[:-1]).all()


def test_distribution_function() -> None:
    for x in (-11.5, -8.0, -2.0, -1e-300, 0.0, 0.7, 2.0, 6.0):
        with localcontext() as context:
            context.prec = 110
            assert gaussian.distribution(x) == float(1 - upper_tail(Decimal(x))), x
    assert gaussian.distribution(-math.inf) == gaussian.distribution(-12.5) == 0.0
    assert gaussian.distribution(math.inf) == gaussian.distribution(12.5) == 1.0


def kolmogorov(sample: torch.Tensor, low: float = -math.inf, high: float = math.inf) -> float:
    """sqrt(n) times the Kolmogorov-Smirnov distance to the normal distribution given that it lies in [low, high]."""

    def below(x: float) -> float:
        return math.erfc(-x / math.sqrt(2)) / 2

    within = below(high) - below(low)
    found = [(below(x) - below(low)) / within for x in sample.sort().values.tolist()]
    values = torch.tensor(found, dtype=torch.float64)
    steps = torch.arange(len(values), dtype=torch.float64) / len(values)
    return float(torch.maximum(values - steps, steps + 1 / len(values) - values).max()) * math.sqrt(len(values))


def test_the_distribution_is_normal() -> None:
    """Fixed seed, so that the test is exact: moments within five standard deviations, distance below the 1 % point."""
    n = 1 << 18
    z = STREAM.normal((n,), dtype=torch.float64)
    for power, (mean, variance) in {1: (0, 1), 2: (1, 2), 3: (0, 15), 4: (3, 96), 6: (15, 10170)}.items():
        assert abs(float((z**power).mean()) - mean) < 5 * math.sqrt(variance / n), power
    assert kolmogorov(z) < 1.63
    assert kolmogorov(STREAM.normal((n,)).double()) < 1.63
    beyond = int((z.abs() > 4).sum())  # 16.6 are expected
    assert 3 < beyond < 40


@pytest.mark.parametrize(
    ("low", "high"),
    [(-2, 2), (-0.5, 3), (1.5, 2.5), (-math.inf, 0.3), (4, 5), (-7, -5), (5, math.inf), (7.9, math.inf)],
)
def test_the_truncated_distribution(low: float, high: float) -> None:
    n = 1 << 16
    z = trunc_normal_(torch.empty(n, dtype=torch.float64), STREAM, low=low, high=high)
    assert low <= float(z.min()) and float(z.max()) <= high
    reflected = low + high > 0  # the distance is taken where Python's distribution function keeps its precision
    assert kolmogorov(-z if reflected else z, *((-high, -low) if reflected else (low, high))) < 1.63


@pytest.mark.parametrize(
    ("mean", "std", "low"),
    [(0.5002922367301874, 2.725257526734052, 0.6535669058469082), (-1.5, 2.73, 14.319908885187408)],
)
def test_a_very_narrow_interval_is_kept(mean: float, std: float, low: float) -> None:
    """Two steps of a float wide: without care, mean + std * z leaves it by rounding."""
    middle = math.nextafter(low, math.inf)
    high = math.nextafter(middle, math.inf)
    z = trunc_normal_(torch.empty(1000, dtype=torch.float64), STREAM, mean, std, low, high)
    assert set(z.tolist()) <= {low, middle, high}


def numbers(words: torch.Tensor) -> torch.Tensor:
    return torch.stack([gaussian.normals(words), gaussian.truncated(words, -1.0, 2.5)])


WORDS = torch.randint(-(2**63), 2**63 - 1, (1 << 17,), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def whole() -> torch.Tensor:
    return numbers(WORDS)


@given(
    start=st.integers(0, 1000), length=st.one_of(st.integers(1, 70), st.integers(1000, 1100)), step=st.integers(1, 9)
)
def test_bits_depend_on_no_length_offset_or_stride(whole: torch.Tensor, start: int, length: int, step: int) -> None:
    part = slice(start, start + length * step, step)
    assert raw(numbers(WORDS[part])) == raw(whole[:, part])


def test_golden_digest() -> None:
    """Enough numbers for every branch but the far tail, which `test_extreme_words` has. It may never change."""
    z = LogicalRng(0).stream("golden").normal((1 << 16,), dtype=torch.float64)
    t = trunc_normal_(torch.empty(1 << 16, dtype=torch.float64), LogicalRng(0).stream("golden"), 0.5, 2.0, -3.0, 1.0)
    assert hashlib.sha256(raw(z) + raw(t)).hexdigest() == GOLDEN_DIGEST
    far = gaussian.upper_quantile(torch.tensor([1e-12, 1e-15, 2.0**-54], dtype=torch.float64))
    assert raw(far).hex() == GOLDEN_FAR


GOLDEN_DIGEST = "6b9087c100a42fb33e6d836d9eeef09630c9f3ced3ae5e2e07d10f85221e006c"
GOLDEN_FAR = "2aa357ba4f231c4067967807f0c31f404c7cd659b0952040"


def test_bits_depend_on_no_thread_count(whole: torch.Tensor) -> None:
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            assert raw(numbers(WORDS)) == raw(whole)
            assert raw(STREAM.normal((1 << 18,), dtype=torch.float64)[-5:]) == raw(
                STREAM.normal((1 << 18,), (range((1 << 18) - 5, 1 << 18),), torch.float64)
            )
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("capability", ["default", "avx2"])
def test_bits_depend_on_no_vector_unit(capability: str) -> None:
    """torch picks its loops when it starts, so each needs a process of its own."""
    script = (
        "import hashlib, torch; from ckpt.random import LogicalRng;"
        "z = LogicalRng(0).stream('golden').normal((1 << 16,), dtype=torch.float64);"
        "print(torch.backends.cpu.get_cpu_capability(), hashlib.sha256(z.numpy().tobytes()).hexdigest())"
    )
    environment = os.environ | {"ATEN_CPU_CAPABILITY": capability}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    used, digest = done.stdout.split()
    if used != capability.upper():
        pytest.skip(f"this build of torch ran with {used}")
    here = LogicalRng(0).stream("golden").normal((1 << 16,), dtype=torch.float64)
    assert digest == hashlib.sha256(raw(here)).hexdigest()


def test_bits_depend_on_no_flushing_of_denormals(whole: torch.Tensor) -> None:
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush denormals")
    try:
        found = numbers(WORDS)
    finally:
        torch.set_flush_denormal(False)
    assert raw(found) == raw(whole)


def test_numpy_gives_the_same_bits(whole: torch.Tensor) -> None:
    """The central branch in NumPy's own loops: other compilers, other vector code."""
    words = WORDS.numpy()
    odd = ((words >> 11) & ((1 << 52) - 1)) * 2 + 1
    q = 0.5 - odd.astype("f8") * 2.0**-54
    r = 0.180625 - q * q
    numerator, denominator = 0.0 * r, 0.0 * r
    for c, d in zip(*gaussian._CENTRE, strict=True):
        numerator, denominator = numerator * r + c, denominator * r + d
    z = numerator / denominator * q
    ordered = q * (numerator / denominator)
    central = q <= 0.425
    assert (z == ordered).all()
    assert raw(whole[0].abs()[torch.from_numpy(central)]) == abs(ordered)[central].tobytes()
