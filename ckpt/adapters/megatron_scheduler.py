"""Megatron Core's OptimizerParamScheduler. Its own `load_state_dict` is exact only before the first step."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from ckpt.errors import StateMismatch
from ckpt.state.names import Key, join

if TYPE_CHECKING:
    from ckpt.adapters.capture import Walker


def is_scheduler(node: object) -> bool:
    """Whether this is Megatron Core's scheduler of learning rate and weight decay."""
    module = sys.modules.get("megatron.core.optimizer_param_scheduler")
    return module is not None and isinstance(node, module.OptimizerParamScheduler)


def capture(walker: Walker, scheduler: Any, path: tuple[Key, ...]) -> None:
    """Captures the scheduler; called when all optimizers are captured, so that it is loaded after them.

    Raises StateMismatch where the checkpoint has another schedule and the scheduler is told to insist on its own
    (neither `use_checkpoint_opt_param_scheduler` nor `override_opt_param_scheduler`).
    """
    state = scheduler.state_dict()
    if walker.known is not None and not (
        scheduler.use_checkpoint_opt_param_scheduler or scheduler.override_opt_param_scheduler
    ):
        saved = walker.known.plain_at(path)
        for key in sorted(saved.keys() & state.keys() - {"num_steps"}, key=str):
            if saved[key] != state[key]:
                raise StateMismatch(
                    f"{join((*path, key))}: the checkpoint has {saved[key]!r}, the scheduler {state[key]!r}; use the "
                    "same, or make it with use_checkpoint_opt_param_scheduler or override_opt_param_scheduler"
                )
    walker.mapping(state, path)
    restored = walker.restored_groups
    walker.captured.appliers.append(lambda _: _load(scheduler, state, restored))


def _load(scheduler: Any, state: dict[str, Any], restored: set[int]) -> None:
    """Gives a scheduler its state. Megatron's method adds the saved number of steps to its own, and sets rates and
    weight decays from what it knows half-way: groups whose options were loaded keep those, unless it overrides them."""
    groups = [g for g in scheduler.optimizer.param_groups if id(g) in restored]
    before = [dict(g) for g in groups]
    scheduler.num_steps = 0
    scheduler.load_state_dict(state)
    if not scheduler.override_opt_param_scheduler:
        for group, options in zip(groups, before, strict=True):
            group.update(options)
