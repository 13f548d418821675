"""Case 19: streams are put back last, so that set-up before a load does not matter; and what may be done after it.

The order: build everything (models, loaders), warm up, load, train. A load draws nothing once the streams are back.
From then on ckpt's loader and its logical random numbers draw nothing from the streams either; other loaders do.
"""

import random
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler

import ckpt
from ckpt.data import GlobalCursor, GlobalLoader
from ckpt.random import LogicalRng, dropout
from tests.data.corpus import Augmented, Numbers
from tests.support.ranks import run_ranks
from tests.support.raw import raw

SIZE, BATCH = 60, 4


class Run:
    """A model with torch's dropout, on items with random augmentation. seed_items: whether ckpt's loader gives each
    item streams of its own, or augmentation draws from those of the run too."""

    def __init__(self, seed: int, seed_items: bool = False) -> None:
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Dropout(0.5), torch.nn.Linear(5, 1)).double()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        self.cursor = GlobalCursor(SIZE, "augmented", global_batch=BATCH, seed=5)
        self.loader = GlobalLoader(Augmented(SIZE), self.cursor, 0, 1, seed_items=seed_items)
        self.logical = LogicalRng(9)

    @property
    def state(self) -> dict[str, Any]:
        streams = ckpt.RngState()  # first in the dict, and put back last all the same
        return {
            "rng": streams,
            "model": self.model,
            "opt": self.optimizer,
            "data": self.cursor,
            "logical": self.logical,
        }

    def train(self, steps: int) -> list[bytes]:
        """Losses and logical dropout masks of the next steps."""
        found = []
        for batch in islice(self.loader, steps):
            loss = self.model(batch / SIZE).square().mean() * (random.random() + np.random.random())
            assert loss.isfinite()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.loader.mark_consumed()
            found.append(raw(loss) + raw(dropout(torch.ones(64), 0.5, self.logical.stream("mask"))))
            self.logical.advance()
        return found


def _build_a_loader(run: Run) -> None:
    next(iter(DataLoader(Augmented(9), 3, shuffle=True)))


def _skip_batches(run: Run) -> None:
    list(islice(DataLoader(Augmented(20), 2), 5))


def _warm_up(run: Run) -> None:
    run.model(torch.rand(3, 4).double()).sum().backward()
    run.optimizer.zero_grad()


def _reseed(run: Run) -> None:
    list(RandomSampler(range(7)))
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)


SET_UPS: list[Callable[[Run], None]] = [_build_a_loader, _skip_batches, _warm_up, _reseed]


@pytest.mark.parametrize("seed_items", [False, True], ids=["items draw from the streams", "items have their own"])
def test_set_up_before_a_load_does_not_matter(seed_items: bool, tmp_path: Path) -> None:
    """Alone and all together; 5 steps of losses have the bits of the run that never stopped."""
    straight = Run(1, seed_items)
    straight.train(4)
    with ckpt.Checkpointer(tmp_path) as ck:
        ck.save(4, straight.state)
        expected = straight.train(5)
        for set_up in [[], *([one] for one in SET_UPS), SET_UPS]:
            resumed = Run(2, seed_items)
            for part in set_up:
                part(resumed)
            ck.load(resumed.state)
            assert resumed.train(5) == expected, set_up


class Draws:
    """An entry of the state that draws from every stream whenever it is asked or told something, more at a load."""

    def _draw(self, count: int = 1) -> None:
        for _ in range(count):
            random.random()
            np.random.random()
            torch.rand(3)

    def state_dict(self) -> dict[str, Any]:
        self._draw()
        return {"n": 1, "w": torch.zeros(2)}

    def check_state_dict(self, state: Any) -> None:
        self._draw()

    def load_state_dict(self, state: Any) -> None:
        self._draw(5)


@pytest.mark.parametrize("options", [{}, {"atomic": True}, {"verify": False}], ids=str)
@pytest.mark.parametrize("order", [["rng", "a", "z"], ["a", "z", "rng"], ["z", "rng", "a"]], ids=str)
def test_streams_are_put_back_after_everything_else(order: list[str], options: dict[str, Any], tmp_path: Path) -> None:
    run = Run(1)
    entries = {"rng": ckpt.RngState(), "a": Draws(), "z": {"deep": [Draws(), torch.ones(1)]}}
    state: Any = {**run.state, **{name: entries[name] for name in order}}
    state = {name: state[name] for name in [*order, *(n for n in state if n not in order)]}
    with ckpt.Checkpointer(tmp_path) as ck:
        ck.save(1, state)
        wanted = [random.random(), np.random.random(), *torch.rand(5).tolist()]
        for _ in range(2):
            Run(2)
            ck.load(state, **options)
            assert [random.random(), np.random.random(), *torch.rand(5).tolist()] == wanted


def test_what_ckpt_does_between_a_load_and_the_first_step_draws_nothing(tmp_path: Path) -> None:
    """Its loader: a new one, iterations begun and given up, items fetched with streams of their own. Logical random
    numbers. Another save."""
    straight = Run(1, seed_items=True)
    straight.train(4)
    with ckpt.Checkpointer(tmp_path) as ck:
        ck.save(4, straight.state)
        expected = straight.train(5)
        resumed = Run(2, seed_items=True)
        ck.load(resumed.state)
        other = GlobalLoader(Augmented(SIZE), GlobalCursor(SIZE, "x", global_batch=3), 0, 3)
        for _ in islice(other, 5):
            other.mark_consumed()
        list(islice(resumed.loader, 1))
        resumed.loader.rewind()
        dropout(torch.ones(9), 0.5, resumed.logical.stream("another"))
        ck.save(5, resumed.state)
        assert resumed.train(5) == expected


@pytest.mark.parametrize("part", [_build_a_loader, _skip_batches, _warm_up, _reseed])
def test_what_else_draws_after_a_load_does_matter(part: Callable[[Run], None], tmp_path: Path) -> None:
    """The control: the same set-up after the load is the fault of this case, and shows in the losses. Not in what is
    drawn by logical random numbers; and loading once more makes it good."""
    straight = Run(1)
    straight.train(4)
    with ckpt.Checkpointer(tmp_path) as ck:
        ck.save(4, straight.state)
        expected = straight.train(5)
        resumed = Run(2)
        ck.load(resumed.state)
        part(resumed)
        found = resumed.train(5)
        assert [a[8:] == b[8:] for a, b in zip(found, expected, strict=True)] == [True] * 5
        assert all(a[:8] != b[:8] for a, b in zip(found, expected, strict=True))
        ck.load(resumed.state)
        assert resumed.train(5) == expected


# --- Two ranks of tensor parallelism ---


class Shared:
    """A stream that both ranks must have in the same place: plain values of a state are equal on all ranks."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def state_dict(self) -> dict[str, bytes]:
        return {"stream": self.generator.get_state().numpy().tobytes()}

    def load_state_dict(self, state: dict[str, bytes]) -> None:
        self.generator.set_state(torch.frombuffer(bytearray(state["stream"]), dtype=torch.uint8))


def _masks(rank: int, shared: Shared, logical: LogicalRng, steps: int) -> list[list[bytes]]:
    """For each step a mask of the shared stream, a logical one, and numbers of the rank's own stream."""
    found = []
    for _ in range(steps):
        equal = torch.bernoulli(torch.full((16,), 0.5), generator=shared.generator)
        whole = dropout(torch.ones(4, 32), 0.5, logical.stream("mask"))
        columns = range(16 * rank, 16 * rank + 16)
        part = dropout(torch.ones(4, 16), 0.5, logical.stream("mask"), shape=(4, 32), at=(None, columns))
        assert raw(part) == raw(whole[:, columns.start : columns.stop])
        found.append([raw(equal), raw(whole), raw(torch.rand(16))])
        logical.advance()
    return found


def _two(rank: int, world: int, root: str) -> tuple[list[list[bytes]], list[list[bytes]], list[str]]:
    """Masks straight on and after a load; what is said where streams that must be equal have come apart."""
    torch.manual_seed(10 + rank)
    shared, logical = Shared(3), LogicalRng(4)
    state = {"rng": ckpt.RngState(), "shared": shared, "logical": logical}
    _masks(rank, shared, logical, 3)
    said = []
    with ckpt.Checkpointer(root, ckpt.Layout(tp=2)) as ck:
        ck.save(3, state)
        straight = _masks(rank, shared, logical, 5)
        torch.manual_seed(7)
        shared, logical = Shared(8 + rank), LogicalRng(4)
        state = {"rng": ckpt.RngState(), "shared": shared, "logical": logical}
        if rank == 0:  # one rank alone builds a loader, and skips
            list(islice(DataLoader(Numbers(9), 2, shuffle=True), 3))
        ck.load(state)
        resumed = _masks(rank, shared, logical, 5)
        ck.load(state)
        if rank == 0:
            torch.rand(1, generator=shared.generator)
        said.append(_refused(ck, state))
        ck.load(state)
        if rank == 1:
            logical.advance()
        said.append(_refused(ck, state))
        state["declared"] = ckpt.replicated(torch.get_rng_state())
        ck.load(state, allow_missing=["declared"])
        state["declared"] = ckpt.replicated(torch.get_rng_state())
        said.append(_refused(ck, state))
        state["declared"] = ckpt.replicated(shared.generator.get_state())
        ck.save(4, state)
    return straight, resumed, said


def _refused(ck: ckpt.Checkpointer, state: dict[str, Any]) -> str:
    with pytest.raises(ckpt.StateMismatch) as error:
        ck.save(9, state)
    return str(error.value)


@pytest.mark.ranks
def test_two_tensor_parallel_ranks(tmp_path: Path) -> None:
    ranks = run_ranks(2, _two, str(tmp_path), timeout=60)
    for straight, resumed, said in ranks:
        assert resumed == straight
        for words, name in zip(said, ("shared/stream", "logical/step", "declared"), strict=True):
            assert name in words, words
    first, second = (straight for straight, _, _ in ranks)
    for one, other in zip(first, second, strict=True):
        assert one[:2] == other[:2], "masks that must agree"
        assert one[2] != other[2], "and streams of a rank's own"
