"""A flat piece of a local tensor holds, at each of its boxes, the elements that the logical tensor has there."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckpt.adapters.flat import flat_piece
from ckpt.adapters.placement import Placement
from ckpt.errors import StateMismatch
from ckpt.geometry import Box

shapes = st.lists(st.integers(1, 5), min_size=0, max_size=4).map(tuple)


@st.composite
def placed(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor, Placement]:
    """A logical tensor of distinct elements, a local one cut out of it as one box of one slice of a stack, or as two
    halves of a fusion along an axis, and its placement."""
    local_shape = draw(shapes)
    stack = tuple(draw(st.lists(st.integers(1, 3), max_size=2)))
    index = tuple(draw(st.integers(0, n - 1)) for n in stack)
    before = tuple(draw(st.integers(0, 2)) for _ in local_shape)
    after = tuple(draw(st.integers(0, 2)) for _ in local_shape)
    shape = tuple(a + n + b for a, n, b in zip(before, local_shape, after, strict=True))
    axis = draw(st.sampled_from([None, *(i for i, n in enumerate(local_shape) if n % 2 == 0)]))
    halves = [(before, local_shape, (0,) * len(local_shape))]
    if axis is not None:  # both halves lie apart in the logical tensor
        shape = tuple(2 * n if i == axis else n for i, n in enumerate(shape))
        extent = tuple(n // 2 if i == axis else n for i, n in enumerate(local_shape))
        far = tuple(o + shape[axis] // 2 if i == axis else o for i, o in enumerate(before))
        inner = tuple(extent[axis] if i == axis else 0 for i in range(len(extent)))
        halves = [(before, extent, (0,) * len(extent)), (far, extent, inner)]
    full = torch.arange(math.prod(stack + shape)).reshape(stack + shape)
    local = torch.empty(local_shape, dtype=torch.int64)
    parts = []
    for offset, extent, inner in halves:
        outer, own = Box(index + offset, (1,) * len(stack) + extent), Box(inner, extent)
        local[own.slices] = full[outer.slices].reshape(extent)
        parts.append((outer, own))
    return full, local, Placement(stack + shape, len(stack), tuple(parts))


@given(placed(), st.data())
def test_pieces_of_a_local_tensor_lie_where_its_elements_lie(
    made: tuple[torch.Tensor, torch.Tensor, Placement], data: st.DataObject
) -> None:
    full, local, whole = made
    flat = local.reshape(-1).clone()
    cuts = sorted([*data.draw(st.lists(st.integers(0, flat.numel()), max_size=4)), 0, flat.numel()])
    found = torch.full_like(full, -1)
    for start, stop in itertools.pairwise(cuts):
        piece = flat[start:stop].clone()
        placement = flat_piece(whole, local.shape, start, stop)
        assert (placement.shape, placement.stack, placement.length) == (whole.shape, whole.stack, stop - start)
        assert len(placement.parts) <= max(1, 2 * local.dim() - 1) * len(whole.parts)
        for shard in placement.shards(piece, "piece"):
            assert torch.equal(shard.view, full[shard.box.slices])
            assert (found[shard.box.slices] == -1).all()  # each element once
            found[shard.box.slices] = shard.view
            shard.view.fill_(-2)  # a view of the piece's own memory
        assert (piece == -2).all()
    assert sorted(found[found != -1].tolist()) == sorted(local.reshape(-1).tolist())
    if flat.numel():
        assert flat_piece(whole, local.shape, 0, 1).stacked_at == whole.stacked_at


def test_a_piece_of_another_length_is_refused() -> None:
    placement = flat_piece(Placement.whole((3, 4)), (3, 4), 2, 7)
    with pytest.raises(StateMismatch, match=r"w: shape \[4\] for a piece of 5 elements"):
        placement.shards(torch.zeros(4), "w")
    with pytest.raises(ValueError, match="interval 2:13"):
        flat_piece(Placement.whole((3, 4)), (3, 4), 2, 13)
