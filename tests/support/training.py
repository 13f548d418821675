"""A training loop for the tiny GPT on the bytes of Python's library, with the same batches on every layout.

    with parallel(tp=2, pp=2), megatron_on_cpu():
        trainer = make_trainer(size, seed=1)
        loss = train_step(trainer, step)

`trainer.model` is the bare GPTModel and `trainer.optimizer` a torch AdamW over its parameters: what a
checkpoint holds. Megatron's DistributedDataParallel averages the gradients of data-parallel replicas, and a
global batch runs through Megatron's own schedule (1F1B where there are pipeline stages). Experts train
without TP only: with it Megatron asks for sequence parallelism, which does not run on the CPU.
"""

import functools
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from tests.support.gpt_oracle import GptSize
from tests.support.tiny_gpt import build_model


@dataclass
class Trainer:
    """A model in training. `wrapped` is Megatron's DDP around `model`; both share their parameters."""

    size: GptSize
    model: Any
    wrapped: Any
    optimizer: torch.optim.AdamW


def make_trainer(size: GptSize, seed: int, lr: float = 1e-3) -> Trainer:
    """Build this rank's model, DDP wrapper and AdamW. Megatron's parallel state must be initialised."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    model = build_model(size, seed)
    ddp = DistributedDataParallelConfig(use_distributed_optimizer=False, overlap_grad_reduce=False)
    wrapped = DistributedDataParallel(model.config, ddp, model)
    # foreach=False: one tensor after the other, so that a tensor's bits do not depend on what is beside it.
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.01, foreach=False)
    return Trainer(size, model, wrapped, optimizer)


@functools.cache
def corpus(limit: int = 1 << 20) -> np.ndarray:
    """The first `limit` bytes of the standard library's top-level sources, in order of their names."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = b""
    for path in sorted(folder.glob("*.py")):
        text += path.read_bytes()
        if len(text) >= limit:
            break
    return np.frombuffer(text[:limit], dtype=np.uint8)


def global_batch(step: int, batch: int, seq: int) -> torch.Tensor:
    """The (batch, seq + 1) tokens of a step, a function of the step alone: each row a piece of the corpus."""
    text = corpus()
    starts = np.random.default_rng([2024, step]).integers(0, len(text) - seq - 1, size=batch)
    return torch.from_numpy(np.stack([text[start : start + seq + 1] for start in starts]).astype(np.int64))


def _microbatches(step: int, batch: int, micro: int, seq: int) -> Iterator[torch.Tensor]:
    """This rank's microbatches of a step: its contiguous rows of the global batch, `micro` at a time."""
    from megatron.core import parallel_state as ps

    rows = batch // ps.get_data_parallel_world_size()
    first = ps.get_data_parallel_rank() * rows
    return iter(global_batch(step, batch, seq)[first : first + rows].split(micro))


def _forward(data: Iterator[torch.Tensor], model: Any) -> tuple[torch.Tensor, Any]:
    tokens = next(data)
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    seq = inputs.shape[1]
    positions = torch.arange(seq).expand_as(inputs).contiguous()
    future = torch.triu(torch.ones(1, 1, seq, seq, dtype=torch.bool), 1)
    output = model(inputs, positions, future, labels=targets)

    def mean_loss(per_token: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        loss = per_token.float().mean()
        return loss, {"loss": loss.detach().clone()}  # the schedule divides its own in place

    return output, mean_loss


def train_step(trainer: Trainer, step: int, batch: int = 16, micro: int = 2) -> float:
    """One optimizer step on the step's global batch. Gives the mean loss over that batch, on every rank."""
    trainer.wrapped.zero_grad_buffer()
    loss = run_batch(trainer.wrapped, trainer.size, step, batch, micro)
    for param in trainer.model.parameters():
        param.grad = param.main_grad.to(param.dtype)
    trainer.optimizer.step()
    for param in trainer.model.parameters():
        param.grad = None
    return loss


def run_batch(wrapped: Any, size: GptSize, step: int, batch: int, micro: int) -> float:
    """Runs the step's global batch forward and backward through Megatron's schedule. Gives the mean loss over the
    batch, on every rank."""
    return run_microbatches(wrapped, size, _microbatches(step, batch, micro, size.seq), batch, micro)


def run_microbatches(wrapped: Any, size: GptSize, data: Iterator[torch.Tensor], batch: int, micro: int) -> float:
    """`run_batch` on this rank's microbatches of any global batch, each (micro, seq + 1) tokens."""
    from megatron.core import parallel_state as ps
    from megatron.core.pipeline_parallel import get_forward_backward_func

    dp = ps.get_data_parallel_world_size()
    if batch % (dp * micro):
        raise ValueError(f"a batch of {batch} does not divide into microbatches of {micro} on {dp} replicas")
    losses = get_forward_backward_func()(
        forward_step_func=_forward,
        data_iterator=data,
        model=[wrapped],
        num_microbatches=batch // dp // micro,
        seq_length=size.seq,
        micro_batch_size=micro,
        forward_only=False,
    )
    return _mean_over_job([float(entry["loss"]) for entry in losses], batch // micro)


def _mean_over_job(losses: list[float], count: int) -> float:
    """Each loss lives on the last stage's TP ranks; count it once, add over the job, tell every rank."""
    from megatron.core import parallel_state as ps

    here = ps.is_pipeline_last_stage() and ps.get_tensor_model_parallel_rank() == 0
    total = torch.tensor([sum(losses) if here else 0.0], dtype=torch.float64)
    dist.all_reduce(total)
    return float(total) / count
