"""Megatron Core with a loop in the manner of Megatron-LM's own, checkpointed by ckpt:

    torchrun --nproc-per-node 2 docs/examples/on_megatron.py runs/megatron

A GPTModel in bfloat16, data parallel, with the DistributedOptimizer and an all-gather of parameters that overlaps the
next forward pass. On a machine without a GPU it uses the stand-ins of this repository's tests.
"""

import contextlib
import logging
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig
from tiny import SEQUENCE, Text

from ckpt.trainer.hooks.megatron import MegatronHook

GLOBAL_BATCH, MICRO_BATCH = 8, 2


def build() -> tuple[list[Any], Any, Any]:
    """Model chunks, optimizer and scheduler, as Megatron-LM's `setup_model_and_optimizer` gives them."""
    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        finalize_model_grads_func=finalize_model_grads,
    )
    torch.manual_seed(1)
    spec = get_gpt_layer_local_spec()
    model = GPTModel(config, spec, vocab_size=256, max_sequence_length=SEQUENCE).bfloat16()
    overlap = DistributedDataParallelConfig(
        use_distributed_optimizer=True, overlap_param_gather=True, overlap_grad_reduce=True, grad_reduce_in_fp32=True
    )
    chunks = [DistributedDataParallel(config, overlap, model)]
    adam = OptimizerConfig(optimizer="adam", lr=1e-2, min_lr=1e-4, bf16=True, use_distributed_optimizer=True)
    adam.overlap_param_gather = True
    optimizer = get_megatron_optimizer(adam, chunks, use_gloo_process_groups=False)
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=1e-2,
        min_lr=1e-4,
        lr_warmup_steps=40,
        lr_decay_steps=400,
        lr_decay_style="cosine",
        start_wd=0.01,
        end_wd=0.1,
        wd_incr_steps=400,
        wd_incr_style="linear",
    )
    return chunks, optimizer, scheduler


def microbatches(text: Text, consumed: int) -> Any:
    """This rank's part of the global batch that follows so many samples."""
    rank, world = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    share = GLOBAL_BATCH // world
    for first in range(consumed + rank * share, consumed + (rank + 1) * share, MICRO_BATCH):
        yield torch.stack([text[i % len(text)] for i in range(first, first + MICRO_BATCH)])


def forward_step(batches: Any, model: Any) -> tuple[torch.Tensor, Any]:
    tokens = next(batches)
    future = torch.triu(torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool), 1)
    positions = torch.arange(SEQUENCE).expand(len(tokens), SEQUENCE)
    losses = model(tokens[:, :-1].contiguous(), positions, future, labels=tokens[:, 1:].contiguous())
    return losses.float().mean(), lambda loss: (loss, {"loss": loss.detach().clone()})


def train_step(model: list[Any], optimizer: Any, scheduler: Any, batches: Any) -> None:
    for chunk in model:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    losses = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=batches,
        model=model,
        num_microbatches=GLOBAL_BATCH // MICRO_BATCH // parallel_state.get_data_parallel_world_size(),
        seq_length=SEQUENCE,
        micro_batch_size=MICRO_BATCH,
        forward_only=False,
    )
    optimizer.step()
    scheduler.step(increment=GLOBAL_BATCH)
    print(f"samples {scheduler.num_steps} loss {losses[0]['loss'].item():.4f}", flush=True)


def train(root: str, steps: int = 30) -> dict[str, Any]:
    with on_this_machine():
        model_parallel_cuda_manual_seed(1 + dist.get_rank())
        model, optimizer, scheduler = build()
        text, args = (
            Text(),
            SimpleNamespace(consumed_train_samples=0, skipped_train_samples=0, consumed_valid_samples=0),
        )
        flops: float = 0

        # In Megatron-LM: training.save_checkpoint, training.load_checkpoint, training.checkpoint_and_decide_exit =
        # hook.save_checkpoint, hook.load_checkpoint, hook.checkpoint_and_decide_exit, and get_args for the lambda.
        with MegatronHook(root, lambda: args, every_steps=5) as hook:
            iteration, flops = hook.load_checkpoint(model, optimizer, scheduler)
            while iteration < steps:
                train_step(model, optimizer, scheduler, microbatches(text, args.consumed_train_samples))
                iteration += 1
                args.consumed_train_samples += GLOBAL_BATCH
                flops += 1e6
                hook.checkpoint_and_decide_exit(model, optimizer, scheduler, iteration, flops)
            hook.save_checkpoint(iteration, model, optimizer, scheduler, flops)
    singles = [single.optimizer for single in optimizer.chained_optimizers]
    return {
        "model": model[0].module,
        "optimizers": singles,
        "schedulers": [scheduler],
        "more": {"args": vars(args), "flops": flops},
    }


@contextlib.contextmanager
def on_this_machine() -> Any:
    """Megatron's process groups, and on a machine without a GPU what lets it run there."""
    if not dist.is_initialized():
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        os.environ.setdefault("MASTER_PORT", "29533")
        rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo", rank=rank, world_size=world)
    with contextlib.ExitStack() as stack:
        if not torch.cuda.is_available():
            sys.path.append(str(Path(__file__).parents[2]))
            from tests.support.megatron_cpu import megatron_on_cpu

            stack.enter_context(megatron_on_cpu())
            # There Megatron's two generators are one, about which it warns at every step.
            logging.getLogger("megatron.core.tensor_parallel.random").setLevel(logging.ERROR)
        parallel_state.initialize_model_parallel()
        try:
            yield
        finally:
            parallel_state.destroy_model_parallel()


if __name__ == "__main__":
    train(sys.argv[1])
