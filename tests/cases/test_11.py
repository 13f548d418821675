"""Case 11: a run that stops amid an epoch goes on with the rest of its permutation: nothing twice, nothing left out."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, RandomSampler, SubsetRandomSampler

import ckpt
from ckpt.data import GlobalCursor, GlobalLoader, TorchdataCursor
from tests.data.corpus import Augmented, Numbers
from tests.support.ranks import run_ranks
from tests.support.raw import raw

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # torchdata, with newer torch

SIZE, BATCH, STOP = 64, 4, 5  # 20 of 64 samples


class Run(ABC):
    """Trains a model with dropout from torch's global stream. `data` is what its state holds of its place in the data.
    validate: between two steps, a loop over a DataLoader that shuffles by the global stream."""

    def __init__(self, seed: int, validate: bool = False) -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Dropout(0.5), torch.nn.Linear(6, 1))
        self.model.double()
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.own = torch.Generator().manual_seed(seed)
        self.validate, self.data = validate, self._make_data(seed)
        self.ids: list[int] = []
        self.losses: list[bytes] = []

    @abstractmethod
    def _make_data(self, seed: int) -> Any:
        """What holds the place in the data."""

    @abstractmethod
    def batches(self) -> Iterator[torch.Tensor]:
        """Batches from the place on, epoch after epoch."""

    def average_gradients(self) -> None:  # noqa: B027 (it may be left as it is)
        """Called before each step."""

    def consumed(self) -> None:  # noqa: B027
        """Called after each step."""

    @property
    def state(self) -> dict[str, Any]:
        rng = ckpt.RngState({"own": self.own})
        return {"rng": rng, "data": self.data, "model": self.model, "opt": self.optimizer}

    def train(self, steps: int) -> None:
        for batch in self.batches():
            loss = self.model(batch.double()).square().mean() * torch.rand(1, generator=self.own).double()
            assert loss.isfinite()
            loss.backward()
            self.average_gradients()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.consumed()
            self.ids += [int(i) for i in batch[:, 0]]
            self.losses.append(raw(loss))
            if self.validate:
                for _ in DataLoader(Numbers(6), batch_size=3, shuffle=True):
                    torch.rand(2)
            steps -= 1
            if not steps:
                return


class Global(Run):
    """By ckpt's cursor, which keeps the seed of the permutation and the place."""

    rank, world = 0, 1

    def _make_data(self, seed: int) -> GlobalCursor:
        cursor = GlobalCursor.over(Augmented(SIZE), global_batch=BATCH * self.world, seed=11)
        self.loader = GlobalLoader(Augmented(SIZE), cursor, self.rank, self.world)
        return cursor

    def batches(self) -> Iterator[torch.Tensor]:
        return iter(self.loader)

    def consumed(self) -> None:
        self.loader.mark_consumed()


class Torchdata(Run):
    """By torchdata's loader, whose sampler has a generator of its own, as TorchdataCursor asks for."""

    def _make_data(self, seed: int) -> TorchdataCursor:
        stateful = pytest.importorskip("torchdata.stateful_dataloader")
        samplers = pytest.importorskip("torchdata.stateful_dataloader.sampler")
        data = torch.cat([torch.arange(SIZE)[:, None], torch.full((SIZE, 3), 0.5)], 1)
        sampler = samplers.RandomSampler(data, generator=torch.Generator().manual_seed(seed))
        self.loader = stateful.StatefulDataLoader(data, BATCH, sampler=sampler, generator=torch.Generator())
        return TorchdataCursor(self.loader, 0, 1)

    def batches(self) -> Iterator[torch.Tensor]:
        while True:
            yield from self.loader


def _check_epochs(ids: list[int], size: int = SIZE) -> None:
    """Every epoch has every sample once; the last may be cut short."""
    for start in range(0, len(ids), size):
        epoch = Counter(ids[start : start + size])
        assert [i for i, n in epoch.items() if n > 1] == [], "seen twice"
        assert len(ids) - start < size or set(range(size)) - set(epoch) == set(), "never seen"


@pytest.mark.parametrize("validate", [False, True], ids=["training alone", "validation between"])
@pytest.mark.parametrize("kind", [Global, Torchdata])
def test_the_rest_of_the_epoch_comes_in_its_order(kind: type[Run], validate: bool, tmp_path: Path) -> None:
    """Saved after 20 of 64 samples, and again from the resumed run in the next epoch."""
    straight = kind(1, validate)
    straight.train(40)
    first = kind(1, validate)
    first.train(STOP)
    with ckpt.Checkpointer(tmp_path) as ck:
        ck.save(STOP, first.state)
        second = kind(2, validate)  # which seeds the global stream anew
        ck.load(second.state)
        second.train(18)
        ck.save(STOP + 18, second.state)
        third = kind(3, validate)
        ck.load(third.state)
        third.train(17)
    ids = first.ids + second.ids + third.ids
    assert ids == straight.ids and ids[:SIZE] != sorted(ids[:SIZE]) and ids[:SIZE] != ids[SIZE : 2 * SIZE]
    _check_epochs(ids)
    assert first.losses + second.losses + third.losses == straight.losses


def test_the_fault_itself() -> None:
    """The control: streams as they are amid an epoch, and a number of samples to skip, give another permutation."""
    torch.manual_seed(1)
    batches = iter(DataLoader(Numbers(SIZE), BATCH, shuffle=True))
    ids = [int(i) for _ in range(STOP) for i in next(batches)[:, 0]]
    torch.set_rng_state(torch.get_rng_state())
    again = [int(i) for batch in DataLoader(Numbers(SIZE), BATCH, shuffle=True) for i in batch[:, 0]]
    with pytest.raises(AssertionError, match="seen twice"):
        _check_epochs(ids + again[STOP * BATCH :])


def _refused() -> dict[str, Any]:
    data = Numbers(SIZE)
    return {
        "a loader": DataLoader(data, BATCH, shuffle=True),
        "a loader with a generator": DataLoader(data, BATCH, shuffle=True, generator=torch.Generator()),
        "an iteration": iter(DataLoader(data, BATCH, shuffle=True)),
        "a sampler": RandomSampler(data),
        "a sampler with a generator": RandomSampler(data, generator=torch.Generator()),
        "a sampler of a part": SubsetRandomSampler(range(9)),
        "an iterator over a permutation": iter(torch.randperm(SIZE).tolist()),
    }


@pytest.mark.parametrize("kind", _refused())
def test_what_cannot_be_restored_is_refused_at_save(kind: str, tmp_path: Path) -> None:
    with ckpt.Checkpointer(tmp_path) as ck:
        with pytest.raises(ckpt.Unsupported, match="data: cannot keep a value of type"):
            ck.save(1, {"w": torch.ones(2), "data": _refused()[kind]})
        assert ck.latest() is None


def test_samplers_of_a_torchdata_loader_that_cannot_be_restored_are_refused(tmp_path: Path) -> None:
    make = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    data, own = Numbers(SIZE), torch.Generator()
    for loader, words in (
        (make(data, BATCH, shuffle=True), "resuming is exact only with a generator of the loader's own"),
        (make(data, BATCH, shuffle=True, generator=own), "generator of the loader's own, which its sampler does not"),
        (make(data, BATCH, sampler=RandomSampler(data), generator=own), "a RandomSampler of torch.utils.data is no"),
    ):
        with pytest.raises(ckpt.Unsupported, match=words):
            TorchdataCursor(loader, 0, 1)
        with ckpt.Checkpointer(tmp_path) as ck, pytest.raises(ckpt.Unsupported, match=r"data: .*TorchdataCursor"):
            ck.save(1, {"data": loader})


class OfTwo(Global):
    """One of two data-parallel ranks, which share a model and have streams of their own."""

    world = 2

    def __init__(self, seed: int) -> None:
        self.rank = dist.get_rank()
        super().__init__(seed, validate=True)
        torch.manual_seed(10 * seed + self.rank)
        self.own.manual_seed(10 * seed + self.rank)

    def average_gradients(self) -> None:
        for parameter in self.model.parameters():
            dist.all_reduce(parameter.grad)


def _two(rank: int, world: int, root: str) -> list[tuple[list[int], list[bytes]]]:
    """A run that never stopped, one that did, and the one that goes on."""
    straight = OfTwo(1)
    straight.train(20)
    first = OfTwo(1)
    first.train(STOP)
    with ckpt.Checkpointer(root, ckpt.Layout(dp=2)) as ck:
        ck.save(STOP, first.state)
        second = OfTwo(2)
        ck.load(second.state)
    second.train(20 - STOP)
    return [(run.ids, run.losses) for run in (straight, first, second)]


@pytest.mark.ranks
def test_two_data_parallel_ranks(tmp_path: Path) -> None:
    ranks = run_ranks(2, _two, str(tmp_path), timeout=60)
    for (ids, losses), (first, first_losses), (second, second_losses) in ranks:
        assert first + second == ids and first_losses + second_losses == losses
    assert ranks[0][0][1] != ranks[1][0][1], "ranks have dropout of their own"
    steps = [range(at, at + BATCH) for at in range(0, 20 * BATCH, BATCH)]
    _check_epochs([straight[0][0][i] for step in steps for straight in ranks for i in step])
