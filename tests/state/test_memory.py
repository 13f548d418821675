"""Which views share memory, against sets of byte addresses."""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt.errors import StateMismatch
from ckpt.state.memory import check_disjoint

BUFFER = 64
ALIGNED = {torch.uint8: 1, torch.int16: 2, torch.float32: 4, torch.float64: 8}


def addresses(view: torch.Tensor) -> list[int]:
    """The address of every byte of every element."""
    size = view.element_size()
    found: list[int] = []
    for at in itertools.product(*map(range, view.shape)):
        start = view.data_ptr() + size * sum(i * s for i, s in zip(at, view.stride(), strict=True))
        found += range(start, start + size)
    return found


@st.composite
def windows(draw: st.DrawFn, buffer: torch.Tensor) -> torch.Tensor:
    """Any strided view that lies inside of a buffer, of any of several dtypes."""
    dtype = draw(st.sampled_from(sorted(ALIGNED, key=str)))
    typed = buffer.view(dtype)
    ndim = draw(st.integers(0, 3))
    shape = draw(st.lists(st.integers(0, 4), min_size=ndim, max_size=ndim))
    stride = draw(st.lists(st.integers(0, 9), min_size=ndim, max_size=ndim))
    while sum((n - 1) * s for n, s in zip(shape, stride, strict=True) if n) >= len(typed):
        stride = [s // 2 for s in stride]
    reach = sum((n - 1) * s for n, s in zip(shape, stride, strict=True) if n)
    return typed.as_strided(shape, stride, draw(st.integers(0, len(typed) - 1 - reach)))


@settings(max_examples=400)
@given(st.data())
def test_exactly_the_views_that_share_a_byte_are_refused(data: st.DataObject) -> None:
    buffers = [torch.zeros(BUFFER, dtype=torch.uint8), torch.zeros(BUFFER, dtype=torch.uint8)]
    views = [
        (f"view{n}", data.draw(windows(buffers[data.draw(st.integers(0, 1))])))
        for n in range(data.draw(st.integers(0, 5)))
    ]
    held = {name: addresses(view) for name, view in views}
    overlaps = {frozenset({a}) for a, own in held.items() if len(set(own)) != len(own)}
    overlaps |= {frozenset(p) for p in itertools.combinations(held, 2) if set(held[p[0]]) & set(held[p[1]])}
    if not overlaps:
        check_disjoint(views)
        return
    with pytest.raises(StateMismatch) as found:
        check_disjoint(views)
    assert frozenset(re.findall(r"\bview\d", str(found.value))) in overlaps


def test_identical_views_under_two_names_are_refused_here() -> None:
    """Ties are found before, by `Captured.seal`."""
    x = torch.zeros(4)
    with pytest.raises(StateMismatch, match="a and b overlap"):
        check_disjoint([("a", x), ("b", x)])


def test_overlapping_slices_are_refused() -> None:
    x = torch.zeros(10)
    with pytest.raises(StateMismatch, match="head and tail overlap in memory"):
        check_disjoint([("tail", x[4:]), ("head", x[:5])])
    check_disjoint([("tail", x[5:]), ("head", x[:5])])


def test_interleaved_views_pass() -> None:
    x = torch.zeros(6, 4)
    check_disjoint([("even", x[::2]), ("odd", x[1::2])])
    check_disjoint([(f"column{i}", x[:, i]) for i in range(4)])
    parts = torch.view_as_real(torch.zeros(5, dtype=torch.complex64))
    check_disjoint([("real", parts[:, 0]), ("imag", parts[:, 1])])
    with pytest.raises(StateMismatch, match="overlap"):
        check_disjoint([("row", x[2]), ("column", x[:, 1])])


def test_different_dtypes_over_the_same_bytes_are_refused() -> None:
    x = torch.zeros(8, dtype=torch.float32)
    with pytest.raises(StateMismatch, match="overlap"):
        check_disjoint([("floats", x[:3]), ("bytes", x.view(torch.uint8)[8:20])])
    check_disjoint([("floats", x[:3]), ("bytes", x.view(torch.uint8)[12:20])])


@pytest.mark.parametrize(
    "view",
    [
        torch.zeros(3, 1).expand(3, 4),
        torch.zeros(1).expand(5),
        torch.zeros(()).expand(2, 2),
        torch.zeros(6).as_strided((3, 3), (1, 1)),
        torch.zeros(9).unfold(0, 3, 2),
    ],
    ids=["rows", "vector", "scalar", "as_strided", "unfold"],
)
def test_expanded_tensors_are_refused(view: torch.Tensor) -> None:
    with pytest.raises(StateMismatch, match=r"^w: several of its elements share one place"):
        check_disjoint([("other", torch.zeros(3)), ("w", view)])


def test_strides_that_interleave_axes_pass() -> None:
    """Offsets 0, 2, 4 and 3, 5, 7: no element shares a place, though no axis steps past the other."""
    check_disjoint([("w", torch.zeros(20).as_strided((3, 2), (2, 3)))])


def test_expanded_axes_of_size_one_and_empty_tensors_pass() -> None:
    check_disjoint(
        [("a", torch.zeros(4, 1).expand(4, 1)), ("b", torch.zeros(0).expand(3, 0)), ("c", torch.zeros(2, 0))]
    )


def test_tensors_over_one_numpy_array_are_seen_to_overlap() -> None:
    """They have storages of their own, which begin at different addresses."""
    array = np.zeros(10, dtype=np.float32)
    with pytest.raises(StateMismatch, match="x and y overlap"):
        check_disjoint([("x", torch.from_numpy(array[:6])), ("y", torch.from_numpy(array[4:]))])
    check_disjoint([("x", torch.from_numpy(array[:5])), ("y", torch.from_numpy(array[5:]))])


def test_tensors_on_the_meta_device_hold_no_memory() -> None:
    check_disjoint([("a", torch.zeros(3, device="meta")), ("b", torch.zeros(3, device="meta"))])
