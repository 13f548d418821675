"""Copies of many boxes at once: the inner loop of packing, exchange and placement."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch

from ckpt.native.descriptors import MAX_NDIM
from ckpt.native.library import Overlap, find, thread_count


def copy_boxes(copies: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copies the elements of each (destination, source) of equal shape and item size, whatever their strides.

    Pairs on the CPU go to one call of the compiled kernel, pairs on one CUDA device to one launch on its current
    stream. Pairs across devices, and all pairs where there are no kernels, go through torch. Destinations of different
    pairs must not overlap. Raises ValueError where shapes or item sizes differ.
    """
    together: dict[torch.device, list[tuple[torch.Tensor, torch.Tensor]]] = defaultdict(list)
    library = find()
    for to, source in copies:
        device = to.device
        if library is not None and device == source.device and to.dim() <= MAX_NDIM:
            together[device].append((to, source))
        else:
            _copy_by_torch(to, source)
    for device, pairs in together.items():
        assert library is not None
        try:
            if library.takes(device):
                library.box_copy(pairs, thread_count())
                continue
        except Overlap:  # strides that interleave without meeting, which only an element by element look can tell
            pass
        for to, source in pairs:
            _copy_by_torch(to, source)


def _copy_by_torch(to: torch.Tensor, source: torch.Tensor) -> None:
    if to.shape != source.shape or to.element_size() != source.element_size():
        raise ValueError(f"cannot copy {source.dtype}{list(source.shape)} into {to.dtype}{list(to.shape)}")
    to.copy_(source.view(to.dtype))
