"""A model of DTensors stops, and goes on in fresh processes with the bits of the run that never stopped.

FSDP2 over tensor parallelism on a 2-d mesh: some weights are cut along axis 0 by both (strided shards), some along an
axis each, some by FSDP alone; many unevenly, and some ranks hold nothing of the last layer. float32 parameters,
computing in bfloat16, and dropout from two streams: one that ranks of tensor parallelism share, and one that they do
not.
"""

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import ckpt
from ckpt.data import GlobalCursor, GlobalLoader
from tests.resume import digests
from tests.resume.runs import Trace, Traces, faults, first_half, second_half, straight, unmoved, unseen
from tests.support.ranks import Crew

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

LAYOUT = ckpt.Layout(tp=2, dp=2)
WIDTH, INNER = 10, 14
GLOBAL_BATCH, MICRO_BATCH = 8, 2


class Items(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """30 points, each moved at random whenever it is fetched; a run of ten steps goes into the third epoch."""

    def __len__(self) -> int:
        return 30

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        moved = torch.randn(WIDTH) + random.random() + np.random.rand(WIDTH)
        return (torch.arange(WIDTH) * index % 7 + moved).float(), torch.tensor([index % 5.0])


class Block(nn.Module):
    """A residual block. region: the stream of dropout between its two weights, where ranks of tensor parallelism hold
    other hidden units."""

    def __init__(self, region: torch.Generator) -> None:
        super().__init__()
        self.region = region
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = nn.functional.gelu(self.up(self.norm(inputs)))
        kept = torch.rand(hidden.shape, generator=self.region) > 0.1
        return inputs + self.dropout(self.down(hidden * kept / 0.9))


class ShardedRun:
    """Training on this rank of four. Its start depends on the seed, and the order of its data does not."""

    def __init__(self, rank: int, seed: int) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        dp_rank = rank // LAYOUT.tp
        torch.manual_seed(seed)
        self.region = torch.Generator().manual_seed(1000 * seed + rank)
        self.net = nn.Sequential(Block(self.region), Block(self.region), nn.Linear(WIDTH, 1))
        mesh = init_device_mesh("cpu", (LAYOUT.dp, LAYOUT.tp), mesh_dim_names=("dp", "tp"))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for block in self.net[:2]:
            parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
            fully_shard(block, mesh=mesh["dp"], mp_policy=policy)
        fully_shard(self.net, mesh=mesh["dp"], mp_policy=policy)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.01, foreach=False)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=12)

        random.seed(1000 * seed + rank)
        np.random.seed([seed, rank])
        torch.manual_seed(1000 * seed + dp_rank)

        self.cursor = GlobalCursor.over(Items(), global_batch=GLOBAL_BATCH, seed=3, fingerprint="items")
        self.loader = GlobalLoader(Items(), self.cursor, dp_rank, LAYOUT.dp, MICRO_BATCH)
        self.batches: Iterator[Any] | None = None
        self.state = ckpt.TrainState(
            model=self.net,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            rng=ckpt.RngState({"region": self.region}),
            data=self.cursor,
            step=0,
        )

    def step(self) -> list[float]:
        self.batches = self.batches or iter(self.loader)
        losses = []
        for _ in range(self.loader.micro_batches):
            inputs, targets = next(self.batches)
            self.net.set_requires_gradient_sync(self.loader.complete)
            loss = nn.functional.mse_loss(self.net(inputs).float(), targets)
            (loss / self.loader.micro_batches).backward()
            losses.append(loss.item())
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        self.loader.mark_consumed()
        self.state.extra["step"] += 1
        return losses

    def everything(self) -> dict[str, Any]:
        return {
            "model": digests.module(self.net),
            "optimizer": digests.optimizer(self.optimizer),
            "scheduler": self.scheduler.state_dict(),
            "rng": digests.streams(region=self.region),
            "data": {"total": self.cursor.total},
            "step": self.state.extra["step"],
        }


def _spoil_region(run: Any) -> None:
    run.region.manual_seed(0)


# --- On a rank ---


def _before(rank: int, world: int, url: str) -> tuple[Trace, Trace]:
    return straight(ShardedRun(rank, 1)), first_half(ShardedRun(rank, 1), url, LAYOUT)


def _after(rank: int, world: int, url: str) -> tuple[Trace, dict[str, Trace]]:
    resumed = second_half(ShardedRun(rank, 2), url, LAYOUT)
    controls = {part: second_half(ShardedRun(rank, 3), url, LAYOUT, without=part) for part in ("rng", "data")}
    return resumed, controls | {"region": second_half(ShardedRun(rank, 3), url, LAYOUT, spoil=_spoil_region)}


def _placements(rank: int, world: int) -> set[str]:
    net = ShardedRun(rank, 1).net
    return {" ".join(type(p).__name__ for p in parameter.placements) for parameter in net.parameters()}


# --- In the parent ---


@pytest.fixture(scope="module")
def crew() -> Iterator[Crew]:
    with Crew(4) as four:
        yield four


@pytest.fixture(scope="module")
def traces(crew: Crew, tmp_path_factory: pytest.TempPathFactory) -> Traces:
    url = str(tmp_path_factory.mktemp("dtensor") / "root")
    before = crew.run(_before, url)
    with Crew(4) as fresh:
        return Traces.of(before, fresh.run(_after, url))


def test_the_model_has_every_kind_of_shard(crew: Crew) -> None:
    for found in crew.run(_placements):
        assert found == {"_StridedShard Shard", "Shard Shard", "Shard Replicate", "Shard"}


def test_a_resumed_run_has_the_bits_of_the_straight_one(traces: Traces) -> None:
    assert faults(traces) == []


def test_every_part_moves(traces: Traces) -> None:
    """So that it takes a load to have the bits of the middle, and the right steps to have those of the end."""
    empty = {"/model/2.weight", "/model/2.bias"}
    empty |= {f"/optimizer/0/states/{n}/{kind}" for n in (12, 13) for kind in ("exp_avg", "exp_avg_sq")}
    assert unmoved(traces) == {"/rng/python", "/rng/numpy"} | empty


def test_a_run_that_lacks_a_part_differs(traces: Traces) -> None:
    """The control: without the random streams, without the place in the data, and with one stream elsewhere."""
    assert unseen(traces, {"rng": "rng", "data": "data", "region": "rng"}) == []
