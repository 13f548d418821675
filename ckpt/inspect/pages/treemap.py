"""Size by tensor: a squarified treemap (Bruls, Huizing and van Wijk, 2000), tensors of one folder side by side."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from xml.etree import ElementTree

from ckpt.inspect import wording
from ckpt.inspect.pages.page import element, fitting, hue, picture

Area = tuple[float, float, float, float]
"""x, y, width, height."""

_WIDTH, _HEIGHT = 1100.0, 420.0
_BETWEEN = re.compile("[/.]")
_FOLDERS = 12
_TILES = 200  # drawn one by one; smaller tensors of a folder share one tile


def squarify(sizes: Sequence[float], area: Area) -> list[Area]:
    """An area for each of some positive sizes, in proportion, as square as can be. sizes: the largest first."""
    x, y, width, height = area
    rest = list(sizes)
    placed: list[Area] = []
    while rest:
        scale = width * height / sum(rest)  # anew for each row, or rounding would add up
        rest = [size * scale for size in rest]
        side = min(width, height)
        count = 1
        while count < len(rest) and _worst(rest[: count + 1], side) <= _worst(rest[:count], side):
            count += 1
        row, rest = rest[:count], rest[count:]
        thick = sum(row) / side if side else 0.0
        at = 0.0
        for one in row:
            long = one / thick if thick else 0.0
            placed.append((x, y + at, thick, long) if width >= height else (x + at, y, long, thick))
            at += long
        if width >= height:
            x, width = x + thick, max(0.0, width - thick)
        else:
            y, height = y + thick, max(0.0, height - thick)
    return placed


def treemap(tensors: Sequence[tuple[str, int]]) -> ElementTree.Element | None:
    """tensors: names and bytes. None where there are no bytes."""
    folders = _folders([(name, size) for name, size in tensors if size])
    if not folders:
        return None
    drawn: list[ElementTree.Element] = []
    totals = [sum(size for _, size in members) for _, members in folders]
    for number, ((folder, members), area) in enumerate(
        zip(folders, squarify(totals, (0.0, 0.0, _WIDTH, _HEIGHT)), strict=True)
    ):
        inside = squarify([size for _, size in members], area)
        tiles = [_tile(name, folder, size, a) for (name, size), a in zip(members, inside, strict=True)]
        x, y, width, height = area
        frame = element("rect", x=x, y=y, width=width, height=height, class_="frame")
        drawn.append(element("g", *tiles, frame, style=hue(number)))
    label = f"Size by tensor: {len(tensors)} tensors of {wording.size(sum(totals))}, areas in proportion to bytes"
    key, high = _key([(folder, total) for (folder, _), total in zip(folders, totals, strict=True)])
    return picture(_WIDTH, _HEIGHT + high, label, *drawn, *key, kind="treemap")


def _key(folders: Sequence[tuple[str, int]]) -> tuple[list[ElementTree.Element], float]:
    """Which colour is which folder, in rows below the tiles, and their height; nothing where there is one colour."""
    if len(folders) == 1:
        return [], 0.0
    parts, x, y = [], 0.0, _HEIGHT + 12
    for number, (folder, total) in enumerate(folders):
        text = fitting(f"{folder} {wording.size(total)}", _WIDTH / 2)
        wide = 36 + 6.8 * len(text)
        if x + wide > _WIDTH:
            x, y = 0.0, y + 18
        swatch = element("g", element("rect", x=x, y=y, width=12, height=12), class_="tile", style=hue(number))
        parts += [swatch, element("text", text=text, x=x + 18, y=y + 10, class_="dim")]
        x += wide
    return parts, y + 18 - _HEIGHT


def _folders(tensors: list[tuple[str, int]]) -> list[tuple[str, list[tuple[str, int]]]]:
    """Folders with their tensors, the largest first, the small ones of each as one."""
    depth = next(d for d in (3, 2, 1, 0) if not d or len({_folder(name, d) for name, _ in tensors}) <= _FOLDERS)
    large = {name for name, _ in sorted(tensors, key=lambda t: -t[1])[:_TILES]}
    folders: dict[str, list[tuple[str, int]]] = defaultdict(list)
    small: dict[str, list[int]] = defaultdict(list)
    for name, size in tensors:
        folder = _folder(name, depth)
        if name in large:
            folders[folder].append((name, size))
        else:
            small[folder].append(size)
    for folder, sizes in small.items():
        folders[folder].append((f"{folder or 'in all'}: {len(sizes)} smaller tensors", sum(sizes)))
    ordered = [(f, sorted(members, key=lambda m: -m[1])) for f, members in folders.items()]
    return sorted(ordered, key=lambda f: -sum(size for _, size in f[1]))


def _folder(name: str, depth: int) -> str:
    """The first `depth` parts of a name, between slashes or dots."""
    ends = [found.start() for found in _BETWEEN.finditer(name)]
    return "" if not depth else name[: ends[depth - 1]] if len(ends) >= depth else name


def _tile(name: str, folder: str, size: int, area: Area) -> ElementTree.Element:
    x, y, width, height = area
    parts = [element("rect", x=x, y=y, width=width, height=height)]
    short = name.removeprefix(folder).lstrip("/.") or name
    if height > 16 and (text := fitting(short, width - 8)):
        parts.append(element("text", text=text, x=x + 4, y=y + 13))
        if height > 32 and (bytes_ := fitting(wording.size(size), width - 8)):
            parts.append(element("text", text=bytes_, x=x + 4, y=y + 27, class_="dim"))
    tile: ElementTree.Element = element("g", *parts, title=f"{name}: {wording.size(size)}", class_="tile")
    return tile


def _worst(row: Sequence[float], side: float) -> float:
    """The largest ratio of sides in a row of areas laid along a side."""
    total = sum(row)
    if not side or not total or not row[-1]:
        return float("inf")
    return max(side * side * row[0] / (total * total), total * total / (side * side * row[-1]))
