"""Which indices of a tensor a DTensor's rank holds, against torch's own cutting of labelled tensors."""

from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Partial, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from ckpt.adapters import dtensors
from ckpt.errors import Unsupported


@st.composite
def cuts(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], list[Placement]]:
    """(tensor shape, mesh shape, placements)."""
    shape = tuple(draw(st.lists(st.integers(0, 12), min_size=1, max_size=3)))
    mesh = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    axis = st.integers(0, len(shape) - 1)
    strided = st.builds(lambda dim, n: _StridedShard(dim, split_factor=n), axis, st.integers(1, 4))
    placements = draw(st.lists(st.one_of(st.just(Replicate()), st.builds(Shard, axis), strided), min_size=3))
    return shape, mesh, placements[: len(mesh)]


@given(cuts())
def test_each_rank_holds_what_torch_gives_it(cut: tuple[tuple[int, ...], tuple[int, ...], list[Placement]]) -> None:
    shape, mesh, placements = cut
    full = torch.arange(prod(shape)).reshape(shape)
    for rank in range(prod(mesh)):
        at = [int(i) for i in torch.unravel_index(torch.tensor(rank), mesh)]
        local = full
        for size, index, placement in zip(mesh, at, placements, strict=True):
            if not isinstance(placement, Replicate):
                local = placement._split_tensor(local, size, with_padding=False)[0][index]
        axes = dtensors.runs_of(shape, mesh, at, placements, "x")
        assert [sum(n for _, n in runs) for runs in axes] == list(local.shape)
        found = torch.full_like(local, -1)
        for box, inner in dtensors._parts(axes):
            found[inner.slices] = full[box.slices]
        assert found.tolist() == local.tolist()


def test_partial_sums_are_refused() -> None:
    with pytest.raises(Unsupported, match=r"layer/w: DTensor placement .*redistribute"):
        dtensors.runs_of((4,), (2,), (0,), [Partial()], "layer/w")
