"""A checkpoint manager for Megatron Bridge: the protocol of `megatron.bridge.training.checkpointing.CheckpointManager`.

    cfg.checkpoint.custom_manager_class = "ckpt.trainer.hooks.bridge.BridgeManager"

Bridge imports classes of known packages alone, so tell it of this one before:
`megatron.bridge.utils.instantiate_utils.register_allowed_target_prefix("ckpt.")`. Nothing of Bridge is imported here.
"""

from __future__ import annotations

from typing import Any

from ckpt.errors import Unsupported
from ckpt.trainer.hooks.megatron import MegatronHook


class BridgeManager:
    """Saves to the root `checkpoint.save`, and resumes from there. Saves are those of Bridge's `save_interval`, and one
    more when the job is told to end. For options of the Checkpointer, override `make_hook` in a class of your own."""

    def __init__(self, checkpoint_config: Any) -> None:
        self.checkpoint_config = checkpoint_config
        self._hook: MegatronHook | None = None
        self._context: Any = None  # of the last save or load
        self._step = -1  # that `finalize_async_saves` has seen

    def make_hook(self, **options: Any) -> MegatronHook:
        """The hook that saves and loads. Raises Unsupported without a root."""
        config = self.checkpoint_config
        if not config.save:
            raise Unsupported("BridgeManager: checkpoint.save is not set; it is the root to save to and to resume from")
        return MegatronHook(config.save, self._train_state, asynchronous=bool(config.async_save), **options)

    @property
    def checkpointing_context(self) -> dict[str, Any]:
        """What Bridge looks at to decide whether there is something to load. It looks for files of its own, but not if
        there is a manager of local checkpoints that says it has one: this one always does, and `load` gives (0, 0)
        where nothing is committed."""
        return {"local_checkpoint_manager": _AlwaysThere()}

    def save(self, ctx: Any, callback_manager: Any = None) -> None:
        """Collective. Saves what a CheckpointSaveContext holds. Raises Unsupported for several modules (module_name)
        and for callbacks on a save, and what `MegatronHook.save_checkpoint` raises."""
        if ctx.module_name is not None:
            raise Unsupported(f"BridgeManager: module {ctx.module_name!r} of several; one model alone is carried")
        if callback_manager is not None and callback_manager.has_callbacks("on_checkpoint_save"):
            raise Unsupported("BridgeManager: callbacks for on_checkpoint_save are not called; take them out")
        self._context = ctx
        self._made().save_checkpoint(
            ctx.state.train_state.step,
            ctx.model,
            ctx.optimizer,
            ctx.opt_param_scheduler,
            ctx.num_floating_point_operations_so_far,
            non_persistent_ckpt=ctx.non_persistent_ckpt,
            train_data_iterator=ctx.train_data_iterator,
        )

    def load(self, ctx: Any) -> tuple[int, int]:
        """Collective. Fills what a CheckpointLoadContext holds, its train state too; gives (iteration, floating point
        operations so far), or (0, 0) where nothing is committed. Raises what `MegatronHook.load_checkpoint` raises."""
        self._context = ctx
        iteration, flops = self._made().load_checkpoint(
            ctx.model,
            ctx.optimizer,
            ctx.opt_param_scheduler,
            strict=ctx.strict,
            skip_load_to_model_and_opt=ctx.skip_load_to_model_and_opt,
        )
        train_state = ctx.state.train_state
        train_state.step, train_state.floating_point_operations_so_far = iteration, int(flops)
        self._step = iteration
        return iteration, int(flops)

    def finalize_async_saves(self, state: Any, blocking: bool = False, terminate: bool = False) -> None:
        """Collective. Bridge calls it before every iteration, where this does what `Checkpointer.after_step` does for
        the iteration that has ended: once the job is told to end, it saves and raises Preempted. blocking: waits for
        the save under way; terminate: closes."""
        ctx, step = self._context, state.train_state.step
        if blocking:
            self._made().wait()
        elif ctx is not None and step != self._step:
            self._step = step
            flops = state.train_state.floating_point_operations_so_far
            self._made().checkpoint_and_decide_exit(ctx.model, ctx.optimizer, ctx.opt_param_scheduler, step, flops)
        if terminate:
            self._made().close()

    def _train_state(self) -> Any:
        return self._context.state.train_state

    def _made(self) -> MegatronHook:
        if self._hook is None:
            self._hook = self.make_hook()
        return self._hook


class _AlwaysThere:
    @staticmethod
    def find_latest() -> int:
        return 0
