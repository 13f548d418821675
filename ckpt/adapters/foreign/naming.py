"""Megatron Core's names of a model's tensors into Hugging Face's, and back: boxes are moved, by a table of data.

Nothing is computed or cast, so that there and back gives the bits that were. The tables are in `naming_families`. On
Megatron's side names are those of `sharded_state_dict`: layers, and experts, stacked on leading axes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

from ckpt.adapters.foreign.moved import Move, Moved
from ckpt.adapters.foreign.naming_families import BUFFERS, FAMILIES, SPELLINGS, Line
from ckpt.adapters.foreign.naming_sizes import Sizes, family_of, read_config, sizes_of
from ckpt.engine.stream import Source
from ckpt.errors import StateMismatch, Unsupported
from ckpt.geometry import Box, TensorSpec
from ckpt.geometry.box import Index
from ckpt.state.values import Json

AUTO = "auto"
_MOST_PARTS = 1_000_000  # a config.json that asks for more is no model's
_SHOWN = 8  # names in an error
_PREFIX = re.compile(r"(model|transformer)\.")


@dataclass(frozen=True)
class Part:
    """A box of a tensor of Hugging Face's, and the same elements in one of Megatron's."""

    hf: str
    hf_box: Box
    megatron: str
    megatron_box: Box
    transposed: bool


@dataclass
class Table:
    """All parts of a model. hf, megatron: the shape of each tensor; stack: how many axes of Megatron's are layers and
    experts; padded: of Megatron's, those with a row for each word, and maybe more."""

    parts: list[Part] = field(default_factory=list)
    hf: dict[str, Index] = field(default_factory=dict)
    megatron: dict[str, Index] = field(default_factory=dict)
    stack: dict[str, int] = field(default_factory=dict)
    padded: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class Model:
    """What the tables need to know of a model. config: its `config.json` as it stands, which says so; path: where that
    lies."""

    family: str
    sizes: Sizes
    config: bytes
    path: Path

    @staticmethod
    def read(names: str, path: Path) -> Model:
        """names: a family, or "auto" for the one that the `config.json` at `path` says. Raises StoreError,
        CorruptCheckpoint or CkptError naming the file."""
        config, document = read_config(path)
        family = family_of(document, FAMILIES, path) if names == AUTO else names
        return Model(family, sizes_of(document, family, path), config, path)

    def table(self, spread: frozenset[str] = frozenset()) -> Table:
        """spread: which of "layer" and "expert" are numbers in Megatron's names, not axes of its tensors. Raises
        Unsupported for sizes that no model has."""
        lines = [line for line in FAMILIES[self.family] if line.when is None or line.when in self.sizes.has]
        if self.sizes.groups > _MOST_PARTS or sum(map(self._parts_of, lines)) > _MOST_PARTS:
            raise Unsupported(f"{self.path}: sizes that no model has: {self.sizes}")
        table = Table()
        for line in lines:
            self._add(table, line, spread)
        return table

    def _stacks(self, line: Line) -> dict[str, int]:
        sizes = {"layer": self.sizes.layers, "expert": self.sizes.experts}
        return {word: size for word, size in sizes.items() if f"{{{word}}}" in line.hf}

    def _parts_of(self, line: Line) -> int:
        return math.prod(self._stacks(line).values()) * len(self.sizes.rows(line.rows).runs)

    def _add(self, table: Table, line: Line, spread: frozenset[str]) -> None:
        rows = self.sizes.rows(line.rows)
        columns: Index = (self.sizes.size(line.columns),) if line.columns else ()
        stacks = self._stacks(line)
        sizes = tuple(size for word, size in stacks.items() if word not in spread)
        for numbers in product(*map(range, stacks.values())):
            labels = dict(zip(stacks, numbers, strict=True))
            hf, megatron = line.hf.format(**labels), line.megatron
            for word, number in labels.items():
                place, label = (f"{{{word}}}", str(number)) if word in spread else (f"{{{word}}}.", "")
                megatron = megatron.replace(place, label)
            front = tuple(number for word, number in labels.items() if word not in spread)
            table.hf[hf] = _turned((rows.hf, *columns), line)
            table.megatron[megatron] = (*sizes, rows.megatron, *columns)
            table.stack[megatron] = len(sizes)
            if line.rows == "vocabulary":
                table.padded.add(megatron)
            rest = (0,) * len(columns)
            for first, start, count in rows.runs:
                hf_box = Box(_turned((first, *rest), line), _turned((count, *columns), line))
                box = Box((*front, start, *rest), (*(1 for _ in front), count, *columns))
                table.parts.append(Part(hf, hf_box, megatron, box, line.transposed))


def _turned(numbers: Index, line: Line) -> Index:
    return numbers[::-1] if line.transposed else numbers


@dataclass(frozen=True)
class Named:
    """source: the state under its new names; to: whose they are; tensors: the old names of what each is made of; left:
    what has none, with the reason."""

    model: Model
    source: Source
    to: str
    tensors: Mapping[str, tuple[str, ...]]
    left: Mapping[str, str]

    @property
    def record(self) -> Json:
        """For a person, or a program, to see what was done."""
        return {
            "family": self.model.family,
            "config": str(self.model.path),
            "to": self.to,
            "tensors": {new: list(old) for new, old in self.tensors.items()},
            "left_out": dict(self.left),
        }


def to_hf(source: Source, model: Model) -> Named:
    """A model with Megatron's names, under Hugging Face's. Rows that pad the vocabulary are left out, which is said in
    `left`. Raises StateMismatch that lists all tensors that are missing, unknown, or of another shape."""
    there = _tensors(source)
    table = model.table(_spread(there))
    found = {name: _spelled(name, there) for name in table.megatron}
    _compare(source, model, table.megatron, found, there.keys() - set(found.values()), table.padded)
    left = {}
    for name, shape in table.megatron.items():
        held = there[found[name]].shape
        if name in table.padded and held[0] > shape[0]:
            left[found[name]] = f"rows {shape[0]} to {held[0] - 1} pad a vocabulary of {shape[0]}: not carried"
    moves = [Move(found[p.megatron], p.megatron_box, p.hf, p.hf_box, p.transposed) for p in table.parts]
    return _named(source, model, "hf", there, moves, table.hf, {}, left)


def to_megatron(source: Source, model: Model) -> Named:
    """A model with Hugging Face's names, under Megatron's. Constants that older versions of transformers kept are left
    out, which is said in `left`. Raises as `to_hf`; where an output layer that the config ties to the embeddings is
    there, reading raises CorruptCheckpoint if their bits differ."""
    there = _tensors(source)
    table = model.table()
    bare = not any(_PREFIX.match(name) for name in there)
    found = {name: _PREFIX.sub("", name, count=1) if bare else name for name in table.hf}
    left = {name: "a constant, which is no weight" for name in there if any(re.fullmatch(b, name) for b in BUFFERS)}
    tied = {"lm_head.weight"} & there.keys() - set(found.values())
    _compare(source, model, table.hf, found, there.keys() - set(found.values()) - left.keys() - tied)
    moves = [Move(found[p.hf], p.hf_box, p.megatron, p.megatron_box, p.transposed) for p in table.parts]
    for name in tied:
        embedding = next(m for m in moves if m.new == "embedding.word_embeddings.weight")
        if there[name].shape != embedding.taken.extent:
            raise StateMismatch(f"{source.url}: {name} is tied to {embedding.old}, but has another shape")
        moves.append(Move(name, embedding.taken, embedding.new, embedding.placed))
    return _named(source, model, "megatron", there, moves, table.megatron, table.stack, left)


def _tensors(source: Source) -> dict[str, TensorSpec]:
    """By each of their names."""
    there = {t.name: t for t in source.content.tensors}
    return there | {name: there[kept] for name, kept in source.content.aliases.items()}


def _spread(names: Iterable[str]) -> frozenset[str]:
    """Whether layers, and experts, have a tensor each, as in Megatron's checkpoints of models whose layers differ."""
    kinds = {"layer": r"decoder\.layers\.\d+\.", "expert": r".*\.experts\.experts\.\d+\."}
    return frozenset(word for word, pattern in kinds.items() if any(re.match(pattern, name) for name in names))


def _spelled(name: str, there: Mapping[str, object]) -> str:
    """The name by which a tensor of Megatron's is there, or `name` where it is not."""
    for pair in SPELLINGS.items():
        for one, other in (pair, pair[::-1]):
            spelled = name.replace(one, other)
            if name not in there and spelled in there:
                return spelled
    return name


def _compare(
    source: Source,
    model: Model,
    shapes: Mapping[str, Index],
    found: Mapping[str, str],
    unknown: Iterable[str],
    padded: Iterable[str] = (),
) -> None:
    """Raises StateMismatch listing all that does not fit. found: what each tensor of the table is called there; padded:
    those that may have more rows."""
    there = _tensors(source)
    missing = [name for name in found.values() if name not in there]
    odd = []
    for name, shape in shapes.items():
        held = there[found[name]].shape if found[name] in there else shape
        longer = name in padded and held[1:] == shape[1:] and held[:1] > shape[:1]
        if held != shape and not longer:
            odd.append(f"{found[name]} is {list(held)}, not {list(shape)}")
    faults = {"missing": missing, "unknown": sorted(unknown), "of another shape": odd}
    if any(faults.values()):
        listed = "; ".join(f"{what}: {_few(names)}" for what, names in faults.items() if names)
        raise StateMismatch(
            f"{source.url}: not the {model.family} model of {model.path}: {listed}; give its own config.json, or "
            "choose tensors with --select and --rename"
        )


def _few(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _named(
    source: Source,
    model: Model,
    to: str,
    there: Mapping[str, TensorSpec],
    moves: list[Move],
    shapes: Mapping[str, Index],
    stack: Mapping[str, int],
    left: Mapping[str, str],
) -> Named:
    tensors: dict[str, dict[str, None]] = {name: {} for name in shapes}
    for move in moves:
        tensors[move.new][move.old] = None
    specs = list(_specs(source, there, tensors, shapes, stack))
    told = f"as {to} names a {model.family} model of {model.sizes}"
    moved = Moved(source, specs, moves, left, told)
    return Named(model, moved, to, {new: tuple(old) for new, old in tensors.items()}, left)


def _specs(
    source: Source,
    there: Mapping[str, TensorSpec],
    tensors: Mapping[str, Iterable[str]],
    shapes: Mapping[str, Index],
    stack: Mapping[str, int],
) -> Iterator[TensorSpec]:
    for new, old in tensors.items():
        dtypes = {there[name].dtype: name for name in reversed(list(old))}
        if len(dtypes) != 1:
            one, other = sorted(f"{name} is {dtype}" for dtype, name in dtypes.items())[:2]
            raise StateMismatch(f"{source.url}: {one}, {other}, but both are parts of {new}; cast them with --dtype")
        dtype = there[next(iter(old))]
        yield TensorSpec(new, shapes[new], dtype.dtype, dtype.itemsize, stack.get(new, 0))
