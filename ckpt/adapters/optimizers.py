"""torch optimizers: state by parameter name, never by position; options of groups by the names of their members.

A state tensor with its parameter's shape lies where the parameter lies. A 0-dim state tensor (a step counter) exists
once for each stacked layer. Nothing runs or advances the optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ckpt.adapters import dtensors
from ckpt.errors import StateMismatch, Unsupported
from ckpt.state.dtypes import torch_dtype
from ckpt.state.groups import COUNTERS, Group, check_options
from ckpt.state.names import Key, join, split
from ckpt.state.values import canonical_json, encode

if TYPE_CHECKING:
    from ckpt.adapters.capture import Known, Named, Walker

MASTER = "master"
"""Key of the fp32 copy of a 16-bit parameter, beside the keys of the optimizer's own state."""

_NOT_OPTIONS = ("params", "param_names")
_OWN_ATTRIBUTES = ("state", "param_groups", "defaults")


def capture(walker: Walker, optimizer: torch.optim.Optimizer, path: tuple[Key, ...]) -> None:
    """Captures `optimizer`, whose parameters must be tensors of the same state, most often of a module."""
    where = join(path)
    check_plain(optimizer, where)
    check_hides_nothing(optimizer, where)
    walker.captured.groups[where] = capture_groups(walker, optimizer, walker.parameters, path)
    members = {id(p) for group in optimizer.param_groups for p in group["params"] if optimizer.state.get(p)}
    declare_stateless(walker, path, [named for key, named in walker.parameters.items() if key not in members])


def capture_groups(
    walker: Walker,
    optimizer: torch.optim.Optimizer,
    named: Mapping[int, Named],
    path: tuple[Key, ...],
    leave_out: Collection[str] = (),
) -> list[Group]:
    """Captures state and options of an optimizer's groups. named: by id, what each of its tensors stands for;
    leave_out: keys of groups that are no state."""
    groups = []
    walker.captured.optimizers.append(optimizer)
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if id(parameter) not in named:
                raise StateMismatch(
                    f"{join(path)}: a parameter of shape {list(parameter.shape)} in group {number} belongs to no "
                    "module of the state and is no tensor of it; add the model to the state"
                )
            _state(walker, optimizer, group, parameter, named[id(parameter)], path)
        walker.restored_groups.add(id(group))
        groups.append(_group(walker, group, named, path, leave_out))
    if walker.known is not None:
        pairs = list(zip(optimizer.param_groups, groups, strict=True))
        walker.captured.appliers.append(
            lambda values: _apply([(g, values[own.kept_at]) for g, own in pairs if own.kept_at in values])
        )
    return groups


def declare_stateless(walker: Walker, path: tuple[Key, ...], parameters: Iterable[Named]) -> None:
    """Says which parameters have no state in this optimizer, so that what is missing in a stack of layers is no gap."""
    for named in parameters:
        if named.placement.stack and named.placement.parts:
            name = join((*path, "state", *named.path))
            walker.captured.stateless.setdefault(name, set()).add(named.placement.stacked_at)


def check_plain(optimizer: torch.optim.Optimizer, where: str) -> None:
    """Refuses an optimizer whose state is not told by `param_groups` and the state of each of their parameters."""
    if type(optimizer).state_dict is not torch.optim.Optimizer.state_dict:
        raise Unsupported(
            f"{where}: {type(optimizer).__name__} has a state_dict of its own, which may hold more than ckpt sees; "
            "pass the torch optimizer inside it"
        )
    check_members(optimizer, where)


def check_members(optimizer: torch.optim.Optimizer, where: str) -> None:
    """Refuses state of anything but the optimizer's parameters."""
    members = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for key, value in optimizer.state.items():
        if id(key) not in members and value:
            raise Unsupported(
                f"{where}: its state has an entry for {_say(key)}, which is in none of its parameter groups; remove it"
            )


def check_hides_nothing(optimizer: torch.optim.Optimizer, where: str) -> None:
    """Refuses an optimizer that keeps tensors (masters, say) where neither its state nor its groups show them."""
    members = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for name, value in vars(optimizer).items():
        hidden = [t for t in _tensors(value) if id(t) not in members] if name not in _OWN_ATTRIBUTES else []
        if hidden:
            raise Unsupported(
                f"{where}: {type(optimizer).__name__} keeps {_say(hidden[0])} in its attribute {name!r}, which ckpt "
                "cannot name; keep it in the state of its parameter, or make it an entry of the state with a name"
            )


def check_is_no_optimizer(node: object, where: str) -> None:
    """Refuses wrappers that act as an optimizer: their state goes by position, and may be hidden."""
    if hasattr(node, "param_groups") or all(callable(getattr(node, n, None)) for n in ("step", "zero_grad")):
        raise Unsupported(
            f"{where}: {type(node).__name__} acts as an optimizer but is none of torch's or Megatron Core's; ckpt "
            "keeps optimizer state by parameter name and cannot see what a wrapper hides: pass the torch optimizer "
            "inside it, and each further tensor (fp32 masters, say) as an entry of the state with a name"
        )


def _tensors(node: object) -> Iterator[torch.Tensor]:
    if isinstance(node, torch.Tensor):
        yield node
    elif isinstance(node, Mapping):
        for key, value in node.items():
            yield from _tensors(key)
            yield from _tensors(value)
    elif isinstance(node, list | tuple | set | frozenset):
        for value in node:
            yield from _tensors(value)


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
        walker.tensor(local, at, named.placement.per_layer(join(at)))
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
    for key, shape, dtype in _saved_tensors(walker.known, prefix, named):
        if key == MASTER:  # no state of a torch optimizer: who keeps masters has made them already
            continue
        if shape == named.placement.shape and (shape or parameter.dim() == 0) and key != "step":
            made[key] = torch.zeros_like(parameter, dtype=dtype, memory_format=torch.preserve_format).detach()
        elif shape == named.placement.shape[: named.placement.stack]:
            on_device = group.get("capturable") or group.get("fused")
            made[key] = torch.zeros((), dtype=dtype, device=parameter.device if on_device else "cpu")
        elif _is_whole(named):
            made[key] = torch.zeros(shape, dtype=dtype, device=parameter.device)
    stacked = named.placement.stacked_at
    for key, _ in _below(walker.known.values_below, prefix, depth=1 + len(stacked)):
        made.setdefault(key, None)
    return made


def _saved_tensors(
    known: Known, prefix: tuple[Key, ...], named: Named
) -> Iterator[tuple[Key, tuple[int, ...], torch.dtype]]:
    """(key, shape, dtype) of a parameter's state tensors in the checkpoint; the shape is the stacked one, also where
    the checkpoint keeps the slices apart."""
    for key, name in _below(known.tensors_below, prefix):
        yield key, known.shape_here(name, named.placement.shape), torch_dtype(known.tensors[name].dtype)
    stacked = named.placement.stacked_at
    for key, name in _below(known.tensors_below, prefix, depth=1 + len(stacked)):
        if stacked and name == join((*prefix, key, *stacked)):
            spec = known.tensors[name]
            yield key, named.placement.shape[: len(stacked)] + spec.shape, torch_dtype(spec.dtype)


def _below(find: Callable[[str], Iterator[str]], prefix: tuple[Key, ...], depth: int = 1) -> Iterator[tuple[Key, str]]:
    """First key below `prefix` and name of each entry that lies `depth` keys below it."""
    start = join(prefix) + "/"
    for name in find(start):
        if name.count("/") == start.count("/") + depth - 1:
            yield split(name[len(start) :])[0], name


def _group(
    walker: Walker,
    group: dict[str, Any],
    named: Mapping[int, Named],
    path: tuple[Key, ...],
    leave_out: Collection[str],
) -> Group:
    """Options of a group, kept under the name of each member; members that share a name (stacked layers) must agree."""
    options = {k: v for k, v in group.items() if k not in _NOT_OPTIONS and k not in leave_out}
    names = sorted({join((*path, "param_groups", *named[id(p)].path)) for p in group["params"]})
    for name in names:
        known = walker.captured.values.get(name)
        if known is None:
            walker.captured.add_value(name, options)
        elif encode(known, name) != encode(options, name):
            raise StateMismatch(f"{name}: two parameter groups hold parts of this parameter with different options")
    if walker.known is not None:
        _check_saved_alike(walker, options, names)
    return Group(names[0] if names else None, options)


def _check_saved_alike(walker: Walker, options: dict[str, Any], names: list[str]) -> None:
    """All members of a group must have been saved with the same options, and with the options the group has."""
    assert walker.known is not None
    stored = [(n, walker.known.values[n]) for n in names if n in walker.known.values]
    for name, document in stored:
        if document != stored[0][1]:
            raise StateMismatch(f"{name}: saved with other options than {stored[0][0]}, which is in the same group now")
        check_options(name, document, options)


def _apply(groups: Sequence[tuple[dict[str, Any], dict[str, Any]]]) -> None:
    """Gives groups their options as they were saved, in their order too. A tensor in a group is filled in place, so
    that whoever holds it sees the change, unless groups share it that were saved with different values."""
    filled: dict[int, tuple[torch.Tensor, set[bytes]]] = {}
    for group, options in groups:
        for key, value in options.items():
            if _fits(group.get(key), value):
                own = group[key]
                filled.setdefault(id(own), (own, set()))[1].add(canonical_json(encode(value, key)))
    for group, options in groups:
        members = group["params"]
        for key in COUNTERS - set(options):
            if members:
                group.pop(key, None)
        for key, value in options.items():
            own = group.pop(key, None)
            if _fits(own, value) and len(filled[id(own)][1]) == 1:
                value = own.copy_(value)
            elif isinstance(value, torch.Tensor) and isinstance(own, torch.Tensor):
                value = value.to(own.device)
            elif isinstance(value, torch.Tensor) and key in COUNTERS and members:
                value = value.to(members[0].device)
            group[key] = value


def _fits(own: Any, value: Any) -> bool:
    tensors = isinstance(own, torch.Tensor) and isinstance(value, torch.Tensor)
    return tensors and (own.dtype, own.shape) == (value.dtype, value.shape)
