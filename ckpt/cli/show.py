"""`ckpt show`: one checkpoint, without reading its tensors."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from ckpt.cli import output
from ckpt.inspect.address import Address, find
from ckpt.inspect.committed import Committed, open_committed
from ckpt.inspect.describe import Described, describe
from ckpt.inspect.holders import holders
from ckpt.inspect.pages.show import show_page
from ckpt.store.arrays import expected_objects
from ckpt.store.leases import moment
from ckpt.store.log import Log
from ckpt.store.objects import open_store


@click.command()
@click.argument("address", metavar="URL[@STEP]", type=output.AddressType())
@click.option(
    "--tensors", "pattern", default="*", metavar="PATTERN", help="Only tensors whose name fits, as 'model/*'."
)
@output.html_option
@output.json_option
@output.pager_option
def show(address: Address, pattern: str, page: Path | None, as_json: bool, no_pager: bool) -> None:
    """Show what a checkpoint holds (the newest, without @STEP): where it comes from, its tensors with shapes, dtypes,
    bytes and chunks, its values, and those that each rank has its own of. Tensors are not read.

    Exit codes: 0 done, 1 damaged, 2 usage, 3 store unreachable, 4 no such checkpoint.
    """
    store = open_store(address.url)
    committed = open_committed(store, find(Log(store).read(), address, store.url))
    found = describe(committed.manifest, pattern)
    values = list(_values(committed)) if pattern == "*" else []
    if page is not None:
        text = show_page(_document(committed, found), _provenance(committed), values, holders(committed))
        output.write_page(page, text)
    if as_json:
        output.write_json(_document(committed, found))
        return
    if page is not None:
        return
    parts: list[output.RenderableType] = [output.facts(_provenance(committed)), "", _tensors(found)]
    for title, rows in values:
        parts += ["", output.safe(title, "bold underline"), output.facts([(output.printable(n), v) for n, v in rows])]
    output.write(parts, paged=not no_pager)


def _provenance(committed: Committed) -> list[tuple[str, object]]:
    record, run, manifest = committed.record, committed.run, committed.manifest
    saved = moment(run.get("time"))
    objects = expected_objects(manifest.catalogue)
    versions = run.get("versions")
    return [
        ("checkpoint", f"{committed.store.url}  step {record.step}"),
        ("state id", manifest.state_id),
        ("seq", f"{record.number}, after {record.parent}" if record.parent else record.number),
        ("saved", output.stamp(saved) + ("" if saved is None else f", {output.age(time.time() - saved)}")),
        ("by", f"{run.get('host')}, process {run.get('pid')}, {output.count(len(committed.ranks), 'rank')}"),
        ("layout", "not given" if run.get("layout") is None else output.layout_text(run["layout"], None)),
        ("versions", " ".join(f"{k} {v}" for k, v in sorted(versions.items())) if isinstance(versions, dict) else "?"),
        ("tensors", f"{len(manifest.catalogue.tensors)} of {output.size(manifest.nbytes)}"),
        ("stored in", f"{len(objects)} objects of {output.size(sum(objects.values()))}"),
        ("attempt", committed.prefix),
    ]


def _tensors(found: list[Described]) -> output.Table:
    """The tree of names; a line above its parts for what several tensors have in common."""
    made = output.table("tensor", "shape", "dtype", "size", "chunk", "objects", "notes", right=("size", "objects"))
    above: list[str] = []
    sizes = _sizes(found)
    for one in found:
        parts = one.name.split("/")
        common = 0
        while common < min(len(above), len(parts) - 1) and above[common] == parts[common]:
            common += 1
        for depth in range(common, len(parts) - 1):
            total = output.size(sizes["/".join(parts[: depth + 1])])
            made.add_row(output.safe("  " * depth + parts[depth] + "/"), "", "", total, "", "", "", style="dim")
        above = parts[:-1]
        made.add_row(
            output.safe("  " * (len(parts) - 1) + parts[-1]),
            output.shape(one.shape),
            one.dtype,
            output.size(one.bytes),
            "packed" if one.start is not None else output.shape(one.chunk),
            str(one.objects),
            output.safe(", ".join(_notes(one))),
        )
    return made


def _sizes(found: list[Described]) -> Mapping[str, int]:
    sizes: dict[str, int] = {}
    for one in found:
        parts = one.name.split("/")
        for depth in range(1, len(parts)):
            folder = "/".join(parts[:depth])
            sizes[folder] = sizes.get(folder, 0) + one.bytes
    return sizes


def _notes(one: Described) -> Iterator[str]:
    if one.stack:
        yield f"{output.shape(one.shape[: one.stack])} stacked"
    if one.tied:
        yield f"is also {', '.join(one.tied)}"


def _values(committed: Committed) -> Iterator[tuple[str, list[tuple[str, object]]]]:
    """Titles, and values by name: of the state, and of each rank that has some of its own."""
    groups = [("values", committed.manifest.values)]
    groups += [(f"values of rank {rank}", own) for rank, own in enumerate(committed.ranks)]
    for title, values in groups:
        if values:
            yield title, [(name, output.value_text(document, name)) for name, document in sorted(values.items())]


def _document(committed: Committed, found: list[Described]) -> dict[str, Any]:
    record, manifest = committed.record, committed.manifest
    tensors = []
    for one in found:
        fields = asdict(one)
        tensors.append({k: list(v) if isinstance(v, tuple) else v for k, v in fields.items()})
    return {
        "url": committed.store.url,
        "step": record.step,
        "seq": record.number,
        "parent": record.parent,
        "state_id": manifest.state_id,
        "bytes": manifest.nbytes,
        "attempt": committed.prefix,
        "run": dict(committed.run),
        "tensors": tensors,
        "values": dict(manifest.values),
        "ranks": [dict(own) for own in committed.ranks],
    }
