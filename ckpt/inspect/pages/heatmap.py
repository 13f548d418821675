"""Differing elements by layer: a row for each kind of tensor, a column for each layer."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from xml.etree import ElementTree

from ckpt.inspect.pages.page import element, fitting, picture

SHADES = 7
"""0: equal. 1 to 7: shares of differing elements of at most 1e-6, 1e-5, ... 1."""

_LAYER = re.compile(r"(?:^|(?<=[/.]))~?([0-9]+)(?=[/.]|$)")
_NAMES, _ROW, _HEAD = 360.0, 20.0, 22.0
_WIDE = 720.0  # pixels of all columns together, if that leaves a cell 34 at most and 6 at least
_COLUMNS, _ROWS = 120, 150


@dataclass
class _Cell:
    """elements, differing: of the tensors in it; None where they differ and were not counted. said: of each tensor."""

    elements: int = 0
    differing: int | None = 0
    other: bool = False  # another shape or dtype, or on one side only
    said: tuple[str, ...] = ()


@dataclass(frozen=True)
class HeatMap:
    """picture: None where no tensor is on both sides or nothing differs. equal: kinds of which no tensor differs, which
    are not drawn; cut: kinds that differ and are not drawn either. layers: in one column."""

    picture: ElementTree.Element | None
    equal: int
    cut: int
    layers: int


def kind_and_layer(name: str) -> tuple[str, int | None]:
    """A name with `*` for its first number that stands alone between slashes or dots, and that number."""
    found = _LAYER.search(name)
    if found is None or len(found[1]) > 9:
        return name, None
    return name[: found.start()] + "*" + name[found.end() :], int(found[1])


def heat_map(elements: Mapping[str, int], document: Mapping[str, Any]) -> HeatMap:
    """elements: of every tensor of either side, by name. document: what `ckpt diff --json` prints."""
    cells: dict[str, dict[int | None, _Cell]] = defaultdict(lambda: defaultdict(_Cell))
    apart = {n: d for d in document["differences"] or () for n in (d["name"], *d["tied"])}
    tensors = document["tensors"]
    unread = {n for group in tensors["unequal"] for n in group} - apart.keys()
    other = {n["name"]: "another shape or dtype" for n in tensors["changed"]}
    other |= dict.fromkeys(tensors["only_a"], "only in A") | dict.fromkeys(tensors["only_b"], "only in B")
    for name, count in elements.items():
        kind, layer = kind_and_layer(name)
        slices = apart[name]["slices"] if name in apart and layer is None else None
        if slices is not None:
            for number, differing in enumerate(slices):
                _add(cells[kind][number], f"{name}[{number}]", count // len(slices), differing)
        elif name in apart:
            _add(cells[kind][layer], name, count, apart[name]["differing"])
        elif name in unread:
            _add(cells[kind][layer], name, count, None)
        elif name in other:
            cell = cells[kind][layer]
            cell.other, cell.said = True, (*cell.said, f"{name}: {other[name]}")
        else:
            _add(cells[kind][layer], name, count, 0)
    rows = [k for k, of in cells.items() if any(c.other or c.differing != 0 for c in of.values())]
    layers = sorted({layer for k in rows for layer in cells[k] if layer is not None})
    step = -(-len(layers) // _COLUMNS) or 1
    groups: list[list[int | None]] = [list(layers[i : i + step]) for i in range(0, len(layers), step)]
    if any(None in cells[k] for k in rows):
        groups.append([None])
    shown = sorted(rows)[:_ROWS]
    drawn = None
    if shown:
        drawn = _draw(
            [(k, [_merged([cells[k][n] for n in g if n in cells[k]]) for g in groups]) for k in shown], groups
        )
    return HeatMap(drawn, len(cells) - len(rows), len(rows) - len(shown), step)


def shade(differing: int, elements: int) -> int:
    """Shade of a share of differing elements: each is for ten times more than the one before."""
    if not differing:
        return 0
    return max(1, min(SHADES, SHADES + math.ceil(math.log10(differing / elements))))


def _add(cell: _Cell, name: str, elements: int, differing: int | None) -> None:
    cell.elements += elements
    known = cell.differing is not None and differing is not None
    cell.differing = cell.differing + differing if known else None  # type: ignore[operator]
    if differing is None:
        cell.said = (*cell.said, f"{name}: differs, not read")
    elif differing:
        share = f"{100 * differing / elements:.3g} %"
        cell.said = (*cell.said, f"{name}: {differing:,} of {elements:,} elements differ ({share})")
    else:
        cell.said = (*cell.said, f"{name}: equal")


def _merged(cells: Sequence[_Cell]) -> _Cell | None:
    if not cells:
        return None
    known = all(c.differing is not None for c in cells)
    return _Cell(
        sum(c.elements for c in cells),
        sum(c.differing or 0 for c in cells) if known else None,
        any(c.other for c in cells),
        tuple(said for c in cells for said in c.said),
    )


def _draw(rows: Sequence[tuple[str, list[_Cell | None]]], groups: Sequence[list[int | None]]) -> ElementTree.Element:
    side = max(6.0, min(34.0, _WIDE / len(groups)))
    every = max(1, math.ceil(30 / side))
    parts = []
    for column, group in enumerate(groups):
        x = _NAMES + column * side + (8 if group == [None] else 0)
        if group == [None]:
            parts.append(element("text", text="no layer", x=x, y=14, class_="dim"))
        elif column % every == 0:
            parts.append(element("text", text=str(group[0]), x=x + side / 2, y=14, class_="dim middle"))
    for number, (kind, cells) in enumerate(rows):
        y = _HEAD + number * _ROW
        tail = kind if len(kind) <= 52 else "…" + kind[-51:]
        name = element("text", text=fitting(tail, _NAMES - 10), x=_NAMES - 8, y=y + 14, class_="name")
        parts.append(element("g", name, title=kind))
        for column, cell in enumerate(cells):
            if cell is None:
                continue
            x = _NAMES + column * side + (8 if groups[column] == [None] else 0)
            look = (
                "other"
                if cell.other
                else "unread"
                if cell.differing is None
                else f"s{shade(cell.differing, cell.elements)}"
            )
            said = "; ".join(cell.said[:12]) + (f"; {len(cell.said) - 12} more" if len(cell.said) > 12 else "")
            area = element("rect", x=x, y=y, width=side - 1, height=_ROW - 1, title=said, class_=look)
            parts.append(area)
    label = f"Heat map of differing elements: {len(rows)} kinds of tensors by {len(groups)} columns of layers"
    return picture(_NAMES + len(groups) * side + 70, _HEAD + len(rows) * _ROW + 4, label, *parts, kind="heat")
