"""How numbers and names are written for people, on a terminal and on a page alike."""

from __future__ import annotations

from ckpt.geometry import Layout

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def size(count: int) -> str:
    """Bytes with an IEC unit."""
    power = min(len(_UNITS) - 1, max(0, count.bit_length() - 1) // 10)
    return f"{count} B" if power == 0 else f"{count / (1 << 10 * power):.1f} {_UNITS[power]}"


def shape(extents: tuple[int, ...] | list[int]) -> str:
    """Extents such as `2600x1000`."""
    return "x".join(map(str, extents)) or "scalar"


def place(layout: Layout, rank: int) -> str:
    """Where a rank sits, such as `tp1 pp0`: along the axes that have more than one."""
    at = layout.coords(rank)
    axes = ("tp", "cp", "ep", "dp", "pp")
    return " ".join(f"{axis}{getattr(at, axis)}" for axis in axes if getattr(layout, axis) > 1)


def printable(text: str) -> str:
    """Text from a checkpoint as it is, but what could move the cursor, change colours or turn the direction of writing
    is escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
