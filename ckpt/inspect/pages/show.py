"""The page of `ckpt show --html`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from xml.etree import ElementTree

from markupsafe import Markup

from ckpt.geometry import Grid, Layout
from ckpt.inspect import wording
from ckpt.inspect.holders import Held
from ckpt.inspect.pages.maps import chunk_map, layout_map
from ckpt.inspect.pages.page import markup, render
from ckpt.inspect.pages.treemap import treemap
from ckpt.state.dtypes import STORED

Rows = Sequence[tuple[str, object]]

_DRAWN = 16  # pictures of one kind; those of the most bytes
_COLUMNS = (320, 700)  # pixels: a picture that is wider than these takes two columns, or a whole row


@dataclass
class _Drawn:
    """One picture, and the tensors that it is of."""

    what: str
    names: list[str]
    bytes: int
    picture: Markup
    columns: int


@dataclass
class _Folder:
    """A part of the tree of names."""

    name: str
    bytes: int = 0
    count: int = 0
    folders: dict[str, _Folder] = field(default_factory=dict)
    tensors: list[tuple[str, Mapping[str, Any]]] = field(default_factory=list)


def show_page(document: Mapping[str, Any], facts: Rows, values: Sequence[tuple[str, Rows]], held: Held | str) -> str:
    """HTML. document: what `ckpt show --json` prints. facts: provenance, for people. values: titles, and values by
    name. held: of the receipts, or why there are none."""
    tensors = document["tensors"]
    tiles = treemap([(t["name"], t["bytes"]) for t in tensors])
    layouts, layouts_left = ([], 0) if isinstance(held, str) else _layouts(tensors, held)
    chunks, chunks_left = _chunks(tensors)
    return render(
        "show.html.j2",
        title=f"step {document['step']} of {document['url']}",
        document=document,
        facts=facts,
        values=[(title, rows) for title, rows in values if rows],
        treemap=None if tiles is None else markup(tiles),
        tree=_tree(tensors),
        unheld=held if isinstance(held, str) else None,
        ranks=[] if isinstance(held, str) else _ranks(held, document["run"].get("layout")),
        layouts=layouts,
        layouts_left=layouts_left,
        chunks=chunks,
        chunks_left=chunks_left,
        packed=[t for t in tensors if t["start"] is not None],
    )


def _layouts(tensors: Sequence[Mapping[str, Any]], held: Held) -> tuple[list[_Drawn], int]:
    """A picture for each way in which tensors are cut and held, and how many ways are not drawn."""
    alike: dict[Any, list[Mapping[str, Any]]] = defaultdict(list)
    for one in tensors:
        holdings = held.tensors[one["name"]]
        if one["bytes"]:
            alike[tuple(one["shape"]), holdings.boxes, holdings.ranks].append(one)
    ordered = sorted(alike.items(), key=lambda item: -sum(t["bytes"] for t in item[1]))
    drawn = []
    for (shape, boxes, ranks), members in ordered[:_DRAWN]:
        itemsize = STORED[members[0]["dtype"]].itemsize
        pairs = list(zip(boxes, ranks, strict=True))
        count = len({rank for holders in ranks for rank in holders})
        what = f"{len(boxes)} box{'es' if len(boxes) > 1 else ''} on {count} rank{'s' if count > 1 else ''}"
        drawn.append(_drawn(what, members, layout_map(shape, pairs, itemsize)))
    return drawn, max(0, len(ordered) - _DRAWN)


def _chunks(tensors: Sequence[Mapping[str, Any]]) -> tuple[list[_Drawn], int]:
    """A picture for each grid of arrays that hold one tensor, and how many grids are not drawn."""
    alike: dict[tuple[Grid, int], list[Mapping[str, Any]]] = defaultdict(list)
    for one in tensors:
        if one["start"] is None and one["bytes"]:
            grid = Grid(tuple(one["shape"]), tuple(one["cell"]), tuple(one["chunk"]))
            alike[grid, STORED[one["dtype"]].itemsize].append(one)
    ordered = sorted(alike.items(), key=lambda item: -sum(t["bytes"] for t in item[1]))
    drawn = []
    for (grid, itemsize), members in ordered[:_DRAWN]:
        what = (
            f"{members[0]['objects']} object{'s' if members[0]['objects'] > 1 else ''} of {members[0]['chunks']} chunks"
        )
        drawn.append(_drawn(what, members, chunk_map(grid, itemsize)))
    return drawn, max(0, len(ordered) - _DRAWN)


def _drawn(what: str, members: Sequence[Mapping[str, Any]], picture: ElementTree.Element) -> _Drawn:
    names, total = [t["name"] for t in members], sum(t["bytes"] for t in members)
    return _Drawn(
        what, names, total, markup(picture), 1 + sum(int(picture.attrib["width"]) > most for most in _COLUMNS)
    )


def _ranks(held: Held, layout: Any) -> list[dict[str, Any]]:
    """Rows of the table of ranks, with their place in the layout where the job gave one."""
    given = Layout(**layout) if isinstance(layout, dict) else None
    most = max((max(r.held, r.wrote) for r in held.ranks), default=0) or 1
    rows = []
    for one in held.ranks:
        place = wording.place(given, one.rank) if given is not None and one.rank < given.world else ""
        rows.append({"share": one, "place": place, "held": 100 * one.held / most, "wrote": 100 * one.wrote / most})
    return rows


def _tree(tensors: Sequence[Mapping[str, Any]]) -> _Folder:
    top = _Folder("")
    for one in tensors:
        *above, last = one["name"].split("/")
        at = top
        for part in above:
            at.bytes += one["bytes"]
            at.count += 1
            at = at.folders.setdefault(part, _Folder(part))
        at.bytes += one["bytes"]
        at.count += 1
        at.tensors.append((last, one))
    return top
