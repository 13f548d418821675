"""Boxes of a tensor as pictures: two axes are drawn; along the others the tensor is cut into slices that are alike."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from xml.etree import ElementTree

from ckpt.geometry import Box, Grid
from ckpt.geometry.box import Index
from ckpt.inspect import wording
from ckpt.inspect.pages.page import element, fitting, hue, picture

_SIDE = 260.0  # pixels of a slice's longer side
_LEAST = 34.0  # and of its shorter one, however narrow the tensor is
_GAP, _TOP = 16.0, 18.0
_LABEL = 130.0  # above a slice
_ROW = 4  # slices in a row
_SLICES = 12  # drawn
_LOOKED_AT = 4096  # (slices x boxes) looked through, at least one slice
_BOXES = 1024  # drawn in one slice


@dataclass(frozen=True)
class Region:
    """A box to be drawn. number: of its colour. label: what is written on it; title: its text alternative. Slices whose
    regions have equal parts, numbers and holders look alike."""

    box: Box
    number: int
    label: str
    title: str
    holders: tuple[int, ...] = ()


@dataclass(frozen=True)
class _Slice:
    """What of a tensor lies in one range of the axes that are not drawn. count: how many indices it spans."""

    where: str
    count: int
    regions: tuple[tuple[Box, Region], ...]  # with the part in the two axes drawn


def layout_map(shape: Index, held: Sequence[tuple[Box, tuple[int, ...]]], itemsize: int) -> ElementTree.Element:
    """Which rank holds which box. Replicas, boxes of several ranks, have the colour of the first of them."""
    regions = []
    for box, ranks in held:
        who = _ranks(ranks)
        title = f"{who} {'hold' if len(ranks) > 1 else 'holds'} {box}, {wording.size(box.volume * itemsize)}"
        regions.append(Region(box, ranks[0], _short(ranks), title, ranks))
    return _draw(shape, regions, f"Layout map of {len(held)} boxes of shape {wording.shape(shape)}", None)


def chunk_map(grid: Grid, itemsize: int) -> ElementTree.Element:
    """Stored objects (cells, framed) and their inner chunks (thin lines)."""
    regions = []
    objects = math.prod(grid.counts)
    for index, box in itertools.islice(grid.cells(), _LOOKED_AT):
        name, label = "/".join(map(str, index)), "/".join(map(str, index[-2:]))
        chunks = math.prod(-(-e // c) for e, c in zip(box.extent, grid.chunk, strict=True))
        stored = wording.size(grid.object_bytes(box, itemsize))
        title = f"object {name}: elements {box} in {chunks} chunks, {stored} stored"
        regions.append(Region(box, sum(index[-2:]) % 2, label, title))
    label = f"Chunk map of shape {wording.shape(grid.shape)}: {objects} objects of {wording.shape(grid.cell)}"
    return _draw(grid.shape, regions, f"{label}, chunks of {wording.shape(grid.chunk)}", grid.chunk)


def _draw(shape: Index, regions: Sequence[Region], label: str, chunk: Index | None) -> ElementTree.Element:
    slices, left = _slices(shape, regions)
    rows, columns = ((1,) * (2 - min(2, len(shape))) + shape)[-2:]
    height, width = _extent(rows, columns)
    drawn = []
    step = (width if len(slices) == 1 else max(width, _LABEL)) + _GAP
    for number, one in enumerate(slices):
        x = number % _ROW * step
        y = number // _ROW * (height + _TOP + _GAP) + _TOP
        drawn.append(_slice(one, x, y, (height / max(1, rows), width / max(1, columns)), (height, width), chunk))
    across = min(len(slices), _ROW) or 1
    down = -(-len(slices) // _ROW) or 1
    high = down * (height + _TOP + _GAP)
    total = max(across * step - _GAP + 2, 240.0)
    if left:
        drawn.append(element("text", text=left, x=0, y=high + 8, class_="dim"))
        high += 16
    return picture(total, high, label, *drawn, kind="chunks" if chunk else "layout")


def _extent(rows: int, columns: int) -> tuple[float, float]:
    """Height and width in pixels: in proportion, but nothing is too narrow to be seen."""
    longest = max(rows, columns, 1)
    return max(_LEAST, _SIDE * rows / longest), max(_LEAST, _SIDE * columns / longest)


def _slice(
    one: _Slice, x: float, y: float, scale: tuple[float, float], full: tuple[float, float], chunk: Index | None
) -> ElementTree.Element:
    parts = [element("rect", x=x, y=y, width=full[1], height=full[0], class_="ground")]
    for flat, region in one.regions[:_BOXES]:
        left, top = x + flat.offset[1] * scale[1], y + flat.offset[0] * scale[0]
        width, height = flat.extent[1] * scale[1], flat.extent[0] * scale[0]
        inside = [element("rect", x=left, y=top, width=width, height=height)]
        if chunk is not None:
            inside += _lines(flat, chunk, (left, top, width, height))
        if height > 13 and (text := fitting(region.label, width - 4)):
            inside.append(element("text", text=text, x=left + width / 2, y=top + height / 2 + 4, class_="middle"))
        alike = f"; alike in the others of {one.count} slices" if one.count > 1 else ""
        group = element("g", *inside, title=region.title + alike, class_="box", style=hue(region.number))
        parts.append(group)
    more = len(one.regions) - _BOXES
    said = one.where + (f", the first {_BOXES} of {len(one.regions)} boxes" if more > 0 else "")
    if said:
        parts.append(element("text", text=said, x=x, y=y - 5, class_="dim"))
    made: ElementTree.Element = element("g", *parts)
    return made


def _lines(flat: Box, chunk: Index, area: tuple[float, float, float, float]) -> Iterator[ElementTree.Element]:
    """Borders between the chunks of a cell."""
    left, top, width, height = area
    down, across = ((1,) * (2 - min(2, len(chunk))) + chunk)[-2:]
    for at in range(across, flat.extent[1], across):
        x = left + width * at / flat.extent[1]
        yield element("line", x1=x, y1=top, x2=x, y2=top + height)
    for at in range(down, flat.extent[0], down):
        y = top + height * at / flat.extent[0]
        yield element("line", x1=left, y1=y, x2=left + width, y2=y)


def _slices(shape: Index, regions: Sequence[Region]) -> tuple[list[_Slice], str]:
    """Slices along all axes but the last two, those that follow each other and look alike as one; and what is not in
    them, in words."""
    lead = max(0, len(shape) - 2)
    cuts = [_cuts(shape[axis], axis, regions) for axis in range(lead)]
    total = math.prod(len(c) for c in cuts)
    most = max(1, _LOOKED_AT // max(1, len(regions)))
    found: list[list[tuple[_Slice, Index, Index]]] = []
    for ranges in itertools.islice(itertools.product(*cuts), most):
        offset, extent = tuple(a for a, _ in ranges), tuple(b - a for a, b in ranges)
        within = [(_flat(r.box, lead), r) for r in regions if _covers(r.box, ranges)]
        one = _Slice("", math.prod(extent), tuple(within))
        if found and _look(found[-1][0][0]) == _look(one):
            found[-1].append((one, offset, extent))
        else:
            found.append([(one, offset, extent)])
    slices = [_joined(group, lead) for group in found[:_SLICES]]
    left = []
    if len(found) > _SLICES:
        left.append(f"{len(found) - _SLICES} more slices are not drawn")
    if total > most:
        left.append(f"{total - most} more were not looked at")
    return slices, "; ".join(left)


def _joined(group: Sequence[tuple[_Slice, Index, Index]], lead: int) -> _Slice:
    (one, first, extent), (_, last, tail) = group[0], group[-1]
    if not lead:
        return one
    count = sum(s.count for s, _, _ in group)
    if lead == 1 or len(group) == 1:
        stop = tuple(o + e for o, e in zip(last, tail, strict=True))
        where = f"[{', '.join(f'{a}:{b}' for a, b in zip(first, stop, strict=True))}]"
    else:
        start = ", ".join(f"{a}:{a + e}" for a, e in zip(first, extent, strict=True))
        where = f"[{start}] and on"
    return _Slice(f"{where}, {count} alike" if count > 1 else where, count, one.regions)


def _look(one: _Slice) -> list[tuple[Box, int, tuple[int, ...]]]:
    return [(flat, r.number, r.holders) for flat, r in one.regions]


def _cuts(size: int, axis: int, regions: Sequence[Region]) -> list[tuple[int, int]]:
    edges = {0, size}
    for region in regions:
        edges.update((region.box.offset[axis], region.box.stop[axis]))
    return list(itertools.pairwise(sorted(e for e in edges if e <= size)))


def _covers(box: Box, ranges: Sequence[tuple[int, int]]) -> bool:
    return all(o <= a and b <= o + e for (a, b), o, e in zip(ranges, box.offset, box.extent, strict=False))


def _flat(box: Box, lead: int) -> Box:
    fill = 2 - len(box.offset[lead:])
    return Box((0,) * fill + box.offset[lead:], (1,) * fill + box.extent[lead:])


def _ranks(ranks: Sequence[int], most: int = 8) -> str:
    shown = ", ".join(map(str, ranks[:most]))
    more = f" and {len(ranks) - most} more" if len(ranks) > most else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{more}"


def _short(ranks: Sequence[int]) -> str:
    return f"{ranks[0]} +{len(ranks) - 1}" if len(ranks) > 3 else ", ".join(map(str, ranks))
