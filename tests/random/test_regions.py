"""However a tensor is cut, every part holds the numbers of the whole."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ckpt.errors import CkptError, StateMismatch
from ckpt.geometry import Box
from ckpt.native.logical import Runs
from ckpt.random import LogicalRng, dropout, normal_, trunc_normal_, uniform_
from ckpt.random.regions import region
from tests.geometry.partitions import partitions
from tests.random.test_streams import raw

STREAM = LogicalRng(3).stream("cut")
SHAPES = st.lists(st.integers(1, 7), max_size=4).map(tuple)


def draws(shape: tuple[int, ...], at: Any = None) -> list[torch.Tensor]:
    """Every kind of draw of a region."""
    extent = region(shape, at).extent
    return [
        STREAM.bits(shape, at),
        STREAM.keep_mask(0.3, shape, at),
        STREAM.uniform(shape, at),
        STREAM.uniform(shape, at, torch.float64),
        STREAM.normal(shape, at),
        normal_(torch.empty(extent, dtype=torch.bfloat16), STREAM, 0.5, 0.02, shape=shape, at=at),
        uniform_(torch.empty(extent), STREAM, -1, 1, shape=shape, at=at),
        trunc_normal_(torch.empty(extent), STREAM, shape=shape, at=at),
        dropout(torch.ones(extent), 0.3, STREAM, shape=shape, at=at),
    ]


@settings(max_examples=60)
@given(data=st.data(), shape=SHAPES)
def test_any_partition(data: st.DataObject, shape: tuple[int, ...]) -> None:
    whole = draws(shape)
    for box in data.draw(partitions(shape)):
        for part, full in zip(draws(shape, box), whole, strict=True):
            assert part.is_contiguous()
            assert raw(part) == raw(full[box.slices])


@st.composite
def places(draw: st.DrawFn, size: int) -> Any:
    """Indices along one axis, in each form that a caller may give."""
    low, high = sorted((draw(st.integers(0, size)), draw(st.integers(0, size))))
    listed = draw(st.lists(st.integers(0, size - 1), max_size=5))
    forms = [None, range(low, high), range(low, high, 2), range(high - 1, low - 1, -1), listed]
    forms += [np.array(listed, dtype=np.int32), torch.tensor(listed, dtype=torch.int64)]
    return draw(st.sampled_from(forms))


@settings(max_examples=100)
@given(data=st.data(), shape=SHAPES)
def test_any_places_along_each_axis(data: st.DataObject, shape: tuple[int, ...]) -> None:
    at = [data.draw(places(size)) for size in shape]
    chosen = [range(n) if a is None else a for a, n in zip(at, shape, strict=True)]
    for part, wanted in zip(draws(shape, at), draws(shape), strict=True):
        for axis, indices in enumerate(chosen):
            wanted = wanted.index_select(axis, torch.tensor(list(indices), dtype=torch.int64))
        assert part.shape == wanted.shape
        assert raw(part) == raw(wanted)


def test_runs_are_as_long_as_can_be() -> None:
    def runs(shape: tuple[int, ...], at: Any = None, words: int = 1) -> tuple[list[int], int]:
        found = region(shape, at).runs(words)
        return found.starts.tolist(), found.length

    assert runs((4, 5, 6)) == ([0], 120)
    assert runs((4, 5, 6), Box((1, 0, 0), (2, 5, 6)), 2) == ([60], 120)
    assert runs((4, 5, 6), Box((1, 2, 0), (2, 3, 6))) == ([42, 72], 18)
    assert runs((4, 5, 6), ([3, 1], None, None)) == ([90, 30], 30)
    assert runs((4, 5, 6), ([1, 2, 3], None, None)) == ([30], 90)
    assert runs((4, 5), (None, range(2, 3))) == ([2, 7, 12, 17], 1)
    assert runs((), (), 2) == ([0], 2)


@given(
    starts=st.lists(st.integers(0, 2**40), max_size=9),
    length=st.integers(0, 30),
    limit=st.integers(1, 40),
)
def test_chunks_keep_order(starts: list[int], length: int, limit: int) -> None:
    def elements(runs: Runs) -> list[int]:
        return [int(s) + i for s in runs.starts for i in range(runs.length)]

    runs = Runs(np.array(starts, dtype=np.int64), length)
    parts = list(runs.chunks(limit))
    assert [e for part in parts for e in elements(part)] == elements(runs)
    assert all(0 < part.count <= limit for part in parts)


def test_large_tensors_cross_chunk_borders() -> None:
    """More words than one chunk, from an odd place; and many runs of odd length."""
    n = (1 << 18) + 12345
    whole = STREAM.normal((n + 100,))
    assert raw(STREAM.normal((n + 100,), (range(33, 33 + n),))) == raw(whole[33 : 33 + n])
    bits = STREAM.bits((5000, 401))
    assert raw(STREAM.bits((5000, 401), (None, range(3, 200)))) == raw(bits[:, 3:200])


def test_tensor_parallel_columns_and_rows_and_data_parallel_samples() -> None:
    """The cuts of a trainer: hidden units over TP, tokens over CP (zig-zag), samples over DP, strided."""
    shape = (8, 16, 64)
    whole = STREAM.keep_mask(0.1, shape)
    for tp in (1, 2, 3, 4, 8):
        edges = [64 * r // tp for r in range(tp + 1)]
        parts = [STREAM.keep_mask(0.1, shape, (None, None, range(a, b))) for a, b in itertools.pairwise(edges)]
        assert raw(torch.cat(parts, 2)) == raw(whole)
    for cp in (1, 2, 4):
        size = 16 // (2 * cp)
        for rank in range(cp):
            tokens = [
                *range(rank * size, (rank + 1) * size),
                *range((2 * cp - 1 - rank) * size, (2 * cp - rank) * size),
            ]
            assert raw(STREAM.keep_mask(0.1, shape, (None, tokens, None))) == raw(whole[:, tokens])
    for dp in (1, 2, 4, 8):
        for rank in range(dp):
            assert raw(STREAM.keep_mask(0.1, shape, (range(rank, 8, dp), None, None))) == raw(whole[rank::dp])


def test_the_number_of_samples_does_not_matter() -> None:
    """The leading axis only counts: a data set may grow."""
    few, many = (STREAM.bits((n, 3, 5), ([7, 2, 9], None, None)) for n in (10, 2**50))
    assert raw(few) == raw(many)


@given(shape=SHAPES, axis=st.integers(0, 3), low=st.integers(-2, 8), length=st.integers(1, 9))
def test_places_outside_are_refused(shape: tuple[int, ...], axis: int, low: int, length: int) -> None:
    assume(axis < len(shape) and (low < 0 or low + length > shape[axis]))
    for form in (range, lambda a, b: list(range(a, b)), lambda a, b: [*range(a, b), low]):
        at = [None if i != axis else form(low, low + length) for i in range(len(shape))]
        with pytest.raises(StateMismatch, match=rf"along axis {axis} leave the logical shape"):
            STREAM.bits(shape, at)


def test_bad_regions_are_refused() -> None:
    with pytest.raises(StateMismatch, match="one per axis"):
        STREAM.bits((2, 3), (range(2),))
    with pytest.raises(StateMismatch, match="one per axis"):
        STREAM.bits((2, 3), Box((0,), (2,)))
    with pytest.raises(StateMismatch, match="leave the logical shape"):
        STREAM.bits((2, 3), Box((0, 1), (2, 3)))
    with pytest.raises(StateMismatch, match="negative extent"):
        STREAM.bits((2, -3))
    for bad in ([0.5], [[0]], [True], torch.tensor(0), "01", 3):
        with pytest.raises(StateMismatch, match=r"axis 0 .* must be a range"):
            STREAM.bits((2,), (bad,))
    for shape in ((2**62 + 1,), (2**40, 2**23), (0, 2**70)):
        with pytest.raises(CkptError, match=r"2\^62 elements"):
            STREAM.bits(shape)
    assert STREAM.bits((2**62,), ([2**62 - 1],)).shape == (1,)
    assert STREAM.normal((2**62,), ([2**62 - 1],)).shape == (1,)


def test_empty_regions() -> None:
    for shape, at in (((0, 3), None), ((4, 3), (range(2, 2), None)), ((4, 3), (None, [])), ((4, 3), ([], range(1)))):
        for part in draws(shape, at):
            assert part.numel() == 0 and tuple(part.shape) == region(shape, at).extent
