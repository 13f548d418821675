"""Which views of tensors share memory."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

import torch

from ckpt.errors import StateMismatch

Named = tuple[str, torch.Tensor]


def check_disjoint(views: Sequence[Named]) -> None:
    """Checks that no byte of memory belongs to two elements, of one view or of two.

    Raises StateMismatch naming the tensors. Memory is told by its address, since two tensors may be made over one
    NumPy array or buffer. Views whose address ranges do not meet cost nothing more; the others are counted element
    by element.
    """
    by_device: dict[torch.device, list[tuple[int, int, str, torch.Tensor]]] = defaultdict(list)
    for name, view in views:
        if view.numel() and view.device.type != "meta":
            reach = sum((n - 1) * int(s) for n, s in zip(view.shape, view.stride(), strict=True)) + 1
            start = view.data_ptr()
            by_device[view.device].append((start, start + reach * view.element_size(), name, view))
    for spans in by_device.values():
        spans.sort(key=lambda span: span[:3])
        cluster: list[Named] = []
        first = end = -1
        for start, stop, name, view in spans:
            if start >= end:
                _count(cluster, first, end)
                cluster, first = [], start
            cluster.append((name, view))
            end = max(end, stop)
        _count(cluster, first, end)


def _count(cluster: Sequence[Named], first: int, end: int) -> None:
    """Gives each place in memory from `first` to `end` to at most one element."""
    if not cluster or (len(cluster) == 1 and _strides_are_disjoint(cluster[0][1])):
        return
    unit = math.gcd(*(n for _, view in cluster for n in (view.element_size(), view.data_ptr() - first)))
    owner = torch.zeros((end - first) // unit, dtype=torch.int32)
    for number, (name, view) in enumerate(cluster, start=1):
        size = view.element_size() // unit
        at = (view.data_ptr() - first) // unit
        for part in range(size):
            place = torch.as_strided(owner, view.shape, [s * size for s in view.stride()], at + part)
            if place.any():
                other = cluster[int(place[place != 0][0]) - 1][0]
                raise StateMismatch(f"{other} and {name} overlap in memory without being the same view; {_REMEDY}")
            place.fill_(number)
        if not _strides_are_disjoint(view) and int((owner == number).sum()) != view.numel() * size:
            raise StateMismatch(f"{name}: several of its elements share one place in memory; {_REMEDY}")


_REMEDY = "make one of them a copy, or leave it out of the state"


def _strides_are_disjoint(view: torch.Tensor) -> bool:
    """Whether no two elements of a view share memory, by its strides: each axis steps past all smaller ones.

    False where the strides alone do not tell."""
    reach = 1
    for size, stride in sorted(zip(view.shape, view.stride(), strict=True), key=lambda a: a[1]):
        if size > 1:
            if stride < reach:
                return False
            reach = stride * (size - 1) + reach
    return True
