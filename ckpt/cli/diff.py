"""`ckpt diff`: what differs between two checkpoints."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from ckpt.cli import output
from ckpt.cli.errors import DIFFERENT
from ckpt.inspect.address import Address
from ckpt.inspect.committed import Committed, in_use, open_committed
from ckpt.inspect.diff import Compared, Names, TensorDiff, compare, locate
from ckpt.inspect.elements import Element
from ckpt.inspect.pages.diff import diff_page
from ckpt.store.log import Log
from ckpt.store.objects import open_store

_ADDRESS = output.AddressType()


@click.command()
@click.argument("a", metavar="A", type=_ADDRESS)
@click.argument("b", metavar="B", type=_ADDRESS)
@click.option("--brief", is_flag=True, help="Stop at which tensors differ; read none.")
@output.html_option
@output.json_option
@output.pager_option
@click.pass_context
def diff(
    ctx: click.Context, a: Address, b: Address, brief: bool, page: Path | None, as_json: bool, no_pager: bool
) -> None:
    """Compare the checkpoints A and B, each URL[@STEP]. State ids and fingerprints tell which tensors differ. Those
    alone are read, to say how many of their elements do, how far apart they are, and which is the first in row-major
    order.

    Elements differ when their bits do. ulp counts the steps between two floating-point numbers.

    Exit codes: 0 the same, 1 different, or damaged, 2 usage, 3 store unreachable, 4 no such checkpoint.
    """
    with contextlib.ExitStack() as holding:
        sides: list[Committed] = []
        for address in (a, b):
            store = open_store(address.url)
            record, _ = holding.enter_context(in_use(store, Log(store), address, "diff"))
            sides.append(open_committed(store, record))
        compared = compare(*sides)
        with output.progress("reading") as bar:
            found = [] if brief else locate(sides[0], sides[1], compared.unequal, bar)
    document = _document(sides, compared, None if brief else found)
    if page is not None:
        output.write_page(page, diff_page(document, _elements(sides), list(_changed(sides, compared))))
    if as_json:
        output.write_json(document)
    elif page is None:
        output.write(_parts(sides, compared, found, brief), paged=not no_pager)
    if not compared.same:
        ctx.exit(DIFFERENT)


def _parts(
    sides: list[Committed], compared: Compared, found: list[TensorDiff], brief: bool
) -> list[output.RenderableType]:
    rows: list[tuple[str, object]] = [
        (name, f"{side.store.url}  step {side.record.step}, state id {side.manifest.state_id[:12]}")
        for name, side in zip("AB", sides, strict=True)
    ]
    parts: list[output.RenderableType] = [output.facts(rows)]
    if compared.same_state:
        parts.append(output.safe(f"the same state: {compared.equal} tensors and all values", "green"))
    else:
        unequal = sum(map(len, compared.unequal))
        counts = (
            f"{compared.equal} equal, {unequal} differ in bits, {len(compared.tensors.changed)} in shape or dtype, "
            f"{len(compared.tensors.only_a)} only in A, {len(compared.tensors.only_b)} only in B"
        )
        parts.append(output.safe(f"tensors: {counts}", "bold"))
    parts += _kinds(sides, compared)
    if brief:
        parts += [output.safe(f"differs: {', '.join(group)}") for group in compared.unequal]
    elif found:
        parts += ["", _summary(found), "", "first differing element of each", _firsts(found)]
    parts += _values(sides, compared)
    if compared.per_rank is None:
        worlds = " and ".join(str(len(side.ranks)) for side in sides)
        parts.append(f"saved by {worlds} ranks: what each rank has its own of is not compared")
    return parts


def _kinds(sides: list[Committed], compared: Compared) -> list[output.RenderableType]:
    parts = _names("tensor", Names(compared.tensors.only_a, compared.tensors.only_b, ()))
    kinds = [_kinds_of(side) for side in sides]
    for name in compared.tensors.changed:
        parts.append(output.safe(f"tensor changed: {name}: {kinds[0][name]} in A, {kinds[1][name]} in B", "yellow"))
    return parts


def _kinds_of(side: Committed) -> dict[str, str]:
    manifest = side.manifest
    kinds = {t.name: f"{t.dtype} {output.shape(t.shape)}" for t in manifest.catalogue.tensors}
    return kinds | {name: kinds[kept] for name, kept in manifest.aliases.items()}


def _names(what: str, names: Names) -> list[output.RenderableType]:
    rows = [("only in A", names.only_a), ("only in B", names.only_b), ("differs", names.changed)]
    return [output.safe(f"{what} {said}: {name}", "yellow") for said, group in rows for name in group]


def _values(sides: list[Committed], compared: Compared) -> list[output.RenderableType]:
    parts = _names("value", Names(compared.values.only_a, compared.values.only_b, ()))
    for name, a, b in _changed(sides, compared):
        parts.append(output.safe(f"value differs: {name}: {a} in A, {b} in B", "yellow"))
    return parts + (_names("rank's own value", compared.per_rank) if compared.per_rank else [])


def _changed(sides: list[Committed], compared: Compared) -> Iterator[tuple[str, str, str]]:
    """Names of values that differ, with both."""
    for name in compared.values.changed:
        a, b = (output.value_text(side.manifest.values[name], name) for side in sides)
        yield name, a, b


def _elements(sides: list[Committed]) -> dict[str, int]:
    """Elements of every tensor of either side, by each of its names; of A where the shapes differ."""
    found: dict[str, int] = {}
    for side in reversed(sides):
        found |= {t.name: math.prod(t.shape) for t in side.manifest.catalogue.tensors}
        found |= {name: found[kept] for name, kept in side.manifest.aliases.items()}
    return dict(sorted(found.items()))


def _summary(found: list[TensorDiff]) -> output.Table:
    numbers = ("elements", "differ", "%", "max |a-b|", "max ulp", "with NaN")
    made = output.table("tensor", "dtype", *numbers, right=numbers)
    for one in found:
        distance = one.distance
        made.add_row(
            output.safe(" = ".join([one.name, *one.tied])),
            one.dtype,
            str(one.elements),
            str(one.differing),
            f"{100 * one.differing / one.elements:.3g}",
            "-" if distance.largest is None else f"{distance.largest:.6g}",
            "-" if distance.ulp is None else str(distance.ulp),
            str(distance.nan or ""),
        )
    return made


def _firsts(found: list[TensorDiff]) -> output.Table:
    made = output.table("tensor", "index", "A", "B", "bits of A", "bits of B", "ulp", right=("ulp",))
    for one in found:
        first = one.first
        index = f"[{', '.join(map(str, first.index))}]"
        ulp = "-" if first.ulp is None else str(first.ulp)
        made.add_row(
            output.safe(one.name), index, first.a.value, first.b.value, "0x" + first.a.bits, "0x" + first.b.bits, ulp
        )
    return made


def _document(sides: list[Committed], compared: Compared, found: list[TensorDiff] | None) -> dict[str, Any]:
    kinds = [_kinds_of(side) for side in sides]
    ends = [
        {"url": s.store.url, "step": s.record.step, "seq": s.record.number, "state_id": s.manifest.state_id}
        for s in sides
    ]
    return {
        "a": ends[0],
        "b": ends[1],
        "same": compared.same,
        "same_state": compared.same_state,
        "tensors": {
            "equal": compared.equal,
            "only_a": list(compared.tensors.only_a),
            "only_b": list(compared.tensors.only_b),
            "changed": [{"name": n, "a": kinds[0][n], "b": kinds[1][n]} for n in compared.tensors.changed],
            "unequal": [list(group) for group in compared.unequal],
        },
        "differences": None if found is None else [_difference(one) for one in found],
        "values": _names_document(compared.values),
        "per_rank": None if compared.per_rank is None else _names_document(compared.per_rank),
    }


def _names_document(names: Names) -> dict[str, list[str]]:
    return {"only_a": list(names.only_a), "only_b": list(names.only_b), "changed": list(names.changed)}


def _difference(one: TensorDiff) -> dict[str, Any]:
    def side(element: Element) -> dict[str, str]:
        return {"value": element.value, "bits": element.bits}

    largest = one.distance.largest
    return {
        "name": one.name,
        "tied": list(one.tied),
        "shape": list(one.shape),
        "dtype": one.dtype,
        "elements": one.elements,
        "differing": one.differing,
        "max_abs": str(largest) if isinstance(largest, float) and math.isinf(largest) else largest,
        "max_ulp": one.distance.ulp,
        "nan": one.distance.nan,
        "slices": None if one.slices is None else list(one.slices),
        "first": {"index": list(one.first.index), "a": side(one.first.a), "b": side(one.first.b), "ulp": one.first.ulp},
    }
