"""Which saved random stream a rank of another layout goes on with."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt.errors import StateMismatch
from ckpt.geometry import Layout
from ckpt.state.streams import Stream, Streams
from ckpt.state.values import encode

DENSE = ("tp", "cp", "dp", "pp")

dense_layouts = st.builds(
    Layout,
    tp=st.integers(1, 3),
    cp=st.integers(1, 2),
    dp=st.integers(1, 3),
    pp=st.integers(1, 2),
    order=st.sampled_from(["tp-cp-ep-dp-pp", "dp-cp-tp-ep-pp", "tp-pp-cp-ep-dp"]),
)


def at(layout: Layout, rank: int, axes: tuple[str, ...]) -> tuple[int, ...]:
    return tuple(getattr(layout.coords(rank), a) for a in axes)


def saved(layout: Layout, axes: tuple[str, ...]) -> list[Any]:
    """Streams that depend on the coordinates along `axes` alone."""
    return [encode(list(at(layout, r, axes)), "x") for r in range(layout.world)]


@given(dense_layouts, dense_layouts, st.sets(st.sampled_from(DENSE)))
def test_a_stream_goes_on_if_and_only_if_its_axes_have_not_changed(before: Layout, now: Layout, axes: set[str]) -> None:
    own = tuple(sorted(axes))
    streams = Streams("s", Stream("s"), saved(before, own), before, now)
    meaningful = all(
        getattr(before, a) == getattr(now, a)
        if a in axes and getattr(before, a) > 1
        else getattr(before, a) > 1 or getattr(now, a) == 1
        for a in DENSE
    )
    for rank in range(now.world):
        if meaningful:
            assert streams.of(rank) == (list(at(now, rank, own)), False)
        else:
            with pytest.raises(StateMismatch, match=rf"s: rank {rank} has no such random stream.*rederive=\['s'\]"):
                streams.of(rank)


@given(dense_layouts, dense_layouts, st.sets(st.sampled_from(DENSE)))
def test_new_streams_are_shared_as_the_saved_ones_were(before: Layout, now: Layout, axes: set[str]) -> None:
    own = tuple(sorted(axes))
    streams = Streams("s", Stream("s", rederive=lambda seed: seed), saved(before, own), before, now)
    found = [streams.of(r) for r in range(now.world)]
    if not found[0][1]:
        return
    assert all(made and 0 <= seed < 1 << 63 for seed, made in found)
    differs = tuple(a for a in DENSE if (a in axes if getattr(before, a) > 1 else a == "dp"))
    for a, b in itertools.combinations(range(now.world), 2):
        assert (found[a] == found[b]) == (at(now, a, differs) == at(now, b, differs))


def rederived(stream: Stream, before: Layout, now: Layout, depends: Callable[[Any], Any]) -> list[tuple[Any, bool]]:
    states = [encode(depends(before.coords(r)), "x") for r in range(before.world)]
    return [Streams("s", stream, states, before, now).of(r) for r in range(now.world)]


def test_what_is_known_of_megatron_streams_decides_where_tensor_parallelism_begins() -> None:
    before, now = Layout(dp=2), Layout(tp=2, dp=2)
    same = Stream("torch", same=frozenset({"tp"}), rederive=lambda seed: seed)
    assert rederived(same, before, now, lambda c: 7) == [(7, False)] * 4
    differs = Stream("model-parallel-rng", differs=frozenset({"tp"}), rederive=lambda seed: seed)
    found = rederived(differs, before, now, lambda c: 7)
    assert [made for _, made in found] == [True] * 4
    assert found[0] == found[2] and found[1] == found[3] and found[0] != found[1]


def test_expert_streams_go_by_expert_coordinates() -> None:
    stream = Stream("expert-parallel-rng", expert=True)
    before, now = Layout(tp=1, dp=2, ep=2), Layout(tp=1, dp=4, ep=2)
    with pytest.raises(StateMismatch, match="nothing tells"):  # one expert-data-parallel rank before
        rederived(stream, before, now, lambda c: c.ep)
    assert rederived(stream, now, before, lambda c: c.ep) == [(0, False), (1, False)]
    with pytest.raises(StateMismatch, match="differs along ep"):
        rederived(stream, now, Layout(dp=4, ep=4), lambda c: c.ep)


def test_other_chunks_of_interleaved_stages_are_other_layers() -> None:
    before, now = Layout(pp=2, vpp=2), Layout(pp=2)
    with pytest.raises(StateMismatch, match="differs along pp"):
        rederived(Stream("torch"), before, now, lambda c: c.pp)
    assert rederived(Stream("torch"), before, now, lambda c: 1) == [(1, False)] * 2


def test_without_layouts_only_what_all_ranks_share_goes_on() -> None:
    for before, now in ((None, None), (None, Layout(dp=3)), (Layout(dp=2), None)):
        assert Streams("s", Stream("s"), ["a", "a"], before, now).of(2) == ("a", False)
        with pytest.raises(StateMismatch, match="differs along rank"):
            Streams("s", Stream("s"), ["a", "b"], before, now).of(0)
        fresh = Streams("s", Stream("s", rederive=lambda seed: seed), ["a", "b"], before, now)
        assert len({fresh.of(r) for r in range(3)}) == 3
    with pytest.raises(StateMismatch, match="nothing tells"):
        Streams("s", Stream("s"), ["a"], None, None).of(0)


def test_a_stream_that_some_saved_rank_lacks_does_not_go_on() -> None:
    with pytest.raises(StateMismatch):
        Streams("s", Stream("s"), ["a", None], Layout(dp=2), Layout()).of(0)


def test_seeds_depend_on_the_name_and_on_all_that_was_saved() -> None:
    def seed(name: str, states: list[str]) -> Any:
        return Streams(name, Stream("s", rederive=lambda seed: seed), states, Layout(dp=2), Layout(dp=3)).of(0)

    assert seed("s", ["a", "b"]) == seed("s", ["a", "b"])
    assert len({seed("s", ["a", "b"]), seed("t", ["a", "b"]), seed("s", ["a", "c"]), seed("s", ["b", "a"])}) == 4
