"""Parameter groups of optimizers, over all ranks.

The options of a group (learning rate, betas, keys of one's own) are a plain value under the name of each of its
members, so that they are found again on any layout, in any order and grouping. A group that has no member on a rank is
told by its place in the optimizer's list: at one place there is one group, on every rank. If some rank has a member of
it, its options are that member's; if none has, they are kept as `<optimizer>/empty_groups/~k`, k counting such groups
in order.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckpt.errors import StateMismatch
from ckpt.state.names import join
from ckpt.state.values import Json, decode, encode

COUNTERS = frozenset({"step"})
"""Options that are state: some optimizers count steps in the group, from the first step on, and only where the group
has members."""

Declared = Mapping[str, Json]
"""What one rank tells the others: for each optimizer, by place, the name of the value of its group's smallest member,
or a list of one item, the encoded options of a group without members."""


@dataclass
class Group:
    """One parameter group as a rank has it. member: name of the value of its smallest member, None without any.
    kept_at: name of the value with its options, which a load finds once all ranks' groups are known."""

    member: str | None
    options: Mapping[str, Any]
    kept_at: str = ""


def declare(groups: Mapping[str, Sequence[Group]]) -> Declared:
    """This rank's groups by optimizer. Raises Unsupported for an option that cannot be kept."""
    return {
        name: [g.member if g.member is not None else [encode(dict(g.options), name)] for g in one]
        for name, one in groups.items()
    }


def places(declared: Sequence[Declared]) -> dict[str, list[str]]:
    """For each optimizer, by place, the name of the value that holds the group's options."""
    found: dict[str, list[str]] = {}
    for name in sorted({name for one in declared for name in one}):
        empty = 0
        found[name] = []
        for place in range(max(len(one.get(name, ())) for one in declared)):
            members = [g for _, g in _at(declared, name, place) if isinstance(g, str)]
            found[name].append(min(members) if members else f"{name}/{join(('empty_groups', empty))}")
            empty += not members
    return found


def _at(declared: Sequence[Declared], name: str, place: int) -> list[tuple[int, Json]]:
    """(rank, group) of the ranks that have a group at a place."""
    return [(rank, one[name][place]) for rank, one in enumerate(declared) if place < len(one.get(name, ()))]


def empty_groups(declared: Sequence[Declared], values: Mapping[str, Json]) -> dict[str, Json]:
    """The values of groups that have no member on any rank. `values`: those of all ranks, with all members' options.

    Raises StateMismatch where a group is empty on a rank and has other options there than elsewhere.
    """
    kept: dict[str, Json] = {}
    for name, at in places(declared).items():
        for place, value in enumerate(at):
            groups = _at(declared, name, place)
            if all(isinstance(group, str) for _, group in groups):
                continue
            options = [(rank, _settled(values[g] if isinstance(g, str) else g[0])) for rank, g in groups]
            first, expected = options[0]
            for rank, found in options[1:]:
                if found != expected:
                    raise StateMismatch(
                        f"{name}: parameter group {place} has other options on rank {rank} than on rank {first} "
                        f"({_differing(found, expected, name)}), and no parameters on one of them; give a group the "
                        "same place and the same options on every rank"
                    )
            if value not in values:
                kept[value] = expected
    return kept


def _settled(options: Json) -> Json:
    """Encoded options without the counters."""
    return {"dict": [item for item in options["dict"] if item[0] not in COUNTERS]}


def _differing(one: Json, other: Json, name: str) -> str:
    a, b = ({k: encode(v, name) for k, v in decode(x, name).items()} for x in (one, other))
    return ", ".join(sorted(k for k in a.keys() | b.keys() if k not in a or k not in b or a[k] != b[k])) or "order"


def check_options(name: str, saved: Json, own: Collection[str]) -> None:
    """Checks that a group was saved with the options that it has here; counters may be missing on either side.

    Raises StateMismatch naming the value and the options."""
    keys, mine = set(decode(saved, name)) - COUNTERS, set(own) - COUNTERS
    if keys != mine:
        raise StateMismatch(
            f"{name}: its parameter group has options {sorted(mine - keys)} that the checkpoint lacks, or "
            f"lacks {sorted(keys - mine)}; use the optimizer it was saved with"
        )
