"""Matching what ranks want against what a checkpoint holds: names, dtypes, shapes. Nothing is changed here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

import torch

from ckpt.engine import padding
from ckpt.engine.merge import Union
from ckpt.errors import StateMismatch
from ckpt.geometry import Holdings
from ckpt.state import Vocabulary
from ckpt.state.captured import Captured, LocalTensor, Shard
from ckpt.state.dtypes import bits, torch_dtype
from ckpt.state.groups import Declared, check_options, places
from ckpt.store.opened import Opened

_MOST_NAMES = 10


@dataclass(frozen=True)
class Options:
    """What a caller allows: patterns (`fnmatch`) of names that may be missing from the checkpoint, that may be in it
    and nowhere in the state, and of tensors that may be cast to the dtype of the state. vocabulary: whose padding may
    be left behind."""

    allow_missing: tuple[str, ...] = ()
    allow_extra: tuple[str, ...] = ()
    cast: tuple[str, ...] = ()
    vocabulary: Vocabulary | None = None


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether a name is one that the caller allows."""
    return any(fnmatchcase(name, p) for p in patterns)


@dataclass
class Target:
    """What one rank will fill: `tensors` by the name under which the checkpoint keeps them. `casts` are tensors that
    are first loaded as stored, into memory of their own, and cast into place at the end. `pads` are views, by name, of
    rows of padding that nothing is loaded into: zero at the end."""

    tensors: dict[str, list[LocalTensor]]
    casts: list[tuple[LocalTensor, LocalTensor]]
    pads: dict[str, list[torch.Tensor]]


def match(captured: Captured, opened: Opened, options: Options, rank: int) -> Target:
    """Matches this rank's state. Raises StateMismatch naming tensor, rank, and what was expected and found."""
    stored = {t.name: t for t in opened.manifest.catalogue.tensors}
    kept = {**{name: name for name in stored}, **opened.manifest.aliases}
    target = Target({}, [], {})
    missing = []
    wanted = {**{n: n for n in captured.tensors}, **captured.aliases}
    for name, own in sorted(wanted.items()):
        if name not in kept:
            missing.append(name)
            continue
        tensor = captured.tensors[own]
        spec = stored[kept[name]]
        if name != own:
            _check_tie(name, own, kept, opened)
            continue
        shapes = (spec.shape, tensor.spec.shape)
        if options.vocabulary is not None and options.vocabulary.fits(name, *shapes):
            tensor, target.pads[name] = padding.cut(tensor, spec.shape[0], options.vocabulary)
        elif spec.shape != tensor.spec.shape:
            raise StateMismatch(
                f"{name}: rank {rank} has shape {list(tensor.spec.shape)}, the checkpoint {list(spec.shape)}; "
                + padding.remedy(name, *shapes)
            )
        if tensor.spec.dtype != spec.dtype:
            if not matches(name, options.cast):
                raise StateMismatch(
                    f"{name}: rank {rank} has dtype {tensor.spec.dtype}, the checkpoint {spec.dtype}; dtypes never "
                    f"change silently: use the saved dtype, or ask for cast=[{name!r}]"
                )
            _check_cast(name, spec.dtype, tensor.spec.dtype)
            landing = _landing(tensor, spec.dtype)
            target.casts.append((tensor, landing))
            tensor = landing
        target.tensors.setdefault(kept[name], []).append(tensor)
    missing += [n for n in captured.values if n not in opened.manifest.values]
    missing = [n for n in missing if not matches(n, options.allow_missing)]
    if missing:
        raise StateMismatch(
            f"rank {rank}: the checkpoint has no {_list(missing)}; allow_missing=[...] keeps what the state holds"
        )
    return target


def _check_tie(name: str, own: str, kept: Mapping[str, str], opened: Opened) -> None:
    """Two names that share memory here must have had equal bits there."""
    if kept.get(own) == kept[name]:
        return
    digests = dict(zip((t.name for t in opened.manifest.catalogue.tensors), opened.manifest.digests, strict=True))
    if own not in kept or digests[kept[own]] != digests[kept[name]]:
        raise StateMismatch(
            f"{name}: shares its memory with {own} here, but the checkpoint has different bits for the two; untie them"
        )


def _check_cast(name: str, saved: str, own: str) -> None:
    """Finds out before anything is changed whether torch can cast."""
    source = torch.zeros(1, dtype=torch_dtype(saved))
    try:
        if source.is_complex() and not torch_dtype(own).is_complex:
            raise RuntimeError("the imaginary part would be lost")
        torch.zeros(1, dtype=torch_dtype(own)).copy_(source)
    except RuntimeError as error:
        raise StateMismatch(f"{name}: cannot be cast from {saved} to {own}: {error}; use the saved dtype") from None


def _landing(tensor: LocalTensor, dtype: str) -> LocalTensor:
    wanted = torch_dtype(dtype)
    shards = [Shard(s.box, bits(torch.empty(s.box.extent, dtype=wanted))) for s in tensor.shards]
    spec = replace(tensor.spec, dtype=dtype, itemsize=torch.empty(0, dtype=wanted).element_size())
    return LocalTensor(spec, shards)


def finish(target: Target) -> None:
    """Casts what was loaded as stored into place, and makes padding zero. Local."""
    for pads in target.pads.values():
        for view in pads:
            view.zero_()
    for tensor, landing in target.casts:
        own, saved = torch_dtype(tensor.spec.dtype), torch_dtype(landing.spec.dtype)
        for into, source in zip(tensor.shards, landing.shards, strict=True):
            into.view.view(own).copy_(source.view.view(saved))


def match_groups(captured: Captured, declared: Sequence[Declared], opened: Opened, options: Options) -> set[str]:
    """Tells this rank's parameter groups where their options are kept; returns the names of those values on all ranks.

    declared: all ranks' groups. Raises StateMismatch where the checkpoint has no such group, or one with other options.
    """
    at = places(declared)
    for name, groups in captured.groups.items():
        for place, group in enumerate(groups):
            if group.member is not None:
                group.kept_at = group.member
                continue
            group.kept_at = at[name][place]
            if group.kept_at in opened.manifest.values:
                check_options(group.kept_at, opened.manifest.values[group.kept_at], group.options)
            elif not matches(group.kept_at, options.allow_missing):
                raise StateMismatch(
                    f"{name}: parameter group {place} has no parameters, and the checkpoint has no {group.kept_at}; "
                    "allow_missing=[...] keeps what the group holds"
                )
    return {value for values in at.values() for value in values}


def wanted_by_all(
    union: Union, opened: Opened, values: Set[str], tied: Set[str], options: Options
) -> dict[int, Holdings]:
    """What the whole job wants, by index into the checkpoint's catalogue; raises StateMismatch for a tensor or value of
    the checkpoint that no rank wants, or a tensor that the ranks together do not want exactly once.

    values: names of those that any rank has; tied: of tensors that share the memory of another one on their rank.
    """
    found = {}
    names = {t.name: i for i, t in enumerate(opened.manifest.catalogue.tensors)}
    for spec, holdings in zip(union.catalogue.tensors, union.holdings, strict=True):
        holdings.check_cover(spec.name, spec.shape)
        found[names[spec.name]] = holdings
    wanted = tied | {spec.name for spec in union.catalogue.tensors}
    extra = [t for t in names if t not in wanted]
    extra += [n for n in opened.manifest.values if n not in values]
    extra = [n for n in extra if not matches(n, options.allow_extra)]
    if extra:
        raise StateMismatch(
            f"the checkpoint holds {_list(extra)}, which no rank's state has; allow_extra=[...] leaves them out"
        )
    return found


def _list(names: Sequence[str]) -> str:
    shown = ", ".join(sorted(names)[:_MOST_NAMES])
    return shown if len(names) <= _MOST_NAMES else f"{shown} and {len(names) - _MOST_NAMES} more"
