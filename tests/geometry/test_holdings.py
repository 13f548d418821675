"""Exact coverage: partitions pass; one gap or one overlap anywhere is found, with the tensor and the ranks."""

import itertools
import re

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from ckpt.errors import StateMismatch
from ckpt.geometry import Box, Holdings
from tests.geometry.partitions import Held, counts, flat_boxes, holders, partitions, pinwheel

Index = tuple[int, ...]
WORLD = 9


@st.composite
def covered(draw: st.DrawFn) -> tuple[Index, list[Box], Held]:
    shape = tuple(draw(st.lists(st.integers(1, 5), max_size=4)))
    boxes = draw(partitions(shape))
    return shape, boxes, draw(holders(boxes, WORLD))


@given(covered())
def test_exact_partitions_pass_with_replicas_and_empty_boxes(case: tuple[Index, list[Box], Held]) -> None:
    shape, boxes, held = case
    assert (counts(boxes, shape) == 1).all(), "the strategy itself"
    Holdings.of(held).check_cover("w", shape)


@given(covered(), st.data())
def test_a_gap_is_refused(case: tuple[Index, list[Box], Held], data: st.DataObject) -> None:
    """One box is left out by all its ranks, or all but a part of it."""
    shape, boxes, held = case
    lost = data.draw(st.sampled_from([b for b in boxes if b.volume]))
    rest = [(r, b) for r, b in held if b != lost]
    partly = data.draw(st.sampled_from([False, True]))
    if shape and partly:
        axis = data.draw(st.integers(0, len(shape) - 1))
        keep = data.draw(st.integers(0, lost.extent[axis] - 1))
        extent = tuple(keep if i == axis else n for i, n in enumerate(lost.extent))
        rest += [(r, Box(lost.offset, extent)) for r, b in held if b == lost]
    with pytest.raises(StateMismatch) as found:
        Holdings.of(rest).check_cover("layer.weight", shape)
    assert str(found.value).startswith("layer.weight: no rank holds the elements [")
    where = named_box(str(found.value))
    assert (counts([b for _, b in rest], shape)[where.slices] == 0).all(), "the place it names is not held"


@given(covered(), st.data())
def test_an_overlap_is_refused_and_names_both_ranks(case: tuple[Index, list[Box], Held], data: st.DataObject) -> None:
    """One rank more holds a box that meets others without being one of them."""
    shape, boxes, held = case
    assume(shape)
    offset = tuple(data.draw(st.integers(0, n - 1)) for n in shape)
    extent = tuple(data.draw(st.integers(1, n - o)) for n, o in zip(shape, offset, strict=True))
    extra = Box(offset, extent)
    assume(extra not in boxes)
    with pytest.raises(StateMismatch) as found:
        Holdings.of([*held, (77, extra)]).check_cover("layer.weight", shape)
    message = str(found.value)
    assert message.startswith("layer.weight: boxes ")
    assert str(extra) in message
    ranks = {int(n) for n in re.findall(r"\d+", message.split(" of ranks ")[1].split(" overlap")[0])}
    assert 77 in ranks
    where = named_box(message.split(" overlap in ")[1])
    other = {r for r, b in held if b.intersect(where)}
    assert ranks - {77} <= other
    assert ranks - {77}
    assert extra.contains(where)


BY_HAND = {
    "grid": [Box((i, j), (2, 3)) for i in (0, 2) for j in (0, 3)],
    "rows": [Box((i, 0), (1, 6)) for i in range(4)],
    "flat": flat_boxes((4, 6), 0, 8) + flat_boxes((4, 6), 8, 11) + flat_boxes((4, 6), 11, 24),
    "pinwheel": pinwheel((4, 6)),
}


@pytest.mark.parametrize("way", BY_HAND)
def test_every_single_lost_or_moved_box_is_found(way: str) -> None:
    boxes = BY_HAND[way]
    Holdings.of(enumerate(boxes)).check_cover("w", (4, 6))
    for rank, box in enumerate(boxes):
        rest = [(r, b) for r, b in enumerate(boxes) if r != rank]
        with pytest.raises(StateMismatch, match=r"^w: no rank holds the elements"):
            Holdings.of(rest).check_cover("w", (4, 6))
        for offset in itertools.product(*(range(n - e + 1) for n, e in zip((4, 6), box.extent, strict=True))):
            if offset != box.offset:
                with pytest.raises(StateMismatch, match=r"^w: (no rank holds|boxes .* overlap)"):
                    Holdings.of([*rest, (rank, Box(offset, box.extent))]).check_cover("w", (4, 6))


def named_box(message: str) -> Box:
    """The first box that a message names."""
    match = re.search(r"\[([0-9:, ]*)\]", message)
    assert match
    pairs = [tuple(map(int, part.split(":"))) for part in match[1].split(", ") if part]
    return Box(tuple(a for a, _ in pairs), tuple(b - a for a, b in pairs))


@given(covered(), st.data())
def test_meeting_finds_every_held_element_and_its_holders(
    case: tuple[Index, list[Box], Held], data: st.DataObject
) -> None:
    shape, _, held = case
    offset = tuple(data.draw(st.integers(0, n)) for n in shape)
    extent = tuple(data.draw(st.integers(0, n - o)) for n, o in zip(shape, offset, strict=True))
    asked = Box(offset, extent)
    found = Holdings.of(held).meeting(asked)
    expected: dict[Index, set[int]] = {}
    for rank, box in held:
        for index in itertools.product(*(range(o, o + n) for o, n in zip(box.offset, box.extent, strict=True))):
            if all(o <= i < o + n for i, o, n in zip(index, asked.offset, asked.extent, strict=True)):
                expected.setdefault(index, set()).add(rank)
    got: dict[Index, set[int]] = {}
    for box, ranks in found:
        assert box.volume
        for index in itertools.product(*(range(o, o + n) for o, n in zip(box.offset, box.extent, strict=True))):
            assert index not in got
            got[index] = set(ranks)
    assert got == expected
    assert found == sorted(found)


def test_holdings_do_not_depend_on_the_order_of_declarations() -> None:
    held = [(3, Box((0,), (2,))), (1, Box((2,), (2,))), (0, Box((0,), (2,))), (2, Box((4,), (0,)))]
    expected = Holdings((Box((0,), (2,)), Box((2,), (2,))), ((0, 3), (1,)))
    assert all(Holdings.of(order) == expected for order in itertools.permutations(held))


def test_a_rank_that_gives_one_box_twice_is_refused() -> None:
    with pytest.raises(StateMismatch, match=r"rank 4 gives box \[0:2\] twice"):
        Holdings.of([(4, Box((0,), (2,))), (1, Box((0,), (2,))), (4, Box((0,), (2,)))])


@pytest.mark.parametrize("shape", [(), (3,), (2, 3, 4)], ids=str)
def test_a_tensor_that_nobody_holds_is_a_gap(shape: Index) -> None:
    with pytest.raises(StateMismatch, match="w: no rank holds the elements"):
        Holdings.of([]).check_cover("w", shape)


@pytest.mark.parametrize("shape", [(0,), (3, 0, 2)], ids=str)
def test_a_tensor_without_elements_is_covered_by_nothing(shape: Index) -> None:
    Holdings.of([]).check_cover("w", shape)
    Holdings.of([(0, Box.whole(shape)), (1, Box.whole(shape))]).check_cover("w", shape)


def test_a_scalar_is_held_once_or_replicated() -> None:
    Holdings.of([(0, Box((), ())), (5, Box((), ()))]).check_cover("step", ())


@pytest.mark.parametrize("box", [Box((0, 0), (3, 3)), Box((2, 0), (1, 3)), Box((0,), (2,))], ids=str)
def test_a_box_outside_of_the_shape_is_refused_with_its_rank(box: Box) -> None:
    held = [(0, Box((0, 0), (2, 3))), (6, box)]
    with pytest.raises(StateMismatch, match=r"w: rank 6 gives box .* outside of shape \(2, 3\)"):
        Holdings.of(held).check_cover("w", (2, 3))


def test_a_gap_and_an_overlap_that_cancel_in_volume_are_found() -> None:
    held = [(0, Box((0, 0), (2, 2))), (1, Box((1, 1), (2, 2))), (2, Box((0, 2), (1, 1)))]
    assert sum(b.volume for _, b in held) == 9
    with pytest.raises(StateMismatch, match="w: "):
        Holdings.of(held).check_cover("w", (3, 3))


def test_a_pinwheel_is_covered_and_its_hole_is_found() -> None:
    boxes = pinwheel((5, 7))
    Holdings.of(enumerate(boxes)).check_cover("w", (5, 7))
    with pytest.raises(StateMismatch, match=r"no rank holds the elements \[1:4, 1:6\]"):
        Holdings.of(enumerate(boxes[:-1])).check_cover("w", (5, 7))


def test_many_ranks_are_named_in_short() -> None:
    held = [(r, Box((0,), (4,))) for r in range(100)] + [(r, Box((3,), (2,))) for r in range(100, 200)]
    with pytest.raises(StateMismatch, match=r"of ranks 0, 1, 2, 3, 4, 5, 6, 7 and 192 more overlap in \[3:4\]"):
        Holdings.of(held).check_cover("w", (5,))


def test_coordinates_beyond_32_bits() -> None:
    size = 2**33 + 5
    held = [(0, Box((0,), (2**32 + 1,))), (1, Box((2**32 + 1,), (size - 2**32 - 1,)))]
    Holdings.of(held).check_cover("w", (size,))
    with pytest.raises(StateMismatch, match=rf"\[{2**32}:{2**32 + 1}\]"):
        Holdings.of([(0, Box((0,), (2**32,))), held[1]]).check_cover("w", (size,))
