"""Megatron Core's optimizers: the DistributedOptimizer (ZeRO-1), the float16 and fp32 ones, and chains of them.

All of them wrap torch optimizers whose tensors stand for parameters of the model: the parameter itself (fp32), an fp32
master of a 16-bit one, or a flat piece of either that this data-parallel rank owns. Megatron's own lists and ranges
tell which; then state goes by parameter name as for any torch optimizer, with the master beside the moments as
`…/master`. So names and bits are the same with ZeRO and without. Padding of flat buffers is no state. No step is taken
and nothing is gathered.

Written against megatron-core 0.16; nothing of Megatron is imported before an object of it is met.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ckpt.adapters import optimizers
from ckpt.adapters.flat import flat_piece
from ckpt.adapters.megatron_copies import Copy, check_copies
from ckpt.errors import StateMismatch, Unsupported
from ckpt.state.groups import Group
from ckpt.state.names import Key, join
from ckpt.state.values import encode

if TYPE_CHECKING:
    from ckpt.adapters.capture import Named, Walker

Path = tuple[Key, ...]

_OF_THE_LAYOUT = ("is_expert_parallel",)
"""Keys of parameter groups that say how the layout places them."""


@dataclass(frozen=True)
class _Slot:
    """A tensor that an inner optimizer steps, for a parameter of the model or its elements start..stop. working: the
    16-bit tensor that `stepped` is the master of, of the same shape; None where the parameter itself is stepped."""

    stepped: torch.Tensor
    parameter: torch.Tensor
    interval: tuple[int, int] | None = None
    working: torch.Tensor | None = None


def is_optimizer(node: object) -> bool:
    """Whether this is one of Megatron Core's optimizers."""
    module = sys.modules.get("megatron.core.optimizer.optimizer")
    return module is not None and isinstance(node, module.MegatronOptimizer)


def capture(walker: Walker, optimizer: Any, path: Path) -> None:
    """Captures a Megatron optimizer whose model is in the same state.

    Raises Unsupported for classes and options whose state cannot be told by parameter name, StateMismatch where a
    16-bit parameter is not its rounded master (at save at once, at load when all is loaded).
    """
    groups: list[Group] = []
    copies: list[Copy] = []
    singles = list(_singles(optimizer))
    _scalers(walker, singles, path)
    for single in singles:
        if getattr(single, "is_stub_optimizer", False):
            continue
        slots = list(_slots(single, join(path)))
        named = {id(slot.stepped): _named(walker, slot, path) for slot in slots}
        groups += optimizers.capture_groups(walker, single.optimizer, named, path, _OF_THE_LAYOUT)
        copies += _masters(walker, slots, named, path)
    walker.captured.groups[join(path)] = groups
    optimizers.declare_stateless(walker, path, [named for named in walker.parameters.values() if not named.trained])
    if walker.known is None:
        check_copies(copies)
    else:
        walker.captured.appliers.append(lambda _: check_copies(copies))


def _singles(optimizer: Any) -> Iterator[Any]:
    """The optimizers of a chain, or the one."""
    from megatron.core.optimizer import ChainedOptimizer
    from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer

    if type(optimizer) in (ChainedOptimizer, LayerWiseDistributedOptimizer):
        for single in optimizer.chained_optimizers:
            yield from _singles(single)
    else:
        yield optimizer


def _scalers(walker: Walker, singles: Sequence[Any], path: Path) -> None:
    """Captures the scalers of fp16 gradients. Megatron steps experts by an optimizer of their own, with a scaler of its
    own, if and only if they are expert-parallel; without, they go by the scaler of all."""
    names = [join((*path, name)) for name in ("grad_scaler", "expert_grad_scaler")]
    saved = [walker.known.values.get(name) for name in names] if walker.known is not None else [None, None]
    for single in singles:
        scaler = getattr(single, "grad_scaler", None)
        state = scaler.state_dict() if scaler is not None else {}
        if not state:
            continue
        expert = any(group.get("is_expert_parallel") for group in single.param_groups)
        name = names[expert and (walker.known is None or saved[1] is not None)]
        known = walker.captured.values.get(name)
        if known is None:
            walker.captured.add_value(name, state)
        elif walker.known is None and encode(known, name) != encode(state, name):
            raise Unsupported(f"{name}: two optimizers of a chain have grad scalers with different states")
        walker.captured.appliers.append(partial(_scale, scaler, name))
    if saved[1] is not None and saved[1] == saved[0] and names[0] in walker.captured.values:
        walker.captured.values.setdefault(names[1], walker.captured.values[names[0]])  # this layout has one for all


def _scale(scaler: Any, name: str, values: dict[str, Any]) -> None:
    if name in values:
        scaler.load_state_dict({k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in values[name].items()})


def _slots(single: Any, where: str) -> Iterator[_Slot]:
    """What each tensor of the inner optimizer stands for. Raises Unsupported for an optimizer that does not tell."""
    from megatron.core.optimizer import FP32Optimizer
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params

    _check_inner(single.optimizer, where)
    kind = type(single)
    if kind is DistributedOptimizer:
        _check_distributed(single, where)
        yield from _distributed_slots(single, where)
    elif kind is Float16OptimizerWithFloat16Params:
        for working, masters in zip(single.float16_groups, single.fp32_from_float16_groups, strict=True):
            for parameter, master in zip(working, masters, strict=True):
                yield _Slot(master, parameter, working=parameter)
        for parameter in (p for group in single.fp32_from_fp32_groups for p in group):
            yield _Slot(parameter, parameter)
    elif kind is FP32Optimizer:
        for parameter in single.get_parameters():
            yield _Slot(parameter, parameter)
    else:
        raise Unsupported(
            f"{where}: a Megatron optimizer of class {kind.__module__}.{kind.__qualname__}; ckpt knows "
            "DistributedOptimizer, Float16OptimizerWithFloat16Params, FP32Optimizer, and chains of them"
        )


def _distributed_slots(single: Any, where: str) -> Iterator[_Slot]:
    """The flat pieces that this rank owns.

    Megatron's `model_param_group_index_map` is not used: in a group of fp32 and 16-bit parameters its order is not that
    of the inner optimizer. The parallel lists say which piece belongs to which parameter."""
    kinds = (
        (single.model_fp32_groups, single.shard_fp32_groups, False),
        (single.model_float16_groups, single.shard_fp32_from_float16_groups, True),
    )
    for models, pieces, masters in kinds:
        for parameters, owned in zip(models, pieces, strict=True):
            for parameter, piece in zip(parameters, owned, strict=True):
                _check_in_buffer(single, parameter, where)
                found = single._get_model_param_range_map(parameter)["param"]
                flat = parameter.detach().view(-1)[found.start : found.end]
                yield _Slot(piece, parameter, (found.start, found.end), flat if masters else None)


def _check_in_buffer(single: Any, parameter: torch.Tensor, where: str) -> None:
    """The optimizer steps and gathers what lies in its buffer, so the parameter must still be a view of it."""
    buffer = single.buffers[single.model_param_gbuf_map[parameter][0]].param_data
    if buffer is None or buffer.untyped_storage().data_ptr() != parameter.untyped_storage().data_ptr():
        raise Unsupported(
            f"{where}: a parameter of shape {list(parameter.shape)} no longer lies in the optimizer's parameter buffer "
            "(its .data was replaced, or it is quantized), so the optimizer would not step it; copy into it instead"
        )


def _check_distributed(single: Any, where: str) -> None:
    if single.ddp_config.use_megatron_fsdp:
        raise Unsupported(f"{where}: the DistributedOptimizer of Megatron FSDP; use FSDP2 of torch, or Megatron's DDP")
    for chunk in single.model_chunks:
        for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
            if group.param_gather_handle is not None:
                raise StateMismatch(
                    f"{where}: an all-gather of parameters is under way (overlap_param_gather); call "
                    "start_param_sync(force_sync=True) of each model chunk first"
                )


def _check_inner(inner: Any, where: str) -> None:
    """Refuses inner optimizers that scale, quantize or move their state: FusedAdam only where its state is not fp32."""
    name, module = type(inner).__name__, type(inner).__module__
    if name == "HybridDeviceOptimizer":
        raise Unsupported(f"{where}: optimizer_cpu_offload keeps copies of its own; switch it off")
    if name == "FusedAdam" and module.startswith(("transformer_engine.", "apex.")):
        dtypes = getattr(inner, "name_to_dtype_map", {})
        low = [k for k in ("exp_avg", "exp_avg_sq") if dtypes.get(k, torch.float32) != torch.float32]
        if low or getattr(inner, "master_weights", False):
            raise Unsupported(
                f"{where}: use_precision_aware_optimizer scales state by factors of each layout; switch it off"
            )
        optimizers.check_members(inner, where)
        return
    optimizers.check_plain(inner, where)
    optimizers.check_hides_nothing(inner, where)


def _named(walker: Walker, slot: _Slot, path: Path) -> Named:
    """Name of what a slot stands for, and where its tensor lies."""
    from ckpt.adapters.capture import Named

    whole = walker.parameters.get(id(slot.parameter))
    if whole is None:
        raise StateMismatch(
            f"{join(path)}: a parameter of shape {list(slot.parameter.shape)} belongs to no module of the state; add "
            "the model that this optimizer was made for to the state"
        )
    if slot.interval is None:
        return whole
    return Named(whole.path, flat_piece(whole.placement, slot.parameter.shape, *slot.interval))


def _masters(walker: Walker, slots: list[_Slot], named: dict[int, Named], path: Path) -> list[Copy]:
    """Captures the masters; returns each with its working copy, to be compared."""
    copies = []
    for slot in slots:
        if slot.working is not None:
            own = named[id(slot.stepped)]
            walker.tensor(slot.stepped, (*path, "state", *own.path, optimizers.MASTER), own.placement)
            whole = walker.parameters[id(slot.parameter)]
            start = slot.interval[0] if slot.interval else 0
            copies.append(Copy(join(own.path), whole.placement, slot.parameter, start, slot.working, slot.stepped))
    return copies
