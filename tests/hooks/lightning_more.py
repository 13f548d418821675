"""The example of Lightning with more in it: validation within epochs and after them, whose loader draws from the run's
random streams, early stopping, dropout in a schedule of epochs."""

from typing import Any

import on_lightning
import torch
from lightning.pytorch.callbacks import EarlyStopping, Timer


class Module(on_lightning.Module):
    def val_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(self.text, batch_size=40)  # draws a seed each time it is begun

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.model(batch) + torch.rand(()))


def train(root: str, steps: int) -> dict[str, Any]:
    watch = EarlyStopping("val_loss", patience=100, check_on_train_epoch_end=False)
    left = on_lightning.train(
        root, steps, Module, callbacks=[watch, Timer()], val_check_interval=10, check_val_every_n_epoch=None
    )
    return {**left, "more": {**left["more"], "watch": watch.state_dict()}}
