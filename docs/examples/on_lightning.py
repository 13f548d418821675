"""PyTorch Lightning, checkpointed by ckpt:

    python docs/examples/on_lightning.py runs/lightning

or on several ranks: `torchrun --nproc-per-node 2 docs/examples/on_lightning.py runs/lightning`. Stop it as you like,
and start it again.
"""

import os
import sys
from typing import Any

import lightning
import torch
from tiny import ByteModel, Text

from ckpt.data import GlobalCursor, GlobalLoader
from ckpt.trainer.hooks.lightning import CheckpointCallback

GLOBAL_BATCH, MICRO_BATCH = 8, 2


class Module(lightning.LightningModule):
    def __init__(self, text: Text, cursor: GlobalCursor) -> None:
        super().__init__()
        self.model, self.text, self.cursor = ByteModel(), text, cursor

    def train_dataloader(self) -> GlobalLoader:
        rank, world = self.trainer.global_rank, self.trainer.world_size
        return GlobalLoader(self.text, self.cursor, rank, world, MICRO_BATCH, ahead=True)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.model(batch)

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=30)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def train(root: str, steps: int = 30, kind: Any = Module, **options: Any) -> dict[str, Any]:
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    lightning.seed_everything(0)
    text = Text()
    cursor = GlobalCursor.over(text, global_batch=GLOBAL_BATCH, seed=1, epoch_end="drop")
    module = kind(text, cursor)
    trainer = lightning.Trainer(
        accelerator="auto" if torch.cuda.is_available() else "cpu",
        devices=ranks,
        max_steps=steps,
        accumulate_grad_batches=GLOBAL_BATCH // MICRO_BATCH // ranks,
        callbacks=[*options.pop("callbacks", []), CheckpointCallback(root, cursor, every_steps=5)],
        enable_checkpointing=False,  # ckpt saves
        enable_progress_bar=False,
        logger=False,
        **options,
    )
    torch.manual_seed(trainer.global_rank)  # each rank drops other units
    trainer.fit(module)
    return {
        "model": module,
        "optimizers": trainer.optimizers,
        "schedulers": [config.scheduler for config in trainer.lr_scheduler_configs],
        "more": {"step": trainer.global_step, "loops": trainer.fit_loop.state_dict()},
    }


if __name__ == "__main__":
    train(sys.argv[1])
