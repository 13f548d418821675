"""Random exact partitions of a shape into boxes, in the ways that training frameworks cut tensors and in odder ones."""

import itertools
import math
from collections.abc import Sequence

import numpy as np
from hypothesis import strategies as st

from ckpt.geometry import Box

Index = tuple[int, ...]
Held = list[tuple[int, Box]]


def cut_points(size: int, most: int = 4) -> st.SearchStrategy[list[int]]:
    """Sorted cut points of an axis, 0 and `size` among them; equal ones leave empty parts."""
    return st.lists(st.integers(0, size), max_size=most).map(lambda inner: [0, *sorted(inner), size])


@st.composite
def grids(draw: st.DrawFn, shape: Index) -> list[Box]:
    """The cells of a grid with uneven cuts, empty cells included."""
    axes = []
    for size in shape:
        points = draw(cut_points(size, 3))
        axes.append(list(itertools.pairwise(points)))
    return [Box(tuple(a for a, _ in cell), tuple(b - a for a, b in cell)) for cell in itertools.product(*axes)]


@st.composite
def guillotines(draw: st.DrawFn, shape: Index) -> list[Box]:
    """Boxes from cutting boxes in two again and again, any box along any axis: no grid in general."""
    boxes = [Box.whole(shape)]
    for _ in range(draw(st.integers(0, 7)) if shape else 0):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        axis = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(0, box.extent[axis]))
        low, high, start = list(box.extent), list(box.extent), list(box.offset)
        low[axis], high[axis], start[axis] = at, box.extent[axis] - at, box.offset[axis] + at
        boxes += [Box(box.offset, tuple(low)), Box(tuple(start), tuple(high))]
    return boxes


def flat_boxes(shape: Index, start: int, stop: int) -> list[Box]:
    """The elements start..stop in row-major order as maximal runs of whole rows: slow, and written without the code
    under test."""
    if start == stop:
        return []
    if not shape:
        return [Box((), ())]
    row = math.prod(shape[1:])
    boxes: list[Box] = []
    while start < stop:
        first, inside = divmod(start, row)
        if inside == 0 and stop - start >= row:
            count = (stop - start) // row
            boxes.append(Box((first,) + (0,) * (len(shape) - 1), (count, *shape[1:])))
            start += count * row
        else:
            upto = min(row, inside + stop - start)
            boxes += [Box((first, *b.offset), (1, *b.extent)) for b in flat_boxes(shape[1:], inside, upto)]
            start += upto - inside
    return boxes


@st.composite
def flat_intervals(draw: st.DrawFn, shape: Index) -> list[Box]:
    """Boxes of flat row-major intervals, as ZeRO cuts a tensor."""
    points = draw(cut_points(math.prod(shape), 5))
    return [box for a, b in itertools.pairwise(points) for box in flat_boxes(shape, a, b)]


def pinwheel(shape: Index) -> list[Box]:
    """Five boxes of a 2-D tensor that no straight cut separates (needs 3 x 3 at least)."""
    n, m = shape
    return [
        Box((0, 0), (1, m - 1)),
        Box((0, m - 1), (n - 1, 1)),
        Box((n - 1, 1), (1, m - 1)),
        Box((1, 0), (n - 1, 1)),
        Box((1, 1), (n - 2, m - 2)),
    ]


def partitions(shape: Index) -> st.SearchStrategy[list[Box]]:
    """Boxes that cover each element of a shape exactly once; some may be empty."""
    ways = [grids(shape), guillotines(shape), flat_intervals(shape)]
    if len(shape) == 2 and min(shape) >= 3:
        ways.append(st.just(pinwheel(shape)))
    return st.one_of(ways)


@st.composite
def holders(draw: st.DrawFn, boxes: Sequence[Box], world: int) -> Held:
    """Gives each box to one rank, and some also to further ranks as replicas."""
    held: Held = []
    for box in boxes:
        ranks = draw(st.sets(st.integers(0, world - 1), min_size=1, max_size=3))
        held += [(rank, box) for rank in sorted(ranks)]
    return draw(st.permutations(held))


def counts(boxes: Sequence[Box], shape: Index) -> np.ndarray:
    """How many of the boxes hold each element."""
    found = np.zeros(shape, dtype=np.int64)
    for box in boxes:
        found[tuple(slice(o, o + e) for o, e in zip(box.offset, box.extent, strict=True))] += 1
    return found
