"""`ckpt-reshard --names`: a model's tensors under Megatron Core's names, or under Hugging Face's."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from ckpt.adapters.foreign.changes import Changed, Changes
from ckpt.adapters.foreign.naming import Model, Named, to_hf, to_megatron
from ckpt.adapters.foreign.naming_sizes import CONFIG
from ckpt.cli import output
from ckpt.engine.stream import Source


def model_of(names: str | None, config: Path | None, form: str, source: str) -> Model | None:
    """The model that `--names` and `--config` speak of. form, source: the format of SRC, and where it lies: there is
    Hugging Face's config.json too."""
    if names is None:
        if config is not None:
            raise click.UsageError("--config says what a model's tensors are called; give --names with it")
        return None
    if config is None:
        if form != "hf":
            raise click.UsageError("--names needs the sizes of the model: give Hugging Face's config.json as --config")
        folder = Path(source)
        config = (folder if folder.is_dir() else folder.parent) / CONFIG
    return Model.read(names, config)


def changed_and_named(
    source: Source, form: str, changes: Changes, model: Model | None
) -> tuple[Source, Changed | None, Named | None]:
    """The state that is wanted, and what changes there were. Changes speak of Megatron's names: they come after the new
    names where SRC has Hugging Face's, else before."""
    named = to_megatron(source, model) if model is not None and form == "hf" else None
    changed = None if changes == Changes() else Changed(named.source if named else source, changes)
    wanted = changed or (named.source if named else source)
    if model is not None and named is None:
        named = to_hf(wanted, model)
        wanted = named.source
    return wanted, changed, named


def beside(named: Named | None) -> Mapping[str, bytes]:
    """Files that belong to a result in Hugging Face's format."""
    return {} if named is None or named.to != "hf" else {CONFIG: named.model.config}


def show(record: Mapping[str, Any] | None) -> list[output.RenderableType]:
    """The record of the new names, for a person: a line for each tensor of Megatron's."""
    if not record:
        return []
    lines: dict[str, list[str]] = {}
    for new, old in record["tensors"].items():
        for one in old:
            megatron, hf = (new, one) if record["to"] == "megatron" else (one, new)
            lines.setdefault(megatron, []).append(hf)
    table = output.table("Megatron Core", "", "Hugging Face")
    for megatron, hf in lines.items():
        more = f" and {len(hf) - 1} more" if len(hf) > 1 else ""
        table.add_row(output.safe(megatron), "<-" if record["to"] == "megatron" else "->", output.safe(hf[0] + more))
    return [f"names of a {record['family']} model:", table]
