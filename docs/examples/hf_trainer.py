"""The Trainer of Hugging Face transformers, checkpointed by ckpt:

    python docs/examples/hf_trainer.py runs/hf

or on several ranks: `torchrun --nproc-per-node 2 docs/examples/hf_trainer.py runs/hf`. Stop it as you like, and start
it again.
"""

import sys
from typing import Any

import torch
from tiny import ByteModel, Text, start_ranks
from transformers import TrainingArguments, set_seed

from ckpt.trainer.hooks.transformers import CheckpointCallback, ResumableTrainer


class Model(ByteModel):
    """Gives its loss as the Trainer wants it."""

    def forward(self, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": super().forward(tokens)}


def train(root: str, steps: int = 30) -> dict[str, Any]:
    _, world = start_ranks()
    set_seed(0)
    args = TrainingArguments(
        output_dir=f"{root}-logs",
        per_device_train_batch_size=2,
        gradient_accumulation_steps=4 // world,
        max_steps=steps,
        learning_rate=1e-2,
        logging_steps=5,
        use_cpu=not torch.cuda.is_available(),
        remove_unused_columns=False,
        report_to="none",
        disable_tqdm=True,
        ddp_find_unused_parameters=False,
        save_strategy="no",  # ckpt saves
    )
    trainer = ResumableTrainer(
        model=Model(),
        args=args,
        train_dataset=Text(),
        data_collator=lambda items: {"tokens": torch.stack(items)},
        callbacks=[CheckpointCallback(root, every_steps=5)],
    )
    trainer.train()
    return {
        "model": trainer.model,
        "optimizers": [trainer.optimizer.optimizer],
        "schedulers": [trainer.lr_scheduler],
        "more": {"step": trainer.state.global_step, "epoch": trainer.state.epoch},
    }


if __name__ == "__main__":
    train(sys.argv[1])
