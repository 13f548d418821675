"""The Trainer of Hugging Face transformers, on one process or under accelerate.

    trainer = ResumableTrainer(model=model, args=args, callbacks=[CheckpointCallback("runs/hf", every_steps=100)], ...)
    trainer.train()

The callback saves between steps. To resume, the Trainer asks methods of its own to load the files of a checkpoint, and
counts on from the `trainer_state.json` in it; `Resumable` answers for them, so that the Trainer's own counting puts the
sampler where it was. Written against transformers 5 and accelerate 1.16.
"""

from __future__ import annotations

import dataclasses
import os
import random
import tempfile
from collections.abc import Callable, Mapping
from typing import Any, cast

import numpy as np
import torch

from ckpt.data import dataset_fingerprint
from ckpt.errors import CkptError, StateMismatch, Unsupported
from ckpt.state import PerRank, RngState
from ckpt.trainer.checkpointer import Checkpointer
from ckpt.trainer.hooks.run import Run, framework, hold_streams

with framework("transformers or accelerate", "transformers"):
    import accelerate
    from transformers import Trainer, TrainerCallback, TrainerState
    from transformers.trainer_callback import ExportableState

_ = accelerate  # the Trainer needs it, and says so late


class CheckpointCallback(TrainerCallback):
    """Saves a Trainer's run: between two steps, when the Trainer has logged and evaluated, and once at the end.

    url, options: of the Checkpointer, which is made when training begins. fingerprint: of the data set, any text that
    changes when the data do; None has that of `ckpt.data.dataset_fingerprint`. The Trainer must be `Resumable`.
    """

    def __init__(self, url: str | os.PathLike[str], *, fingerprint: str | None = None, **options: Any) -> None:
        self.url, self.options, self.fingerprint = url, options, fingerprint
        self.run: Run | None = None
        self._seen = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        if self.run is None:
            raise CkptError(
                "CheckpointCallback: this Trainer does not resume from ckpt; use ResumableTrainer, or a class of "
                "Resumable and your own"
            )
        self._seen = state.global_step

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        self._after(state.global_step)

    def on_step_begin(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        self._after(state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        assert self.run is not None
        self._after(state.global_step)
        self.run.finish(state.global_step)

    def _after(self, step: int) -> None:
        if step != self._seen:
            assert self.run is not None
            self._seen = step
            self.run.after(step)


class Resumable:
    """Makes a class of Trainer resume from the root of its `CheckpointCallback`:

        class MyTrainer(Resumable, SFTTrainer): ...

    A run goes on with the same batches if items are the same whenever they are fetched. Raises Unsupported where the
    Trainer would save by itself (`save_strategy`, `enable_jit_checkpoint`), count otherwise (`ignore_data_skip`,
    `auto_find_batch_size`) or keeps its state elsewhere (DeepSpeed), and where fetching draws from the run's random
    streams.
    """

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Collective. Resumes from the newest committed step, if there is one, and trains; see `Trainer.train`.
        resume_from_checkpoint: False begins anew. Raises Preempted, which exits with code 75, once the job was told to
        end."""
        callback = self._callback()
        self._check(resume_from_checkpoint)
        with Checkpointer(callback.url, **callback.options) as ck, tempfile.TemporaryDirectory() as folder:
            counts = _Counts(self)
            self._put_back: Callable[[], None] | None = None
            self._iterator: Any = None
            resumes = resume_from_checkpoint is not False and ck.load({"trainer": counts}, allow_extra=["*"])
            if resumes:
                counts.write(folder)
            self._run = callback.run = Run(ck, _State(self, counts, callback.fingerprint))
            try:
                return super().train(folder if resumes else None, *args, **kwargs)  # type: ignore[misc]
            finally:
                callback.run = None

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Weights come with everything else, below."""

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Called when model, optimizer and scheduler are all made and wrapped."""
        if checkpoint is not None:
            self._run.resume()
            self._put_back = hold_streams(RngState())

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Called right before the first step: after its batches were fetched, or before an epoch begins."""
        if checkpoint is not None:
            assert self._put_back is not None
            self._put_back()

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
        """Fetches the batches of a step: none where the run had ended, which the Trainer does not notice by itself. The
        first fetch of a pass draws a seed; later ones must draw nothing."""
        if self.state.global_step >= self.state.max_steps:  # type: ignore[attr-defined]
            self.control.should_training_stop = True  # type: ignore[attr-defined]
            return [], None
        first, before = epoch_iterator is not self._iterator, _drawn()
        self._iterator = epoch_iterator
        samples = super().get_batch_samples(epoch_iterator, num_batches, device)  # type: ignore[misc]
        if not first and _drawn() != before:
            raise Unsupported(
                "the data set or collator draws from the global random streams when a batch is fetched, so a resumed "
                "run would get other batches; draw from a generator that is seeded by the item, or train with "
                "Checkpointer.steps_of and a ckpt.data.GlobalLoader, which does that"
            )
        return samples

    def _callback(self) -> CheckpointCallback:
        found = [c for c in self.callback_handler.callbacks if isinstance(c, CheckpointCallback)]  # type: ignore[attr-defined]
        if len(found) != 1:
            raise CkptError(f"{type(self).__name__} has {len(found)} CheckpointCallbacks; give it one")
        return found[0]

    def _check(self, resume_from_checkpoint: Any) -> None:
        args: Any = self.args  # type: ignore[attr-defined]
        refused = {
            f"resume_from_checkpoint={resume_from_checkpoint!r}": not isinstance(resume_from_checkpoint, bool | None),
            f"save_strategy={str(args.save_strategy)!r}": str(getattr(args.save_strategy, "value", "")) != "no",
            "enable_jit_checkpoint": getattr(args, "enable_jit_checkpoint", False),
            "ignore_data_skip": args.ignore_data_skip,
            "auto_find_batch_size": args.auto_find_batch_size,
            "DeepSpeed": getattr(self, "is_deepspeed_enabled", False),
        }
        wrong = [name for name, there in refused.items() if there]
        if wrong:
            raise Unsupported(
                f"{', '.join(wrong)}: ckpt saves and resumes this run, all of it and nothing twice; use "
                'save_strategy="no", resume_from_checkpoint=None or False, and leave out the others'
            )


class ResumableTrainer(Resumable, Trainer):
    """`transformers.Trainer`, resuming from ckpt."""


class _State(dict[str, Any]):
    """The state of a Trainer, which makes and wraps its parts after training has begun: they are looked at when the
    state is walked."""

    def __init__(self, trainer: Any, counts: _Counts, fingerprint: str | None) -> None:
        super().__init__()
        self._trainer, self._counts, self._fingerprint = trainer, counts, fingerprint
        self._data: _Data | None = None

    def __iter__(self) -> Any:
        trainer = self._trainer
        self._data = self._data or _Data(trainer, self._fingerprint)
        parts = {
            "model": trainer.model,
            "optimizer": getattr(trainer.optimizer, "optimizer", trainer.optimizer),
            "scheduler": getattr(trainer.lr_scheduler, "scheduler", trainer.lr_scheduler),
            "scaler": getattr(trainer.accelerator, "scaler", None),
            "trainer": self._counts,
            "data": self._data,
            "rng": RngState(),
        }
        self.update({name: part for name, part in parts.items() if part is not None})
        return super().__iter__()


class _Counts:
    """What the Trainer counts and logs: its TrainerState, which each rank has its own of, for it holds times."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._loaded: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        state = dataclasses.asdict(self._trainer.state)
        for name in ("is_local_process_zero", "is_world_process_zero"):
            del state[name]
        owners = [*self._trainer.callback_handler.callbacks, self._trainer.control]
        exported: dict[str, Any] = {}
        for owner in owners:
            if isinstance(owner, ExportableState):
                exported.setdefault(type(owner).__name__, []).append(owner.state())
        return {"state": PerRank({**state, "stateful_callbacks": exported})}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._loaded = dict(state["state"].value)

    def write(self, folder: str) -> None:
        """Writes the file that the Trainer reads."""
        TrainerState(**self._loaded).save_to_json(os.path.join(folder, "trainer_state.json"))


class _Data:
    """What decides which batches follow a step: nothing of it may change."""

    def __init__(self, trainer: Any, fingerprint: str | None) -> None:
        args, dataset = trainer.args, trainer.train_dataset
        size = len(dataset) if hasattr(dataset, "__len__") else None
        if fingerprint is None and size is not None:
            put_back = hold_streams(RngState())
            fingerprint = dataset_fingerprint(dataset)
            put_back()
        self.fixed = {
            "processes": args.world_size,
            "per_device_train_batch_size": args.per_device_train_batch_size,
            "gradient_accumulation_steps": args.gradient_accumulation_steps,
            "seed": args.seed,
            "data_seed": args.data_seed,
            "dataloader_drop_last": args.dataloader_drop_last,
            "train_sampling_strategy": str(getattr(args, "train_sampling_strategy", "random")),
            "split_batches": args.accelerator_config.split_batches,
            "dataset_size": size,
            "fingerprint": fingerprint,
        }

    def state_dict(self) -> dict[str, Any]:
        return dict(self.fixed)

    def check_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, own in self.fixed.items():
            if state.get(name) != own:
                raise StateMismatch(
                    f"data: saved with {name}={state.get(name)!r}, this run has {own!r}, and its batches would not be "
                    "those that follow; use the saved one"
                )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.check_state_dict(state)


def _drawn() -> tuple[Any, ...]:
    """Equal if nothing was drawn between from the global streams of this process."""
    _, words, *place = cast(Any, np.random.get_state(legacy=True))
    return random.getstate(), words.tobytes(), *place, torch.get_rng_state().numpy().tobytes()
