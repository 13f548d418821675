"""Random numbers drawn while an item is fetched (augmentation), keyed by the sample and not by who fetches it."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from ckpt.native.philox import philox4x32

Numbered = tuple[int, Any]

_LOW = 0xFFFFFFFF
_PURPOSE = 0x0DA7A002  # keeps these numbers apart from every other use of the same seed


def fetch_seeded(dataset: Any, seed: int, numbered: Sequence[Numbered]) -> list[Any]:
    """The items of `dataset` under these (number, key) pairs. While one is fetched, the global generators of `random`,
    NumPy and torch (CPU) are a function of (seed, number) alone; afterwards they are as they were before."""
    words = _words(seed, [number for number, _ in numbered])
    items = []
    with _restored():
        for (_, key), own in zip(numbered, words, strict=True):
            _seed(own)
            items.append(dataset[key])
    return items


class SeededItems:
    """A map-style data set for a DataLoader, whose keys are (number, key of `dataset`); see `fetch_seeded`."""

    def __init__(self, dataset: Any, seed: int) -> None:
        self.dataset, self.seed = dataset, seed

    def __getitem__(self, numbered: Numbered) -> Any:
        return fetch_seeded(self.dataset, self.seed, [numbered])[0]

    def __getitems__(self, numbered: Sequence[Numbered]) -> list[Any]:
        return fetch_seeded(self.dataset, self.seed, numbered)


def _words(seed: int, numbers: Sequence[int]) -> list[list[int]]:
    """Four 32-bit words for each number."""
    counter = np.zeros((4, len(numbers)), np.uint64)
    counter[0] = [n & _LOW for n in numbers]
    counter[1] = [n >> 32 for n in numbers]
    counter[2] = _PURPOSE
    words: list[list[int]] = philox4x32(counter, (seed & _LOW, seed >> 32)).T.tolist()
    return words


def _seed(words: Sequence[int]) -> None:
    random.seed(words[0] | words[1] << 32 | words[2] << 64 | words[3] << 96)
    np.random.seed(words)
    torch.default_generator.manual_seed(words[2] | words[3] << 32)


@contextmanager
def _restored() -> Iterator[None]:
    python, numpy, cpu = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.default_generator.set_state(cpu)
