"""Placement rules against plain slicing of labelled arrays."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckpt.geometry import Box
from ckpt.geometry.placement import balanced_cut, ceil_cut, even_cut, flat_interval, fused_blocks, shard, stacked
from tests.geometry.partitions import counts

Index = tuple[int, ...]
shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)


def labelled(shape: Index) -> np.ndarray:
    return np.arange(math.prod(shape)).reshape(shape)


@given(shapes, st.data())
def test_a_flat_interval_is_few_boxes_that_hold_exactly_its_elements_in_order(
    shape: Index, data: st.DataObject
) -> None:
    volume = math.prod(shape)
    start = data.draw(st.integers(0, volume))
    stop = data.draw(st.integers(start, volume))
    boxes = flat_interval(shape, start, stop)
    assert len(boxes) <= max(1, 2 * len(shape) - 1)
    assert all(box.volume for box in boxes)
    held = [labelled(shape)[box.slices].ravel() for box in boxes]
    assert np.concatenate([np.empty(0, dtype=np.int64), *held]).tolist() == list(range(start, stop))


def test_a_flat_interval_of_three_axes_by_hand() -> None:
    assert flat_interval((4, 3, 5), 7, 52) == [
        Box((0, 1, 2), (1, 1, 3)),
        Box((0, 2, 0), (1, 1, 5)),
        Box((1, 0, 0), (2, 3, 5)),
        Box((3, 0, 0), (1, 1, 5)),
        Box((3, 1, 0), (1, 1, 2)),
    ]
    assert flat_interval((), 0, 1) == [Box((), ())]
    assert flat_interval((), 1, 1) == []
    assert flat_interval((3, 0, 2), 0, 0) == []


def test_a_flat_interval_of_a_huge_tensor() -> None:
    boxes = flat_interval((70000, 70000), 2**32 - 3, 2**32 + 70000)
    assert sum(box.volume for box in boxes) == 70003
    row, column = divmod(2**32 - 3, 70000)
    assert boxes[0] == Box((row, column), (1, 70000 - column))
    assert boxes[-1].stop == (row + 2, column + 3)


@pytest.mark.parametrize(("start", "stop"), [(-1, 3), (4, 3), (0, 13), (13, 13)])
def test_an_interval_outside_of_the_tensor_is_refused(start: int, stop: int) -> None:
    with pytest.raises(ValueError, match="leaves a tensor"):
        flat_interval((3, 4), start, stop)


@given(st.integers(0, 60), st.integers(1, 9))
def test_ceil_cuts_are_torch_chunk(size: int, parts: int) -> None:
    chunks = [c.tolist() for c in torch.arange(size).chunk(parts)] if size else []
    cuts = [ceil_cut(size, parts, i) for i in range(parts)]
    assert [list(range(o, o + n)) for o, n in cuts if n] == chunks
    assert all(o == size for o, n in cuts if not n), "an empty part never lies where a real one does"


@given(st.integers(0, 60), st.integers(1, 9))
def test_balanced_cuts_are_array_split(size: int, parts: int) -> None:
    pieces = [p.tolist() for p in np.array_split(np.arange(size), parts)]
    cuts = (balanced_cut(size, parts, i) for i in range(parts))
    assert [list(range(o, o + n)) for o, n in cuts] == pieces


@given(st.integers(0, 12), st.integers(1, 9))
def test_even_cuts_are_split(each: int, parts: int) -> None:
    pieces = [p.tolist() for p in np.split(np.arange(each * parts), parts)]
    cuts = (even_cut(each * parts, parts, i) for i in range(parts))
    assert [list(range(o, o + n)) for o, n in cuts] == pieces


def test_an_even_cut_that_does_not_divide_is_refused() -> None:
    with pytest.raises(ValueError, match="7 does not divide into 2"):
        even_cut(7, 2, 0)


@given(st.tuples(st.integers(0, 9), st.integers(0, 9)), st.integers(1, 4), st.integers(1, 3), st.integers(1, 3))
def test_several_mesh_axes_on_one_dimension(shape: Index, first: int, second: int, other: int) -> None:
    """Axis 0 is chunked by one mesh axis, each part again by another; axis 1 by a third: as torch.chunk does it."""
    tensor = torch.from_numpy(labelled(shape))
    boxes = []
    for i in range(first):
        for j in range(second):
            for k in range(other):
                box = shard(shape, [(0, first, i), (0, second, j), (1, other, k)], ceil_cut)
                local = _chunk(_chunk(_chunk(tensor, 0, first, i), 0, second, j), 1, other, k)
                assert labelled(shape)[box.slices].tolist() == local.tolist()
                boxes.append(box)
    assert (counts([b for b in boxes if b.volume], shape) == 1).all()


def _chunk(tensor: torch.Tensor, dim: int, parts: int, index: int) -> torch.Tensor:
    """What torch.chunk gives part `index`, empty past the last real one."""
    pieces = tensor.chunk(parts, dim) if tensor.shape[dim] else ()
    return pieces[index] if index < len(pieces) else tensor.narrow(dim, 0, 0)


def test_even_shards_of_two_mesh_axes_by_hand() -> None:
    assert shard((24, 5), [(0, 2, 1), (0, 3, 2)]) == Box((20, 0), (4, 5))
    assert shard((7, 6), [(1, 3, 1)]) == Box((0, 2), (7, 2))
    assert shard((7, 6), [(0, 4, 3)], balanced_cut) == Box((6, 0), (1, 6))
    assert shard((), []) == Box((), ())


@given(
    st.lists(st.integers(0, 4), min_size=1, max_size=4),
    st.sampled_from([1, 2, 4]),
    st.integers(0, 2),
    st.integers(0, 3),
)
def test_fused_blocks_are_the_parts_of_the_blocks(each: list[int], parts: int, axis: int, other: int) -> None:
    """Gate and up, or Q, K and V of different sizes, on any axis of a 3-D tensor, built by plain slicing."""
    blocks = [n * parts for n in each]
    shape = tuple(sum(blocks) if i == axis else other for i in range(3))
    full = labelled(shape)
    edges = np.cumsum(blocks)[:-1].tolist()
    everything = []
    for index in range(parts):
        split = [np.split(block, parts, axis=axis)[index] for block in np.split(full, edges, axis=axis)]
        boxes = fused_blocks(shape, axis, blocks, parts, index)
        local = np.concatenate([full[b.slices] for b in boxes], axis=axis)
        assert local.tolist() == np.concatenate(split, axis=axis).tolist()
        everything += boxes
    assert (counts(everything, shape) == 1).all()


def test_fused_gate_and_up_under_tp_2_by_hand() -> None:
    """Rows 0..7 are the gate, 8..15 up: rank 1 holds gate rows 4..7 and up rows 12..15, one after the other."""
    assert fused_blocks((16, 3), 0, [8, 8], 2, 1) == [Box((4, 0), (4, 3)), Box((12, 0), (4, 3))]


def test_fused_blocks_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="do not add up"):
        fused_blocks((16, 3), 0, [8, 4], 2, 0)
    with pytest.raises(ValueError, match="does not divide"):
        fused_blocks((16, 3), 0, [13, 3], 2, 0)


@given(shapes, st.integers(0, 3), st.integers(0, 2))
def test_stacked_is_a_slice_of_layers_and_experts(shape: Index, layer: int, expert: int) -> None:
    full = labelled((4, 3, *shape))
    box = stacked(Box.whole(shape), layer, expert)
    assert full[box.slices].tolist() == [[full[layer, expert].tolist()]]
