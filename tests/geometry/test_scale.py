"""Planning for 1,024 simulated ranks and 1,000 tensors in one process."""

import hashlib
import resource

import pytest

from ckpt.errors import StateMismatch
from ckpt.geometry import Box, Catalogue, Holdings, TensorSpec, read_plan, write_plan
from ckpt.geometry.placement import balanced_cut, flat_interval
from tests.geometry.partitions import Held

WORLD = 1024
TENSORS = 1000
BUDGET = 16 << 20
MEMORY = 1280 << 20


def spec(number: int) -> TensorSpec:
    """A bfloat16 matrix; every tenth has 32 MiB and so several objects."""
    return TensorSpec(f"layer.{number:04}", (2050, 8192 if number % 10 == 0 else 64), "bfloat16", 2)


def held(number: int) -> Held:
    """One uneven part of a tensor on each of the ranks: rows, or for every 50th tensor a flat interval."""
    shape = spec(number).shape
    found: Held = []
    for rank in range(WORLD):
        if number % 50 == 1:
            start, extent = balanced_cut(shape[0] * shape[1], WORLD, rank)
            found += [(rank, box) for box in flat_interval(shape, start, start + extent)]
        else:
            start, extent = balanced_cut(shape[0], WORLD, (rank + number) % WORLD)
            found.append((rank, Box((start, 0), (extent, shape[1]))))
    return found


def peak() -> int:
    """Most memory this process ever held, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@pytest.fixture(scope="module")
def before() -> int:
    return peak()


@pytest.fixture(scope="module")
def merged(before: int) -> tuple[Catalogue, list[Holdings]]:
    catalogue = Catalogue.of([spec(number) for number in range(TENSORS)])
    return catalogue, [Holdings.of(held(number)) for number in range(TENSORS)]


@pytest.mark.slow
def test_a_million_declared_boxes_are_merged_checked_and_planned(
    before: int, merged: tuple[Catalogue, list[Holdings]]
) -> None:
    catalogue, holdings = merged
    assert sum(len(h.boxes) for h in holdings) >= WORLD * TENSORS
    check_all(catalogue, holdings)
    plan = write_plan(catalogue, holdings, WORLD, BUDGET)
    units = list(plan.units)
    assert len({(u.array, u.index) for u in units}) == len(units)
    assert sum(u.nbytes for u in units) == sum(plan.owned) == sum(s.nbytes for s in catalogue.tensors)
    links = sum(k.box.volume for u in units for k in u.links)
    assert links == sum(s.nbytes // s.itemsize for s in catalogue.tensors)
    assert max(plan.owned) <= 2 * 16 << 20, "no rank writes more than two objects of 6.4 GiB over 1,024 ranks"
    assert peak() - before < MEMORY


@pytest.mark.slow
def test_a_tensor_in_fifty_is_planned_for_reading_by_others(merged: tuple[Catalogue, list[Holdings]]) -> None:
    """Every rank wants its rows of 20 tensors, as they were held by another rank."""
    catalogue, holdings = merged
    wanted = {i: holdings[i] for i in range(0, TENSORS, 50)}
    plan = read_plan(catalogue, wanted, WORLD, BUDGET)
    read = sum(u.nbytes for u in plan.units)
    assert read == sum(catalogue.tensors[i].nbytes for i in wanted)
    given = sum(k.box.volume * len(k.ranks) for u in plan.units for k in u.links)
    assert given == sum(box.volume * len(r) for h in wanted.values() for box, r in zip(h.boxes, h.ranks, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("number", [51, 990])
def test_one_planted_gap_and_one_planted_overlap_are_found(
    merged: tuple[Catalogue, list[Holdings]], number: int
) -> None:
    """In one box of one tensor of the thousand, on one rank of the 1,024; all other tensors are in order."""
    catalogue, holdings = merged
    rank = int(hashlib.sha256(str(number).encode()).hexdigest(), 16) % WORLD
    declared = held(number)
    mine = [box for r, box in declared if r == rank]
    box = max(mine, key=lambda b: b.volume)
    rest = [(r, b) for r, b in declared if (r, b) != (rank, box)]
    shorter = Box(box.offset, (*box.extent[:-1], box.extent[-1] - 1))
    at = box.offset[-1] + box.extent[-1] - 1
    with pytest.raises(StateMismatch, match=rf"layer\.{number:04}: no rank holds the elements \[.*, {at}:{at + 1}\]"):
        check_all(catalogue, [*holdings[:number], Holdings.of([*rest, (rank, shorter)]), *holdings[number + 1 :]])
    extra = Box((box.offset[0], 0), (box.extent[0], 1)) if box.offset[-1] else Box(box.offset, (1, 1))
    assert extra not in [b for _, b in declared]
    with pytest.raises(StateMismatch, match=rf"layer\.{number:04}: boxes .* of ranks .* overlap in") as found:
        other = (rank + 1) % WORLD
        check_all(catalogue, [*holdings[:number], Holdings.of([*declared, (other, extra)]), *holdings[number + 1 :]])
    ranks = str(found.value).split(" of ranks ")[1].split(" overlap")[0].split(", ")
    assert str(other) in ranks


def check_all(catalogue: Catalogue, holdings: list[Holdings]) -> None:
    for tensor, one in zip(catalogue.tensors, holdings, strict=True):
        one.check_cover(tensor.name, tensor.shape)


@pytest.mark.slow
def test_fifty_thousand_tiny_tensors_of_one_rank_make_few_objects() -> None:
    tiny = [TensorSpec(f"t{i}", (i % 40,), "float32", 4) for i in range(50_000)]
    catalogue = Catalogue.of(tiny)
    everything = [Holdings.of([(0, Box.whole(t.shape))]) for t in catalogue.tensors]
    plan = write_plan(catalogue, everything, 1, BUDGET)
    assert len(list(plan.units)) == 1
    assert sum(k.box.volume for u in plan.units for k in u.links) == sum(i % 40 for i in range(50_000))
