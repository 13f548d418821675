"""Adapters for torchdata and Hugging Face datasets, against the libraries themselves."""

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

import ckpt
from ckpt.data import HuggingFaceCursor, TorchdataCursor
from ckpt.data.plain import freeze, thaw
from ckpt.state.values import decode, encode
from tests.data.corpus import Numbers
from tests.support.raw import raw

stateful_dataloader = pytest.importorskip("torchdata.stateful_dataloader")
datasets = pytest.importorskip("datasets")
distributed = pytest.importorskip("datasets.distributed")
samplers = pytest.importorskip("torchdata.stateful_dataloader.sampler")

pytestmark = [
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning"),
]


class Counting(IterableDataset[int]):
    """An iterable data set with a state of its own: a tensor and an array, as real ones have."""

    def __init__(self) -> None:
        self.next = 0

    def __iter__(self) -> Iterator[int]:
        while self.next < 11:
            self.next += 1
            yield self.next
        self.next = 0

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next, "tensor": torch.arange(2000), "array": np.arange(self.next)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert raw(state["tensor"]) == raw(torch.arange(2000)) and len(state["array"]) == state["next"]
        self.next = state["next"]


def _torchdata(kind: str, workers: int = 0) -> Any:
    data: Any = Numbers(10)
    options: dict[str, Any] = {"batch_size": 3, "generator": torch.Generator(), "num_workers": workers}
    if workers:
        options["multiprocessing_context"] = "fork"  # the workers use no TensorStore
    if kind == "shuffled":
        options["sampler"] = samplers.RandomSampler(data, generator=torch.Generator().manual_seed(1))
    elif kind == "distributed":
        options["sampler"] = samplers.StatefulDistributedSampler(data, 2, 1, seed=3)
    elif kind == "iterable":
        data = Counting()
    return stateful_dataloader.StatefulDataLoader(data, **options)


def _passes(loader: Any) -> Iterator[Any]:
    while True:
        for batch in loader:
            yield batch.tolist() if isinstance(batch, torch.Tensor) else batch
        yield "the end of a pass"


def _through_json(state: dict[str, Any]) -> dict[str, Any]:
    """What a checkpoint does with a plain value."""
    return {key: decode(encode(value, key), key) for key, value in state.items()}


@pytest.mark.parametrize(
    "kind, workers", [("plain", 0), ("shuffled", 0), ("distributed", 0), ("iterable", 0), ("shuffled", 2)]
)
def test_torchdata_resumes_at_every_batch(kind: str, workers: int) -> None:
    straight = _take(_passes(_torchdata(kind, workers)), 11)
    for stop in range(11):
        loader = _torchdata(kind, workers)
        cursor, passes = TorchdataCursor(loader, 1, 2), _passes(loader)
        first = _take(passes, stop)
        if kind == "distributed" and first[-1:] == ["the end of a pass"]:
            with pytest.raises(ckpt.Unsupported, match="next pass of a resumed run would be empty; save before"):
                cursor.state_dict()
            continue
        state = _through_json(cursor.state_dict())
        resumed = _torchdata(kind, workers)
        other = TorchdataCursor(resumed, 1, 2)
        other.load_state_dict(state)
        assert other.state_dict() == state, "saving again before the first batch"
        assert first + _take(_passes(resumed), 11 - stop) == straight


def _take(iterator: Iterator[Any], count: int) -> list[Any]:
    return [next(iterator) for _ in range(count)]


def test_torchdata_state_starts_no_workers_and_moves_no_generator() -> None:
    loader = _torchdata("plain", workers=2)
    before = torch.get_rng_state().numpy().tobytes()
    TorchdataCursor(loader, 0, 1).state_dict()
    assert loader._iterator is None and torch.get_rng_state().numpy().tobytes() == before
    shuffled = _torchdata("shuffled")
    cursor = TorchdataCursor(shuffled, 0, 1)
    next(iter(shuffled))
    resumed = _torchdata("shuffled")
    TorchdataCursor(resumed, 0, 1).load_state_dict(cursor.state_dict())
    next(iter(resumed))
    assert torch.get_rng_state().numpy().tobytes() == before


def test_torchdata_refuses_what_would_not_be_exact() -> None:
    make, data, generator = stateful_dataloader.StatefulDataLoader, Numbers(10), torch.Generator()
    torch_sampler = torch.utils.data.RandomSampler(data, generator=torch.Generator())
    refused: list[tuple[Any, str]] = [
        (make(data, batch_size=3), "pass generator=torch.Generator\\(\\) to the loader"),
        (make(data, batch_size=3, shuffle=True, generator=generator), "its sampler does not share"),
        (make(data, batch_size=3, sampler=torch_sampler, generator=generator), "is no part of the loader's state"),
        (make(data, batch_size=3, in_order=False, generator=generator), "leave it out"),
        (DataLoader(data, batch_size=3), "a DataLoader keeps no state; use StatefulDataLoader or GlobalLoader"),
    ]
    for loader, message in refused:
        with pytest.raises(ckpt.Unsupported, match=message):
            TorchdataCursor(loader, 0, 1)


def test_torchdata_shuffling_with_a_shared_generator_is_rightly_refused() -> None:
    """Were this to start passing, the refusal could go: the pass after a resumed one comes in another order."""

    def make() -> Any:
        generator = torch.Generator().manual_seed(1)
        return stateful_dataloader.StatefulDataLoader(Numbers(10), batch_size=3, shuffle=True, generator=generator)

    straight = _take(_passes(make()), 7)
    loader = make()
    passes = _passes(loader)
    first = _take(passes, 2)
    resumed = make()
    resumed.load_state_dict(copy.deepcopy(loader.state_dict()))
    rest = _take(_passes(resumed), 5)
    assert first + rest[:2] == straight[:4] and rest[3:] != straight[5:]


def test_torchdata_refuses_another_number_of_workers_and_going_back_to_the_start() -> None:
    loader = _torchdata("plain")
    cursor = TorchdataCursor(loader, 0, 1)
    start = cursor.state_dict()
    next(iter(loader))
    with pytest.raises(
        ckpt.StateMismatch, match="saved before the first pass, but this loader has begun; build it anew"
    ):
        cursor.load_state_dict(start)
    with pytest.raises(ckpt.StateMismatch, match=r"num_workers=0, this run has num_workers=1.*pass the saved number"):
        TorchdataCursor(_torchdata("plain", workers=1), 0, 1).load_state_dict(cursor.state_dict())


# Hugging Face datasets


def _table(shards: int = 4) -> Any:
    return datasets.Dataset.from_dict({"a": list(range(23))}).to_iterable_dataset(num_shards=shards)


def _rows(shards: list[int]) -> Iterator[dict[str, int]]:
    for shard in shards:
        for i in range(6):
            yield {"a": 6 * shard + i}


def _double(row: dict[str, Any]) -> dict[str, Any]:
    return {"b": 2 * row["a"]}


def _doubles(rows: dict[str, Any]) -> dict[str, Any]:
    return {"b": [2 * a for a in rows["a"]]}


def _not_third(row: dict[str, Any]) -> bool:
    return bool(row["a"] % 3)


def _generated() -> Any:
    return datasets.IterableDataset.from_generator(_rows, gen_kwargs={"shards": [0, 1, 2, 3]})


def _interleaved() -> Any:
    return datasets.interleave_datasets([_table(2), _table(3)], probabilities=[0.3, 0.7], seed=3)


HUGGING_FACE: dict[str, Callable[[], Any]] = {
    "plain": _table,
    "of two ranks, by shards": lambda: distributed.split_dataset_by_node(_table(), 1, 2),
    "of two ranks, by examples": lambda: distributed.split_dataset_by_node(_table(3), 1, 2),
    "mapped": lambda: _table().map(_double),
    "mapped by batches": lambda: _table().map(_doubles, batched=True, batch_size=4),
    "filtered": lambda: _table().filter(_not_third),
    "generated": _generated,
    "interleaved": _interleaved,
    "shards shuffled": lambda: _table().shuffle(seed=3, buffer_size=1),
    "torch": lambda: _table().with_format("torch"),
    "skipped and cut": lambda: _table().skip(3).take(9),
}


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)


@pytest.mark.parametrize("kind", HUGGING_FACE)
def test_hugging_face_resumes_at_every_example(kind: str) -> None:
    make = HUGGING_FACE[kind]
    expected = [str(row) for row in make()]
    length, count = len(expected), len(expected) + 4
    straight = _take(_examples(HuggingFaceCursor(make(), 1, 2)), count)
    assert straight[:length] == expected and straight[length] == "the end of a pass"
    for stop in range(0, count, 3 if length > 12 else 1):
        cursor = HuggingFaceCursor(make(), 1, 2)
        first = _take(_examples(cursor), stop)
        state = _through_json(cursor.state_dict())
        other = HuggingFaceCursor(make(), 1, 2)
        other.load_state_dict(state)
        assert other.state_dict() == state, "saving again before the first example"
        assert first + _take(_examples(other), count - stop) == straight


def _examples(cursor: Any) -> Iterator[str]:
    while True:
        for row in cursor:
            yield str(row)
        yield "the end of a pass"


def test_hugging_face_goes_on_after_a_break_and_back_after_a_load() -> None:
    cursor = HuggingFaceCursor(_table(), 0, 1)
    rows = [row["a"] for row, _ in zip(cursor, range(5), strict=False)]
    state = cursor.state_dict()  # zip took one more than it gave
    later = [row["a"] for row in cursor]
    assert rows + later[-17:] == [*range(5), *range(6, 23)]
    for _ in range(2):
        cursor.load_state_dict(state)
        assert [row["a"] for row in cursor] == later
    assert [row["a"] for row in cursor] == list(range(23)), "the next pass begins at the start"


def test_hugging_face_epochs_come_back() -> None:
    def make() -> Any:
        return _table().shuffle(seed=3, buffer_size=1)

    straight = HuggingFaceCursor(make(), 0, 1)
    straight.dataset.set_epoch(2)
    iterator = iter(straight)
    first = _take(iterator, 7)
    state = straight.state_dict()
    other = HuggingFaceCursor(make(), 0, 1)
    other.load_state_dict(state)
    assert other.dataset.epoch == 2
    rest = list(other)
    assert rest == list(iterator) and first + rest != list(HuggingFaceCursor(make(), 0, 1))


def test_hugging_face_refuses_a_shuffle_buffer_a_worker_and_other_steps() -> None:
    for dataset in (
        _table().shuffle(seed=3, buffer_size=5),
        _table().shuffle(seed=3, buffer_size=5).map(_double),
        datasets.interleave_datasets([_table(), _table().shuffle(seed=3, buffer_size=5)]),
    ):
        with pytest.raises(ckpt.Unsupported, match="shuffles through a buffer, whose content is not part of its state"):
            HuggingFaceCursor(dataset, 0, 1)
    with pytest.raises(ckpt.Unsupported, match="a Dataset is no IterableDataset of `datasets`; use GlobalLoader"):
        HuggingFaceCursor(datasets.Dataset.from_dict({"a": [1]}), 0, 1)
    with pytest.raises(ckpt.StateMismatch, match="build it as it was"):
        HuggingFaceCursor(_generated(), 0, 1).load_state_dict(_begun(_table()).state_dict())


def _begun(dataset: Any) -> HuggingFaceCursor:
    cursor = HuggingFaceCursor(dataset, 0, 1)
    next(iter(cursor))
    return cursor


class _InWorker(IterableDataset[Any]):
    def __init__(self, cursor: HuggingFaceCursor) -> None:
        self.cursor = cursor

    def __iter__(self) -> Iterator[Any]:
        return iter(self.cursor)


def test_hugging_face_refuses_to_be_iterated_in_a_worker() -> None:
    data = _InWorker(HuggingFaceCursor(_table(), 0, 1))
    with pytest.raises(ckpt.Unsupported, match="the main process does not see a worker's place"):
        next(iter(DataLoader(data, num_workers=1, multiprocessing_context="fork")))


def test_hugging_face_notices_iteration_past_the_cursor() -> None:
    cursor = HuggingFaceCursor(_table(), 0, 1)
    next(iter(cursor.dataset))
    with pytest.raises(ckpt.CkptError, match="iterated past its cursor; iterate over the cursor instead"):
        cursor.state_dict()


# Both


@pytest.mark.parametrize("make", [lambda r, w: TorchdataCursor(_torchdata("plain"), r, w), lambda r, w: _hf(r, w)])
def test_another_number_of_ranks_is_refused_with_the_reason(make: Callable[[int, int], Any]) -> None:
    state = make(1, 4).state_dict()
    make(1, 4).load_state_dict(state)
    for rank, world in ((1, 2), (0, 1), (1, 8)):
        with pytest.raises(
            ckpt.StateMismatch, match=rf"saved by 4 data-parallel ranks, this run has {world}, and .*Glob"
        ):
            make(rank, world).load_state_dict(state)
    with pytest.raises(ckpt.StateMismatch, match="has no dp_rank_2"):
        make(2, 4).load_state_dict(state)
    with pytest.raises(ckpt.StateMismatch, match="saved with the cursor 'other'"):
        make(1, 4).load_state_dict(state | {"cursor": "other"})
    with pytest.raises(ckpt.CkptError, match="dp_rank=4 must be"):
        make(4, 4)


def _hf(rank: int, world: int) -> HuggingFaceCursor:
    return HuggingFaceCursor(distributed.split_dataset_by_node(_table(8), rank, world), rank, world)


def test_frozen_states_come_back_with_their_bits() -> None:
    state: dict[Any, Any] = {
        "tensor": torch.tensor([[1.0, -0.0], [float("nan"), 2.0]], dtype=torch.bfloat16).T,
        "empty": torch.empty(0, 3, dtype=torch.int16),
        "array": np.array([[1, 2], [3, 4]], np.uint8)[:, ::-1],
        3: [(None, True, 1.5, b"x", 2**100)],
    }
    frozen = decode(encode(freeze(state, "x"), "x"), "x")
    thawed = thaw(frozen, "x")
    assert list(thawed) == list(state) and thawed[3] == state[3]
    for key in ("tensor", "empty"):
        assert raw(thawed[key]) == raw(state[key])
        assert (thawed[key].dtype, thawed[key].shape) == (state[key].dtype, state[key].shape)
    assert thawed["array"].tobytes() == state["array"].tobytes() and thawed["array"].dtype == np.uint8
    thawed["array"][0] = 0  # writable
    for bad in (torch.empty(1, device="meta"), np.array([object()]), {"ckpt.data tensor": 1}):
        with pytest.raises(ckpt.Unsupported, match="x/0: a loader state"):
            freeze([bad], "x")
    with pytest.raises(ckpt.CorruptCheckpoint, match="not a loader state"):
        thaw({"ckpt.data tensor": ("int64", [3], b"12345678")}, "x")
