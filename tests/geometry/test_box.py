"""Boxes against sets of indices."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt.geometry import Box


@st.composite
def boxes(draw: st.DrawFn, ndim: int) -> Box:
    numbers = st.tuples(*[st.integers(0, 4)] * ndim)
    return Box(draw(numbers), draw(numbers))


pairs = st.integers(0, 3).flatmap(lambda ndim: st.tuples(boxes(ndim), boxes(ndim)))


def elements(box: Box) -> set[tuple[int, ...]]:
    return set(itertools.product(*(range(o, o + e) for o, e in zip(box.offset, box.extent, strict=True))))


@given(pairs)
def test_operations_agree_with_sets_of_elements(pair: tuple[Box, Box]) -> None:
    a, b = pair
    assert a.volume == len(elements(a))
    common = a.intersect(b)
    assert (elements(common) if common is not None else set()) == elements(a) & elements(b)
    assert common is None or common.volume > 0
    assert a.intersect(b) == b.intersect(a)
    if b.volume:
        assert a.contains(b) == (elements(b) <= elements(a))


@given(pairs)
def test_slices_and_relative_coordinates_address_the_same_elements(pair: tuple[Box, Box]) -> None:
    a, b = pair
    tensor = np.arange(10 ** len(a.offset)).reshape((10,) * len(a.offset))
    assert set(tensor[a.slices].ravel().tolist()) == {int(tensor[i]) for i in elements(a)}
    common = a.intersect(b)
    if common is not None:
        assert tensor[a.slices][common.relative_to(a).slices].tobytes() == tensor[common.slices].tobytes()


def test_a_scalar_has_one_box_of_one_element() -> None:
    box = Box.whole(())
    assert (box.volume, box.stop, box.slices) == (1, (), ())
    assert box.intersect(box) == box
    assert box.contains(box)


def test_an_empty_box_meets_nothing() -> None:
    assert Box((2, 0), (0, 5)).intersect(Box.whole((5, 5))) is None
    assert Box((2, 0), (0, 5)).volume == 0


def test_whole_and_stop() -> None:
    assert Box.whole((3, 0, 2)) == Box((0, 0, 0), (3, 0, 2))
    assert Box((1, 2), (3, 4)).stop == (4, 6)
    assert str(Box((1, 2), (3, 4))) == "[1:4, 2:6]"


def test_numbers_beyond_32_bits() -> None:
    box = Box((2**40, 2**33), (2**31 + 7, 2**33))
    assert box.volume == (2**31 + 7) * 2**33
    assert box.intersect(Box((2**40 + 2**31, 0), (2**31, 2**35))) == Box((2**40 + 2**31, 2**33), (7, 2**33))


@pytest.mark.parametrize(("offset", "extent"), [((0,), (1, 1)), ((), (1,)), ((-1,), (1,)), ((0, 0), (1, -1))])
def test_malformed_boxes_are_refused(offset: tuple[int, ...], extent: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="box offset"):
        Box(offset, extent)


@given(st.lists(boxes(2), max_size=6))
def test_order_is_by_offset_then_extent(found: list[Box]) -> None:
    assert sorted(found) == sorted(found, key=lambda b: (b.offset, b.extent))
