"""The order in which Megatron Bridge (training/setup.py, training/train.py) calls its checkpoint manager, around the
model of docs/examples/on_megatron.py. Bridge itself does not run without GPUs."""

from types import SimpleNamespace
from typing import Any

import torch.distributed as dist
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from on_megatron import GLOBAL_BATCH, build, microbatches, on_this_machine, train_step
from tiny import Text

from ckpt.trainer.hooks.bridge import BridgeManager


def train(root: str, steps: int) -> dict[str, Any]:
    with on_this_machine():
        model_parallel_cuda_manual_seed(1 + dist.get_rank())
        counted = SimpleNamespace(
            step=0,
            consumed_train_samples=0,
            skipped_train_samples=0,
            consumed_valid_samples=0,
            floating_point_operations_so_far=0,
        )
        state = SimpleNamespace(train_state=counted)
        manager: Any = BridgeManager(SimpleNamespace(save=root, async_save=True))
        model, optimizer, scheduler = build()
        parts = {"state": state, "model": model, "optimizer": optimizer, "opt_param_scheduler": scheduler}
        parts = {**parts, "pg_collection": None, "module_name": None}
        if manager.checkpointing_context["local_checkpoint_manager"].find_latest() != -1:
            manager.load(SimpleNamespace(**parts, strict=True, skip_load_to_model_and_opt=False))

        def save() -> None:
            flops, data = counted.floating_point_operations_so_far, iter(())
            more = {"num_floating_point_operations_so_far": flops, "train_data_iterator": data}
            manager.save(SimpleNamespace(**parts, **more, non_persistent_ckpt=False), None)

        text = Text()
        while counted.step < steps:
            manager.finalize_async_saves(state=state, blocking=False)
            train_step(model, optimizer, scheduler, microbatches(text, counted.consumed_train_samples))
            counted.step += 1
            counted.consumed_train_samples += GLOBAL_BATCH
            counted.floating_point_operations_so_far += 10**6
            if counted.step % 5 == 0:
                save()
        if counted.step % 5:
            save()
        for _ in range(2):  # at the end of training, and of the run
            manager.finalize_async_saves(state=state, blocking=True, terminate=True)
    return {
        "model": model[0].module,
        "optimizers": [single.optimizer for single in optimizer.chained_optimizers],
        "schedulers": [scheduler],
        "more": {"train_state": vars(counted)},
    }
