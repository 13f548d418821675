"""The page of `ckpt diff --html`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ckpt.inspect.pages.heatmap import SHADES, heat_map
from ckpt.inspect.pages.page import markup, render

_OPEN = 40  # rows of a table that are shown without being asked for


def diff_page(document: Mapping[str, Any], elements: Mapping[str, int], values: Sequence[tuple[str, str, str]]) -> str:
    """HTML. document: what `ckpt diff --json` prints. elements: of every tensor of either side, by name. values: names,
    and texts of both sides, of values that differ."""
    tensors, found = document["tensors"], document["differences"]
    heat = heat_map(elements, document)
    counts = [
        ("equal", tensors["equal"], "same"),
        ("differ in bits", sum(map(len, tensors["unequal"])), "bits"),
        ("other shape or dtype", len(tensors["changed"]), "kind"),
        ("only in A", len(tensors["only_a"]), "only"),
        ("only in B", len(tensors["only_b"]), "only"),
    ]
    return render(
        "diff.html.j2",
        title=" and ".join(f"{side['url']} step {side['step']}" for side in (document["a"], document["b"])),
        document=document,
        counts=counts,
        total=sum(count for _, count, _ in counts) or 1,
        differing=None if found is None else sum(d["differing"] for d in found),
        largest=None if found is None else sorted(found, key=lambda d: -d["differing"] / d["elements"]),
        marked=[]
        if found is None
        else [(d, *_marked(d["first"]["a"]["bits"], d["first"]["b"]["bits"])) for d in found],
        heat=None if heat.picture is None else markup(heat.picture),
        heat_map=heat,
        shades=[(0, "equal"), *((n, f"{10.0 ** (n - SHADES) * 100:g} %") for n in range(1, SHADES + 1))],
        values=values,
        open=_OPEN,
    )


def _marked(a: str, b: str) -> tuple[list[tuple[str, bool]], list[tuple[str, bool]]]:
    """Digits of two bit patterns of one length, each with whether it differs."""
    apart = [x != y for x, y in zip(a, b, strict=True)]
    return list(zip(a, apart, strict=True)), list(zip(b, apart, strict=True))
