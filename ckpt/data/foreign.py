"""Loaders of other libraries whose state belongs to one data-parallel rank: carried to the same rank of as many, and
refused elsewhere. Neither library is imported here."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from torch.utils.data import RandomSampler, SubsetRandomSampler, WeightedRandomSampler, get_worker_info

from ckpt.data.plain import freeze, thaw
from ckpt.errors import CkptError, StateMismatch, Unsupported

_INSTEAD = "resume on that size, or begin the next run with ckpt.data.GlobalCursor, whose place is the same on any size"
_GENERATORS = (
    "pass generator=torch.Generator() to the loader, and to it as sampler= a "
    "torchdata.stateful_dataloader.sampler.RandomSampler with another generator"
)


def check_is_no_rank_loader(node: object, where: str) -> None:
    """Refuses a loader or data set of these libraries that stands in a state by itself: its state is one rank's, and
    says so nowhere. Equal counts on all ranks would pass as one state, and load on any number of ranks."""
    if {kind.__module__.partition(".")[0] for kind in type(node).__mro__} & {"torchdata", "datasets"}:
        raise Unsupported(
            f"{where}: what a {type(node).__name__} keeps is one data-parallel rank's place in its own share of the "
            "data; put a ckpt.data.TorchdataCursor or HuggingFaceCursor of it into the state, or its state_dict in "
            "ckpt.per_rank(), or use ckpt.data.GlobalLoader"
        )


class RankCursor(ABC):
    """The state of a loader that each data-parallel rank has its own of.

    A state dict names the number of data-parallel ranks and holds one entry, named by this one. Ranks that share a
    batch (tensor, pipeline or context parallel ones) have entries of one name, so a save finds it when they differ, and
    a load may change those parallel sizes. Another number of data-parallel ranks is refused with StateMismatch.
    """

    kind: ClassVar[str]
    reason: ClassVar[str]

    def __init__(self, dp_rank: int, dp_size: int) -> None:
        if not 0 <= dp_rank < dp_size:
            raise CkptError(f"{self.kind}: dp_rank={dp_rank} must be at least 0 and below dp_size={dp_size}")
        self.dp_rank, self.dp_size = dp_rank, dp_size

    @abstractmethod
    def _state(self) -> Any:
        """The loader's state as plain data; None where a pass has not begun."""

    @abstractmethod
    def _load(self, state: Any) -> None:
        """Inverse of `_state`."""

    @abstractmethod
    def _check(self, state: Any) -> None:
        """Raises StateMismatch when `_load` could not take `state` here."""

    def state_dict(self) -> dict[str, Any]:
        """Plain values: the kind of loader, dp_size, and this rank's state, in a tuple so that it stays one value."""
        return {"cursor": self.kind, "dp_size": self.dp_size, self._name: (freeze(self._state(), self.kind),)}

    def check_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises StateMismatch, with the reason and the remedy, when `state` cannot be loaded here."""
        if state.get("cursor") != self.kind:
            raise StateMismatch(
                f"saved with the cursor {state.get('cursor')!r}, this run has {self.kind!r}; use that one"
            )
        if state.get("dp_size") != self.dp_size:
            raise StateMismatch(
                f"{self.kind}: saved by {state.get('dp_size')} data-parallel ranks, this run has {self.dp_size}, and "
                f"{self.reason}; {_INSTEAD}"
            )
        if self._name not in state:
            raise StateMismatch(f"{self.kind}: the saved state has no {self._name}; load another step")
        self._check(thaw(state[self._name][0], self.kind))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes a saved state. Raises StateMismatch, with nothing changed, when it is not for this rank."""
        self.check_state_dict(state)
        self._load(thaw(state[self._name][0], self.kind))

    @property
    def _name(self) -> str:
        return f"dp_rank_{self.dp_rank}"


class TorchdataCursor(RankCursor):
    """The state of a torchdata `StatefulDataLoader`. Iterate over the loader itself; save while a pass is running.

    The loader must be built as it was for the run that saved, with as many workers. A batch counts as trained on once
    it is handed out, so save between optimizer steps. Raises Unsupported for what torchdata does not resume exactly:

    * a loader without a `generator` of its own: a resumed iteration draws a seed from torch's global generator;
    * one whose sampler draws from that same generator, or from one that is not saved (a random sampler of
      torch.utils.data): the passes after the first come in another order. torchdata's own `RandomSampler` is fine;
    * in_order=False;
    * a state taken between two passes of a `StatefulDistributedSampler`: the next pass would be empty.
    """

    kind = "torchdata.StatefulDataLoader"
    reason = "each rank's state counts batches of its own share of the data, which is another share for another size"

    def __init__(self, loader: Any, dp_rank: int, dp_size: int) -> None:
        super().__init__(dp_rank, dp_size)
        if not (hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")):
            raise Unsupported(f"a {type(loader).__name__} keeps no state; use StatefulDataLoader or GlobalLoader")
        if loader.generator is None or getattr(loader.sampler, "generator", None) is loader.generator:
            raise Unsupported(
                f"{self.kind}: resuming is exact only with a generator of the loader's own, which its sampler does not "
                f"share; {_GENERATORS}"
            )
        if isinstance(loader.sampler, RandomSampler | SubsetRandomSampler | WeightedRandomSampler):
            raise Unsupported(
                f"{self.kind}: the generator of a {type(loader.sampler).__name__} of torch.utils.data is no part of "
                f"the loader's state; {_GENERATORS}"
            )
        if not loader.in_order:
            raise Unsupported(
                f"{self.kind}: in_order=False hands out batches in an order that is not kept; leave it out"
            )
        self.loader = loader
        self._loaded: Any = None

    def _state(self) -> Any:
        if self.loader._iterator is None:  # its own state_dict would start an iteration, and the workers
            return self._loaded
        state = self.loader.state_dict()
        if state.get("_iterator_finished") and type(self.loader.sampler).__name__ == "StatefulDistributedSampler":
            raise Unsupported(
                f"{self.kind}: between two passes a StatefulDistributedSampler is saved as used up, and the next pass "
                "of a resumed run would be empty; save before a pass ends, or after the first batch of the next"
            )
        return state

    def _check(self, state: Any) -> None:
        if state is None and (self.loader._iterator is not None or self._loaded is not None):
            raise StateMismatch(f"{self.kind}: saved before the first pass, but this loader has begun; build it anew")
        if state is None:
            return
        workers = state["_snapshot"]["_main_snapshot"]["_num_workers"] if "_snapshot" in state else 0
        if workers != self.loader.num_workers:
            raise StateMismatch(
                f"{self.kind}: saved with num_workers={workers}, this run has num_workers={self.loader.num_workers}, "
                "and each worker has a state of its own; pass the saved number"
            )

    def _load(self, state: Any) -> None:
        self._loaded = state
        self.loader.load_state_dict({} if state is None else state)


class HuggingFaceCursor(RankCursor):
    """An iterable data set of Hugging Face `datasets` and its place. Iterate over the cursor, in the main process: it
    goes on from its place, to the end of the pass; the next iteration is the next pass.

    Split the data set first (`split_dataset_by_node(dataset, dp_rank, dp_size)`). A load calls `dataset.set_epoch`. An
    example counts as trained on once it is handed out, so save between optimizer steps. Raises Unsupported for a
    shuffle buffer, whose content `datasets` does not save, and in a DataLoader's worker.
    """

    kind = "datasets.IterableDataset"
    reason = "its place counts the examples of one rank's shards, and another size gives every rank other shards"

    def __init__(self, dataset: Any, dp_rank: int, dp_size: int) -> None:
        super().__init__(dp_rank, dp_size)
        if not (hasattr(dataset, "_ex_iterable") and hasattr(dataset, "set_epoch")):
            raise Unsupported(f"a {type(dataset).__name__} is no IterableDataset of `datasets`; use GlobalLoader")
        if any(getattr(source, "buffer_size", 1) > 1 for source in _sources(dataset._ex_iterable)):
            raise Unsupported(
                f"{self.kind}: it shuffles through a buffer, whose content is not part of its state, so a resumed run "
                "would see other examples; use shuffle(buffer_size=1), which shuffles shards, or a map-style data set "
                "with ckpt.data.GlobalCursor"
            )
        self.dataset = dataset
        self._running = False
        self._loaded: Any = None
        self._idle = freeze(dataset.state_dict(), self.kind)

    def __iter__(self) -> Iterator[Any]:
        if get_worker_info() is not None:
            raise Unsupported(f"{self.kind}: the main process does not see a worker's place; iterate without workers")
        self.dataset.load_state_dict(self._state()["place"] or {})
        for example in self.dataset:
            self._running = True
            yield example
        self._rest(None)

    def _rest(self, loaded: Any) -> None:
        """No pass is running; the next iteration begins at `loaded`, or at the start of a pass."""
        self._running, self._loaded = False, loaded
        self._idle = freeze(self.dataset.state_dict(), self.kind)

    def _state(self) -> Any:
        epoch, now = int(self.dataset.epoch), self.dataset.state_dict()
        if self._running:
            return {"epoch": int(now["epoch"]), "place": now}
        if freeze(now, self.kind) != self._idle:
            raise CkptError(f"{self.kind}: the data set was iterated past its cursor; iterate over the cursor instead")
        return {"epoch": epoch if self._loaded is None else int(self._loaded["epoch"]), "place": self._loaded}

    def _check(self, state: Any) -> None:
        own = self.dataset.state_dict()["examples_iterable"].get("type")
        saved = own if state["place"] is None else state["place"]["examples_iterable"].get("type")
        if saved != own:
            raise StateMismatch(f"{self.kind}: saved for a {saved}, but this data set is a {own}; build it as it was")

    def _load(self, state: Any) -> None:
        self.dataset.set_epoch(state["epoch"])
        self._rest(state["place"])


def _sources(node: Any) -> Iterator[Any]:
    """An example iterable of `datasets` and all that it reads from."""
    yield node
    below = [getattr(node, "ex_iterable", None), *getattr(node, "ex_iterables", [])]
    for source in below:
        if source is not None:
            yield from _sources(source)
