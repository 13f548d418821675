"""The tree: its nodes, and sums that do not depend on how leaves are cut into runs."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckpt.errors import CkptError
from ckpt.invariant.tree import Accumulator, cover, finish, is_node


def by_definition(leaves: torch.Tensor) -> torch.Tensor:
    if len(leaves) == 1:
        return leaves[0]
    half = 1 << (len(leaves) - 1).bit_length() - 1
    return by_definition(leaves[:half]) + by_definition(leaves[half:])


def all_nodes(lo: int, hi: int) -> set[tuple[int, int]]:
    if hi - lo == 1:
        return {(lo, hi)}
    cut = lo + (1 << (hi - lo - 1).bit_length() - 1)
    return {(lo, hi)} | all_nodes(lo, cut) | all_nodes(cut, hi)


@given(st.integers(1, 40), st.integers(0, 40), st.integers(0, 41))
def test_a_node_is_a_subtree(leaves: int, lo: int, hi: int) -> None:
    assert is_node((lo, hi), leaves) == ((lo, hi) in all_nodes(0, leaves))


@given(st.integers(1, 300), st.data())
def test_the_largest_nodes_of_a_run_cover_it(leaves: int, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, leaves))
    stop = data.draw(st.integers(start, leaves))
    found = cover(start, stop, leaves)
    assert [i for lo, hi in found for i in range(lo, hi)] == list(range(start, stop))
    assert all(is_node(node, leaves) for node in found)
    assert not any(is_node((a[0], b[1]), leaves) for a, b in itertools.pairwise(found))
    assert len(found) <= 2 * math.ceil(math.log2(leaves)) + 1


def random_leaves(leaves: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Any bits but NaN payloads: infinities, zeros of both signs and denormals among them."""
    generator = torch.Generator().manual_seed(seed)
    size = dtype.itemsize
    raw = torch.randint(0, 256, (leaves, 50 * size), dtype=torch.uint8, generator=generator).view(dtype)
    raw[:, :10] = (torch.randn(leaves, 10, generator=generator) * 3).to(dtype)
    return raw


@given(
    st.integers(1, 33),
    st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]),
    st.integers(0, 2**32 - 1),
    st.data(),
)
def test_any_cut_into_runs_gives_the_bits_of_the_definition(
    leaves: int, dtype: torch.dtype, seed: int, data: st.DataObject
) -> None:
    given_ = random_leaves(leaves, dtype, seed)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    wanted = by_definition(given_.to(wide)).clone()
    wanted[wanted.isnan()] = torch.nan
    cuts = sorted(data.draw(st.sets(st.integers(1, leaves), max_size=6)) | {0, leaves})
    nodes = {}
    for start, stop in itertools.pairwise(cuts):
        run = Accumulator(start, leaves)
        for leaf in given_[start:stop]:
            run.add(leaf)
            assert len(run.nodes) <= 2 * math.ceil(math.log2(leaves)) + 1
        assert list(run.nodes) == cover(start, stop, leaves)
        nodes |= run.nodes
    assert finish(nodes, leaves).numpy().tobytes() == wanted.numpy().tobytes()


@given(st.integers(0, 12))
def test_a_whole_tree_in_order_keeps_log2_buffers(power: int) -> None:
    run = Accumulator(0, 1 << power)
    for _ in range(1 << power):
        run.add(torch.ones(1))
        assert len(run.nodes) <= power + 1
    assert finish(run.nodes, 1 << power).item() == 1 << power


def test_leaves_are_copied_and_never_changed() -> None:
    leaves = torch.arange(8.0).reshape(4, 2)
    run = Accumulator(0, 4)
    for leaf in leaves:
        run.add(leaf)
    assert leaves.tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    leaves.zero_()
    assert finish(run.nodes, 4).tolist() == [12, 16]


def test_what_cannot_be_summed_is_refused() -> None:
    run = Accumulator(0, 2)
    run.add(torch.zeros(3))
    with pytest.raises(CkptError, match="leaf 1 is"):
        run.add(torch.zeros(4))
    with pytest.raises(CkptError, match="leaf 1 of 2 is nowhere"):
        finish(run.nodes, 2)
    run.add(torch.zeros(3))
    with pytest.raises(CkptError, match="all 2 leaves"):
        run.add(torch.zeros(3))
    with pytest.raises(CkptError, match="no canonical sum"):
        Accumulator(0, 1).add(torch.zeros(3, dtype=torch.int32))
    with pytest.raises(CkptError, match="begins within"):
        Accumulator(3, 2)


def test_flushed_denormals_are_refused() -> None:
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush denormals")
    try:
        with pytest.raises(CkptError, match="set_flush_denormal"):
            Accumulator(0, 2).add(torch.zeros(3))
    finally:
        torch.set_flush_denormal(False)
