"""Megatron Core stops, and goes on in fresh processes with the bits of the run that never stopped.

The real stack: GPTModel in bfloat16, dense and with experts, dropout of hidden states and of attention from Megatron's
streams, DistributedOptimizer with float32 masters, its scheduler, and 1F1B over pipeline stages.
"""

import logging
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

import ckpt
from ckpt import Layout
from ckpt.data import GlobalCursor, GlobalLoader, MegatronCursor
from tests.resume import digests
from tests.resume.runs import Trace, Traces, faults, first_half, second_half, straight, unmoved, unseen
from tests.support import megatron_trainer as mt
from tests.support.gpt_oracle import GptSize
from tests.support.layouts import start
from tests.support.megatron_cpu import megatron_on_cpu
from tests.support.tiny_gpt import parallel
from tests.support.training import corpus, run_batch, run_microbatches

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

BATCH, MICRO = 8, 2
DENSE = GptSize(layers=4, hidden=32, heads=4, kv_groups=2, ffn=88, vocab=128, seq=16, dtype=torch.bfloat16, dropout=0.1)
EXPERTS = GptSize(layers=2, hidden=32, heads=4, ffn=40, vocab=256, seq=16, experts=4, dtype=torch.bfloat16, dropout=0.1)


@dataclass(frozen=True)
class Setup:
    """A model on a layout. numbered: whether the place in the data is Megatron's own number of consumed samples, or a
    cursor of ckpt that feeds a loader."""

    size: GptSize
    layout: Layout
    numbered: bool


SETUPS = {
    "dense, tp=2 pp=2": Setup(DENSE, Layout(tp=2, pp=2), numbered=False),
    "dense, pp=2 dp=2": Setup(DENSE, Layout(pp=2, dp=2), numbered=False),
    "experts, pp=2 dp=2 ep=2": Setup(EXPERTS, Layout(pp=2, dp=2, ep=2), numbered=True),
}


class Windows(torch.utils.data.Dataset[torch.Tensor]):
    """30 pieces of the corpus of seq + 1 bytes: a run of ten steps goes into the third epoch."""

    def __init__(self, seq: int) -> None:
        self.seq = seq

    def __len__(self) -> int:
        return 30

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.from_numpy(corpus()[1000 * index : 1000 * index + self.seq + 1].astype(np.int64))


class MegatronRun:
    """Training on this rank. Its start depends on the seed, and the order of its data does not. Needs
    `megatron_on_cpu()` and parallel state."""

    def __init__(self, setup: Setup, seed: int) -> None:
        from megatron.core import parallel_state as ps
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

        self.trainer = mt.make_trainer(setup.size, "zero", seed)
        own = seed + 100 * ps.get_pipeline_model_parallel_rank()  # as Megatron's own training script seeds
        random.seed(own)
        np.random.seed(own)
        model_parallel_cuda_manual_seed(own)

        rank, dp = ps.get_data_parallel_rank(), ps.get_data_parallel_world_size()
        self.cursor: MegatronCursor | GlobalCursor
        self.loader: GlobalLoader | None = None
        self.batches: Iterator[Any] | None = None
        if setup.numbered:
            self.cursor = MegatronCursor(BATCH, MICRO, dp, total_samples=10_000)
        else:
            windows = Windows(setup.size.seq)
            self.cursor = GlobalCursor.over(windows, global_batch=BATCH, seed=3)
            self.loader = GlobalLoader(windows, self.cursor, rank, dp, MICRO)
        self.state = ckpt.TrainState(
            model=self.trainer.model,
            optimizer=self.trainer.optimizer,
            scheduler=self.trainer.scheduler,
            rng=ckpt.RngState(),
            data=self.cursor,
            step=0,
        )

    def step(self) -> list[float]:
        trainer = self.trainer
        trainer.wrapped.zero_grad_buffer()
        trainer.optimizer.zero_grad()
        loss = self._forward_backward()
        updated, norm, _ = trainer.optimizer.step()
        assert updated
        trainer.scheduler.step(increment=BATCH)
        self.state.extra["step"] += 1
        return [loss, float(norm)]

    def _forward_backward(self) -> float:
        if isinstance(self.cursor, MegatronCursor):
            number = self.cursor.consumed_samples // BATCH
            loss = run_batch(self.trainer.wrapped, self.trainer.size, number, BATCH, MICRO)
            self.cursor.advance()
            return loss
        assert self.loader is not None
        self.batches = self.batches or iter(self.loader)
        loss = run_microbatches(self.trainer.wrapped, self.trainer.size, self.batches, BATCH, MICRO)
        self.loader.mark_consumed()
        return loss

    def everything(self) -> dict[str, Any]:
        singles = mt.singles(self.trainer.optimizer)
        here = isinstance(self.cursor, MegatronCursor)
        return {
            "model": digests.module(self.trainer.model),
            "optimizer": [digests.optimizer(single.optimizer) for single in singles],
            "masters": [single.shard_fp32_from_float16_groups for single in singles],
            "scheduler": {k: v for k, v in vars(self.trainer.scheduler).items() if k != "optimizer"},
            "rng": digests.streams(),
            "data": {"samples": self.cursor.consumed_samples if here else self.cursor.total},
            "step": self.state.extra["step"],
        }


def _spoil_tracker(run: Any) -> None:
    """Sets the stream of tensor-parallel regions to another place."""
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    with get_cuda_rng_tracker().fork():
        torch.manual_seed(0)


# --- On a rank ---


def _quiet() -> None:
    """On the CPU both of Megatron's generators are one, about which its tracker warns at every fork."""
    logging.getLogger("megatron.core.tensor_parallel.random").setLevel(logging.ERROR)


def _before(rank: int, world: int, setup: Setup, url: str) -> tuple[Trace, Trace]:
    _quiet()
    layout = setup.layout
    with parallel(layout.tp, layout.pp, layout.dp, layout.ep), megatron_on_cpu():
        whole = straight(MegatronRun(setup, 1))
        return whole, first_half(MegatronRun(setup, 1), url, layout)


def _after(rank: int, world: int, setup: Setup, url: str) -> tuple[Trace, dict[str, Trace]]:
    _quiet()
    layout = setup.layout
    with parallel(layout.tp, layout.pp, layout.dp, layout.ep), megatron_on_cpu():
        resumed = second_half(MegatronRun(setup, 2), url, layout)
        return resumed, {
            "rng": second_half(MegatronRun(setup, 3), url, layout, without="rng"),
            "data": second_half(MegatronRun(setup, 3), url, layout, without="data"),
            "tracker": second_half(MegatronRun(setup, 3), url, layout, spoil=_spoil_tracker),
        }


# --- In the parent ---


@pytest.fixture(scope="module")
def all_traces(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Traces]:
    roots = {name: str(tmp_path_factory.mktemp("megatron") / "root") for name in SETUPS}
    with start(4) as crew:
        before = {name: crew.run(_before, SETUPS[name], url) for name, url in roots.items()}
    with start(4) as fresh:
        after = {name: fresh.run(_after, SETUPS[name], url) for name, url in roots.items()}
    return {name: Traces.of(before[name], after[name]) for name in SETUPS}


@pytest.fixture(params=list(SETUPS))
def traces(request: pytest.FixtureRequest, all_traces: dict[str, Traces]) -> Traces:
    return all_traces[request.param]


def test_a_resumed_run_has_the_bits_of_the_straight_one(traces: Traces) -> None:
    assert faults(traces) == []


def test_every_part_moves(traces: Traces) -> None:
    """So that it takes a load to have the bits of the middle, and the right steps to have those of the end."""
    assert unmoved(traces) == {
        f"/rng/{name}" for name in ("python", "numpy", "data-parallel-rng", "expert-parallel-rng")
    }


def test_a_run_that_lacks_a_part_differs(traces: Traces) -> None:
    """The control: without the random streams, without the place in the data, and with one stream elsewhere."""
    assert unseen(traces, {"rng": "rng", "data": "data", "tracker": "rng"}) == []
