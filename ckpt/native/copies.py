"""Copies of many boxes at once: the inner loop of packing, exchange and placement."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ckpt.native.library import MAX_NDIM, Overlap, find, thread_count


def copy_boxes(copies: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copies the elements of each (destination, source) of equal shape and item size, whatever their strides.

    Pairs on the CPU go to one call of the compiled kernel, pairs on one CUDA device to one launch on its current
    stream. Pairs across devices, and all pairs where there are no kernels, go through torch. Destinations of different
    pairs must not overlap. Raises ValueError where shapes or item sizes differ.
    """
    together: dict[torch.device, list[tuple[torch.Tensor, torch.Tensor]]] = {}
    library = find()
    for to, source in copies:
        if to.shape != source.shape or to.element_size() != source.element_size():
            raise ValueError(f"cannot copy {source.dtype}{list(source.shape)} into {to.dtype}{list(to.shape)}")
        if library is not None and to.device == source.device and library.takes(to.device) and to.dim() <= MAX_NDIM:
            together.setdefault(to.device, []).append((to, source))
        else:
            to.copy_(source.view(to.dtype))
    for pairs in together.values():
        assert library is not None
        try:
            library.box_copy(pairs, thread_count())
        except Overlap:  # strides that interleave without meeting, which only an element by element look can tell
            for to, source in pairs:
                to.copy_(source.view(to.dtype))
