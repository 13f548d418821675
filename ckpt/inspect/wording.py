"""How numbers and names are written for people, on a terminal and on a page alike."""

from __future__ import annotations

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def size(count: int) -> str:
    """Bytes with an IEC unit."""
    power = min(len(_UNITS) - 1, max(0, count.bit_length() - 1) // 10)
    return f"{count} B" if power == 0 else f"{count / (1 << 10 * power):.1f} {_UNITS[power]}"


def shape(extents: tuple[int, ...] | list[int]) -> str:
    """Extents such as `2600x1000`."""
    return "x".join(map(str, extents)) or "scalar"


def printable(text: str) -> str:
    """Text from a checkpoint as it is, but what could move the cursor, change colours or turn the direction of writing
    is escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
