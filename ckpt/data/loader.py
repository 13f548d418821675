"""A rank's share of each global batch, in microbatches, and what has been trained on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Sampler

from ckpt.data.cursor import Cursor
from ckpt.data.seeding import SeededItems
from ckpt.errors import CkptError, StateMismatch

_OWN = ("batch_size", "shuffle", "sampler", "batch_sampler", "drop_last", "generator")


class GlobalSampler(Sampler[list[Any]]):
    """A batch sampler for DataLoader: the keys of each microbatch of one data-parallel rank, from the cursor on.

    A rank's share of a global batch is contiguous in the global order, so the ranks' shares, joined, are the same
    global batch for every `world`; a share is cut into microbatches of `micro_batch` samples (all of it by default).
    Iterating does not move the cursor, so a DataLoader may run ahead. rank, world: the data-parallel ones. numbered:
    give (number of the sample since the run began, key) instead of the key.

    Raises StateMismatch when `world` does not divide the global batch, or `micro_batch` the share.
    """

    def __init__(
        self, cursor: Cursor[Any], rank: int, world: int, micro_batch: int | None = None, *, numbered: bool = False
    ) -> None:
        if not 0 <= rank < world:
            raise CkptError(f"rank={rank} must be at least 0 and below world={world}, both of data parallelism alone")
        share, left = divmod(cursor.global_batch, world)
        if left:
            raise StateMismatch(
                f"a global batch of {cursor.global_batch} {cursor.unit} cannot be shared equally by {world} "
                f"data-parallel ranks; use {_divisors(cursor.global_batch)} of them"
            )
        micro_batch = share if micro_batch is None else micro_batch
        if micro_batch < 1 or share % micro_batch:
            raise StateMismatch(
                f"micro_batch={micro_batch} does not divide the {share} {cursor.unit} that each of {world} "
                f"data-parallel ranks has of a global batch of {cursor.global_batch}; use {_divisors(share)}"
            )
        self.cursor, self.micro_batch, self.numbered = cursor, micro_batch, numbered
        self.micro_batches = share // micro_batch
        self._first, self._last = rank * share, (rank + 1) * share

    def __iter__(self) -> Iterator[list[Any]]:
        begin = self.cursor.total + self._first
        for keys in self.cursor.batches(self._first, self._last):
            listed = list(enumerate(keys, begin)) if self.numbered else list(keys)
            for start in range(0, len(listed), self.micro_batch):
                yield listed[start : start + self.micro_batch]
            begin += self.cursor.global_batch


class GlobalLoader:
    """Loads one data-parallel rank's microbatches of each global batch, from the cursor's place on.

        for batch in loader:
            loss(batch).backward()
            if loader.complete:  # all microbatches of a global batch have been handed out
                optimizer.step()
                loader.mark_consumed()

    Only `mark_consumed` moves the cursor: what workers prefetch, and what has been handed out but not marked, counts as
    not trained on, and a run that resumes from a state saved meanwhile gets it again. Asking for the next global batch,
    or a new iteration, without it raises CkptError, so that a forgotten call is noticed; `rewind` gives up what was
    handed out. With ahead=True further batches may be asked for before that, as frameworks do that fetch ahead; what is
    not marked is then given again by a new iteration. Iterating ends with the epoch for epoch_end="drop" and never for
    "wrap". After a load into the cursor a running iteration raises CkptError: begin a new one.

    dataset: map-style, of the size that the cursor says. rank, world: the data-parallel ones; ranks that share a batch
    (tensor, pipeline or context parallel ones) pass the same. micro_batch: samples in a microbatch; by default a rank's
    whole share of the global batch. seed_items: fetch every item under global generators of `random`, NumPy and torch
    (CPU) that depend on the seed and the number of the sample alone, so that augmentation does not depend on ranks,
    workers and restarts; False saves about 15 us an item and uses the data set's `__getitems__`.

    options: those of torch's DataLoader. With workers, processes are spawned unless `multiprocessing_context` says
    otherwise, because TensorStore, which ckpt imports, aborts when it is used in a forked child; so the data set and
    `collate_fn` must be picklable, and the main module importable. The DataLoader has a generator of its own, so that
    torch's global one does not depend on how often a run was resumed.

    Raises StateMismatch when `world` does not divide the global batch, `micro_batch` a rank's share, or the data set is
    not the cursor's; CkptError for an option that would change the order.
    """

    def __init__(
        self,
        dataset: Any,
        cursor: Cursor[Any],
        rank: int,
        world: int,
        micro_batch: int | None = None,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        *,
        seed_items: bool = True,
        ahead: bool = False,
        **options: Any,
    ) -> None:
        taken = [name for name in _OWN if name in options]
        if taken or not options.get("in_order", True):
            raise CkptError(
                f"GlobalLoader: {taken[0] if taken else 'in_order=False'} would change the order; leave it out"
            )
        cursor.check_dataset(dataset)
        source: Any = SeededItems(dataset, cursor.seed) if seed_items else dataset
        if num_workers:
            options.setdefault("multiprocessing_context", "spawn")
        self.cursor, self.ahead = cursor, ahead
        self._sampler = GlobalSampler(cursor, rank, world, micro_batch, numbered=seed_items)
        self._loader: DataLoader[Any] = DataLoader(
            source,
            batch_sampler=self._sampler,
            num_workers=num_workers,
            collate_fn=collate_fn,
            generator=torch.Generator(),
            **options,
        )
        self._handed = 0  # microbatches that were handed out and not marked
        self._moves = cursor.moves  # as this loader left the cursor
        self._iteration = 0

    @property
    def micro_batches(self) -> int:
        """Microbatches of one global batch on this rank."""
        return self._sampler.micro_batches

    @property
    def complete(self) -> bool:
        """Whether all microbatches of the current global batch have been handed out, and are not yet marked."""
        return self._handed >= self.micro_batches and self._moves == self.cursor.moves

    def mark_consumed(self) -> None:
        """Counts the global batch that was handed out as trained on: call it once for each optimizer step.

        Raises CkptError, with nothing changed, unless all its microbatches were handed out.
        """
        if not self.complete:
            handed = self._handed if self._moves == self.cursor.moves else 0
            raise CkptError(
                f"mark_consumed: {handed} of the {self.micro_batches} microbatches of the global batch at "
                f"{self._where()} have been handed out; call it after the last one, once for each global batch"
            )
        self.cursor.advance()
        self._handed, self._moves = self._handed - self.micro_batches, self.cursor.moves

    def rewind(self) -> None:
        """Gives up what was handed out and not marked, and the running iteration: the next one begins at the cursor."""
        self._handed, self._moves = 0, self.cursor.moves
        self._iteration += 1

    def __iter__(self) -> Iterator[Any]:
        if self._moves == self.cursor.moves:
            self._require_marked(self._handed == 0, "a new iteration was begun")
        self.rewind()
        return self._hand_out(self._iteration)

    def _hand_out(self, iteration: int) -> Iterator[Any]:
        batches = iter(self._loader)
        while True:
            if self._iteration != iteration or self._moves != self.cursor.moves:
                raise CkptError(
                    "the cursor was moved (by a load, say), or another iteration begun: iterate over the loader anew"
                )
            self._require_marked(self._handed < self.micro_batches, "what follows was asked for")
            try:
                batch = next(batches)
            except StopIteration:
                return
            self._handed += 1
            yield batch

    def _require_marked(self, marked: bool, event: str) -> None:
        if not marked and not self.ahead:
            raise CkptError(
                f"{self._handed} of {self.micro_batches} microbatches of the global batch at {self._where()} were "
                f"handed out and not marked as trained on when {event}; call loader.mark_consumed() after each "
                "optimizer step, or loader.rewind() to get them again"
            )

    def _where(self) -> str:
        return f"{self.cursor.unit} {self.cursor.total} (epoch {self.cursor.epoch})"


def _divisors(n: int) -> str:
    found = [str(d) for d in range(1, n + 1) if n % d == 0]
    return ", ".join(found[:-1]) + f" or {found[-1]}" if len(found) > 1 else found[0]
