"""The exact norm: equal to the root of the exact sum, whatever the cut; and clipping by it."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckpt.errors import CkptError
from ckpt.invariant import SquaredNorm, clip_coefficient

ANY = st.integers(0, 2**32 - 1).map(lambda bits: bits if (bits >> 23) & 0xFF != 0xFF else bits & 0x7FFFFF)


def floats(bits: list[int]) -> torch.Tensor:
    return torch.tensor(bits, dtype=torch.int64).to(torch.int32).view(torch.float32)


def of(*tensors: torch.Tensor) -> float:
    exact = SquaredNorm()
    exact.add(tensors)
    return exact.value()


@given(st.lists(ANY, max_size=40))
def test_it_is_the_root_of_the_exact_sum_rounded_to_nearest(bits: list[int]) -> None:
    """A root r is nearest if the sum lies between the squares of the middles to r's neighbours."""
    total = sum((Fraction(x) ** 2 for x in floats(bits).tolist()), Fraction())
    root = of(floats(bits))
    below, above = (Fraction(math.nextafter(root, to)) for to in (-math.inf, math.inf))
    low, high = (Fraction(root) + below) / 2, (Fraction(root) + above) / 2
    assert (max(low, Fraction()) ** 2 <= total <= high**2) if total else root == 0.0


@given(st.lists(ANY, min_size=1, max_size=60), st.data())
def test_no_cut_and_no_order_changes_a_bit(bits: list[int], data: st.DataObject) -> None:
    shuffled = data.draw(st.permutations(bits))
    at = data.draw(st.integers(0, len(bits)))
    assert of(floats(bits)).hex() == of(floats(shuffled[at:]), floats(shuffled[:at])).hex()


def test_rows_of_any_stride_and_many_elements_count_once() -> None:
    x = torch.randn(300, 500, generator=torch.Generator().manual_seed(5))
    wanted = math.sqrt(sum(Fraction(v) ** 2 for v in x.flatten().tolist()))
    assert abs(of(x) / wanted - 1) < 1e-15
    assert of(x.t()) == of(x[:, ::2], x[:, 1::2]) == of(x)


def test_what_is_not_finite_is_told() -> None:
    assert of(torch.tensor([1.0, -math.inf])) == math.inf
    assert math.isnan(of(torch.tensor([1.0, math.inf, math.nan])))
    for norm in (math.inf, math.nan):
        with pytest.raises(CkptError, match="norm is"):
            clip_coefficient(norm, 1.0)


def test_other_dtypes_are_refused() -> None:
    with pytest.raises(CkptError, match="bfloat16"):
        of(torch.ones(2, dtype=torch.bfloat16))


def test_the_coefficient_is_one_below_the_limit() -> None:
    assert clip_coefficient(0.5, 1.0) == 1.0
    assert clip_coefficient(4.0, 1.0) == 1.0 / (4.0 + 1e-6)
