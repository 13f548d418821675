"""A real Megatron GPT with the invariant layers, in training on CPU.

    with parallel(tp=2, pp=2), megatron_on_cpu():
        trainer = make_trainer(size, contract, zero=True)
        loss, norm = train_step(trainer)

Sizes are those of `tiny_gpt`; data come from `training.global_batch`, so that every layout has the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ckpt import invariant as inv
from tests.support.gpt_oracle import GptSize
from tests.support.tiny_gpt import make_config, place
from tests.support.training import global_batch


@dataclass
class InvariantTrainer:
    size: GptSize
    contract: inv.Contract
    granules: inv.Granules
    step: Any
    chunks: list[Any]
    wrapped: list[Any]
    optimizer: Any
    number: int = 0

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds; plain values are put back into this dict, so keep it."""
        model = self.chunks[0] if len(self.chunks) == 1 else self.chunks
        return {"model": model, "optimizer": self.optimizer, "rng": self.granules.rng, "step": self.number}


def make_trainer(
    size: GptSize,
    contract: inv.Contract,
    *,
    zero: bool = False,
    sequence_parallel: bool = False,
    vpp: int = 1,
    clip: float = 1.0,
    rope: bool = False,
    norm: str = "LayerNorm",
) -> InvariantTrainer:
    """This rank's part; needs `megatron_on_cpu()` and Megatron's parallel state."""
    from megatron.core import parallel_state as ps
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    from ckpt.invariant import megatron as im

    here = place()
    group = ps.get_tensor_model_parallel_group() if here.tp > 1 else None
    granules = inv.Granules(contract, group, sequence_parallel=sequence_parallel)
    step = im.Step(granules, clip=clip)
    config = make_config(
        size,
        here,
        virtual_pipeline_model_parallel_size=vpp if vpp > 1 else None,
        sequence_parallel=sequence_parallel and here.tp > 1,
        normalization=norm,
        perform_initialization=False,
        calculate_per_token_loss=True,
        # Two stages are each other's neighbours on both sides; then Megatron's interleaved schedule needs this.
        overlap_p2p_comm=vpp > 1 and here.pp == 2,
        batch_p2p_comm=not (vpp > 1 and here.pp == 2),
        finalize_model_grads_func=step.finalize,
    )
    chunks = []
    for stage in range(vpp):
        options = {"vp_stage": stage} if vpp > 1 else {}
        model = im.GPTModel(
            config,
            granules,
            vocab_size=size.vocab,
            max_sequence_length=size.seq,
            pre_process=ps.is_pipeline_first_stage(ignore_virtual=False, **options),
            post_process=ps.is_pipeline_last_stage(ignore_virtual=False, **options),
            share_embeddings_and_output_weights=size.tied,
            position_embedding_type="rope" if rope else "learned_absolute",
            **options,
        )
        model.to(size.dtype)  # Megatron's position embedding is fp32 until then
        im.initialise_(model, granules)
        chunks.append(model)
    ddp = DistributedDataParallelConfig(use_distributed_optimizer=zero, grad_reduce_in_fp32=True)
    wrapped = [DistributedDataParallel(config, ddp, chunk) for chunk in chunks]
    options = OptimizerConfig(
        optimizer="adam",
        lr=1e-2,
        weight_decay=0.01,
        clip_grad=0.0,
        bf16=size.dtype == torch.bfloat16,
        params_dtype=size.dtype,
        use_distributed_optimizer=zero,
    )
    optimizer = get_megatron_optimizer(options, wrapped, use_gloo_process_groups=False)
    return InvariantTrainer(size, contract, granules, step, chunks, wrapped, optimizer)


def train_step(trainer: InvariantTrainer) -> tuple[float, float]:
    """One optimizer step on the next global batch. The mean loss and the gradients' norm, on every rank."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    for chunk in trainer.wrapped:
        chunk.zero_grad_buffer()
    trainer.optimizer.zero_grad()
    mine = trainer.step.microbatches()
    data = [_numbered(trainer, mine) for _ in trainer.wrapped]
    found = get_forward_backward_func()(
        forward_step_func=lambda iterator, model: _forward(trainer, iterator, model),
        data_iterator=data if len(data) > 1 else data[0],
        model=trainer.wrapped,
        num_microbatches=len(mine),
        seq_length=trainer.size.seq,
        micro_batch_size=trainer.contract.microbatch,
        forward_only=False,
    )
    trainer.optimizer.step()
    trainer.granules.rng.advance()
    trainer.number += 1
    return _loss(trainer, mine, [entry["loss"] for entry in found]), trainer.step.norm


def _numbered(trainer: InvariantTrainer, mine: range) -> Iterator[tuple[int, torch.Tensor]]:
    """This rank's microbatches of the step, each with its number."""
    batch = global_batch(trainer.number, trainer.contract.batch, trainer.size.seq)
    rows = batch.split(trainer.contract.microbatch)
    return ((number, rows[number]) for number in mine)


def _forward(trainer: InvariantTrainer, data: Iterator[tuple[int, torch.Tensor]], model: Any) -> tuple[Any, Any]:
    number, tokens = next(data)
    trainer.granules.begin(number)
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    positions = torch.arange(inputs.shape[1]).expand_as(inputs).contiguous()
    output = model(inputs, positions, None, labels=targets)

    def summed(per_token: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        loss = per_token.sum()
        return loss, torch.tensor(per_token.numel(), dtype=torch.int), {"loss": loss.detach().clone()}

    return output, summed


def _loss(trainer: InvariantTrainer, mine: range, losses: list[torch.Tensor]) -> float:
    from megatron.core import parallel_state as ps

    mean = torch.zeros(1)
    if ps.is_pipeline_last_stage():
        leaves = inv.Accumulator(mine.start, trainer.contract.microbatches)
        for loss in losses:
            leaves.add(loss.reshape(1))
        mean = inv.canonical_all_reduce(leaves, ps.get_data_parallel_group())
        mean.div_(trainer.contract.batch * trainer.size.seq)
    dist.broadcast(mean, ps.get_pipeline_model_parallel_last_rank(), group=ps.get_pipeline_model_parallel_group())
    return float(mean)
