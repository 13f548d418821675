"""What the hooks of Megatron refuse, that parameters are synchronised before a capture, and that a growing batch size
goes on where it was; played as an example is, on two data-parallel ranks."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import num_microbatches_calculator
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from on_megatron import build, microbatches, on_this_machine, train_step
from tiny import Text

import ckpt
from ckpt.trainer.hooks.bridge import BridgeManager
from ckpt.trainer.hooks.megatron import MegatronHook, megatron_layout, sync_parameters


def train(root: str, steps: int) -> dict[str, Any]:
    with on_this_machine():
        model_parallel_cuda_manual_seed(1)
        model, optimizer, scheduler = build()
        assert megatron_layout() == ckpt.Layout(etp=1, dp=dist.get_world_size())
        for consumed in (0, 8):  # the first step has a learning rate of 0
            train_step(model, optimizer, scheduler, microbatches(Text(), consumed))
        _out_of_date(root, model, optimizer)
        _refused(root, model, optimizer, scheduler)
        _growing(root, model, optimizer, scheduler)
        singles = [single.optimizer for single in optimizer.chained_optimizers]
        return {"model": model[0].module, "optimizers": singles, "schedulers": [scheduler]}


def _out_of_date(root: str, model: list[Any], optimizer: Any) -> None:
    """After a step each rank has only its own part of the new parameters."""
    with ckpt.Checkpointer(f"{root}/plain", megatron_layout()) as ck:
        with pytest.raises(ckpt.StateMismatch):
            ck.save(1, {"model": model, "optimizer": optimizer})
        sync_parameters(model, optimizer)
        ck.save(1, {"model": model, "optimizer": optimizer})
        master = optimizer.chained_optimizers[0].shard_fp32_from_float16_groups[0][0]
        with torch.no_grad():
            master.view(-1)[:1] += 1
        with pytest.raises(ckpt.StateMismatch, match="but its fp32 master is"):
            ck.save(2, {"model": model, "optimizer": optimizer})
        ck.load({"model": model, "optimizer": optimizer})


def _refused(root: str, model: list[Any], optimizer: Any, scheduler: Any) -> None:
    parts = (model, optimizer, scheduler)
    energon = SimpleNamespace(iterable=SimpleNamespace(save_state=lambda: None))
    with MegatronHook(f"{root}/hook", asynchronous=False) as hook:
        for options in ({"non_persistent_ckpt": True}, {"release": True}):
            with pytest.raises(ckpt.Unsupported, match="no non-persistent and no release"):
                hook.save_checkpoint(1, *parts, 0, **options)
        with pytest.raises(ckpt.Unsupported, match="has a state of its own"):
            hook.save_checkpoint(1, *parts, 0, train_data_iterator=[energon])
        for options in ({"load_arg": "pretrained_checkpoint"}, {"strict": False}, {"skip_load_to_model_and_opt": True}):
            with pytest.raises(ckpt.Unsupported, match="resumes its own root"):
                hook.load_checkpoint(*parts, **options)
        assert hook.load_checkpoint(*parts) == (0, 0)
        hook.save_checkpoint(1, *parts, 1.5, None, tp_group=None, rng_state_key_prefix="")
        hook.save_checkpoint(1, *parts, 1.5)  # what has been saved is not saved again
        assert hook.load_checkpoint(model, None, None) == (1, 1.5)
    with pytest.raises(ckpt.Unsupported, match=r"checkpoint\.save is not set"):
        BridgeManager(SimpleNamespace(save=None, async_save=False)).make_hook()
    manager = BridgeManager(SimpleNamespace(save=f"{root}/bridge", async_save=False))
    with pytest.raises(ckpt.Unsupported, match="module 'vision' of several"):
        manager.save(SimpleNamespace(module_name="vision"))
    with pytest.raises(ckpt.Unsupported, match="callbacks for on_checkpoint_save"):
        manager.save(SimpleNamespace(module_name=None), SimpleNamespace(has_callbacks=lambda name: True))


def _growing(root: str, *parts: Any) -> None:
    """A global batch of 4 samples grows by 4 after each 100 of 300 samples; a rank's microbatches have 2."""
    args = SimpleNamespace(consumed_train_samples=250, skipped_train_samples=3, consumed_valid_samples=5)
    with MegatronHook(f"{root}/growing", lambda: args, every_steps=1) as hook:
        hook.save_checkpoint(1, *parts, 0)
        assert not hook.checkpoint_and_decide_exit(*parts, 1, 0)  # both want this step, which is saved once
        num_microbatches_calculator.init_num_microbatches_calculator(0, [4, 4, 300], 16, 2, dist.get_world_size())
        try:
            assert num_microbatches_calculator.get_num_microbatches() == 1
            vars(args).update(dict.fromkeys(vars(args), 0))
            assert hook.load_checkpoint(*parts) == (1, 0)
            assert list(vars(args).values()) == [250, 3, 5]
            assert num_microbatches_calculator.get_num_microbatches() == 3
        finally:
            num_microbatches_calculator.unset_num_microbatches_calculator()
    assert len(list(Path(root, "growing", "attempts").glob("*/*"))) == 1
