"""What a rank has of a tensor, against NumPy: a local tensor is what index arrays pick, and bands make it up again."""

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ckpt.adapters.foreign.parts import Part
from ckpt.adapters.foreign.slabs import slabs


@st.composite
def parts(draw: st.DrawFn) -> tuple[tuple[int, ...], list[list[tuple[int, int]]]]:
    """A shape, and runs of each axis that do not overlap, in any order."""
    shape = draw(st.lists(st.integers(0, 7), max_size=4).map(tuple))
    runs = []
    for size in shape:
        cuts = sorted(draw(st.sets(st.integers(0, size), max_size=5)))
        some = [(a, b - a) for a, b in pairwise(cuts)] + [(size, 0)]
        runs.append(draw(st.permutations(some)) if draw(st.booleans()) else [(0, size)])
    return shape, runs


def _picked(shape: tuple[int, ...], runs: list[list[tuple[int, int]]]) -> tuple[np.ndarray, np.ndarray]:
    whole = np.arange(int(np.prod(shape, dtype=int))).reshape(shape)
    local = whole
    for axis, of_axis in enumerate(runs):
        chosen = [i for first, count in of_axis for i in range(first, first + count)]
        local = np.take(local, np.array(chosen, dtype=int), axis=axis)
    return whole, local


@given(parts())
def test_boxes_are_what_the_runs_pick(drawn: tuple[tuple[int, ...], list[list[tuple[int, int]]]]) -> None:
    whole, local = _picked(*drawn)
    part = Part.of(drawn[1])
    assert part.shape == local.shape and part.volume == local.size
    again = np.full(part.shape, -1)
    for box, inner in part.boxes:
        assert (again[inner.slices] == -1).all()
        again[inner.slices] = whole[box.slices]
    assert again.tolist() == local.tolist()
    assert Part.of(part.runs) == part


UNITS = st.lists(st.tuples(*[st.integers(1, 4)] * 4), max_size=2)


@given(parts(), st.integers(1, 80), UNITS)
def test_bands_make_up_the_local_tensor(
    drawn: tuple[tuple[int, ...], list[list[tuple[int, int]]]], limit: int, units: list[tuple[int, ...]]
) -> None:
    whole, local = _picked(*drawn)
    part = Part.of(drawn[1])
    found = np.full(local.size, -1)
    covered = 0
    for band in slabs(whole.shape, 1, limit, units):
        elements = whole[band.slices]
        assert elements.size == 1 or elements.size <= limit
        assert elements.reshape(-1).tolist() == list(range(covered, covered + elements.size))
        covered += elements.size
        for stretch in part.within(band):
            array = np.full(stretch.shape, -1)
            for box, inner in stretch.pairs:
                array[inner.slices] = elements[box.slices]
            into = found[stretch.start : stretch.start + array.size]
            assert (into == -1).all() and into.size == array.size
            into[:] = array.reshape(-1)
    assert covered == whole.size and found.tolist() == local.reshape(-1).tolist()


def test_slabs_end_between_units_where_there_is_room() -> None:
    ends = [band.stop[0] for band in slabs((100, 10), 1, 350, [(16, 5), (4, 5)])]
    assert ends == [32, 64, 96, 100]
    assert [band.stop[0] for band in slabs((100, 10), 1, 150, [(16, 5), (4, 5)])][:3] == [12, 24, 36]
    assert [band.stop[0] for band in slabs((100, 10), 1, 30, [(16, 5), (4, 5)])][:3] == [3, 6, 9]
