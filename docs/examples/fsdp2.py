"""FSDP2 in a loop in the manner of torchtitan, checkpointed by ckpt:

    torchrun --nproc-per-node 2 docs/examples/fsdp2.py runs/fsdp2

Stop it as you like, and start it again, on another number of ranks too.
"""

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from tiny import ByteModel, Text, start_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from ckpt.data import GlobalCursor, GlobalLoader
from ckpt.trainer.hooks.titan import TitanCheckpointer


class Optimizers:
    """One optimizer for each part of the model, stepped together."""

    def __init__(self, model_parts: list[nn.Module]) -> None:
        self.optimizers = [torch.optim.AdamW(part.parameters(), lr=1e-2) for part in model_parts]

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()


class Schedulers:
    def __init__(self, optimizers: Optimizers, factor: Callable[[int], float]) -> None:
        self.schedulers = [torch.optim.lr_scheduler.LambdaLR(o, factor) for o in optimizers.optimizers]

    def step(self) -> None:
        for scheduler in self.schedulers:
            scheduler.step()


class Trainer:
    """Holds what such a trainer holds; it is its own train state."""

    def __init__(self, root: str) -> None:
        rank, world = start_ranks()
        if not dist.is_initialized():
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        torch.manual_seed(0)
        mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp_shard",))
        self.model_parts: list[nn.Module] = [fully_shard(ByteModel(), mesh=mesh)]
        self.optimizers = Optimizers(self.model_parts)
        self.lr_schedulers = Schedulers(self.optimizers, lambda step: 1 / (1 + step / 10))
        torch.manual_seed(rank)  # each rank drops other units

        text = Text()
        self.dataloader = GlobalLoader(text, GlobalCursor.over(text, global_batch=8, seed=1), rank, world, 2)
        self.step, self.tokens = 0, 0
        self.checkpointer = TitanCheckpointer(
            root,
            model_parts=self.model_parts,
            optimizers=self.optimizers,
            lr_schedulers=self.lr_schedulers,
            dataloader=self.dataloader,
            states={"train_state": self},
            every_steps=5,
        )

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "tokens": self.tokens}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step, self.tokens = state["step"], state["tokens"]

    def train(self, steps: int) -> None:
        self.checkpointer.load()
        batches = iter(self.dataloader)
        try:
            while self.step < steps:
                self.step += 1
                self.train_step(batches)
                self.checkpointer.save(self.step, last_step=self.step == steps)
        finally:
            self.checkpointer.close()

    def train_step(self, batches: Any) -> None:
        self.optimizers.zero_grad()
        for _ in range(self.dataloader.micro_batches):
            batch = next(batches)
            loss = self.model_parts[0](batch) / self.dataloader.micro_batches
            loss.backward()
            self.tokens += batch.numel()
        self.optimizers.step()
        self.lr_schedulers.step()
        print(f"step {self.step} loss {loss.item():.4f}", flush=True)


def train(root: str, steps: int = 30) -> dict[str, Any]:
    trainer = Trainer(root)
    trainer.train(steps)
    return {
        "model": trainer.model_parts[0],
        "optimizers": trainer.optimizers.optimizers,
        "schedulers": trainer.lr_schedulers.schedulers,
        "more": {"train_state": trainer.state_dict()},
    }


if __name__ == "__main__":
    train(sys.argv[1])
