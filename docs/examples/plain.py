"""A plain loop with one line of ckpt around its steps:

    python docs/examples/plain.py runs/plain

or on several ranks: `torchrun --nproc-per-node 2 docs/examples/plain.py runs/plain`. Stop it as you like, and start it
again: it goes on from the newest committed step.
"""

import sys
from typing import Any

import torch
from tiny import ByteModel, Text, start_ranks
from torch.nn.parallel import DistributedDataParallel

import ckpt
from ckpt.data import GlobalCursor, GlobalLoader


def train(root: str, steps: int = 30) -> dict[str, Any]:
    rank, world = start_ranks()
    torch.manual_seed(0)
    model = ByteModel()
    wrapped = DistributedDataParallel(model) if world > 1 else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
    torch.manual_seed(rank)  # each rank drops other units

    text = Text()
    cursor = GlobalCursor.over(text, global_batch=8, seed=1)
    loader = GlobalLoader(text, cursor, rank, world, micro_batch=2)
    state = ckpt.TrainState(model=model, optimizer=optimizer, scheduler=scheduler, rng=ckpt.RngState(), data=cursor)

    with ckpt.Checkpointer(root, every_steps=5) as ck:
        for step, batch in ck.steps_of(loader, state, until=steps):
            loss = wrapped(batch) / loader.micro_batches
            loss.backward()
            if loader.complete:  # all microbatches of the global batch
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                print(f"rank {rank} step {step} loss {loss.item():.4f}", flush=True)
    return {"model": model, "optimizers": [optimizer], "schedulers": [scheduler]}


if __name__ == "__main__":
    train(sys.argv[1])
