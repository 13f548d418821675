"""Reductions over ranks: the bits of the tree for every partition; ordinary ones as the control that differs."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from ckpt.errors import CkptError
from ckpt.invariant import Accumulator, canonical_all_reduce, canonical_reduce_scatter
from tests.invariant.test_tree import by_definition, random_leaves
from tests.support.ranks import Crew

pytestmark = [pytest.mark.ranks]

WORLD = 4
LEAVES = 13
PARTITIONS = [(4, 3, 3, 3), (1, 1, 1, 10), (10, 1, 1, 1), (8, 1, 3, 1), (2, 6, 4, 1)]


@pytest.fixture(scope="module")
def crew() -> Iterator[Crew]:
    with Crew(WORLD) as crew:
        yield crew


def accumulated(given: torch.Tensor, counts: tuple[int, ...], rank: int, order: tuple[int, ...]) -> Accumulator:
    """This rank's run; `order` says which place in the row of runs each rank has."""
    place = order[rank]
    start = sum(counts[:place])
    run = Accumulator(start, len(given))
    for leaf in given[start : start + counts[place]]:
        run.add(leaf)
    return run


def reduce_all(rank: int, world: int) -> list[str]:
    """What is wrong, over partitions, dtypes, sizes and buckets."""
    wrong = []
    for number, dtype in enumerate((torch.float32, torch.bfloat16, torch.float64)):
        given = random_leaves(LEAVES, dtype, number)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        wanted = by_definition(given.to(wide)).clone()
        wanted[wanted.isnan()] = torch.nan
        size = -(-wanted.numel() // world)
        for counts in PARTITIONS:
            for order in ((0, 1, 2, 3), (3, 1, 0, 2)):
                for bucket in (64 << 20, 40):
                    found = canonical_all_reduce(accumulated(given, counts, rank, order), bucket_bytes=bucket)
                    if found.numpy().tobytes() != wanted.numpy().tobytes():
                        wrong.append(f"all_reduce {dtype} {counts} {order} {bucket}")
                part = canonical_reduce_scatter(accumulated(given, counts, rank, order))
                if part.numpy().tobytes() != wanted[rank * size : (rank + 1) * size].numpy().tobytes():
                    wrong.append(f"reduce_scatter {dtype} {counts} {order}")
    return wrong


def test_every_partition_gives_the_bits_of_the_tree(crew: Crew) -> None:
    assert crew.run(reduce_all) == [[]] * WORLD


def small(rank: int, world: int) -> list[list[float]]:
    """Fewer elements than ranks, and a shape of no axes."""
    run = Accumulator(rank, world)
    run.add(torch.tensor([float(rank), 1.0]))
    alone = Accumulator(rank, world)
    alone.add(torch.tensor(2.0))
    return [canonical_all_reduce(run).tolist(), [canonical_all_reduce(alone).item()]]


def test_fewer_elements_than_ranks(crew: Crew) -> None:
    assert crew.run(small) == [[[6.0, 4.0], [8.0]]] * WORLD


def ordinary(rank: int, world: int) -> list[bytes]:
    """The control: leaves added rank by rank and summed by the library, over two partitions."""
    given = torch.randn(LEAVES, 1000, generator=torch.Generator().manual_seed(1))
    found = []
    for counts in PARTITIONS[:2]:
        start = sum(counts[:rank])
        total = given[start : start + counts[rank]].sum(0)
        dist.all_reduce(total)
        found.append(total.numpy().tobytes())
    return found


def test_an_ordinary_all_reduce_depends_on_the_partition(crew: Crew) -> None:
    one, other = crew.run(ordinary)[0]
    assert one != other


def wrong_parts(rank: int, world: int) -> list[str]:
    """What each rank is told of partitions that are none."""
    said = []
    for start, leaves, count, shape in [
        (rank if rank < 3 else 2, 4, 1, 3),
        (rank if rank < 3 else 4, 5, 1, 3),
        (rank, 5, 1, 3),
        (rank, 4, 1, 3 if rank else 2),
        (rank, 4 + (rank == 2), 1, 3),
    ]:
        run = Accumulator(start, leaves)
        for _ in range(count):
            run.add(torch.zeros(shape))
        with pytest.raises(CkptError) as caught:
            canonical_all_reduce(run)
        said.append(str(caught.value))
    with pytest.raises(CkptError, match="without leaves"):
        canonical_all_reduce(Accumulator(0, 4))
    return said


def test_a_partition_that_is_none_is_refused_on_every_rank(crew: Crew) -> None:
    first, *others = crew.run(wrong_parts)
    assert all(other == first for other in others)
    assert "leaf 2 of 4 is there twice" in first[0]
    assert "leaf 3 of 5 is missing" in first[1]
    assert "leaf 4 of 5 is missing" in first[2]
    assert "different things" in first[3] and "different things" in first[4]
