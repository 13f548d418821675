"""What a save captured, what it did not, and why: for people."""

from __future__ import annotations

import io
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from ckpt.engine.merge import Union
from ckpt.geometry import Holdings, TensorSpec
from ckpt.state.names import split

_MOST_NAMES = 5
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


@dataclass(frozen=True)
class Contents:
    """Tensors of all ranks with who holds what, names of all plain values and of this rank's own, and what this rank
    left out, by name, with the reason."""

    union: Union
    values: Collection[str]
    per_rank: Collection[str]
    left_out: Mapping[str, str]

    def lines(self) -> list[str]:
        """All of it, to be printed line by line."""
        tensors = self.union.catalogue.tensors
        size = sum(spec.nbytes for spec in tensors)
        return [f"{len(tensors)} tensors of {size:,} bytes", *self.table().splitlines(), *self.notes()]

    def table(self) -> str:
        """A line for each entry of the state: how many of its tensors are cut over ranks and how many are whole on each
        rank that has them, plain values that all ranks share and that each has its own of, and bytes of tensors."""
        from rich.console import Console
        from rich.table import Table

        table = Table(box=None, pad_edge=False)
        for heading in ("entry", "sharded", "whole", "values", "per rank", "size"):
            table.add_column(heading, justify="left" if heading == "entry" else "right")
        for entry, (tensors, values, own) in sorted(self._entries().items()):
            sharded = sum(_is_sharded(spec, holdings) for spec, holdings in tensors)
            size = sum(spec.nbytes for spec, _ in tensors)
            counts = (sharded, len(tensors) - sharded, values, own)
            table.add_row(entry, *(str(n) if n else "" for n in counts), _bytes(size) if tensors else "")
        out = io.StringIO()
        Console(file=out, width=100, color_system=None).print(table)
        return "\n".join(line.rstrip() for line in out.getvalue().splitlines())

    def notes(self) -> list[str]:
        """Names that share one memory, and what was left out, by reason."""
        reasons = defaultdict(list)
        for name, reason in self.left_out.items():
            reasons[reason].append(name)
        lines = [f"stored once: {name} is {kept}" for name, kept in self.union.aliases.items()]
        return lines + [f"not captured: {_names(names)}: {reason}" for reason, names in sorted(reasons.items())]

    def _entries(self) -> dict[str, tuple[list[tuple[TensorSpec, Holdings]], int, int]]:
        tensors = defaultdict(list)
        for spec, holdings in zip(self.union.catalogue.tensors, self.union.holdings, strict=True):
            tensors[_entry(spec.name)].append((spec, holdings))
        counts = [[_entry(name) for name in names] for names in (self.values, self.per_rank)]
        entries = {*tensors, *counts[0], *counts[1]}
        return {e: (tensors.get(e, []), counts[0].count(e), counts[1].count(e)) for e in entries}


def _entry(name: str) -> str:
    return str(split(name)[0])


def _is_sharded(spec: TensorSpec, holdings: Holdings) -> bool:
    return any(box.extent != spec.shape for box in holdings.boxes)


def _bytes(count: int) -> str:
    power = min(len(_UNITS) - 1, max(0, count.bit_length() - 1) // 10)
    return f"{count} B" if power == 0 else f"{count / (1 << 10 * power):.1f} {_UNITS[power]}"


def _names(names: Sequence[str]) -> str:
    shown = ", ".join(sorted(names)[:_MOST_NAMES])
    return shown if len(names) <= _MOST_NAMES else f"{shown} and {len(names) - _MOST_NAMES} more"
