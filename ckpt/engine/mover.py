"""Moves boxes between ranks, one round of a plan at a time, through packed buffers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch

from ckpt.engine.group import Group
from ckpt.geometry import Box, Link, Unit
from ckpt.native.copies import copy_boxes
from ckpt.state.captured import LocalTensor, Shard
from ckpt.state.dtypes import opaque


@dataclass(frozen=True)
class Move:
    """One box of one tensor that goes from rank `source` to rank `target` for a unit."""

    source: int
    target: int
    unit: int
    link: Link

    @property
    def tensor(self) -> int:
        return self.link.tensor

    @property
    def box(self) -> Box:
        return self.link.box


class Moving(Protocol):
    """A box of a tensor (by catalogue index) on its way from one rank to another."""

    @property
    def source(self) -> int: ...
    @property
    def target(self) -> int: ...
    @property
    def tensor(self) -> int: ...
    @property
    def box(self) -> Box: ...


M = TypeVar("M", bound=Moving)


def write_moves(units: Sequence[Unit]) -> list[Move]:
    """What must move before the units can be written: from the holder of each link to the unit's owner."""
    return [
        Move(k.ranks[0], u.owner, number, k) for number, u in enumerate(units) for k in u.links if k.ranks[0] != u.owner
    ]


def read_moves(units: Sequence[Unit]) -> list[Move]:
    """What must move after the units are read: from the owner to everybody else who wants a link's box."""
    return [
        Move(u.owner, rank, number, k)
        for number, u in enumerate(units)
        for k in u.links
        for rank in k.ranks
        if rank != u.owner
    ]


class Mover:
    """Exchanges the moves of a round; keeps its buffers from one round to the next."""

    def __init__(self, comm: Group, itemsizes: Sequence[int]) -> None:
        """itemsizes: bytes per element of each tensor of the catalogue."""
        self._comm, self._itemsizes = comm, itemsizes
        self._send = self._receive = torch.empty(0, dtype=torch.uint8)

    def exchange(
        self, moves: Sequence[M], give: Iterable[tuple[M, torch.Tensor]], what: str
    ) -> Iterator[tuple[M, torch.Tensor]]:
        """Collective. `moves`: of the whole job, in the plan's order. `give`: this rank's outgoing moves in that order,
        each with its elements. Yields the incoming moves, each with its elements (valid until the next exchange)."""
        me, world = self._comm.rank, self._comm.world
        sent, received = [0] * world, [0] * world
        for m in moves:
            if m.source == me:
                sent[m.target] += self._nbytes(m)
            if m.target == me:
                received[m.source] += self._nbytes(m)
        self._send, self._receive = _room(self._send, sum(sent)), _room(self._receive, sum(received))
        at = _starts(sent)
        copies = []
        for move, elements in give:
            place = self._send[at[move.target] : at[move.target] + elements.numel() * elements.element_size()]
            copies.append((place.view(elements.dtype).reshape(move.box.extent), elements))
            at[move.target] += self._nbytes(move)
        copy_boxes(copies)
        self._comm.exchange(self._send[: sum(sent)], sent, self._receive[: sum(received)], received, what)
        at = _starts(received)
        for move in moves:
            if move.target == me:
                size = move.box.volume * self._itemsizes[move.tensor]
                place = self._receive[at[move.source] : at[move.source] + size]
                at[move.source] += self._nbytes(move)
                yield (
                    move,
                    place.view(opaque(self._itemsizes[move.tensor])).reshape(move.box.extent),
                )

    def _nbytes(self, move: Moving) -> int:
        """Room for a move: a multiple of 16, so that the next one is aligned for any item size."""
        return -(-move.box.volume * self._itemsizes[move.tensor] // 16) * 16


def _starts(sizes: Sequence[int]) -> list[int]:
    starts, end = [], 0
    for size in sizes:
        starts.append(end)
        end += size
    return starts


def _room(buffer: torch.Tensor, nbytes: int) -> torch.Tensor:
    return buffer if buffer.numel() >= nbytes else torch.empty(nbytes, dtype=torch.uint8)


def part_of(buffer: torch.Tensor, link: Link, packed: bool) -> torch.Tensor:
    """The elements of a link's box inside a unit's buffer."""
    if packed:
        flat = buffer[link.start : link.start + link.within.volume]
        return flat.reshape(link.within.extent)[link.box.relative_to(link.within).slices]
    return buffer[link.box.relative_to(link.within).slices]


def elements_of(found: Any, itemsize: int) -> torch.Tensor:
    """What TensorStore gave of an array, as elements of the same width."""
    kind = {1: "u1", 2: "i2", 4: "i4", 8: "i8", 16: "c16"}[itemsize]
    tensor = torch.from_numpy(found.view(kind))
    assert tensor.dtype == opaque(itemsize)
    return tensor


def held_parts(shards: Sequence[Shard], box: Box) -> Iterator[tuple[Box, torch.Tensor]]:
    """The parts of `box` that these shards hold, each with the live memory."""
    for shard in shards:
        common = shard.box.intersect(box)
        if common is not None:
            yield common, shard.view[common.relative_to(shard.box).slices]


def gather_box(tensor: LocalTensor, box: Box) -> torch.Tensor:
    """The elements of a box that this rank holds, as live memory if one shard has it all, else as a copy."""
    whole = next((view for common, view in held_parts(tensor.shards, box) if common == box), None)
    if whole is None:
        raise AssertionError(f"{tensor.spec.name}: the plan takes {box}, which no shard holds whole")
    return whole


def by_unit(found: Iterable[tuple[Move, torch.Tensor]]) -> Mapping[int, list[tuple[Link, torch.Tensor]]]:
    grouped: dict[int, list[tuple[Link, torch.Tensor]]] = defaultdict(list)
    for move, place in found:
        grouped[move.unit].append((move.link, place))
    return grouped
