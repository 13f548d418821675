"""The sizes of a model, from Hugging Face's `config.json`, and which rows of a tensor of Megatron's they make."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckpt.errors import CkptError, CorruptCheckpoint, StoreError

CONFIG = "config.json"
_LARGEST = 16 << 20  # bytes of a config.json
_FAR = 1 << 40  # more than any size of a model

Run = tuple[int, int, int]  # first row at Hugging Face, first row at Megatron, number of rows


@dataclass(frozen=True)
class Rows:
    """hf, megatron: the number of rows that each tensor has; runs: which are the same."""

    hf: int
    megatron: int
    runs: tuple[Run, ...]


@dataclass(frozen=True)
class Sizes:
    """groups: of heads that share a key and a value; ffn: the width between the two layers of an MLP, of one expert
    where there are experts; vocabulary: without padding; has: of "output_layer" (not tied to the embeddings),
    "attention_bias", "mlp_bias", those that there are."""

    layers: int
    hidden: int
    heads: int
    groups: int
    head_dim: int
    ffn: int
    vocabulary: int
    positions: int = 0
    experts: int = 0
    has: frozenset[str] = frozenset()

    def size(self, word: str) -> int:
        """A number of columns, or of rows that are the same at both."""
        return self.heads * self.head_dim if word == "attended" else int(getattr(self, word))

    def rows(self, word: str) -> Rows:
        """The rows that a word of a table names."""
        if word in ("query", "key", "value", "query_key_value"):
            return self._attention(word)
        if word in ("gate", "up"):
            return Rows(self.ffn, 2 * self.ffn, ((0, self.ffn * (word == "up"), self.ffn),))
        size = self.size(word)
        return Rows(size, size, ((0, 0, size),))

    def _attention(self, word: str) -> Rows:
        """Megatron has for each group its queries, its key and its value."""
        queries = self.heads // self.groups * self.head_dim
        block = queries + 2 * self.head_dim
        counts = {"query": queries, "key": self.head_dim, "value": self.head_dim}
        within = {"query": 0, "key": queries, "value": queries + self.head_dim}
        before = dict.fromkeys(counts, 0)
        total = counts.get(word, block) * self.groups
        if word == "query_key_value":
            before = {name: first * self.groups for name, first in within.items()}
        else:
            counts = {word: counts[word]}
        runs = tuple(
            (before[name] + group * count, group * block + within[name], count)
            for name, count in counts.items()
            for group in range(self.groups)
        )
        return Rows(total, block * self.groups, runs)


def read_config(path: Path) -> tuple[bytes, Mapping[str, Any]]:
    """A `config.json`, as it stands and read. Raises StoreError or CorruptCheckpoint naming it."""
    try:
        if path.stat().st_size > _LARGEST:
            raise CorruptCheckpoint(f"{path}: {path.stat().st_size} bytes are no config.json of Hugging Face")
        data = path.read_bytes()
    except OSError as error:
        raise StoreError(f"{path}: cannot be read: {error.strerror}; give --config") from error
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpoint(f"{path}: not JSON: {error}") from None
    if not isinstance(document, dict):
        raise CorruptCheckpoint(f"{path}: not a config.json of Hugging Face")
    return data, document


def family_of(config: Mapping[str, Any], known: Mapping[str, object], where: Path) -> str:
    """The family that a config says its model is of. Raises CkptError for one that is not `known`."""
    kind = config.get("model_type")
    if isinstance(kind, str) and kind in known:
        return kind
    raise CkptError(
        f"{where}: is of a model_type {kind!r}; known are {', '.join(known)}; say --names with one of them, if the "
        "tensors have the same names as its"
    )


def sizes_of(config: Mapping[str, Any], family: str, where: Path) -> Sizes:
    """Raises CorruptCheckpoint where a size is missing or absurd."""
    read = _Reader(config, where)
    if family == "gpt2":
        hidden, heads = read.size("n_embd"), read.size("n_head")
        sizes = Sizes(
            layers=read.size("n_layer"),
            hidden=hidden,
            heads=heads,
            groups=heads,
            head_dim=hidden // heads,
            ffn=read.size("n_inner", 4 * hidden),
            vocabulary=read.size("vocab_size"),
            positions=read.size("n_positions"),
            has=read.has(output_layer=not read.flag("tie_word_embeddings", True)),
        )
    else:
        hidden, heads = read.size("hidden_size"), read.size("num_attention_heads")
        sizes = Sizes(
            layers=read.size("num_hidden_layers"),
            hidden=hidden,
            heads=heads,
            groups=read.size("num_key_value_heads", heads),
            head_dim=read.size("head_dim", hidden // heads),
            ffn=read.size("intermediate_size"),
            vocabulary=read.size("vocab_size"),
            experts=read.size("num_local_experts") if family == "mixtral" else 0,
            has=read.has(
                output_layer=not read.flag("tie_word_embeddings", False),
                attention_bias=read.flag("attention_bias", False),
                mlp_bias=read.flag("mlp_bias", False),
            ),
        )
    if not sizes.head_dim or sizes.heads % sizes.groups:
        raise CorruptCheckpoint(f"{where}: {sizes.heads} heads do not divide {hidden}, or into {sizes.groups} groups")
    return sizes


@dataclass(frozen=True)
class _Reader:
    config: Mapping[str, Any]
    where: Path

    def size(self, key: str, default: int | None = None) -> int:
        value = self.config.get(key)
        found = default if value is None else value
        if type(found) is not int or not 0 < found < _FAR:
            raise CorruptCheckpoint(f"{self.where}: {key} is {value!r}, where a positive whole number is needed")
        return found

    def flag(self, key: str, default: bool) -> bool:
        found = self.config.get(key, default)
        if type(found) is not bool:
            raise CorruptCheckpoint(f"{self.where}: {key} is {found!r}, where true or false is needed")
        return found

    def has(self, **flags: bool) -> frozenset[str]:
        return frozenset(name for name, there in flags.items() if there)
