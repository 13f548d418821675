"""Rank order against Megatron Core's own generator of rank groups."""

import itertools
from collections import defaultdict

import pytest
from megatron.core.parallel_state import RankGenerator

from ckpt.errors import StateMismatch
from ckpt.geometry import Coords, Layout

ORDERS = ["tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp", "tp-cp-pp-ep-dp", "dp-ep-cp-tp-pp", "pp-dp-cp-ep-tp", "cp-ep-dp-pp-tp"]
Sizes = dict[str, int]
SIZES: list[Sizes] = [
    {},
    {"tp": 2, "dp": 2, "pp": 2},
    {"tp": 3, "cp": 2, "dp": 5, "pp": 2},
    {"tp": 2, "cp": 2, "dp": 4, "pp": 3},
    {"dp": 8, "ep": 4},
    {"tp": 2, "dp": 4, "ep": 2, "pp": 2},
    {"tp": 4, "dp": 2, "ep": 4, "etp": 1, "pp": 2},
    {"tp": 4, "cp": 2, "dp": 2, "ep": 8, "etp": 2},
    {"tp": 1, "cp": 2, "dp": 6, "ep": 3, "etp": 2, "pp": 2},
    {"tp": 2, "dp": 4, "ep": 1, "etp": 4, "pp": 4},
]


def generators(sizes: Sizes, order: str) -> tuple[RankGenerator, RankGenerator]:
    """Megatron's generators of the dense and of the expert groups."""
    tp, cp, dp, pp, ep = (sizes.get(axis, 1) for axis in ("tp", "cp", "dp", "pp", "ep"))
    etp = sizes.get("etp", tp)
    dense = RankGenerator(tp=tp, ep=1, dp=dp, pp=pp, cp=cp, order=order)
    return dense, RankGenerator(tp=etp, ep=ep, dp=tp * cp * dp // (etp * ep), pp=pp, cp=1, order=order)


def possible(sizes: Sizes, order: str) -> bool:
    """What Megatron asserts when it makes its groups: dense and expert layers have the same pipeline stages."""
    dense, expert = generators(sizes, order)
    return bool(dense.get_ranks("pp") == expert.get_ranks("pp"))


CASES = [pytest.param(s, o, id=f"{s}-{o}") for s in SIZES for o in ORDERS if possible(s, o)]
IMPOSSIBLE = [pytest.param(s, o, id=f"{s}-{o}") for s in SIZES for o in ORDERS if not possible(s, o)]


def groups(layout: Layout, along: tuple[str, ...], axes: tuple[str, ...]) -> list[list[int]]:
    """Ranks that differ only in the axes `along`, in order of rank, from the coordinates."""
    found: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for rank in range(layout.world):
        at = layout.coords(rank)
        found[tuple(getattr(at, axis) for axis in axes if axis not in along)].append(rank)
    return sorted(found.values())


def megatron(generator: RankGenerator, token: str) -> list[list[int]]:
    return sorted(sorted(group) for group in generator.get_ranks(token))


@pytest.mark.parametrize(("sizes", "order"), CASES)
def test_dense_groups_are_megatrons(sizes: Sizes, order: str) -> None:
    layout = Layout(**sizes, order=order)  # type: ignore[arg-type]
    theirs, _ = generators(sizes, order)
    assert theirs.world_size == layout.world
    axes = ("tp", "cp", "dp", "pp")
    for n in (1, 2, 3):
        for along in itertools.combinations(axes, n):
            assert groups(layout, along, axes) == megatron(theirs, "-".join(along)), along


@pytest.mark.parametrize(("sizes", "order"), CASES)
def test_expert_groups_are_megatrons(sizes: Sizes, order: str) -> None:
    layout = Layout(**sizes, order=order)  # type: ignore[arg-type]
    _, theirs = generators(sizes, order)
    assert theirs.world_size == layout.world
    for axis, token in {"etp": "tp", "ep": "ep", "edp": "dp", "pp": "pp"}.items():
        place = {rank: at for group in theirs.get_ranks(token) for at, rank in enumerate(group)}
        assert {rank: getattr(layout.coords(rank), axis) for rank in range(layout.world)} == place


@pytest.mark.parametrize(("sizes", "order"), CASES)
def test_a_coordinate_is_the_place_in_megatrons_group(sizes: Sizes, order: str) -> None:
    layout = Layout(**sizes, order=order)  # type: ignore[arg-type]
    theirs, _ = generators(sizes, order)
    for axis in ("tp", "cp", "dp", "pp"):
        place = {rank: at for group in theirs.get_ranks(axis) for at, rank in enumerate(group)}
        assert {rank: getattr(layout.coords(rank), axis) for rank in range(layout.world)} == place


@pytest.mark.parametrize(("sizes", "order"), IMPOSSIBLE)
def test_orders_that_megatron_refuses_are_refused(sizes: Sizes, order: str) -> None:
    with pytest.raises(StateMismatch, match="pipeline stages"):
        Layout(**sizes, order=order)  # type: ignore[arg-type]


@pytest.mark.parametrize(("sizes", "order"), CASES)
def test_rank_inverts_coords(sizes: Sizes, order: str) -> None:
    layout = Layout(**sizes, order=order)  # type: ignore[arg-type]
    for rank in range(layout.world):
        at = layout.coords(rank)
        assert layout.rank(tp=at.tp, cp=at.cp, dp=at.dp, pp=at.pp) == rank


def test_the_default_order_by_hand() -> None:
    layout = Layout(tp=2, pp=2, dp=2)
    assert layout.world == 8
    assert layout.coords(5) == Coords(tp=1, cp=0, dp=0, pp=1, etp=1, ep=0, edp=0)
    assert layout.rank(tp=1, dp=1, pp=1) == 7
    assert Layout(dp=4, ep=2).coords(3) == Coords(tp=0, cp=0, dp=3, pp=0, etp=0, ep=1, edp=1)


@pytest.mark.parametrize(
    ("sizes", "word"),
    [
        ({"tp": 0}, "tp=0"),
        ({"vpp": 0}, "vpp=0"),
        ({"pp": -1}, "pp=-1"),
        ({"dp": 2, "ep": 4}, "ep=4"),
        ({"tp": 2, "etp": 4}, "etp=4"),
        ({"etp": 0}, "etp=0"),
        ({"order": "tp-dp"}, "order"),
        ({"order": "tp-cp-ep-dp-dp"}, "order"),
    ],
)
def test_impossible_layouts_are_refused(sizes: dict[str, int], word: str) -> None:
    with pytest.raises(StateMismatch, match=word):
        Layout(**sizes)  # type: ignore[arg-type]


def test_ranks_and_coordinates_outside_are_refused() -> None:
    layout = Layout(tp=2, dp=2)
    for rank in (-1, 4):
        with pytest.raises(StateMismatch, match=f"rank {rank} is outside"):
            layout.coords(rank)
    with pytest.raises(StateMismatch, match="pp coordinate 1"):
        layout.rank(pp=1)


def test_different_sizes_read_differently() -> None:
    layouts = [Layout(**sizes) for sizes in SIZES]  # type: ignore[arg-type]
    layouts += [Layout(tp=2, dp=2, etp=1), Layout(tp=2, dp=2), Layout(tp=11), Layout(tp=2, dp=2, vpp=2)]
    assert len({str(layout) for layout in layouts}) == len(layouts)
    assert str(Layout()) == "single"
    assert str(Layout(tp=2, dp=2, etp=1)) == "tp2-dp2-etp1"
