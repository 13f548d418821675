"""A plain module in a plain loop stops, and goes on in fresh processes with the bits of the run that never stopped.

The loop has what such loops have: dropout, BatchNorm, AdamW with two groups, a schedule of learning rate and momentum,
augmentation in the workers of the loader and in the loop, from every kind of generator, and accumulated gradients. It
runs as one process without torch.distributed, and as two under DistributedDataParallel.
"""

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ckpt
from ckpt.data import GlobalCursor, GlobalLoader
from tests.resume import digests
from tests.resume.runs import Trace, Traces, faults, first_half, second_half, straight, unmoved, unseen
from tests.support.ranks import Crew

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

WORKERS = {1: 2, 2: 0}
"""Of the loader of both halves, by the number of ranks. They are processes of their own, and slow to start."""
GLOBAL_BATCH, MICRO_BATCH = 12, 3


class Items(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """50 points, each moved at random whenever it is fetched; a run of ten steps goes into the third epoch."""

    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        moved = torch.randn(16) + random.random() + np.random.rand(16)
        return (torch.arange(16) * index % 17 + moved).float(), torch.tensor([index % 5.0])


class PlainRun:
    """The loop on one of `world` ranks. Its start depends on the seed, and the order of its data does not."""

    def __init__(self, rank: int, world: int, seed: int, workers: int) -> None:
        torch.manual_seed(seed)
        self.net = nn.Sequential(
            nn.Linear(16, 32),
            nn.BatchNorm1d(32),
            nn.ReLU(),
            nn.Dropout(0.2),
            nn.Linear(32, 24),
            nn.Dropout(),
            nn.GELU(),
            nn.Linear(24, 1),
        )
        self.wrapped = DistributedDataParallel(self.net) if world > 1 else self.net
        weights = [p for p in self.net.parameters() if p.dim() > 1]
        others = [p for p in self.net.parameters() if p.dim() == 1]
        self.optimizer = torch.optim.AdamW([{"params": weights}, {"params": others, "weight_decay": 0.0}])
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, [0.02, 0.01], total_steps=25)

        random.seed(1000 * seed + rank)
        np.random.seed([seed, rank])
        torch.manual_seed(1000 * seed + rank)
        self.noise = torch.Generator().manual_seed(2000 * seed + rank)
        self.order = np.random.default_rng([seed, rank])

        self.cursor = GlobalCursor.over(Items(), global_batch=GLOBAL_BATCH, seed=3, fingerprint="items")
        self.loader = GlobalLoader(Items(), self.cursor, rank, world, MICRO_BATCH, workers)
        self.batches: Iterator[Any] | None = None
        self.state = ckpt.TrainState(
            model=self.net,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            rng=ckpt.RngState({"noise": self.noise, "order": self.order}),
            data=self.cursor,
            step=0,
        )

    def step(self) -> list[float]:
        self.batches = self.batches or iter(self.loader)
        losses = []
        for _ in range(self.loader.micro_batches):
            inputs, targets = next(self.batches)
            with contextlib.nullcontext() if self.loader.complete else self._unsynchronised():
                loss = nn.functional.mse_loss(self.wrapped(self._augmented(inputs)), targets)
                (loss / self.loader.micro_batches).backward()
            losses.append(loss.item())
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        self.loader.mark_consumed()
        self.state.extra["step"] += 1
        if self.wrapped is not self.net:  # as DDP does before its next forward: until then replicas' statistics differ
            for buffer in self.net.buffers():
                dist.broadcast(buffer, 0)
        return losses

    def _unsynchronised(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self.wrapped is self.net else self.wrapped.no_sync()

    def _augmented(self, inputs: torch.Tensor) -> torch.Tensor:
        if random.random() < 0.5:
            inputs = inputs.flip(1)
        inputs = inputs * float(np.random.uniform(0.8, 1.2))
        mixed = inputs + 0.1 * inputs[torch.from_numpy(self.order.permutation(len(inputs)))]
        return mixed + 0.1 * torch.randn(mixed.shape, generator=self.noise)

    def everything(self) -> dict[str, Any]:
        return {
            "model": digests.module(self.net),
            "optimizer": digests.optimizer(self.optimizer),
            "scheduler": self.scheduler.state_dict(),
            "rng": digests.streams(noise=self.noise, order=self.order),
            "data": {"total": self.cursor.total},
            "step": self.state.extra["step"],
        }


def _spoil_order(run: PlainRun) -> None:
    run.order.bit_generator.state = np.random.default_rng(0).bit_generator.state


SPOILT: dict[str, Callable[[Any], None]] = {
    "python": lambda run: random.seed(0),
    "numpy": lambda run: np.random.seed(0),
    "torch": lambda run: torch.default_generator.manual_seed(0),
    "noise": lambda run: run.noise.manual_seed(0),
    "order": _spoil_order,
}
"""Sets one random stream to another place."""
PARTS = ("optimizer", "scheduler", "rng", "data")


# --- On a rank ---


def _before(rank: int, world: int, url: str) -> tuple[Trace, Trace]:
    """The straight run has no workers: neither augmentation nor order depends on them."""
    whole = straight(PlainRun(rank, world, 1, 0))
    return whole, first_half(PlainRun(rank, world, 1, WORKERS[world]), url, ckpt.Layout(dp=world))


def _after(rank: int, world: int, url: str) -> tuple[Trace, dict[str, Trace]]:
    layout = ckpt.Layout(dp=world)
    resumed = second_half(PlainRun(rank, world, 2, WORKERS[world]), url, layout)
    controls = {name: second_half(PlainRun(rank, world, 3, 0), url, layout, without=name) for name in PARTS} | {
        name: second_half(PlainRun(rank, world, 3, 0), url, layout, spoil=spoil) for name, spoil in SPOILT.items()
    }
    return resumed, controls


# --- In the parent ---


@pytest.fixture(scope="module", params=list(WORKERS), ids=["one process", "two processes"])
def traces(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Traces:
    world, url = request.param, str(tmp_path_factory.mktemp("plain") / "root")
    with Crew(world, init=world > 1) as crew:
        before = crew.run(_before, url)
    with Crew(world, init=world > 1) as fresh:
        after = fresh.run(_after, url)
    return Traces.of(before, after)


def test_a_resumed_run_has_the_bits_of_the_straight_one(traces: Traces) -> None:
    assert faults(traces) == []


def test_every_part_moves(traces: Traces) -> None:
    """So that it takes a load to have the bits of the middle, and the right steps to have those of the end."""
    assert unmoved(traces) == set()


def test_a_run_that_lacks_a_part_differs(traces: Traces) -> None:
    """The control, for each part of the state and each random stream."""
    assert unseen(traces, {name: name if name in PARTS else "rng" for name in (*PARTS, *SPOILT)}) == []
