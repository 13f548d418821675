"""What another format cannot hold, beside its files: so that a state comes back with the state id that it had."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import torch

from ckpt.adapters.foreign.same import same_bits
from ckpt.engine.stream import Content
from ckpt.errors import CorruptCheckpoint, StoreError
from ckpt.geometry import Box, TensorSpec
from ckpt.state.names import join, split
from ckpt.state.values import Json, canonical_json, decode, parse_json
from ckpt.store.log import FORMAT, check_format

NAME = "ckpt-sidecar.json"

Keys: TypeAlias = Mapping[str, Sequence[str]]  # of each tensor; several where it is tied


def foreign_names(content: Content) -> dict[str, str]:
    """The key of each tensor in other libraries' files: its path joined with dots, as their state dicts have it, or our
    own name where two would be the same. Further names of tied tensors have keys too."""
    names = [t.name for t in content.tensors] + sorted(content.aliases)
    dotted = {name: ".".join(map(str, split(name))) for name in names}
    if len(set(dotted.values())) != len(dotted):
        return {name: name for name in names}
    return dotted


def sidecar(content: Content, state_id: str) -> bytes:
    """The sidecar of a state with this id whose tensors are stored under their `foreign_names`."""
    keys = foreign_names(content)
    return canonical_json(
        {
            "format": FORMAT,
            "step": content.step,
            "state_id": state_id,
            "tensors": [[keys[t.name], t.name, t.stack] for t in content.tensors],
            "aliases": {keys[name]: [name, kept] for name, kept in content.aliases.items()},
            "values": dict(content.values),
            "ranks": [dict(r) for r in content.ranks],
        }
    )


def read_sidecar(folder: Path) -> Mapping[str, Json] | None:
    """The sidecar of a folder, if there is one. Raises CorruptCheckpoint for one that is damaged."""
    path = folder / NAME
    if not os.path.lexists(path):
        return None
    try:
        return parse_sidecar(path.read_bytes(), str(path))
    except OSError as error:
        raise StoreError(f"{path}: cannot be read: {error.strerror}") from error


def parse_sidecar(data: bytes, where: str) -> Mapping[str, Json]:
    """Raises CorruptCheckpoint for what is no sidecar."""
    document = parse_json(data, where)
    if not isinstance(document, dict):
        raise CorruptCheckpoint(f"{where}: not a sidecar; delete it to read the tensors alone")
    check_format(document, where)
    return document


def apply_sidecar(found: Content, document: Mapping[str, Json], folder: Path) -> tuple[Content, Keys]:
    """The content with the names, ties, values and rank values that the sidecar has, and the keys of each name. Tensors
    in files that the sidecar does not know are refused: the files have changed since. found: named by their keys."""
    where = folder / NAME
    specs = {t.name: t for t in found.tensors}
    try:
        names = {key: (name, stack) for key, name, stack in document["tensors"]}
        aliases: dict[str, Any] = document["aliases"]
        if specs.keys() != names.keys() | aliases.keys():
            odd = min(specs.keys() ^ (names.keys() | aliases.keys()))
            raise ValueError(f"{odd} is in the one but not in the other")
        tensors = [replace(specs[key], name=name, stack=stack) for key, (name, stack) in names.items()]
        ties = {name: kept for name, kept in aliases.values()}
        _check_names([t.name for t in tensors] + [name for name, _ in aliases.values()])
        _check_facts(document, tensors, ties)
        for values in (document["values"], *document["ranks"]):
            for name, value in values.items():
                decode(value, f"{where}: {name}")
        content = Content(
            tuple(sorted(tensors)),
            ties,
            document["values"],
            tuple(document["ranks"]),
            {},
            found.identity,
            document["step"],
            document["state_id"],
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CorruptCheckpoint(
            f"{where}: does not fit the files beside it: {error}; delete it to read the tensors alone"
        ) from None
    keys = {name: [key] for key, (name, _) in names.items()}
    for key, (_, kept) in aliases.items():
        keys[kept].append(key)
    return content, keys


def read_tied(read: Callable[[str, Box], torch.Tensor], keys: Sequence[str], box: Box, url: str) -> torch.Tensor:
    """A box of a tensor that is stored under several keys. Raises CorruptCheckpoint where they differ."""
    found = read(keys[0], box)
    for key in keys[1:]:
        if not same_bits(found, read(key, box)):
            raise CorruptCheckpoint(
                f"{url}: {keys[0]} and {key} were one tensor, and now differ; delete {NAME} to read both as they are"
            )
    return found


def beyond(content: Content, form: str) -> dict[str, str]:
    """What files of a format, such as "dcp" or "hf", cannot hold of a state: it is in the sidecar, or gets lost."""
    found = {name: f"is tied to {kept}; stored twice" for name, kept in content.aliases.items()}
    found |= {t.name: f"has {t.stack} stacking axes" for t in content.tensors if t.stack}
    if form in ("hf", "ranks"):
        found |= {name: "is a plain value" for name in content.values}
    for rank, values in enumerate(content.ranks):
        found |= {f"{name} of rank {rank}": "is a value of one rank" for name in values}
    return found


def _check_facts(document: Mapping[str, Json], tensors: Sequence[TensorSpec], ties: Mapping[str, str]) -> None:
    specs, step = {t.name: t for t in tensors}, document["step"]
    if not all(type(t.stack) is int and 0 <= t.stack <= len(t.shape) for t in tensors):
        raise ValueError("a tensor has more stacking axes than axes")
    if not set(ties.values()) <= specs.keys():
        raise ValueError("a tensor is tied to one that is not there")
    if not (step is None or (type(step) is int and step >= 0)) or not isinstance(document["state_id"], str):
        raise ValueError("its step or its state id is malformed")
    if not document["ranks"]:
        raise ValueError("it has no ranks")


def _check_names(names: Sequence[str]) -> None:
    if len(set(names)) != len(names):
        raise ValueError("two tensors have one name")
    for name in names:
        if join(split(name)) != name:
            raise ValueError(f"{name!r} is no name of a tensor")
