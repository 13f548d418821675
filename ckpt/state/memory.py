"""Which views of tensors share memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch

from ckpt.errors import StateMismatch


def check_disjoint(views: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Checks that no byte of memory belongs to two elements, of one view or of two.

    Raises StateMismatch naming the tensors. Views whose address ranges do not meet cost nothing more; the others are
    counted element by element.
    """
    by_storage: dict[tuple[torch.device, int], list[tuple[int, int, str, torch.Tensor]]] = defaultdict(list)
    for name, view in views:
        if view.numel() and view.device.type != "meta":
            first = int(view.storage_offset()) * view.element_size()
            reach = sum((n - 1) * int(s) for n, s in zip(view.shape, view.stride(), strict=True)) + 1
            key = (view.device, view.untyped_storage().data_ptr())
            by_storage[key].append((first, first + reach * view.element_size(), name, view))
    for spans in by_storage.values():
        spans.sort(key=lambda span: span[:3])
        cluster: list[tuple[str, torch.Tensor]] = []
        end = -1
        for start, stop, name, view in spans:
            if start >= end:
                _count(cluster)
                cluster = []
            cluster.append((name, view))
            end = max(end, stop)
        _count(cluster)


def _count(cluster: list[tuple[str, torch.Tensor]]) -> None:
    if not cluster or (len(cluster) == 1 and _strides_are_disjoint(cluster[0][1])):
        return
    nbytes = cluster[0][1].untyped_storage().nbytes()
    owner = torch.zeros(nbytes, dtype=torch.int32)
    for number, (name, view) in enumerate(cluster, start=1):
        size = view.element_size()
        for byte in range(size):
            place = torch.as_strided(
                owner, view.shape, [s * size for s in view.stride()], view.storage_offset() * size + byte
            )
            if place.any():
                other = cluster[int(place[place != 0][0]) - 1][0]
                raise StateMismatch(f"{other} and {name} overlap in memory without being the same view; {_REMEDY}")
            place.fill_(number)
        if not _strides_are_disjoint(view):
            raise StateMismatch(f"{name}: several of its elements share one place in memory; {_REMEDY}")


_REMEDY = "make one of them a copy, or leave it out of the state"


def _strides_are_disjoint(view: torch.Tensor) -> bool:
    """Whether no two elements of a view share memory, by its strides: each axis steps past all smaller ones."""
    reach = 1
    for size, stride in sorted(zip(view.shape, view.stride(), strict=True), key=lambda a: a[1]):
        if size > 1:
            if stride < reach:
                return False
            reach = stride * (size - 1) + reach
    return True
