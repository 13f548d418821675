"""MegatronCursor says yes exactly where Megatron's samplers read the same global batches.

Megatron-LM's samplers are not part of the megatron-core package, so their index arithmetic is written down here, from
megatron/training/datasets/data_samplers.py.
"""

from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch

import ckpt
from ckpt.data import MegatronCursor

BATCH, TOTAL = 12, 120
SIZES = [(1, 1), (2, 1), (1, 2), (2, 2), (1, 3), (3, 2), (2, 3), (1, 6), (6, 2), (4, 3)]  # (micro_batch, dp_size)
ORDERS: list[dict[str, Any]] = [
    {"dataloader_type": "single"},
    {"dataloader_type": "cyclic", "data_sharding": True},
    {"dataloader_type": "cyclic", "data_sharding": False},
]


def _micro_batches(order: dict[str, Any], consumed: int, micro: int, rank: int, size: int) -> Iterator[list[int]]:
    step = micro * size
    while order["dataloader_type"] == "cyclic" or consumed + step <= TOTAL:
        if order["dataloader_type"] == "single":
            yield list(range(consumed + rank * micro, consumed + (rank + 1) * micro))
            consumed += step
            continue
        active = TOTAL - TOTAL % step
        epoch, within = divmod(consumed, active)
        generator = torch.Generator().manual_seed(epoch)
        if order["data_sharding"]:
            bucket = TOTAL // step * micro
            shuffled = torch.randperm(bucket, generator=generator).tolist()[within // size :]
            own = [rank * bucket + x for x in shuffled]
        else:
            shuffled = torch.randperm(TOTAL // micro * micro, generator=generator).tolist()[within:]
            own = shuffled[rank::size]
        for start in range(0, len(own) - micro + 1, micro):
            yield own[start : start + micro]
            consumed += step


def _global_batches(order: dict[str, Any], consumed: int, micro: int, size: int, count: int) -> list[list[int]]:
    each = BATCH // (micro * size)
    ranks = [list(islice(_micro_batches(order, consumed, micro, r, size), count * each)) for r in range(size)]
    return [sorted(x for r in ranks for m in r[i * each : (i + 1) * each] for x in m) for i in range(count)]


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_it_carries_what_gives_the_same_global_batches_and_refuses_the_rest(order: dict[str, Any]) -> None:
    count = 10 if order["dataloader_type"] == "single" else 14
    for saved in SIZES:
        cursor = MegatronCursor(BATCH, *saved, TOTAL, **order)
        for _ in range(3):
            cursor.advance()
        straight = _global_batches(order, 0, *saved, count)
        for sizes in SIZES:
            other = MegatronCursor(BATCH, *sizes, TOTAL, **order)
            same = _global_batches(order, 36, *sizes, count - 3) == straight[3:]
            if sizes[1] != saved[1] and order == ORDERS[1]:
                assert not same
                with pytest.raises(ckpt.StateMismatch, match=r"saved with order='\d buckets of .*the saved dp_size"):
                    other.load_state_dict(cursor.state_dict())
                assert other.consumed_samples == 0
            else:
                assert same
                other.load_state_dict(cursor.state_dict())
                assert other.consumed_samples == 36


def test_sizes_are_refused_as_megatron_refuses_them() -> None:
    calculator = pytest.importorskip("megatron.core.num_microbatches_calculator")
    for micro in range(1, 7):
        for size in range(1, 7):
            try:
                calculator.ConstantNumMicroBatchesCalculator(BATCH, micro, size, False, rank=0)
            except AssertionError:
                with pytest.raises(
                    ckpt.StateMismatch, match=rf"no multiple of micro_batch={micro} times dp_size={size}"
                ):
                    MegatronCursor(BATCH, micro, size, TOTAL)
            else:
                MegatronCursor(BATCH, micro, size, TOTAL)


def test_a_ragged_shuffled_epoch_is_refused_at_once() -> None:
    with pytest.raises(ckpt.Unsupported, match="118 samples are no multiple of micro_batch=2 times dp_size=3"):
        MegatronCursor(BATCH, 2, 3, 118, "cyclic", data_sharding=False)
    MegatronCursor(BATCH, 2, 3, 118)
    sharded = MegatronCursor(BATCH, 2, 2, 118, "cyclic")
    with pytest.raises(ckpt.StateMismatch, match=r"order='2 buckets of 58 samples'.*order='2 buckets of 59 samples'"):
        MegatronCursor(BATCH, 1, 2, 118, "cyclic").load_state_dict(sharded.state_dict())


def test_the_state_is_plain_and_free_of_sizes_where_they_do_not_matter() -> None:
    one, other = MegatronCursor(BATCH, 1, 2, TOTAL), MegatronCursor(BATCH, 3, 4, TOTAL)
    assert one.state_dict() == other.state_dict()
    assert one.state_dict() == {
        "cursor": "MegatronCursor",
        "order": "sequential",
        "global_batch": 12,
        "total_samples": 120,
        "consumed_samples": 0,
    }


@pytest.mark.parametrize(
    "damage, message",
    [
        ({"cursor": "GlobalCursor"}, "cursor='GlobalCursor'"),
        ({"global_batch": 6}, "global_batch=6, but this run has global_batch=12.*use the saved global batch size"),
        ({"total_samples": 60}, "total_samples=60, but this run has total_samples=120"),
        ({"consumed_samples": 7}, "consumed_samples=7 is no multiple of the global batch of 12"),
        ({"consumed_samples": -12}, "consumed_samples=-12"),
        ({"consumed_samples": 12.0}, "consumed_samples=12.0"),
    ],
)
def test_another_run_is_refused(damage: dict[str, Any], message: str) -> None:
    cursor = MegatronCursor(BATCH, 1, 2, TOTAL)
    with pytest.raises(ckpt.StateMismatch, match=message):
        cursor.load_state_dict(cursor.state_dict() | damage)
    assert cursor.consumed_samples == 0


def test_numbers_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ckpt.CkptError, match="at least 1"):
        MegatronCursor(BATCH, 0, 2, TOTAL)
    with pytest.raises(ckpt.Unsupported, match="'external' has no known order"):
        MegatronCursor(BATCH, 1, 2, TOTAL, "external")  # type: ignore[arg-type]
