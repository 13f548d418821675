"""torch optimizers: state by parameter name, never by position; options of groups by the names of their members.

A state tensor with its parameter's shape lies where the parameter lies. A 0-dim state tensor (a step counter) exists
once for each stacked layer. Nothing runs or advances the optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from ckpt.adapters import dtensors
from ckpt.errors import StateMismatch, Unsupported
from ckpt.state.dtypes import torch_dtype
from ckpt.state.names import Key, join, split
from ckpt.state.values import decode, encode

if TYPE_CHECKING:
    from ckpt.adapters.capture import Named, Walker

_NOT_OPTIONS = ("params", "param_names")


def capture(walker: Walker, optimizer: torch.optim.Optimizer, path: tuple[Key, ...]) -> None:
    """Captures `optimizer`, whose parameters must be tensors of the same state, most often of a module."""
    where = join(path)
    _check_plain(optimizer, where)
    for number, group in enumerate(optimizer.param_groups):
        if not group["params"]:
            raise Unsupported(f"{where}: parameter group {number} has no parameters on this rank; remove the group")
        for parameter in group["params"]:
            named = walker.parameters.get(id(parameter))
            if named is None:
                raise StateMismatch(
                    f"{where}: a parameter of shape {list(parameter.shape)} in group {number} belongs to no module of "
                    "the state and is no tensor of it; add the model to the state"
                )
            _state(walker, optimizer, group, parameter, named, path)
        _group(walker, group, path)


def _check_plain(optimizer: torch.optim.Optimizer, where: str) -> None:
    """Refuses what `param_groups` and per-parameter state do not tell, so that nothing is lost without a word."""
    if type(optimizer).state_dict is not torch.optim.Optimizer.state_dict:
        raise Unsupported(
            f"{where}: {type(optimizer).__name__} has a state_dict of its own, which may hold more than ckpt sees; "
            "pass the torch optimizer inside it"
        )
    members = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for key, value in optimizer.state.items():
        if id(key) not in members and value:
            raise Unsupported(
                f"{where}: its state has an entry for {_say(key)}, which is in none of its parameter groups; remove it"
            )


def _say(key: object) -> str:
    return f"a tensor of shape {list(key.shape)}" if isinstance(key, torch.Tensor) else repr(key)[:80]


def _state(
    walker: Walker,
    optimizer: torch.optim.Optimizer,
    group: dict[str, Any],
    parameter: torch.Tensor,
    named: Named,
    path: tuple[Key, ...],
) -> None:
    live = optimizer.state.get(parameter, {})
    if walker.known is not None:
        live = {**_materialised(walker, group, parameter, named, path), **live}
    for key, value in live.items():
        at = (*path, "state", *named.path, key)
        if isinstance(value, torch.Tensor):
            _tensor(walker, value, parameter, named, at)
        else:
            walker.value(value, (*at, *named.placement.stacked_at), _setter(live, key))
    if walker.known is not None and live:  # after the setters of its values
        walker.captured.appliers.append(lambda _: optimizer.state[parameter].update(live))


def _setter(state: dict[Any, Any], key: Any):  # type: ignore[no-untyped-def]
    def put(value: Any) -> None:
        state[key] = value

    return put


def _tensor(walker: Walker, value: torch.Tensor, parameter: torch.Tensor, named: Named, at: tuple[Key, ...]) -> None:
    if value.shape == parameter.shape:
        local = dtensors.local_of(value, join(at))[0] if dtensors.is_dtensor(value) else value
        walker.tensor(local, at, named.placement)
    elif value.dim() == 0:
        local = value.to_local() if dtensors.is_dtensor(value) else value  # type: ignore[attr-defined]
        walker.tensor(local, at, named.placement.per_layer())
    elif named.placement.stack == 0 and not dtensors.is_dtensor(parameter) and _is_whole(named):
        walker.tensor(value, at)
    else:
        raise Unsupported(
            f"{join(at)}: optimizer state of shape {list(value.shape)} for a sharded parameter of shape "
            f"{list(parameter.shape)}; only state of the parameter's shape or 0-dim can be placed"
        )


def _is_whole(named: Named) -> bool:
    return all(box.extent == named.placement.shape for box, _ in named.placement.parts)


def _materialised(
    walker: Walker, group: dict[str, Any], parameter: torch.Tensor, named: Named, path: tuple[Key, ...]
) -> dict[Any, Any]:
    """State that the checkpoint has for this parameter and a never-stepped optimizer has not: empty tensors to fill."""
    assert walker.known is not None
    made: dict[Any, Any] = {}
    prefix = (*path, "state", *named.path)
    for key, name in _below(walker.known.tensors_below, prefix):
        spec = walker.known.tensors[name]
        dtype = torch_dtype(spec.dtype)
        if spec.shape == named.placement.shape and (spec.shape or parameter.dim() == 0) and key != "step":
            made[key] = torch.zeros_like(parameter, dtype=dtype, memory_format=torch.preserve_format).detach()
        elif spec.shape == named.placement.shape[: named.placement.stack]:
            on_device = group.get("capturable") or group.get("fused")
            made[key] = torch.zeros((), dtype=dtype, device=parameter.device if on_device else "cpu")
        elif _is_whole(named):
            made[key] = torch.zeros(spec.shape, dtype=dtype, device=parameter.device)
    stacked = named.placement.stacked_at
    for key, _ in _below(walker.known.values_below, prefix, depth=1 + len(stacked)):
        made.setdefault(key, None)
    return made


def _below(find: Callable[[str], Iterator[str]], prefix: tuple[Key, ...], depth: int = 1) -> Iterator[tuple[Key, str]]:
    """First key below `prefix` and name of each entry that lies `depth` keys below it."""
    start = join(prefix) + "/"
    for name in find(start):
        if name.count("/") == start.count("/") + depth - 1:
            yield split(name[len(start) :])[0], name


def _group(walker: Walker, group: dict[str, Any], path: tuple[Key, ...]) -> None:
    """Options of a group, kept under the name of each member; members that share a name (stacked layers) must agree."""
    options = {k: v for k, v in group.items() if k not in _NOT_OPTIONS}
    names = sorted({join((*path, "param_groups", *walker.parameters[id(p)].path)) for p in group["params"]})
    for name in names:
        known = walker.captured.values.get(name)
        if known is None:
            walker.captured.add_value(name, options)
        elif encode(known, name) != encode(options, name):
            raise StateMismatch(f"{name}: two parameter groups hold parts of this parameter with different options")
    if walker.known is not None:
        _check_options(walker, options, names)
        walker.captured.appliers.append(lambda values: _apply(group, values[names[0]]) if names[0] in values else None)


def _check_options(walker: Walker, options: dict[str, Any], names: list[str]) -> None:
    """All members of a group must have been saved with the same options, and with the options the group has."""
    assert walker.known is not None
    stored = [(n, walker.known.values[n]) for n in names if n in walker.known.values]
    for name, document in stored:
        if document != stored[0][1]:
            raise StateMismatch(f"{name}: saved with other options than {stored[0][0]}, which is in the same group now")
        saved = set(decode(document, name))
        if saved != set(options):
            raise StateMismatch(
                f"{name}: its parameter group has options {sorted(set(options) - saved)} that the checkpoint lacks, or "
                f"lacks {sorted(saved - set(options))}; use the optimizer it was saved with"
            )


def _apply(group: dict[str, Any], options: dict[str, Any]) -> None:
    for key, value in options.items():
        own = group.get(key)
        if isinstance(own, torch.Tensor) and isinstance(value, torch.Tensor):
            if (own.dtype, own.shape) == (value.dtype, value.shape):
                own.copy_(value)
                continue
            value = value.to(own.device)
        group[key] = value
