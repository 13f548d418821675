"""Logical random numbers: words, uniforms and keep-masks of any elements of a stream, on any device.

Element e of the stream (key, number) is word e mod 4 of Philox 4x32-10 under `key` at counter (e / 4 as two 32-bit
words, number as two), lower words first (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011). The
compiled kernels draw long runs; short ones, and devices without kernels, are drawn with torch's integer operations,
which give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from ckpt.native.library import Library, find
from ckpt.native.philox import rounds

I64 = npt.NDArray[np.int64]

_LOW = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Runs:
    """Elements of a stream in the order in which they are wanted: from each start, `length` consecutive ones.

    starts: int64 [r], not negative; no element is above 2^63 - 1.
    """

    starts: I64
    length: int

    @property
    def count(self) -> int:
        """Number of elements."""
        return len(self.starts) * self.length

    def chunks(self, limit: int) -> Iterator[Runs]:
        """The same elements in the same order, in parts of at most `limit`."""
        if self.length > limit:
            for start in self.starts:
                for done in range(0, self.length, limit):
                    yield Runs(start + np.arange(done, done + 1), min(limit, self.length - done))
        elif self.length:
            group = limit // self.length
            for first in range(0, len(self.starts), group):
                yield Runs(self.starts[first : first + group], self.length)


@dataclass(frozen=True, slots=True)
class _Kind:
    """One way to read the words. native: of (library, count, first element); twin: of int64 words below 2^32."""

    dtype: torch.dtype
    native: Callable[[Library, int, int], torch.Tensor]
    twin: Callable[[torch.Tensor], torch.Tensor]


def words(key: int, number: int, runs: Runs, device: torch.device) -> torch.Tensor:
    """int64 [count]: the words, below 2^32."""
    where = str(device)
    kind = _Kind(torch.int64, lambda library, n, first: library.philox(n, first, number, key, where), lambda w: w)
    return _draw(key, number, runs, device, kind)


def uniforms(key: int, number: int, runs: Runs, device: torch.device) -> torch.Tensor:
    """float32 [count] in [0, 1): the top 24 bits of each word, times 2^-24."""
    where = str(device)
    kind = _Kind(
        torch.float32,
        lambda library, n, first: library.philox_uniform(n, first, number, key, where),
        lambda w: (w >> 8).to(torch.float32).mul_(2.0**-24),
    )
    return _draw(key, number, runs, device, kind)


def mask(key: int, number: int, runs: Runs, device: torch.device, threshold: int) -> torch.Tensor:
    """bool [count]: whether each word is below `threshold` (0 to 2^32)."""
    where = str(device)
    kind = _Kind(
        torch.bool,
        lambda library, n, first: library.philox_mask(n, first, number, key, threshold, where).view(torch.bool),
        lambda w: w < threshold,
    )
    return _draw(key, number, runs, device, kind)


def chunk_limit(device: torch.device) -> int:
    """How many elements to work on at once: on a CPU what stays in its caches, elsewhere what one launch is worth."""
    return 1 << 18 if device.type == "cpu" else 1 << 23


def _worth_calling(runs: Runs, device: torch.device) -> bool:
    """Whether a kernel call for each run is cheaper than drawing all of them together with torch, which costs as much
    as some 64 calls, and then more for each word."""
    return len(runs.starts) <= 64 or runs.length >= (1 << 10 if device.type == "cpu" else 1 << 16)


def _draw(key: int, number: int, runs: Runs, device: torch.device, kind: _Kind) -> torch.Tensor:
    library = find()
    if library is not None and not (library.takes(device) and _worth_calling(runs, device)):
        library = None
    if library is not None and len(runs.starts) == 1:
        return kind.native(library, runs.length, int(runs.starts[0]))
    out = torch.empty(runs.count, dtype=kind.dtype, device=device)
    if library is not None and runs.count:
        for row, start in zip(out.view(-1, runs.length), runs.starts.tolist(), strict=True):
            row.copy_(kind.native(library, runs.length, start))
        return out
    done = 0
    for part in runs.chunks(chunk_limit(device)):
        place = out[done : done + part.count].view(-1, part.length)
        place.copy_(kind.twin(_words(key, number, part, device)))
        done += part.count
    return out


def _words(key: int, number: int, runs: Runs, device: torch.device) -> torch.Tensor:
    """int64 [r, length]: the words of runs, each drawn in whole blocks of four from the block of its start on."""
    lanes = runs.starts & 3
    lowest, highest = int(lanes.min()), int(lanes.max())
    each = torch.arange((highest + runs.length + 3) // 4, device=device)
    blocks = torch.from_numpy(runs.starts >> 2).to(device)[:, None] + each
    drawn = _philox(blocks, number, key).view(len(lanes), -1)
    if lowest == highest:
        return drawn[:, lowest : lowest + runs.length]
    return drawn.gather(1, torch.from_numpy(lanes).to(device)[:, None] + torch.arange(runs.length, device=device))


def _philox(blocks: torch.Tensor, number: int, key: int) -> torch.Tensor:
    """int64 [..., 4]: the four words of each block (int64, below 2^61)."""
    low, high = blocks & _LOW, blocks >> 32
    stream = (torch.full_like(low, number & _LOW), torch.full_like(low, number >> 32))
    return torch.stack(rounds(low, high, *stream, (key & _LOW, key >> 32)), dim=-1)
