"""GlobalCursor: the order and its ends against a plain oracle; what a state holds, and what it refuses."""

import copy
import re
from itertools import islice
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ckpt
from ckpt.data import GlobalCursor, GlobalSampler, Permutation, dataset_fingerprint
from tests.data.corpus import Numbers

CONFIG: dict[str, Any] = {"global_batch": 12, "seed": 5}


def _cursor(size: int = 30, fingerprint: str = "f", **changed: Any) -> GlobalCursor:
    return GlobalCursor(size, fingerprint, **(CONFIG | changed))


def _oracle(size: int, batch: int, seed: int, shuffle: bool, end: str, count: int) -> list[list[int]]:
    """The first global batches, by materialising every epoch."""
    samples: list[int] = []
    epoch = 0
    while len(samples) < count * batch:
        order = Permutation(seed, epoch, size)(np.arange(size)).tolist() if shuffle else list(range(size))
        samples += order if end == "wrap" else order[: size - size % batch]
        epoch += 1
    return [samples[i * batch : (i + 1) * batch] for i in range(count)]


@given(st.data(), st.integers(1, 40), st.integers(1, 24), st.integers(0, 9), st.booleans())
def test_batches_are_those_of_materialised_epochs(
    data: st.DataObject, size: int, batch: int, seed: int, shuffle: bool
) -> None:
    end = data.draw(st.sampled_from(["wrap", "drop"] if size >= batch else ["wrap"]))
    cursor = GlobalCursor(size, "", global_batch=batch, seed=seed, shuffle=shuffle, epoch_end=end)
    first = data.draw(st.integers(0, batch))
    last = data.draw(st.integers(first, batch))
    for expected in _oracle(size, batch, seed, shuffle, end, 8):
        assert list(next(cursor.batches(first, last))) == expected[first:last]
        cursor.advance()


@pytest.mark.parametrize("size", [36, 30, 12, 5, 1])
def test_wrap_gives_every_sample_once_an_epoch(size: int) -> None:
    cursor = _cursor(size)
    samples = np.concatenate(list(islice(cursor.batches(0, 12), size))).tolist()
    epochs = [samples[i : i + size] for i in range(0, len(samples), size)]
    assert len(epochs) == 12 and all(sorted(epoch) == list(range(size)) for epoch in epochs)


@pytest.mark.parametrize("size", [36, 30, 12, 23])
def test_drop_ends_with_the_epoch_and_leaves_out_the_rest(size: int) -> None:
    cursor = _cursor(size, epoch_end="drop")
    for epoch in range(3):
        assert (cursor.epoch, cursor.consumed, cursor.total) == (epoch, 0, epoch * (size // 12) * 12)
        batches = list(cursor.batches(0, 12))
        assert len(batches) == size // 12 and len({s for b in batches for s in b}) == size // 12 * 12
        for n in range(size // 12):
            assert len(list(cursor.batches(0, 12))) == size // 12 - n
            cursor.advance()


def test_position_at_epoch_ends() -> None:
    for end, places in (
        ("wrap", [(0, 0, 0), (0, 12, 12), (0, 24, 24), (1, 6, 36), (1, 18, 48), (2, 0, 60)]),
        ("drop", [(0, 0, 0), (0, 12, 12), (1, 0, 24), (1, 12, 36), (2, 0, 48), (2, 12, 60)]),
    ):
        cursor = _cursor(30, epoch_end=end)
        for place in places:
            assert (cursor.epoch, cursor.consumed, cursor.total) == place
            cursor.advance()


def test_sizes_that_nothing_could_hold() -> None:
    cursor = _cursor(2**62, global_batch=4)
    for _ in range(3):
        assert next(cursor.batches(0, 4)) == Permutation(5, 0, 2**62)(np.arange(4) + cursor.total).tolist()
        cursor.advance()


def test_the_state_is_plain_and_says_where_it_is() -> None:
    cursor = GlobalCursor.over(Numbers(30), **CONFIG)
    cursor.advance()
    state = cursor.state_dict()
    assert state == {
        "cursor": "GlobalCursor",
        "order": "feistel-philox-1",
        "dataset_size": 30,
        "dataset_fingerprint": dataset_fingerprint(Numbers(30)),
        "seed": 5,
        "global_batch": 12,
        "epoch_end": "wrap",
        "epoch": 0,
        "consumed": 12,
        "total": 12,
    }
    assert {type(value) for value in state.values()} == {int, str}
    assert all(type(v) is int for k, v in _cursor(seed=np.uint64(5)).state_dict().items() if k == "seed")
    assert GlobalCursor.over(Numbers(30), fingerprint="mine", **CONFIG).state_dict()["dataset_fingerprint"] == "mine"


def test_sequential_order_is_named_in_the_state() -> None:
    cursor = _cursor(shuffle=False)
    assert cursor.state_dict()["order"] == "sequential"
    assert next(cursor.batches(0, 12)) == list(range(12))


@pytest.mark.parametrize(
    "changed, key, remedy",
    [
        (
            {"size": 31},
            "dataset_size=30, but this run has dataset_size=31",
            "open the data set that the run began with",
        ),
        (
            {"fingerprint": "g"},
            "dataset_fingerprint='f', but this run has dataset_fingerprint='g'",
            "same preprocessing",
        ),
        ({"seed": 6}, "seed=5, but this run has seed=6", "pass the saved seed="),
        ({"global_batch": 6}, "global_batch=12, but this run has global_batch=6", "pass the saved global_batch="),
        ({"shuffle": False}, "order='feistel-philox-1', but this run has order='sequential'", "the saved shuffle="),
        ({"epoch_end": "drop"}, "epoch_end='wrap', but this run has epoch_end='drop'", "pass the saved epoch_end="),
    ],
)
def test_another_order_is_refused_by_name_and_nothing_changes(changed: dict[str, Any], key: str, remedy: str) -> None:
    saved = _cursor()
    saved.advance()
    state = saved.state_dict()
    other = _cursor(**changed)
    other.advance()
    before = copy.deepcopy((other.state_dict(), other.moves))
    for take in (other.check_state_dict, other.load_state_dict):
        with pytest.raises(
            ckpt.StateMismatch, match=rf"GlobalCursor: saved with {re.escape(key)}.*{re.escape(remedy)}"
        ):
            take(state)
    assert (other.state_dict(), other.moves) == before


@pytest.mark.parametrize(
    "damage, message",
    [
        ({"epoch": 1}, "an epoch has 30 samples"),
        ({"consumed": 13, "total": 13}, "a global batch has 12 samples"),
        ({"consumed": 0}, "an epoch has 30 samples"),
        ({"epoch": -1, "consumed": 18, "total": -12}, "non-negative ints"),
        ({"total": 12.0}, "non-negative ints"),
        ({"total": True}, "non-negative ints"),
        ({"seed": 5.0}, "seed=5.0, but this run has seed=5"),
        ({"cursor": "PackedCursor"}, "cursor='PackedCursor'.*build the kind of cursor that was saved"),
        ({"news": 1}, "unknown or missing in the saved state: news"),
        ({"total": None}, "non-negative ints"),
    ],
)
def test_a_state_that_cannot_be_is_refused(damage: dict[str, Any], message: str) -> None:
    saved, other = _cursor(), _cursor()
    saved.advance()
    with pytest.raises(ckpt.StateMismatch, match=message):
        other.load_state_dict(saved.state_dict() | damage)
    state = saved.state_dict()
    for key in list(damage):
        state.pop(key, None)
    if damage.keys() <= saved.state_dict().keys():
        with pytest.raises(ckpt.StateMismatch, match=r"missing|None"):
            other.load_state_dict(state)
    assert other.total == 0 and other.moves == 0


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"size": 0}, "0 items"),
        ({"size": 2**62 + 1}, "at most 2\\^62"),
        ({"global_batch": 0}, "global_batch=0 must be at least 1"),
        ({"seed": -1}, "seed=-1"),
        ({"seed": 2**64}, "seed=18446744073709551616"),
        ({"epoch_end": "stop"}, "epoch_end='stop' must be"),
        ({"size": 11, "epoch_end": "drop"}, "11 samples never fill a global batch of 12"),
    ],
)
def test_a_configuration_that_makes_no_order_is_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ckpt.CkptError, match=message):
        _cursor(**changed)


@given(st.integers(1, 60), st.integers(1, 8), st.data())
def test_every_world_gives_the_same_global_batches(batch: int, steps: int, data: st.DataObject) -> None:
    world = data.draw(st.sampled_from([w for w in range(1, batch + 1) if batch % w == 0]))
    share = batch // world
    micro = data.draw(st.sampled_from([m for m in range(1, share + 1) if share % m == 0]))
    cursor = _cursor(25, global_batch=batch)
    ranks = [GlobalSampler(cursor, rank, world, micro) for rank in range(world)]
    assert {sampler.micro_batches for sampler in ranks} == {share // micro}
    keys = [list(islice(sampler, steps * (share // micro))) for sampler in ranks]
    assert all(len(micro_batch) == micro for rank in keys for micro_batch in rank)
    per = share // micro
    for step, expected in enumerate(_oracle(25, batch, 5, True, "wrap", steps)):
        assert [k for rank in keys for m in rank[step * per : (step + 1) * per] for k in m] == expected


def test_samples_are_numbered_through_the_run() -> None:
    cursor = _cursor(30)
    cursor.advance()
    for rank in range(3):
        numbers = [n for m in islice(GlobalSampler(cursor, rank, 3, 2, numbered=True), 4) for n, _ in m]
        assert numbers == [12 + rank * 4 + i for i in range(4)] + [24 + rank * 4 + i for i in range(4)]


@pytest.mark.parametrize(
    "rank, world, micro, message",
    [
        (0, 5, None, r"12 samples cannot be shared equally by 5 data-parallel ranks; use 1, 2, 3, 4, 6 or 12 of them"),
        (0, 24, None, "cannot be shared equally by 24"),
        (0, 2, 4, r"micro_batch=4 does not divide the 6 samples that each of 2 .*; use 1, 2, 3 or 6"),
        (0, 2, 0, "micro_batch=0"),
        (2, 2, None, "rank=2 must be"),
        (-1, 2, None, "rank=-1 must be"),
        (0, 0, None, "world=0"),
    ],
)
def test_shares_that_do_not_come_out_even_are_refused(rank: int, world: int, micro: int | None, message: str) -> None:
    with pytest.raises(ckpt.CkptError, match=message):
        GlobalSampler(_cursor(), rank, world, micro)
