"""The cursor over single samples of a map-style data set."""

from __future__ import annotations

from collections.abc import Mapping, Sized
from typing import Unpack

import numpy as np

from ckpt.data.cursor import Batch, Cursor, Options, check_size
from ckpt.data.fingerprint import dataset_fingerprint
from ckpt.data.permutation import Indices
from ckpt.errors import CkptError


class GlobalCursor(Cursor[int]):
    """Samples of a map-style data set in one global order, a pure function of (seed, epoch, index) that is never
    materialised. For the arguments see `Cursor`.

    Its place is one number, the samples trained on since the run began: positions count on through the epochs, each of
    which has all samples ("wrap") or as many as fill global batches ("drop"). Keys of the data set are ints.
    """

    unit = "samples"

    def __init__(self, size: int, fingerprint: str, **options: Unpack[Options]) -> None:
        super().__init__(size, fingerprint, **options)
        drop = self.epoch_end == "drop"
        self.epoch_length = self.size - self.size % self.global_batch if drop else self.size
        if not self.epoch_length:
            raise CkptError(
                f'{size} samples never fill a global batch of {self.global_batch}, and epoch_end="drop" leaves out '
                'what does not fill one; use epoch_end="wrap" or a smaller global_batch'
            )

    @classmethod
    def over(cls, dataset: Sized, *, fingerprint: str | None = None, **options: Unpack[Options]) -> GlobalCursor:
        """A cursor over this data set, whose fingerprint is computed from some of the items unless it is given.

        options: global_batch, seed, shuffle, epoch_end; see `Cursor`. Raises what `dataset_fingerprint` does.
        """
        found = dataset_fingerprint(dataset) if fingerprint is None else fingerprint
        return cls(len(dataset), found, **options)

    @property
    def total(self) -> int:
        """Samples trained on since the run began."""
        return self._place

    @property
    def consumed(self) -> int:
        """Samples of the current epoch that were trained on."""
        return self._place % self.epoch_length

    def samples(self, start: int, stop: int) -> Indices:
        """Indices into the data set at global positions start to stop - 1: int64 [stop - start]."""
        found = [np.empty(0, np.int64)]
        while start < stop:
            epoch, begin = divmod(start, self.epoch_length)
            end = min(begin + stop - start, self.epoch_length)
            found.append(self.in_epoch(epoch, begin, end))
            start += end - begin
        return np.concatenate(found)

    def check_dataset(self, dataset: Sized) -> None:
        check_size(self, len(dataset))

    def _start(self) -> int:
        return 0

    def _batch(self, place: int, first: int, last: int) -> Batch[int]:
        keys = self.samples(place + first, place + last).tolist()
        return Batch(keys, place // self.epoch_length, place + self.global_batch)

    def _position(self) -> dict[str, int]:
        return {"epoch": self.epoch, "consumed": self.consumed, "total": self.total}

    def _parsed(self, position: Mapping[str, int]) -> int:
        total = position["total"]
        if divmod(total, self.epoch_length) != (position["epoch"], position["consumed"]):
            raise ValueError(f"an epoch has {self.epoch_length} samples")
        if total % self.global_batch:
            raise ValueError(f"a global batch has {self.global_batch} samples")
        return total
