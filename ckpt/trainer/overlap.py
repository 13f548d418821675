"""Copying parameters and optimizer state beside the next forward and backward pass, which leave them as they are.

What an optimizer of the state owns changes in its step, so that step waits for the end of the copy. Everything else
(values, random streams, buffers, frozen weights) is copied before the call returns. What changes owned tensors at
another time voids the save, as far as torch counts changes (`Staging.finish`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any

import torch

from ckpt.engine.staging import Staged, Staging
from ckpt.errors import CkptError
from ckpt.state.captured import Captured, Shard
from ckpt.state.values import Json


def owned(captured: Captured) -> Callable[[Shard], bool]:
    """Whether a shard lies in memory of an optimizer that was captured: a parameter of its groups, or its state."""
    storages = {
        t.untyped_storage().data_ptr() for o in captured.optimizers for t in _tensors(o) if not t.is_inference()
    }
    return lambda shard: shard.view.untyped_storage().data_ptr() in storages


def _tensors(optimizer: torch.optim.Optimizer) -> Iterable[torch.Tensor]:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    state = [t for p in parameters for t in optimizer.state.get(p, {}).values() if isinstance(t, torch.Tensor)]
    for tensor in parameters + state:
        local = getattr(tensor, "_local_tensor", tensor)  # a DTensor's
        yield local.detach()


class Overlap:
    """The copy under way, and the guard: a hook before each step of the optimizers."""

    def __init__(
        self,
        staging: Staging,
        optimizers: Iterable[torch.optim.Optimizer],
        submit: Callable[[Staged | CkptError], Future[Json]],
    ) -> None:
        """submit: hands over what was staged, or says why it is void; called once, from another thread."""
        self.future: Future[Json] = Future()
        self._staging, self._submit = staging, submit
        self._over = threading.Event()
        self._hooks = [o.register_step_pre_hook(self._before_step) for o in optimizers]
        threading.Thread(target=self._run, name="ckpt copy", daemon=True).start()

    def wait(self) -> None:
        """Returns when all is copied and handed over, or has failed, which the save's outcome tells. Any thread."""
        self._over.wait()

    def release(self) -> None:
        """Takes the hooks away. For the thread that steps the optimizers: these must not be doing so."""
        for hook in self._hooks:
            hook.remove()

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self.wait()

    def _run(self) -> None:
        staged: Staged | CkptError
        try:
            try:
                staged = self._staging.finish()
            except CkptError as error:
                staged = error
            except Exception as error:
                staged = CkptError(f"copying beside the training failed: {type(error).__name__}: {error}")
            answer = self._submit(staged)
        except Exception as error:
            answer = Future()
            answer.set_exception(CkptError(f"nothing was handed over: {type(error).__name__}: {error}"))
        finally:
            del self._staging  # which holds the tensors of the moment of the call
            self._over.set()
        answer.add_done_callback(self._answered)

    def _answered(self, answer: Future[Json]) -> None:
        error = answer.exception()
        if error is not None:
            self.future.set_exception(error)
        else:
            self.future.set_result(answer.result())
