"""The two sides that tools/gpu_check compares, and a line of its table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch

from ckpt.fingerprint import reference
from ckpt.geometry.box import Box
from ckpt.native import philox
from ckpt.native.library import Library, _stream, thread_count

Index: TypeAlias = tuple[int, ...]
Boxes: TypeAlias = Sequence[tuple[torch.Tensor, Index, Index]]  # (view, offset, shape of the logical tensor)
Pairs: TypeAlias = Sequence[tuple[torch.Tensor, torch.Tensor]]  # (destination, source)


class Draw(Enum):
    """What is drawn of a stream of random numbers: int32, float32 or uint8."""

    WORDS = "words"
    UNIFORMS = "uniforms"
    MASKS = "masks"


@dataclass(frozen=True)
class Row:
    """One line of the table. traffic: bytes that must cross the memory bus; seconds: 0 where nothing was timed."""

    kernel: str
    case: str
    equal: bool
    traffic: int = 0
    seconds: float = 0.0
    floor: float = 0.0  # bytes a second


class Side(Protocol):
    """One implementation of all kernels, on one device."""

    device: torch.device

    def digests(self, boxes: Boxes) -> list[tuple[int, int]]: ...

    def copy(self, pairs: Pairs) -> None: ...

    def tree_sum(self, leaves: torch.Tensor) -> torch.Tensor: ...

    def draw(self, kind: Draw, count: int, first: int, stream: int, key: int, threshold: int) -> torch.Tensor: ...


class Recorder(Library):
    """Keeps the last call of a kernel, so that it can be timed without the making of its arguments and results."""

    again: Callable[[], None]

    def _call(
        self, name: str, device: torch.device, arguments: list[Any], results: list[Any], threads: int | None = None
    ) -> None:
        self.again = partial(super()._call, name, device, arguments, results, threads)
        self.again()


class NativeSide:
    """The compiled kernels, on the CPU or on a CUDA device."""

    def __init__(self, library: Recorder, device: torch.device) -> None:
        self.library, self.device = library, device

    def digests(self, boxes: Boxes) -> list[tuple[int, int]]:
        return self.library.fingerprint(boxes, thread_count())

    def copy(self, pairs: Pairs) -> None:
        self.library.box_copy(pairs, thread_count())

    def tree_sum(self, leaves: torch.Tensor) -> torch.Tensor:
        return self.library.tree_sum(leaves, thread_count())

    def draw(self, kind: Draw, count: int, first: int, stream: int, key: int, threshold: int) -> torch.Tensor:
        if kind is Draw.UNIFORMS:
            return self.library.philox_uniform(count, first, stream, key, str(self.device))
        if kind is Draw.MASKS:
            return self.library.philox_mask(count, first, stream, key, threshold, str(self.device))
        out = torch.empty(count, dtype=torch.int32, device=self.device)
        self.library._call("philox", self.device, _stream(out, count, first, stream, key), [])  # `philox` widens them
        return out


class ReferenceSide:
    """The reference twins, in NumPy and torch."""

    device = torch.device("cpu")

    def digests(self, boxes: Boxes) -> list[tuple[int, int]]:
        return [reference.box_digest(view, Box(offset, tuple(view.shape)), shape) for view, offset, shape in boxes]

    def copy(self, pairs: Pairs) -> None:
        for to, source in pairs:
            to.copy_(source)

    def tree_sum(self, leaves: torch.Tensor) -> torch.Tensor:
        found = _tree(leaves.to(torch.float64 if leaves.dtype == torch.float64 else torch.float32))
        return torch.where(found.isnan(), torch.nan, found)

    def draw(self, kind: Draw, count: int, first: int, stream: int, key: int, threshold: int) -> torch.Tensor:
        low, block = 0xFFFFFFFF, first // 4
        blocks = np.arange((first + count + 3) // 4 - block, dtype=np.uint64) + np.uint64(block)
        counter = np.empty((4, len(blocks)), dtype=np.uint64)
        counter[0], counter[1] = blocks & np.uint64(low), blocks >> np.uint64(32)
        counter[2], counter[3] = stream & low, stream >> 32
        made = philox.philox4x32(counter, (key & low, key >> 32)).T.reshape(-1)[first % 4 :][:count]
        words = torch.from_numpy(made.astype(np.int64))
        if kind is Draw.UNIFORMS:
            return (words >> 8).float() * 2.0**-24
        return (words < threshold).to(torch.uint8) if kind is Draw.MASKS else words.to(torch.int32)


def _tree(leaves: torch.Tensor) -> torch.Tensor:
    if len(leaves) == 1:
        return leaves[0]
    half = 1 << (len(leaves) - 1).bit_length() - 1
    return _tree(leaves[:half]) + _tree(leaves[half:])


def noise(seed: int, count: int) -> torch.Tensor:
    """uint8 [count]: random bits."""
    out = torch.empty(count, dtype=torch.uint8)
    out.numpy()[:] = np.random.default_rng(seed).integers(0, 256, count, dtype=np.uint8)
    return out


def item(dtype: torch.dtype) -> int:
    return torch.empty(0, dtype=dtype).element_size()


def raw(tensor: torch.Tensor) -> bytes:
    """The bits of a tensor, in row-major order."""
    flat = tensor.cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if len(flat) else b""
