"""What the hooks of Hugging Face and Lightning refuse, and what they resume on purpose; played as an example is, where
both have been imported already."""

import random
from pathlib import Path
from typing import Any

import hf_trainer
import lightning
import on_lightning
import pytest
import torch
from lightning.pytorch.plugins.environments import SLURMEnvironment
from tiny import ByteModel, Text
from transformers import Trainer, TrainingArguments, set_seed

import ckpt
from ckpt.data import GlobalCursor, GlobalLoader
from ckpt.trainer.hooks import lightning as for_lightning
from ckpt.trainer.hooks import transformers as for_trainer


def train(root: str, steps: int) -> dict[str, Any]:
    _hugging_face(Path(root))
    _lightning(Path(root))
    return {"model": ByteModel(), "optimizers": [], "schedulers": []}


def _steps(root: Path) -> list[int]:
    with ckpt.Checkpointer(root, read_only=True) as ck:
        return ck.steps()


# --- Hugging Face ---


class Moving(Text):
    """Windows with a byte changed at random whenever one is fetched."""

    def __getitem__(self, index: int) -> torch.Tensor:
        tokens = super().__getitem__(index)
        tokens[0] = random.randrange(256)
        return tokens


def _trainer(root: Path, kind: Any = for_trainer.ResumableTrainer, text: Any = None, **options: Any) -> Any:
    set_seed(0)
    usual: dict[str, Any] = {"per_device_train_batch_size": 2, "max_steps": 2, "save_strategy": "no", **options}
    callbacks = usual.pop("callbacks", [for_trainer.CheckpointCallback(root)])
    args = TrainingArguments(
        f"{root}-logs", use_cpu=True, remove_unused_columns=False, report_to="none", disable_tqdm=True, **usual
    )
    return kind(
        model=hf_trainer.Model(),
        args=args,
        train_dataset=text or Text(),
        data_collator=lambda items: {"tokens": torch.stack(items)},
        callbacks=callbacks,
    )


def _hugging_face(root: Path) -> None:
    here = root / "hf"
    for options, named in (
        ({"save_strategy": "steps"}, "save_strategy='.*'"),
        ({"ignore_data_skip": True}, "ignore_data_skip"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size"),
        ({"enable_jit_checkpoint": True}, "enable_jit_checkpoint"),
    ):
        with pytest.raises(ckpt.Unsupported, match=named):
            _trainer(here, **options).train()
    with pytest.raises(ckpt.Unsupported, match="resume_from_checkpoint='somewhere'"):
        _trainer(here).train("somewhere")
    deepspeed = _trainer(here)
    deepspeed.is_deepspeed_enabled = True
    with pytest.raises(ckpt.Unsupported, match="DeepSpeed: ckpt saves and resumes this run"):
        deepspeed.train()
    with pytest.raises(ckpt.CkptError, match="does not resume from ckpt"):
        _trainer(here, Trainer).train()
    with pytest.raises(ckpt.CkptError, match="has 0 CheckpointCallbacks"):
        _trainer(here, callbacks=[]).train()
    with pytest.raises(ckpt.Unsupported, match="draws from the global random streams"):
        _trainer(here, text=Moving()).train()
    assert not here.exists() or _steps(here) == []

    _trainer(here).train()
    for options, named in (
        ({"per_device_train_batch_size": 4}, "per_device_train_batch_size=2"),
        ({"data_seed": 7}, "data_seed=None"),
        ({"text": Text(70)}, "dataset_size=80"),
    ):
        other = _trainer(here, **{"max_steps": 3, **options})
        before = [p.detach().clone() for p in other.model.parameters()]
        with pytest.raises(ckpt.StateMismatch, match=f"data: saved with {named}"):
            other.train()
        assert all(map(torch.equal, before, other.model.parameters()))
    on = _trainer(here, max_steps=3)
    on.train()
    assert on.state.global_step == 3 and _steps(here) == [2, 3]
    done = _trainer(here, max_steps=3)
    done.train()  # there is nothing left to do
    assert done.state.global_step == 3 and _steps(here) == [2, 3]
    assert all(map(torch.equal, on.model.parameters(), done.model.parameters()))
    new = _trainer(here, max_steps=1)
    new.train(False)
    assert new.state.global_step == 1 and _steps(here) == [1]


# --- Lightning ---


class Hooked(on_lightning.Module):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["more"] = 1


class Strict(on_lightning.Module):
    def train_dataloader(self) -> GlobalLoader:
        return GlobalLoader(self.text, self.cursor, 0, 1, 2)


class Foreign(on_lightning.Module):
    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(self.text, batch_size=2)


class Plateau(on_lightning.Module):
    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step", "monitor": "x"}}


def _fit(root: Path, kind: Any = on_lightning.Module, steps: int = 2, **options: Any) -> Any:
    lightning.seed_everything(0)
    text = Text()
    cursor = GlobalCursor.over(text, global_batch=4)
    more: dict[str, Any] = {"enable_checkpointing": False, "accumulate_grad_batches": 2, **options}
    extra, path = more.pop("extra", None), more.pop("ckpt_path", None)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=steps,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
        callbacks=[for_lightning.CheckpointCallback(root, cursor, extra=extra)],
        **more,
    )
    trainer.fit(kind(text, cursor), ckpt_path=path)
    return trainer


def _lightning(root: Path) -> None:
    here, own = root / "lightning", root / "lightning.ckpt"
    _fit(root / "another").save_checkpoint(own)
    for options, named in (
        ({"enable_checkpointing": True}, "ModelCheckpoint: pass enable_checkpointing=False"),
        ({"kind": Hooked}, "on_save_checkpoint: keep that state"),
        ({"kind": Strict}, "train_dataloader is a GlobalLoader"),
        ({"kind": Foreign}, "train_dataloader is a DataLoader"),
        ({"kind": Plateau}, "ReduceLROnPlateau by step: use an interval of epochs"),
        ({"ckpt_path": own}, "ckpt_path: leave it out"),
    ):
        with pytest.raises(ckpt.Unsupported, match=named):
            _fit(here, **options)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("JOB_ID", "NTASKS", "PROCID", "LOCALID", "NODEID"):  # of a job of one task
            patch.setenv(f"SLURM_{name}", str(int(name == "NTASKS")))
        with pytest.raises(ckpt.Unsupported, match=r"auto_requeue: use SLURMEnvironment\(auto_requeue=False\)"):
            _fit(here, plugins=[SLURMEnvironment(auto_requeue=True)])
    with pytest.raises(ckpt.CkptError, match="accumulate_grad_batches=1, but a global batch has 2"):
        _fit(here, accumulate_grad_batches=1)
    assert not here.exists() or _steps(here) == []

    average = {"weights": torch.zeros(3), "n": 0}
    average["weights"] += 5
    _fit(here, extra={"average": average})
    again = {"weights": torch.zeros(3), "n": 1}
    assert _fit(here, steps=3, extra={"average": again}).global_step == 3
    assert again["n"] == 0 and again["weights"].tolist() == [5.0] * 3
    assert _steps(here) == [2, 3]
    assert _fit(here, steps=3, extra={"average": again}).global_step == 3  # there is nothing left to do
    assert _steps(here) == [2, 3]
