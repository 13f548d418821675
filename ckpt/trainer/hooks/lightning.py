"""PyTorch Lightning: a callback that saves and resumes `Trainer.fit`.

    cursor = GlobalCursor.over(dataset, global_batch=32)
    trainer = Trainer(callbacks=[CheckpointCallback("runs/x", cursor, every_steps=100)], enable_checkpointing=False)

The state is saved between two batches: when the next one has begun, for by then Lightning has validated and counted.
What its loops have counted for that next one is taken off again. Written against lightning 2.6.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping
from typing import Any

from ckpt.data import Cursor, GlobalLoader
from ckpt.errors import CkptError, Unsupported
from ckpt.state import PerRank, RngState
from ckpt.trainer.checkpointer import Checkpointer
from ckpt.trainer.hooks.run import Run, framework, hold_streams

with framework("PyTorch Lightning", "lightning"):
    from lightning.pytorch.callbacks import Callback, Timer
    from lightning.pytorch.utilities.model_helpers import is_overridden


class CheckpointCallback(Callback):
    """Saves and resumes the fitting of a Trainer. Collective over its ranks.

    url, options: of the Checkpointer, which is made when fitting begins. data: the cursor of the training data, which
    the `GlobalLoader` of `train_dataloader` has too; make that with `ahead=True`, for Lightning fetches a batch before
    it is needed. extra: further entries of the state, by name.

    Raises Unsupported when fitting begins where Lightning would save or load by itself (ModelCheckpoint of whole
    states, ckpt_path, auto_requeue of SLURMEnvironment), and for state that it cannot see (`on_save_checkpoint`).
    """

    def __init__(
        self, url: str | os.PathLike[str], data: Cursor[Any], *, extra: Mapping[str, Any] | None = None, **options: Any
    ) -> None:
        self._url, self._options, self._cursor, self._extra = url, options, data, dict(extra or {})
        self._run: Run | None = None
        self._put_back: Callable[[], None] | None = None
        self._seen = self._batches = 0  # steps that were dealt with; microbatches since fitting began

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Loads the newest committed step; everything is made and wrapped, and no batch has been fetched."""
        _check(trainer, pl_module)
        loops = _Loops(trainer)
        run = self._run = Run(Checkpointer(self._url, **self._options), self._state(trainer, pl_module, loops))
        self._batches, self._put_back = 0, None
        self._seen = run.resume()
        if run.saved is not None:
            loops.restart()
            self._put_back = hold_streams(RngState())

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._running.listen()
        loop = trainer.fit_loop.epoch_loop
        if loop.restarting and loop._should_check_val_fx(trainer.fit_loop._data_fetcher):
            loop._batches_that_stepped -= 1  # Lightning will take the validation that was done for a batch

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self._between(trainer.global_step)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self._between(trainer.global_step)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        loader = self._loader(trainer)
        self._batches += 1
        if self._batches % loader.micro_batches == 0:
            loader.mark_consumed()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._between(trainer.global_step)
        self._running.finish(trainer.global_step)
        self._close()

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Where the run had ended before, there was no training."""
        self._close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Closes before Lightning takes back the handlers of signals that it had set."""
        run, self._run = self._run, None
        if run is not None:
            run.ck.__exit__(type(exception), exception, None)

    def _close(self) -> None:
        run, self._run = self._run, None
        if run is not None:
            run.ck.close()

    def _between(self, step: int) -> None:
        """Between two batches, `step` optimizer steps done."""
        if self._put_back is not None:
            self._put_back()
            self._put_back = None
        if step != self._seen:
            self._seen = step
            self._running.after(step)

    @property
    def _running(self) -> Run:
        if self._run is None:
            raise CkptError("CheckpointCallback: fitting has not begun")
        return self._run

    def _loader(self, trainer: Any) -> GlobalLoader:
        loader = trainer.train_dataloader
        if not (isinstance(loader, GlobalLoader) and loader.cursor is self._cursor and loader.ahead):
            raise Unsupported(
                f"CheckpointCallback: train_dataloader is a {type(loader).__name__}, whose place ckpt would not keep; "
                "return GlobalLoader(dataset, cursor, ..., ahead=True), with the cursor that the callback has"
            )
        if trainer.accumulate_grad_batches != loader.micro_batches:
            raise CkptError(
                f"accumulate_grad_batches={trainer.accumulate_grad_batches}, but a global batch has "
                f"{loader.micro_batches} microbatches on this rank; they must be the same"
            )
        return loader

    def _state(self, trainer: Any, module: Any, loops: _Loops) -> dict[str, Any]:
        parts = {
            "model": module,
            "optimizer": list(trainer.optimizers),
            "scheduler": [config.scheduler for config in trainer.lr_scheduler_configs],
            "precision": trainer.precision_plugin if trainer.precision_plugin.state_dict() else None,
            "datamodule": trainer.datamodule if is_overridden("state_dict", trainer.datamodule) else None,
            "callbacks": _Callbacks([c for c in trainer.callbacks if c is not self and c.state_dict()]),
        }
        own = {name: part for name, part in parts.items() if part}
        return {**own, "loops": loops, "data": self._cursor, "rng": RngState(), **self._extra}


class _Loops:
    """What Lightning's loops have counted."""

    def __init__(self, trainer: Any) -> None:
        self._loop = trainer.fit_loop

    def state_dict(self) -> dict[str, Any]:
        """The counts between two batches, or two epochs, as one value."""
        counts = copy.deepcopy(self._loop.state_dict())
        epoch, batch = counts["epoch_progress"], counts["epoch_loop.batch_progress"]
        if epoch["current"]["started"] != epoch["current"]["ready"]:  # an epoch is about to begin
            _take_off(epoch)
        elif batch["current"]["started"] != batch["current"]["ready"]:  # a batch is
            _take_off(batch)
            batch["is_last_batch"] = False
        counts["state_dict"].pop("combined_loader", None)
        return {"counts": (counts,)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._loop.load_state_dict(copy.deepcopy(state["counts"][0]))

    def restart(self) -> None:
        """Between two epochs there is none to be gone on with, which Lightning does not tell by itself."""
        progress = self._loop.epoch_progress.current
        if progress.ready == progress.processed:
            self._loop._restarting = False
            self._loop.epoch_loop.restarting = False


def _take_off(progress: dict[str, Any]) -> None:
    for name in ("total", "current"):
        progress[name]["ready"] -= 1


class _Callbacks:
    """The states of other callbacks, by their keys. A Timer's is each rank's own."""

    def __init__(self, callbacks: list[Any]) -> None:
        self._callbacks = {callback.state_key: callback for callback in callbacks}

    def __bool__(self) -> bool:
        return bool(self._callbacks)

    def state_dict(self) -> dict[str, Any]:
        states = {key: callback.state_dict() for key, callback in self._callbacks.items()}
        return {k: PerRank(v) if isinstance(self._callbacks[k], Timer) else v for k, v in states.items()}

    def load_state_dict(self, states: Mapping[str, Any]) -> None:
        for key, state in states.items():
            self._callbacks[key].load_state_dict(state.value if isinstance(state, PerRank) else dict(state))


def _check(trainer: Any, module: Any) -> None:
    environment = trainer._accelerator_connector.cluster_environment  # what Lightning asks, whatever the strategy
    plateaus = [c for c in trainer.lr_scheduler_configs if c.reduce_on_plateau and c.interval == "step"]
    hooked = [o for o in (module, trainer.datamodule, *trainer.callbacks) if is_overridden("on_save_checkpoint", o)]
    refused = {
        "a ModelCheckpoint: pass enable_checkpointing=False, or save_weights_only=True": any(
            not callback.save_weights_only for callback in trainer.checkpoint_callbacks
        ),
        "ckpt_path: leave it out": trainer.ckpt_path is not None,
        "auto_requeue: use SLURMEnvironment(auto_requeue=False)": getattr(environment, "auto_requeue", False),
        "ReduceLROnPlateau by step: use an interval of epochs": bool(plateaus),
        "on_save_checkpoint: keep that state in buffers, in state_dict, or in extra=": bool(hooked),
    }
    wrong = [name for name, there in refused.items() if there]
    if wrong:
        raise Unsupported(f"ckpt saves and resumes this run, all of it and nothing twice; not with {'; '.join(wrong)}")
