"""Filling a template. Whatever is printed into a page is escaped, and what is not printable is spelt out."""

from __future__ import annotations

from functools import cache
from typing import Any
from xml.etree import ElementTree

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from ckpt.inspect import wording

_LEAST = 12  # letters of a text that is cut


def render(template: str, **facts: Any) -> str:
    """A whole page. Strings of `facts` are text, never markup."""
    return _environment().get_template(template).render(facts)


def markup(picture: ElementTree.Element) -> Markup:
    """An SVG picture for a template; its serialiser has escaped all text in it."""
    return Markup(ElementTree.tostring(picture, encoding="unicode"))


def element(tag: str, /, *children: ElementTree.Element, text: str = "", title: str = "", **attributes: Any) -> Any:
    """An element of a picture. title: what a pointer shows and a screen reader says. Attributes: `_` stands for
    `-`, a trailing one is dropped (`class_`); floats are cut to two decimals."""
    made = ElementTree.Element(tag)
    for name, value in attributes.items():
        shown = f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
        made.set(name.rstrip("_").replace("_", "-"), shown)
    if title:
        ElementTree.SubElement(made, "title").text = wording.printable(title)
    if text:
        made.text = wording.printable(text)
    made.extend(children)
    return made


def picture(width: float, height: float, label: str, *children: ElementTree.Element, kind: str) -> ElementTree.Element:
    """An SVG of this size in pixels that shrinks with the page. label: its text alternative."""
    made: ElementTree.Element = element(
        "svg",
        *children,
        title=label,
        viewBox=f"0 0 {width:.0f} {height:.0f}",
        width=f"{width:.0f}",
        height=f"{height:.0f}",
        role="img",
        aria_label=wording.printable(label),
        class_=kind,
    )
    return made


def fitting(text: str, width: float) -> str:
    """As much of a text in letters 11 pixels high as fits into `width` pixels; nothing if that is too little."""
    room = int(width / 6.6)
    text = wording.printable(text)
    if len(text) <= room:
        return text
    return text[: room - 1] + "…" if room >= _LEAST else ""


def hue(number: int) -> str:
    """A colour for the n-th of any number of things: neighbours are far apart on the wheel (by the golden angle)."""
    return f"--h:{(212 + number * 137.508) % 360:.0f}"


@cache
def _environment() -> Environment:
    def spelt(value: Any) -> Any:
        return value if isinstance(value, Markup) else wording.printable(str(value))

    made = Environment(
        loader=PackageLoader("ckpt.inspect.pages"),
        autoescape=True,
        finalize=spelt,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters["size"] = wording.size
    made.filters["shape"] = wording.shape
    return made
