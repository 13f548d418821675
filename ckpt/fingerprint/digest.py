"""Digests as values, and the digests of boxes by the fastest means at hand; `reference` holds the mathematics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch

from ckpt.fingerprint import reference
from ckpt.geometry.box import Box, Index
from ckpt.native import field
from ckpt.native.descriptors import MAX_NDIM
from ckpt.native.library import find, thread_count

Digest: TypeAlias = tuple[int, int]
ZERO: Digest = (0, 0)


def add(*digests: Digest) -> Digest:
    """Sum of digests modulo p: the digest of the union of disjoint boxes of one tensor."""
    return sum(d[0] for d in digests) % field.P, sum(d[1] for d in digests) % field.P


def to_hex(digest: Digest) -> str:
    """32 lower-case hexadecimal digits: both halves, 16 each."""
    return f"{digest[0]:016x}{digest[1]:016x}"


def from_hex(text: str) -> Digest:
    """Inverse of `to_hex`. Raises ValueError on anything else."""
    digest = (int(text[:16], 16), int(text[16:], 16))
    if to_hex(digest) != text or max(digest) >= field.P:
        raise ValueError(f"{text!r} is no fingerprint")
    return digest


def tensor_digest(tensor: torch.Tensor) -> Digest:
    """Digest of a whole tensor, of any shape, strides and (plain) dtype."""
    return box_digest(tensor, Box.whole(tuple(tensor.shape)), tuple(tensor.shape))


def box_digest(view: torch.Tensor, box: Box, shape: Index) -> Digest:
    """Digest of the part `box` of a logical tensor of shape `shape`.

    view: the elements of the box, shape `box.extent`, any strides, any device, itemsize 1, 2, 4, 8 or 16 bytes.
    """
    return box_digests([(view, box, shape)])[0]


def box_digests(boxes: Sequence[tuple[torch.Tensor, Box, Index]]) -> list[Digest]:
    """Digests of many boxes: one call of the compiled kernel for all on the CPU, one launch for all on a CUDA device.

    boxes: (view, box, shape) as in `box_digest`, each of any logical tensor.
    """
    library = find()
    found: list[Digest] = [ZERO] * len(boxes)
    together: dict[torch.device, list[tuple[int, torch.Tensor]]] = {}
    for i, (view, box, shape) in enumerate(boxes):
        if tuple(view.shape) != box.extent:
            raise ValueError(f"view of shape {tuple(view.shape)} given for box {box}")
        if not box.volume:
            continue
        if view.dim() == 0 and view.device.type != "cpu":
            view = view.cpu()
        if library is not None and library.takes(view.device) and view.dim() <= MAX_NDIM:
            together.setdefault(view.device, []).append((i, view))
        else:
            found[i] = reference.box_digest(view, box, shape)
    for views in together.values():
        assert library is not None
        described = [(view, boxes[i][1].offset, boxes[i][2]) for i, view in views]
        for (i, _), digest in zip(views, library.fingerprint(described, thread_count()), strict=True):
            found[i] = digest
    return found
