"""Filling a live state in place from a known one: matched first with nothing changed, verified from the live memory
last. A load fills from a store, a live resharding from other ranks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from ckpt.engine.digests import Held, digests_of, held_document, parse_held
from ckpt.engine.group import Group
from ckpt.engine.merge import declare_tensors, union_of
from ckpt.engine.mover import held_parts
from ckpt.engine.target import Options, Target, finish, match, match_groups, matches, wanted_by_all
from ckpt.errors import CorruptCheckpoint, StateInvalid, StateMismatch
from ckpt.geometry import Box, Catalogue, Holdings, Layout
from ckpt.state.captured import Captured, LocalTensor
from ckpt.state.groups import declare
from ckpt.state.streams import Streams
from ckpt.state.values import canonical_json, decode, parse_json
from ckpt.store.commit import held_digests
from ckpt.store.opened import Opened
from ckpt.store.records import Manifest

Copy = tuple[torch.Tensor, torch.Tensor]


@dataclass
class Filling:
    """One state about to be filled. `wanted`: what the whole job wants, by index into the manifest's catalogue; `fill`:
    this rank's shards by the same index; `values`: all plain values to be put back, of which `rederived` are random
    streams that were made anew."""

    captured: Captured
    target: Target
    wanted: dict[int, Holdings]
    fill: Mapping[int, Sequence[LocalTensor]]
    values: dict[str, Any]
    rederived: tuple[str, ...] = ()

    def places(self, tensor: int, box: Box, elements: torch.Tensor) -> list[Copy]:
        """Where the elements of a box go on this rank: (live memory, its part of the elements)."""
        return [
            (view, elements[common.relative_to(box).slices])
            for local in self.fill.get(tensor, ())
            for common, view in held_parts(local.shards, box)
        ]


def prepare(
    comm: Group,
    opened: Opened,
    capture: Callable[[Opened], Captured],
    options: Options,
    layout: dict[str, Any] | None,
    what: str,
) -> Filling:
    """Collective. Matches all ranks' states with what there is to fill them with. Raises StateMismatch; nothing is
    changed. capture: makes this rank's state with live views; what: "load", say, for messages."""
    with comm.phase(f"{what}: match"):
        captured = capture(opened)
        target = match(captured, opened, options, comm.rank)
        values = {n: decode(v, n) for n, v in opened.manifest.values.items()}
        own, rederived = _own_values(captured, opened, options, comm, layout)
        values |= own
        stored = {t.name: t for t in opened.manifest.catalogue.tensors}
        kept = Captured()
        for name, tensors in target.tensors.items():
            # Names tied in the checkpoint may be separate here: each place asks for the same stored tensor.
            boxes = {s.box: s for t in tensors for s in t.shards}
            kept.tensors[name] = LocalTensor(stored[name], list(boxes.values()))
        mine = canonical_json([list(captured.values), list(captured.aliases), declare(captured.groups)])
    declared = comm.all_gather(declare_tensors(kept), f"{what}: declare tensors")
    valued = comm.all_gather(mine, f"{what}: declare values")
    with comm.phase(f"{what}: match all ranks"):
        named = [parse_json(v, f"values of rank {r}") for r, v in enumerate(valued)]
        names, tied = ({name for one in named for name in one[i]} for i in range(2))
        names |= match_groups(captured, [one[2] for one in named], opened, options)
        wanted = wanted_by_all(union_of(declared), opened, names, tied, options)
    index = {t.name: i for i, t in enumerate(opened.manifest.catalogue.tensors)}
    fill = {index[n]: tensors for n, tensors in target.tensors.items()}
    return Filling(captured, target, wanted, fill, values, rederived)


def _own_values(
    captured: Captured, opened: Opened, options: Options, comm: Group, layout: dict[str, Any] | None
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The plain values that belong to this rank alone: those of the same rank of the same layout, or random streams
    that go on here or are made anew; and the names of the latter."""
    everybody = {n for one in opened.ranks for n in one}
    rederived: list[str] = []
    if opened.run.get("layout") == layout and len(opened.ranks) == comm.world:
        saved = opened.ranks[comm.rank]
        mine = {n: decode(saved[n], n) for n in captured.per_rank if n in saved}
        left = saved.keys() - mine.keys()
    else:
        mine = {}
        for name in sorted(captured.per_rank.keys() & everybody):
            if name not in captured.streams:
                _refuse_elsewhere(name, opened, layout, comm.world)
            mine[name], made = _streams(captured, opened, layout, name).of(comm.rank)
            rederived += [name] * made
        for name in sorted(n for n in everybody - mine.keys() if not matches(n, options.allow_extra)):
            _refuse_elsewhere(name, opened, layout, comm.world)
        left = set()
    absent = [n for n in captured.per_rank if n not in mine and not matches(n, options.allow_missing)]
    if absent:
        raise StateMismatch(
            f"rank {comm.rank}: the checkpoint has no per-rank {absent[0]}; allow_missing=[...] keeps what the state "
            "holds"
        )
    extra = sorted(n for n in left if not matches(n, options.allow_extra))
    if extra:
        raise StateMismatch(
            f"rank {comm.rank}: the checkpoint holds per-rank {extra[0]}, which the state has not; allow_extra=[...] "
            "leaves it out"
        )
    return mine, tuple(rederived)


def _streams(captured: Captured, opened: Opened, layout: dict[str, Any] | None, name: str) -> Streams:
    before, now = (None if d is None else Layout(**d) for d in (opened.run.get("layout"), layout))
    return Streams(name, captured.streams[name], [one.get(name) for one in opened.ranks], before, now)


def _refuse_elsewhere(name: str, opened: Opened, layout: dict[str, Any] | None, world: int) -> NoReturn:
    raise StateMismatch(
        f"{name}: kept per rank under layout {opened.run.get('layout')} of {len(opened.ranks)} ranks; it has no "
        f"meaning on layout {layout} of {world} ranks: load on the saved layout, or leave it out of the state and use "
        "allow_extra=[...]"
    )


@contextlib.contextmanager
def changing(filling: Filling, atomic: bool, failed: str, remedy: str) -> Iterator[Callable[[], None]]:
    """Around everything that writes into the live state: an error inside becomes StateInvalid, or, if `atomic`, the old
    tensors are put back and it is raised as it is. The body calls what this yields once it begins to put plain values
    back, which cannot be undone."""
    old = _copies(filling.target) if atomic else None
    applying = False

    def begin_to_apply() -> None:
        nonlocal applying
        applying = True

    try:
        yield begin_to_apply
    except BaseException as error:
        if old is not None:
            for view, copy in old:
                view.copy_(copy)
            if not applying:
                raise
        raise StateInvalid(
            f"{failed} after the state began to change: {error}. This state is a mix: {remedy}"
        ) from error


def _copies(target: Target) -> list[Copy]:
    """Every live view that will be written, with a copy of what it holds now."""
    views = [s.view for tensors in target.tensors.values() for t in tensors for s in t.shards]
    views += [s.view for tensor, _ in target.casts for s in tensor.shards]
    views += [view for pads in target.pads.values() for view in pads]
    return [(v, v.clone()) for v in views]


def apply(comm: Group, filling: Filling, begin_to_apply: Callable[[], None], what: str) -> None:
    """Collective. Casts what was filled as stored into place and clears padding, then puts all plain values back."""
    with comm.phase(f"{what}: cast"):
        finish(filling.target)
    with comm.phase(f"{what}: apply values"):
        begin_to_apply()
        for one in filling.captured.appliers:
            one(filling.values)


def verify(comm: Group, manifest: Manifest, filling: Filling, what: str, blame: str) -> None:
    """Collective. Digests every live box, compares replicas, and compares each tensor's sum with the manifest.

    Raises CorruptCheckpoint naming the tensor, with `blame`: what may have gone wrong, and the remedy."""
    with comm.phase(f"{what}: verify"):
        places = {f"{i}/{n}": t for i, tensors in filling.fill.items() for n, t in enumerate(tensors)}
        digests = digests_of(Captured(places))
        found: Held = {}
        for index, tensors in filling.fill.items():
            name = manifest.catalogue.tensors[index].name
            first: dict[Box, tuple[int, int]] = {}
            for n in range(len(tensors)):
                for box, digest in digests[f"{index}/{n}"]:
                    if first.setdefault(box, digest) != digest:
                        raise CorruptCheckpoint(f"{name}: two places in memory differ in {box} after filling them")
            found[name] = list(first.items())
        document = held_document(found)
    everybody = comm.all_gather(document, f"{what}: digests")
    with comm.phase(f"{what}: compare digests"):
        if comm.rank == 0:
            _compare(manifest, [parse_held(d, r) for r, d in enumerate(everybody)], blame)


def _compare(manifest: Manifest, everybody: Sequence[Held], blame: str) -> None:
    held = {name for one in everybody for name in one}
    wanted = Catalogue(tuple(t for t in manifest.catalogue.tensors if t.name in held), ())
    try:
        found = held_digests(wanted, dict(enumerate(everybody)))
    except StateMismatch as error:
        raise CorruptCheckpoint(f"after filling it, {error}") from None
    for spec, digest in zip(manifest.catalogue.tensors, manifest.digests, strict=True):
        if spec.name in found and found[spec.name] != digest:
            raise CorruptCheckpoint(f"{spec.name}: the fingerprint of the live tensor is not the saved one: {blame}")
