"""What all cursors share: a place in one global order, which no rank and no layout enters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from operator import index
from typing import Any, ClassVar, Generic, Literal, NamedTuple, Required, TypedDict, TypeVar

import numpy as np

from ckpt.data.permutation import LARGEST_SIZE, Indices, Permutation
from ckpt.errors import CkptError, StateMismatch

EpochEnd = Literal["wrap", "drop"]
Plain = int | str | bool
Place = TypeVar("Place")

_SAME_DATA = "open the data set that the run began with, with the same preprocessing"
_REMEDIES = {
    "cursor": "build the kind of cursor that was saved",
    "order": "pass the saved shuffle=, and use a release of ckpt that knows this order",
    "dataset_size": _SAME_DATA,
    "dataset_fingerprint": _SAME_DATA,
    "lengths_fingerprint": "use the tokenizer that the run began with, and its lengths",
    "seed": "pass the saved seed=; a resumed run does not take a new one",
    "global_batch": "pass the saved global_batch=; only the number of ranks and the microbatch may change",
}

_permutation = lru_cache(maxsize=64)(Permutation)


class Options(TypedDict, total=False):
    """Keyword arguments that every cursor takes; see `Cursor`."""

    global_batch: Required[int]
    seed: int
    shuffle: bool
    epoch_end: EpochEnd


class Batch(NamedTuple, Generic[Place]):
    """A part of one global batch. keys: what the data set is asked for, one for each sample of that part; epoch: in
    which the batch begins; after: where the next batch begins."""

    keys: Sequence[Any]
    epoch: int
    after: Place


class Cursor(ABC, Generic[Place]):
    """A place in a global order of samples, which moves by whole global batches.

    Its state is plain values: the configuration that decides the order, and the place. Both are the same on every rank
    of every layout. Loading a state whose configuration is not this cursor's is refused with StateMismatch.

    size, fingerprint: of the data set; the fingerprint is any text that changes when the data do, such as that of
    `dataset_fingerprint`. global_batch: samples of one optimizer step over all ranks. seed: 0 to 2^64 - 1. shuffle: a
    new permutation in every epoch, or the data set's own order. epoch_end: "wrap" lets the last global batch of an
    epoch go on into the next one, so that every batch is full and no sample is left out; "drop" leaves out the samples
    at an epoch's end that do not fill a global batch. Raises CkptError for values that make no order.
    """

    unit: ClassVar[str]

    def __init__(
        self,
        size: int,
        fingerprint: str,
        *,
        global_batch: int,
        seed: int = 0,
        shuffle: bool = True,
        epoch_end: EpochEnd = "wrap",
    ) -> None:
        if not 1 <= size <= LARGEST_SIZE:
            raise CkptError(f"the data set has {size} items; it must have at least 1 and at most 2^62")
        if global_batch < 1:
            raise CkptError(f"global_batch={global_batch} must be at least 1")
        if epoch_end not in ("wrap", "drop"):
            raise CkptError(f'epoch_end={epoch_end!r} must be "wrap" or "drop"')
        Permutation(seed, 0, size)  # refuses a bad seed
        self.size, self.seed, self.global_batch = index(size), index(seed), index(global_batch)
        self.fingerprint, self.shuffle = str(fingerprint), bool(shuffle)
        self.epoch_end: EpochEnd = epoch_end
        self.moves = 0  # how often the place was set: whoever remembers it notices a change
        self._place = self._start()

    @abstractmethod
    def check_dataset(self, dataset: Any) -> None:
        """Raises StateMismatch when a loader is given a data set that this cursor is not for."""

    @property
    @abstractmethod
    def total(self) -> int:
        """Samples (in the cursor's unit) trained on since the run began."""

    @property
    def epoch(self) -> int:
        """The epoch in which the next global batch begins, from 0."""
        return self._batch(self._place, 0, 0).epoch

    @abstractmethod
    def _start(self) -> Place:
        """Where a run begins."""

    @abstractmethod
    def _batch(self, place: Place, first: int, last: int) -> Batch[Place]:
        """Samples first to last - 1 of the global batch at `place`; a pure function."""

    @abstractmethod
    def _position(self) -> dict[str, int]:
        """The place in numbers: those that decide it, and those that people like to read."""

    @abstractmethod
    def _parsed(self, position: Mapping[str, int]) -> Place:
        """Inverse of `_position`, given non-negative ints. Raises ValueError when they contradict each other."""

    def in_epoch(self, epoch: int, start: int, stop: int) -> Indices:
        """The data set's indices at positions start to stop - 1 of an epoch: int64 [stop - start]."""
        positions = np.arange(start, stop, dtype=np.int64)
        return _permutation(self.seed, epoch, self.size)(positions) if self.shuffle else positions

    def batches(self, first: int, last: int) -> Iterator[Sequence[Any]]:
        """Keys of samples first to last - 1 of every global batch from here on; does not move the cursor.

        Endless with epoch_end="wrap"; ends with the epoch with "drop".
        """
        place, epoch = self._place, None
        while True:
            batch = self._batch(place, first, last)
            if self.epoch_end == "drop" and epoch not in (None, batch.epoch):
                return
            yield batch.keys
            place, epoch = batch.after, batch.epoch

    def advance(self) -> None:
        """Counts the next global batch as trained on."""
        self._move(self._batch(self._place, 0, 0).after)

    def configuration(self) -> dict[str, Plain]:
        """All that decides the order."""
        return {
            "order": "feistel-philox-1" if self.shuffle else "sequential",
            "dataset_size": self.size,
            "dataset_fingerprint": self.fingerprint,
            "seed": self.seed,
            "global_batch": self.global_batch,
            "epoch_end": self.epoch_end,
        }

    def state_dict(self) -> dict[str, Plain]:
        """The configuration and the place: plain values, equal on every rank and layout."""
        return {"cursor": type(self).__name__, **self.configuration(), **self._position()}

    def check_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises StateMismatch, naming both values and the remedy, when `state` cannot be loaded here."""
        self._checked(state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Moves to a saved place. Raises StateMismatch, with nothing changed, when it belongs to another order."""
        self._move(self._checked(state))

    def _move(self, place: Place) -> None:
        self._place = place
        self.moves += 1

    def _checked(self, state: Mapping[str, Any]) -> Place:
        name, mine = type(self).__name__, self.state_dict()
        for key in ("cursor", *self.configuration()):
            found, wanted = state.get(key), mine[key]
            if type(found) is not type(wanted) or found != wanted:
                remedy = _REMEDIES.get(key, f"pass the saved {key}=")
                raise StateMismatch(
                    f"{name}: saved with {key}={found!r}, but this run has {key}={wanted!r}, and the order of samples "
                    f"would not be the same: {remedy}"
                )
        odd = sorted(map(str, set(state) ^ set(mine)))
        if odd:
            raise StateMismatch(
                f"{name}: unknown or missing in the saved state: {', '.join(odd)}; use the ckpt it is from"
            )
        position = {key: state[key] for key in self._position()}
        try:
            if any(type(x) is not int or x < 0 for x in position.values()):
                raise ValueError("they must be non-negative ints")
            return self._parsed(position)
        except ValueError as error:
            raise StateMismatch(f"{name}: the saved place {position} cannot be: {error}; load another step") from None


def check_size(cursor: Cursor[Any], found: int) -> None:
    """Raises StateMismatch when a data set of `found` items is not of the cursor's size."""
    if found != cursor.size:
        raise StateMismatch(
            f"the data set has {found} items, the {type(cursor).__name__} is for one of {cursor.size}; {_SAME_DATA}"
        )
