"""Loops on FSDP2 in the manner of torchtitan: parts of a model, containers of optimizers and of schedulers, a
dataloader and a train state that the loop has made, under the calls of torchtitan's checkpoint manager.

    checkpointer = TitanCheckpointer("runs/x", model_parts=..., optimizers=..., lr_schedulers=..., dataloader=...,
                                     states={"train_state": trainer}, every_steps=500)
    checkpointer.load()
    ...
        checkpointer.save(step, last_step=step == steps)

Nothing of torchtitan is imported; the calls are those of its `BaseCheckpointManager` (August 2026).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ckpt.data import Cursor, GlobalLoader
from ckpt.data.foreign import RankCursor
from ckpt.data.plain import freeze, thaw
from ckpt.errors import StateMismatch, Unsupported
from ckpt.state import RngState
from ckpt.trainer.checkpointer import Checkpointer
from ckpt.trainer.hooks.run import Run


class TitanCheckpointer:
    """Saves and resumes one run. Collective, and used from one thread, as a Checkpointer is.

    url, options: of the Checkpointer, which is made here. model_parts: the modules of this rank, one for each stage of
    a pipeline that it has; a parameter has the same name wherever it lies, so stages may be cut anew. optimizers,
    lr_schedulers: the containers, or what they hold: torch's optimizers and schedulers; where there are several, a run
    resumes on as many. dataloader: a `GlobalLoader`, a cursor of ckpt.data (of a torchdata loader, say), or a loader
    whose state_dict names the rank that it is of, as torchtitan's does. states: further entries, by name, plain values
    or objects with state_dict and load_state_dict.

    Raises StateMismatch for a name that is taken, and Unsupported for modules whose state is not all tensors.
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        *,
        model_parts: Sequence[nn.Module],
        optimizers: Any,
        lr_schedulers: Any = None,
        dataloader: Any = None,
        states: Mapping[str, Any] | None = None,
        rng: RngState | None = None,
        **options: Any,
    ) -> None:
        self._loader = dataloader if isinstance(dataloader, GlobalLoader) else None
        parts = {
            "model": model_parts[0] if len(model_parts) == 1 else _merged(model_parts),
            "optimizer": _held(optimizers, "optimizers"),
            "lr_scheduler": _held(lr_schedulers, "schedulers"),
            "dataloader": _place(dataloader),
            "rng": rng or RngState(),
        }
        state = {name: part for name, part in parts.items() if part is not None}
        taken = sorted(state.keys() & dict(states or {}).keys())
        if taken:
            raise StateMismatch(f"states: {', '.join(taken)} is the name of a part of the run; take another")
        self.run = Run(Checkpointer(url, **options), {**state, **(states or {})})

    def load(self, step: int = -1) -> bool:
        """Fills everything from the newest committed step, or from `step`; whether there was one. Call it before the
        dataloader is iterated. Raises what `Checkpointer.load` raises."""
        self.run.resume(None if step == -1 else step)
        return self.run.saved is not None

    def save(self, curr_step: int, last_step: bool = False) -> bool:
        """Call it after every step: what `Checkpointer.after_step` does, and a last save after the last one; whether a
        save of this step has begun. A `GlobalLoader` is marked here. Raises Preempted once the job was told to end."""
        if self._loader is not None:
            self._loader.mark_consumed()
        self.run.after(curr_step)
        if last_step:
            self.run.finish(curr_step)
        return self.run.saved == curr_step

    def maybe_wait_for_staging(self) -> None:
        """Returns at once: a save is staged when `save` returns, and with overlap=True the optimizers wait."""

    def close(self) -> None:
        """Waits for what is being saved; see `Checkpointer.close`."""
        self.run.ck.close()


def _merged(parts: Sequence[nn.Module]) -> dict[str, torch.Tensor]:
    """The tensors of several parts by their names in the whole model."""
    merged: dict[str, torch.Tensor] = {}
    for part in parts:
        for name, tensor in part.state_dict(keep_vars=True).items():
            if name in merged or not isinstance(tensor, torch.Tensor):
                raise Unsupported(
                    f"{name}: {'two model parts have it' if name in merged else 'it is no tensor'}; with several parts "
                    "each name is one tensor of the whole model: pass such a part as an entry of states"
                )
            merged[name] = tensor
    return merged


def _held(container: Any, attribute: str) -> Any:
    """What a container holds: the one, or a list."""
    if container is None:
        return None
    held = getattr(container, attribute, container)
    held = list(held) if isinstance(held, list | tuple) else [held]
    return held[0] if len(held) == 1 else held


def _place(loader: Any) -> Any:
    """The place in the data, as an entry of the state."""
    if isinstance(loader, GlobalLoader):
        return loader.cursor
    if loader is None or isinstance(loader, Cursor | RankCursor):
        return loader
    return _RankLoader(loader)


class _RankLoader:
    """A loader whose state_dict has an entry named by this data-parallel rank, and others that are the same on all
    ranks and must not change. Each entry is one value."""

    def __init__(self, loader: Any) -> None:
        if not any("rank" in name for name in loader.state_dict()):
            raise Unsupported(
                f"dataloader: the state_dict of {type(loader).__name__} does not say which rank's it is; pass a "
                "ckpt.data.GlobalLoader, or a ckpt.data.TorchdataCursor of a torchdata loader"
            )
        self._loader = loader

    def state_dict(self) -> dict[str, Any]:
        return {name: (freeze(value, name),) for name, value in self._loader.state_dict().items()}

    def check_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, own in self.state_dict().items():
            if "rank" not in name and state.get(name) != own:
                raise StateMismatch(
                    f"dataloader: saved with {name}={thaw(state[name][0], name)!r}, this run has "
                    f"{thaw(own[0], name)!r}; use the saved one, or a ckpt.data.GlobalLoader, which any number of "
                    "ranks may have"
                )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._loader.load_state_dict({name: thaw(value[0], name) for name, value in state.items()})
