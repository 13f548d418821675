"""Megatron Core and Megatron-LM: `save_checkpoint` and `load_checkpoint` as the training loop calls them.

Signatures are those of megatron/training/checkpointing.py and training.py, at core 0.16 to 0.19; what comes after the
arguments that both share is taken by keyword.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Any

from ckpt.errors import StateMismatch, Unsupported
from ckpt.geometry import Layout
from ckpt.state import RngState
from ckpt.trainer.background import PendingSave
from ckpt.trainer.checkpointer import Checkpointer
from ckpt.trainer.hooks.run import Run, framework

with framework("Megatron Core", "megatron"):
    from megatron.core import num_microbatches_calculator, parallel_state

import torch.distributed as dist

COUNTERS = ("consumed_train_samples", "skipped_train_samples", "consumed_valid_samples")
"""What Megatron-LM keeps of its place in the data, in its arguments."""
FLOPS = "num_floating_point_operations_so_far"


class MegatronHook:
    """Saves and loads one run of a loop on Megatron Core. Collective, and used from one thread, as a Checkpointer is.
    Works as a context manager.

    url, options: of the Checkpointer, which is made at the first call, when parallel state is there. layout: of the
    job; None takes that of Megatron's parallel state. counters: gives the object whose attributes are COUNTERS
    (Megatron-LM's `get_args`); None keeps none. data: a cursor, or anything else that has the place in the data;
    Megatron's own samplers go by the counters. asynchronous: whether `save_checkpoint` returns when the state is
    staged, or when it is committed.
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        counters: Callable[[], Any] | None = None,
        *,
        layout: Layout | None = None,
        data: Any = None,
        rng: RngState | None = None,
        asynchronous: bool = True,
        **options: Any,
    ) -> None:
        self._url, self._layout, self._options = url, layout, options
        self._counters, self._data, self._rng = counters, data, rng or RngState()
        self._asynchronous = asynchronous
        self._ck: Checkpointer | None = None
        self._saved: int | None = None
        self._pending: PendingSave | None = None

    @property
    def ck(self) -> Checkpointer:
        """The Checkpointer; collective when it is asked for first."""
        if self._ck is None:
            self._ck = Checkpointer(self._url, self._layout or megatron_layout(), **self._options)
        return self._ck

    def save_checkpoint(
        self,
        iteration: int,
        model: Sequence[Any],
        optimizer: Any,
        opt_param_scheduler: Any,
        num_floating_point_operations_so_far: float,
        checkpointing_context: Any = None,
        *,
        non_persistent_ckpt: bool = False,
        train_data_iterator: Any = None,
        release: bool = False,
        **others: Any,
    ) -> None:
        """Saves an iteration, unless a save of it has begun. model: the chunks of this rank, wrapped or not. others:
        process groups and ranks, which ckpt takes from Megatron itself.

        Raises Unsupported for non-persistent and release checkpoints and for data iterators with a state of their own,
        and what `Checkpointer.save` raises.
        """
        if non_persistent_ckpt or release:
            raise Unsupported(
                "save_checkpoint: no non-persistent and no release checkpoints; for the first give fast=, a directory "
                "on the node, and leave out --non-persistent-save-interval"
            )
        self._check_iterator(train_data_iterator)
        if iteration == self._saved:
            return
        state = self._state(iteration, model, optimizer, opt_param_scheduler, num_floating_point_operations_so_far)
        if self._asynchronous:
            self._pending = self.ck.save_async(iteration, state)
        else:
            self.ck.save(iteration, state)
        self._saved = iteration

    def load_checkpoint(
        self,
        ddp_model: Sequence[Any],
        optimizer: Any,
        opt_param_scheduler: Any,
        load_arg: str = "load",
        strict: bool = True,
        checkpointing_context: Any = None,
        skip_load_to_model_and_opt: bool = False,
        **others: Any,
    ) -> tuple[int, float]:
        """Loads the newest committed iteration in place, sets the counters, and gives (iteration, floating point
        operations so far); (0, 0) where nothing is committed. Without an optimizer (or scheduler) its state is left
        where it is.

        Each 16-bit parameter is compared with its rounded fp32 master on the rank that has that; the rest of it, and
        that of other ranks, by the fingerprint of what was saved. Raises Unsupported for other roots (load_arg) and
        strict=False, and what `Checkpointer.load` raises.
        """
        if load_arg != "load" or not strict or skip_load_to_model_and_opt:
            raise Unsupported(
                f"load_checkpoint(load_arg={load_arg!r}, strict={strict}, "
                f"skip_load_to_model_and_opt={skip_load_to_model_and_opt}): this hook resumes its own root, all of it; "
                "use ckpt-reshard or Checkpointer.load for others"
            )
        state = self._state(0, ddp_model, optimizer, opt_param_scheduler, 0)
        absent = {"optimizer": optimizer, "opt_param_scheduler": opt_param_scheduler}
        restored = self.ck.load(state, allow_extra=[f"{name}/*" for name, part in absent.items() if part is None])
        if restored is None:
            return 0, 0
        self._saved = restored.step
        if self._counters is not None:
            owner = self._counters()
            for name in COUNTERS:
                setattr(owner, name, state[name])
            if num_microbatches_calculator._GLOBAL_NUM_MICROBATCHES_CALCULATOR is not None:
                num_microbatches_calculator.update_num_microbatches(state[COUNTERS[0]], consistency_check=False)
        return int(state["iteration"]), state[FLOPS]

    def checkpoint_and_decide_exit(
        self,
        model: Sequence[Any],
        optimizer: Any,
        opt_param_scheduler: Any,
        iteration: int,
        num_floating_point_operations_so_far: float,
        checkpointing_context: Any = None,
        train_data_iterator: Any = None,
    ) -> bool:
        """What `Checkpointer.after_step` does; call it after every iteration, as Megatron-LM's loop calls its own.
        Gives False: when the job has been told to end, it raises Preempted."""
        self._check_iterator(train_data_iterator)
        state = self._state(iteration, model, optimizer, opt_param_scheduler, num_floating_point_operations_so_far)
        run = Run(self.ck, state, self._saved)
        run.after(iteration)
        self._saved = run.saved
        return False

    def wait(self) -> None:
        """Not collective. Waits for the commit of the last `save_checkpoint`; raises its error."""
        if self._pending is not None:
            self._pending.result()

    def close(self) -> None:
        """Waits for what is being saved; see `Checkpointer.close`."""
        if self._ck is not None:
            self._ck.close()

    def __enter__(self) -> MegatronHook:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._ck is not None:
            self._ck.__exit__(kind, error, trace)

    def _state(self, iteration: int, model: Sequence[Any], optimizer: Any, scheduler: Any, flops: float) -> SyncedState:
        parts = {"optimizer": optimizer, "opt_param_scheduler": scheduler, "data": self._data}
        owner = None if self._counters is None else self._counters()
        return SyncedState(
            model=list(model),
            **{name: part for name, part in parts.items() if part is not None},
            rng=self._rng,
            iteration=iteration,
            **{FLOPS: flops},
            **({} if owner is None else {name: getattr(owner, name, 0) for name in COUNTERS}),
        )

    def _check_iterator(self, iterator: Any) -> None:
        for one in iterator if isinstance(iterator, list) else [iterator]:
            if self._data is None and hasattr(getattr(one, "iterable", one), "save_state"):
                raise Unsupported(
                    f"the data iterator {type(one).__name__} has a state of its own, which Megatron's counters do not "
                    "tell; give the hook data=, an object with state_dict and load_state_dict that has it"
                )


class SyncedState(dict[str, Any]):
    """A state whose parameters are synchronised when it is walked, so only if it is saved or loaded: with
    overlap_param_gather a rank's copy of what other ranks stepped is out of date until the next forward pass."""

    def __iter__(self) -> Any:
        sync_parameters(self["model"], self.get("optimizer"))
        return super().__iter__()


def sync_parameters(model: Iterable[Any], optimizer: Any) -> None:
    """Collective over data parallelism: brings every parameter of chunks with overlap_param_gather up to date, as
    Megatron-LM's `force_param_sync` does. Nothing else needs it."""
    stepped = [c for o in getattr(optimizer, "chained_optimizers", [optimizer]) for c in getattr(o, "model_chunks", ())]
    every = {id(chunk): chunk for chunk in [*model, *stepped]}.values()
    chunks = [c for c in every if getattr(getattr(c, "ddp_config", None), "overlap_param_gather", False)]
    if chunks and hasattr(optimizer, "prepare_model_params_for_param_sync"):
        optimizer.prepare_model_params_for_param_sync()
    for chunk in chunks:
        chunk.start_param_sync(force_sync=True)


def megatron_layout() -> Layout:
    """The layout of Megatron's parallel state. Raises StateMismatch where the order of its ranks is not the usual."""
    ps, rank = parallel_state, dist.get_rank()
    layout = Layout(
        tp=ps.get_tensor_model_parallel_world_size(),
        cp=ps.get_context_parallel_world_size(),
        ep=ps.get_expert_model_parallel_world_size(),
        etp=ps.get_expert_tensor_parallel_world_size(),
        dp=ps.get_data_parallel_world_size(),
        pp=ps.get_pipeline_model_parallel_world_size(),
        vpp=ps.get_virtual_pipeline_model_parallel_world_size() or 1,
    )
    own, at = (
        {
            "tp": ps.get_tensor_model_parallel_rank(),
            "cp": ps.get_context_parallel_rank(),
            "dp": ps.get_data_parallel_rank(),
            "pp": ps.get_pipeline_model_parallel_rank(),
            "ep": ps.get_expert_model_parallel_rank(),
            "etp": ps.get_expert_tensor_parallel_rank(),
        },
        layout.coords(rank),
    )
    wrong = [name for name, number in own.items() if getattr(at, name) != number]
    if wrong:
        raise StateMismatch(
            f"rank {rank}: Megatron has it at {own}, {layout} at {at}; give the hook layout=, with the order that "
            "initialize_model_parallel was given"
        )
    return layout
