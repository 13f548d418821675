"""How the parts that ranks hold become one state: declarations, and their checked union."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ckpt.engine.group import Group
from ckpt.errors import RankFailed, StateMismatch
from ckpt.geometry import Box, Catalogue, Holdings, TensorSpec
from ckpt.geometry.box import Index
from ckpt.state.captured import Captured
from ckpt.state.dtypes import STORED
from ckpt.state.groups import declare, empty_groups
from ckpt.state.values import Json, canonical_json, encode, parse_json


@dataclass(frozen=True)
class Union:
    """All ranks' tensors: sorted specs with their holdings, and further names of tied ones."""

    catalogue: Catalogue
    holdings: tuple[Holdings, ...]
    aliases: Mapping[str, str]


def declare_tensors(captured: Captured) -> bytes:
    """What a rank tells the others about its tensors: names, dtypes, shapes, boxes, ties; never the bits."""
    rows = [
        [
            t.spec.name,
            t.spec.dtype,
            list(t.spec.shape),
            t.spec.stack,
            [[list(s.box.offset), list(s.box.extent)] for s in t.shards],
        ]
        for t in captured.tensors.values()
    ]
    stateless = {name: sorted(map(list, slices)) for name, slices in captured.stateless.items()}
    return canonical_json([rows, captured.aliases, stateless])


def partial_stacks(declarations: Sequence[bytes]) -> frozenset[str]:
    """Stacked tensors that lack slices only because some rank says that there is none: state of frozen layers, say.
    Other gaps stay gaps, and errors."""
    held: dict[str, set[Index]] = defaultdict(set)
    none: dict[str, set[Index]] = defaultdict(set)
    stacks: dict[str, Index] = {}
    for rank, data in enumerate(declarations):
        rows, _, stateless = parse_json(data, f"declaration of rank {rank}")
        for name, slices in stateless.items():
            none[name].update(map(tuple, slices))
        for name, _, shape, stack, boxes in rows:
            if stack:
                stacks[name] = tuple(shape[:stack])
                leads = {(tuple(offset[:stack]), tuple(extent[:stack])) for offset, extent in boxes}
                held[name].update(i for lead in leads for i in Box(*lead).indices())
    missing = {name: set(Box.whole(stack).indices()) - held[name] for name, stack in stacks.items()}
    return frozenset(n for n, gone in missing.items() if held[n] and gone and gone <= none[n.rpartition("/")[0]])


@dataclass(frozen=True)
class Declared:
    """What all ranks say of their states: `tensors`, by rank; `values`, merged; and this rank's own `per_rank`."""

    tensors: list[bytes]
    values: dict[str, Json]
    per_rank: dict[str, Json]


def declare_all(
    comm: Group,
    captured: Captured,
    what: str,
    step: int | None = None,
    partial: Callable[[Sequence[bytes]], frozenset[str]] = partial_stacks,
) -> Declared:
    """Collective. Exchanges declarations and merges the values. Takes partial stacks apart into their slices on every
    rank, so that nothing stands for what is not there. step: must be the same on every rank.

    Raises StateMismatch naming entry and ranks where they disagree, Unsupported for a value that cannot be kept."""
    with comm.phase(f"{what}: capture"):
        mine = declare_tensors(captured)
        shared, per_rank = encode_values(captured)
        told = canonical_json([step, shared, declare(captured.groups)])
    tensors = comm.all_gather(mine, f"{what}: declare tensors")
    everybody = comm.all_gather(told, f"{what}: declare values")
    with comm.phase(f"{what}: merge"):
        parsed = [parse_json(v, f"values of rank {r}") for r, v in enumerate(everybody)]
        for rank, (other, _, _) in enumerate(parsed):
            if other != step:
                raise StateMismatch(f"rank {comm.rank} saves step {step}, but rank {rank} saves step {other}")
        values = union_of_values([canonical_json(v) for _, v, _ in parsed])
        values |= empty_groups([groups for _, _, groups in parsed], values)
        apart = partial(tensors)
        for name in sorted(apart & captured.tensors.keys()):
            captured.unstack(name)
    if apart:
        tensors = comm.all_gather(declare_tensors(captured), f"{what}: declare slices")
    return Declared(tensors, values, per_rank)


def compare_plans(comm: Group, digest: str, what: str) -> None:
    """Collective. Raises RankFailed where two ranks have made different plans."""
    for rank, other in enumerate(comm.all_gather(digest.encode(), f"{what}: compare plans")):
        if other.decode() != digest:
            raise RankFailed(f"ranks {comm.rank} and {rank} made different plans; use one version of ckpt")


def union_of(declarations: Sequence[bytes]) -> Union:
    """Merges everybody's declarations. Raises StateMismatch naming the tensor and ranks where they disagree."""
    specs: dict[str, tuple[int, TensorSpec]] = {}
    held: dict[str, list[tuple[int, Box]]] = defaultdict(list)
    aliases: dict[str, tuple[int, str]] = {}
    for rank, data in enumerate(declarations):
        rows, ties, _ = parse_json(data, f"declaration of rank {rank}")
        for name, dtype, shape, stack, boxes in rows:
            spec = TensorSpec(name, tuple(shape), dtype, STORED[dtype].itemsize, stack)
            first, known = specs.setdefault(name, (rank, spec))
            if known != spec:
                raise StateMismatch(f"{name}: {_say(known)} on rank {first}, but {_say(spec)} on rank {rank}")
            held[name] += [(rank, Box(tuple(o), tuple(e))) for o, e in boxes]
        for name, kept in ties.items():
            first, other = aliases.setdefault(name, (rank, kept))
            if other != kept:
                raise StateMismatch(f"{name}: tied to {other} on rank {first}, but to {kept} on rank {rank}")
    for name, (rank, kept) in aliases.items():
        if name in specs and not held[name]:  # where a rank has no part of it, nothing tells that it is tied
            del specs[name]
        elif name in specs:
            raise StateMismatch(f"{name}: tied to {kept} on rank {rank}, but not on rank {specs[name][0]}")
    catalogue = Catalogue.of([spec for _, spec in specs.values()])
    holdings = []
    for spec in catalogue.tensors:
        try:
            holdings.append(Holdings.of(held[spec.name]))
        except StateMismatch as error:
            raise StateMismatch(f"{spec.name}: {error}") from None
    return Union(catalogue, tuple(holdings), {name: kept for name, (_, kept) in sorted(aliases.items())})


def check_cover(union: Union) -> None:
    """Checks that every tensor is covered exactly. Raises StateMismatch naming tensor, place and ranks."""
    for spec, holdings in zip(union.catalogue.tensors, union.holdings, strict=True):
        holdings.check_cover(spec.name, spec.shape)


def encode_values(captured: Captured) -> tuple[dict[str, Json], dict[str, Json]]:
    """Canonical forms of the replicated and the per-rank values. Raises Unsupported naming the entry."""
    return (
        {name: encode(value, name) for name, value in captured.values.items()},
        {name: encode(value, name) for name, value in captured.per_rank.items()},
    )


def union_of_values(declarations: Sequence[bytes]) -> dict[str, Json]:
    """Merges everybody's replicated values (canonical JSON objects). Raises StateMismatch where two ranks differ."""
    merged: dict[str, Json] = {}
    owner: dict[str, int] = {}
    for rank, data in enumerate(declarations):
        for name, value in parse_json(data, f"values of rank {rank}").items():
            if name not in merged:
                merged[name], owner[name] = value, rank
            elif canonical_json(merged[name]) != canonical_json(value):
                raise StateMismatch(
                    f"{name}: ranks {owner[name]} and {rank} have different values; if each rank should keep its own, "
                    "declare it with ckpt.per_rank(...)"
                )
    return merged


def _say(spec: TensorSpec) -> str:
    stacked = f", {spec.stack} stacked axes" if spec.stack else ""
    return f"{spec.dtype}{list(spec.shape)}{stacked}"
