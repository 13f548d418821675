"""Case 17: on another number of data-parallel ranks the place in the data is the same, or refused with the reason."""

from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset

import ckpt
from ckpt.data import GlobalCursor, GlobalLoader, HuggingFaceCursor, MegatronCursor, TorchdataCursor
from tests.data.corpus import Augmented, global_batches
from tests.support.ranks import run_ranks

pytestmark = [pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")]  # torchdata, newer torch

SIZE, STOP = 96, 5
EPOCHS = 2  # how far a run is followed


def _cursor(batch: int, epoch_end: Any = "wrap") -> GlobalCursor:
    return GlobalCursor(SIZE, "numbers", global_batch=batch, seed=4, epoch_end=epoch_end)


def _loaders(cursor: GlobalCursor, size: int) -> list[GlobalLoader]:
    return [GlobalLoader(Augmented(SIZE), _same(cursor), rank, size) for rank in range(size)]


def _same(cursor: GlobalCursor) -> GlobalCursor:
    """A rank's own cursor at the same place."""
    own = _cursor(cursor.global_batch, cursor.epoch_end)
    own.load_state_dict(cursor.state_dict())
    return own


def _ids(batches: list[list[bytes]]) -> list[int]:
    return [int(torch.frombuffer(bytearray(one), dtype=torch.float64)[0]) for batch in batches for one in batch]


@pytest.mark.parametrize("epoch_end", ["wrap", "drop"])
@pytest.mark.parametrize("batch", [8, 12, 24])
def test_every_size_goes_on_with_the_same_global_batches(batch: int, epoch_end: str, tmp_path: Path) -> None:
    """Bits of all samples, with their augmentation, in their order; every sample once an epoch. A chain of sizes."""
    steps = EPOCHS * SIZE // batch
    straight = list(islice(_follow(_loaders(_cursor(batch, epoch_end), 1)), steps))
    sizes = [size for size in (4, 2, 8, 3, 1, 12, 6) if batch % size == 0]
    assert len(sizes) >= 4
    loaders = _loaders(_cursor(batch, epoch_end), sizes[0])
    seen: list[list[bytes]] = []
    with ckpt.Checkpointer(tmp_path) as ck:
        for size in sizes[1:]:
            seen += list(islice(_follow(loaders), min(STOP, steps - len(seen))))
            ck.save(len(seen), {"data": loaders[0].cursor})
            cursor = _cursor(batch, epoch_end)
            ck.load({"data": cursor})
            loaders = _loaders(cursor, size)
        seen += list(islice(_follow(loaders), steps - len(seen)))
    assert seen == straight
    for epoch in range(EPOCHS):
        assert sorted(_ids(seen)[epoch * SIZE : (epoch + 1) * SIZE]) == list(range(SIZE))


def _follow(loaders: list[GlobalLoader]) -> Iterator[list[bytes]]:
    """Global batches through the ends of epochs."""
    while True:
        yield from global_batches(loaders)


def test_a_size_that_does_not_divide_the_global_batch_is_refused() -> None:
    cursor = _cursor(8)
    with pytest.raises(
        ckpt.StateMismatch, match=r"batch of 8 samples cannot be shared equally by 3 .* use 1, 2, 4 or 8"
    ):
        GlobalLoader(Augmented(SIZE), cursor, 0, 3)
    assert cursor.total == 0


# --- Loaders whose state belongs to one data-parallel rank ---


class Shards(IterableDataset[int]):
    """A rank's own share of the data, by hand: its shards are longer or shorter than those of other ranks."""

    def __init__(self, rank: int, size: int) -> None:
        self.items = list(range(SIZE))[rank::size][: SIZE // size - rank]
        self.next = 0

    def __iter__(self) -> Iterator[int]:
        while self.next < len(self.items):
            self.next += 1
            yield self.items[self.next - 1]
        self.next = 0

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


def _torchdata(data: Any, **options: Any) -> Any:
    make = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    return make(data, batch_size=2, generator=torch.Generator(), **options)


def _distributed(rank: int, size: int) -> TorchdataCursor:
    samplers = pytest.importorskip("torchdata.stateful_dataloader.sampler")
    sampler = samplers.StatefulDistributedSampler(range(SIZE), size, rank, seed=3)
    return TorchdataCursor(_torchdata(range(SIZE), sampler=sampler), rank, size)


def _iterable(rank: int, size: int) -> TorchdataCursor:
    return TorchdataCursor(_torchdata(Shards(rank, size)), rank, size)


def _hugging_face(rank: int, size: int) -> HuggingFaceCursor:
    datasets = pytest.importorskip("datasets")
    split = pytest.importorskip("datasets.distributed").split_dataset_by_node
    table = datasets.Dataset.from_dict({"a": list(range(SIZE))}).to_iterable_dataset(num_shards=8)
    return HuggingFaceCursor(split(table, rank, size), rank, size)


class ByHand:
    """A loader of the user's that declares its state as the rank's own."""

    def __init__(self, rank: int, size: int) -> None:
        self.data = Shards(rank, size)
        self.loader = self.data

    def state_dict(self) -> dict[str, Any]:
        return {"place": ckpt.per_rank(self.data.state_dict())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.data.load_state_dict(state["place"].value)


Make = Callable[[int, int], Any]
RANK_LOADERS: dict[str, Make] = {
    "torchdata": _distributed,
    "torchdata, iterable": _iterable,
    "datasets": _hugging_face,
    "by hand": ByHand,
}


def _items(cursor: Any) -> Iterator[list[int]]:
    """What a rank's loader hands out, each a list of numbers."""
    for item in cursor if isinstance(cursor, HuggingFaceCursor) else cursor.loader:
        found = item["a"] if isinstance(item, dict) else item
        yield found.tolist() if isinstance(found, torch.Tensor) else [found]


def _rank_loaders(rank: int, world: int, root: str) -> dict[str, Any]:
    """Four ranks save after three items, and load on the same size; then two of them try to. Also the global cursor,
    whose place two ranks do get."""
    found: dict[str, Any] = {}
    global_cursor = _cursor(8)
    global_loader = GlobalLoader(Augmented(SIZE), global_cursor, rank, 4)
    for _ in islice(global_loader, STOP):
        global_loader.mark_consumed()
    two = dist.new_group([0, 1])
    for name, make in RANK_LOADERS.items():
        if name == "datasets":  # slow to import; below, in one process
            continue
        straight = list(islice(_items(make(rank, 4)), 9))
        cursor, weight = make(rank, 4), torch.zeros(3)
        iteration = _items(cursor)
        first = list(islice(iteration, 3))
        state = {"w": weight, "global": global_cursor, "loader": cursor}
        with ckpt.Checkpointer(f"{root}/{name}", ckpt.Layout(dp=4)) as ck:
            ck.save(1, state)
            again = make(rank, 4)
            ck.load({**state, "loader": again})
        resumed = list(islice(_items(again), 6))
        said = ""
        if rank < 2:
            weight.fill_(7)
            own = _cursor(8)
            small = {"w": weight, "global": own, "loader": make(rank, 2)}
            with ckpt.Checkpointer(f"{root}/{name}", ckpt.Layout(dp=2), process_group=two) as ck:
                with pytest.raises(ckpt.StateMismatch) as error:
                    ck.load(small)
                said = str(error.value)
                assert weight.tolist() == [7, 7, 7] and own.total == 0
                del small["loader"]
                ck.load(small, allow_extra=["loader/*"])
            assert weight.tolist() == [0, 0, 0] and own.total == 8 * STOP
        dist.barrier()
        found[name] = first + resumed == straight, said
    return found


@pytest.mark.ranks
def test_loaders_of_a_rank_go_on_on_the_same_size_and_are_refused_on_another(tmp_path: Path) -> None:
    for rank, found in enumerate(run_ranks(4, _rank_loaders, str(tmp_path), timeout=90)):
        assert {name for name, (exact, _) in found.items() if not exact} == set()
        for name, (_, said) in found.items():
            if rank >= 2:
                continue
            if name == "by hand":
                assert "loader/place" in said and "allow_extra" in said, said
            else:
                assert "saved by 4 data-parallel ranks, this run has 2, and" in said, said
                assert "resume on that size, or begin the next run with ckpt.data.GlobalCursor" in said


def _bare_loaders(rank: int) -> dict[str, Any]:
    nodes = pytest.importorskip("torchdata.nodes")
    table = _hugging_face(rank, 4).dataset
    return {
        "StatefulDataLoader": _distributed(rank, 4).loader,
        "IterableDataset": table,
        "Loader": nodes.Loader(nodes.IterableWrapper(range(8))),
    }


@pytest.mark.parametrize("kind", ["StatefulDataLoader", "IterableDataset", "Loader"])
def test_a_loader_of_a_rank_that_does_not_say_so_is_refused(kind: str, tmp_path: Path) -> None:
    """Ranks that have read as much have equal states, which would pass for one state of all ranks, of any number."""
    bare = _bare_loaders(0)[kind]
    next(iter(bare))
    with ckpt.Checkpointer(tmp_path) as ck:
        with pytest.raises(ckpt.Unsupported, match=f"loader: what a {kind} keeps is one data-parallel rank's place"):
            ck.save(1, {"loader": bare})
        ck.save(1, {"loader": ckpt.per_rank({"place": 1})})
        with pytest.raises(ckpt.Unsupported, match=r"loader: .*ckpt\.data\.TorchdataCursor.*GlobalLoader"):
            ck.load({"loader": bare})


@pytest.mark.parametrize("make", [name for name in RANK_LOADERS if name != "by hand"])
@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_neither_more_nor_fewer_ranks_take_a_state(make: str, size: int) -> None:
    state = RANK_LOADERS[make](1, 4).state_dict()
    for rank in range(size):
        target = RANK_LOADERS[make](rank, size)
        with pytest.raises(ckpt.StateMismatch, match=f"saved by 4 data-parallel ranks, this run has {size}, and"):
            target.load_state_dict(state)


def test_megatrons_count_of_samples_is_refused_where_ranks_make_the_order() -> None:
    saved = {kind: MegatronCursor(24, 1, 4, SIZE, "cyclic", kind) for kind in (True, False)}
    for cursor in saved.values():
        cursor.advance()
    for size in (2, 8):
        bucketed, shuffled = (MegatronCursor(24, 1, size, SIZE, "cyclic", kind) for kind in (True, False))
        with pytest.raises(ckpt.StateMismatch, match=f"order='4 buckets of 24 .* order='{size} buckets of"):
            bucketed.load_state_dict(saved[True].state_dict())
        shuffled.load_state_dict(saved[False].state_dict())
        assert (bucketed.consumed_samples, shuffled.consumed_samples) == (0, 24)
