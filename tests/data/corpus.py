"""Data sets for the tests of data cursors; nothing of ckpt is imported, so that a worker starts quickly."""

import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset


class Numbers(Dataset[torch.Tensor]):
    """Item i is [i, 2 i + 1]."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, 2 * index + 1])


class Augmented(Numbers):
    """Item i is [i, three random numbers from the three global generators]."""

    def __getitem__(self, index: int) -> torch.Tensor:
        drawn = [random.random(), np.random.random(), torch.rand((), dtype=torch.float64).item()]
        return torch.tensor([index, *drawn], dtype=torch.float64)


class Documents:
    """Document i has lengths[i] tokens, 1000 i and on."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self.lengths = list(lengths)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.arange(self.lengths[index]) + 1000 * index


def raw(batch: Any) -> bytes:
    """The bytes of a batch: a tensor, or a dict of tensors."""
    if isinstance(batch, dict):
        return b"".join(raw(batch[key]) for key in sorted(batch))
    return batch.numpy().tobytes()


def global_batches(loaders: Sequence[Any]) -> Iterator[list[bytes]]:
    """Trains: one loader per data-parallel rank, in step. Yields each global batch as the bytes of its samples, once it
    is marked as consumed on every rank."""
    iterations = [iter(loader) for loader in loaders]
    while True:
        samples: list[bytes] = []
        for loader, iteration in zip(loaders, iterations, strict=True):
            for _ in range(loader.micro_batches):
                batch = next(iteration, None)
                if batch is None:
                    return
                samples += _samples(batch)
            loader.mark_consumed()
        yield samples


def _samples(batch: Any) -> list[bytes]:
    if isinstance(batch, dict):
        size = len(next(iter(batch.values())))
        return [raw({key: value[i] for key, value in batch.items()}) for i in range(size)]
    return [raw(sample) for sample in batch]
