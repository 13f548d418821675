"""A state that does not fit the checkpoint, or does not tile its tensors, is refused in phase 1: nothing has changed.

The message names the tensor, the rank and a remedy.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from tests.engine.states import refused_load, sample_state, state_bits
from tests.support.raw import labelled, random_bits, raw


def test_missing_keys(ck: ckpt.Checkpointer) -> None:
    target = sample_state(20, more=torch.ones(3), other=5)
    refused_load(ck, target, ckpt.StateMismatch, ["rank 0: the checkpoint has no more, other", "allow_missing"])
    refused_load(ck, target, ckpt.StateMismatch, ["has no other"], allow_missing=["mor?"])
    restored = ck.load(target, allow_missing=["more", "oth*"])
    assert restored is not None and (restored.tensors, target["other"]) == (4, 5)
    assert state_bits(target) == state_bits(sample_state(10, more=torch.ones(3), other=5))


def test_extra_keys(ck: ckpt.Checkpointer) -> None:
    target = {"small": torch.zeros(5, 3), "epoch": 0}
    words = ["the checkpoint holds big, count, note, own, which no rank's state has", "allow_extra"]
    refused_load(ck, target, ckpt.StateMismatch, words)
    refused_load(ck, target, ckpt.StateMismatch, ["holds note"], allow_extra=["big", "own", "count"])
    ck.load(target, allow_extra=["big", "own", "[cn]o*"])
    assert state_bits(target) == {k: v for k, v in state_bits(sample_state(10)).items() if k in target}


def test_many_missing_keys_are_counted_not_listed(ck: ckpt.Checkpointer) -> None:
    target = sample_state(20, **{f"new{i:03}": torch.zeros(1) for i in range(50)})
    message = refused_load(ck, target, ckpt.StateMismatch, ["new000", "and 40 more"])
    assert len(message) < 400


DTYPES = [torch.float64, torch.bfloat16, torch.int32, torch.complex64]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_another_dtype(dtype: torch.dtype, ck: ckpt.Checkpointer) -> None:
    target = sample_state(20) | {"own": torch.ones(300, 100, dtype=dtype)}
    name = str(dtype).removeprefix("torch.")
    words = [f"own: rank 0 has dtype {name}, the checkpoint float32", "use the saved dtype, or ask for cast=['own']"]
    refused_load(ck, target, ckpt.StateMismatch, words)
    refused_load(ck, target, ckpt.StateMismatch, words, cast=["small"])
    ck.load(target, cast=["o*"])
    assert target["own"].dtype is dtype
    assert raw(target["own"]) == raw(sample_state(10)["own"].to(dtype))


@pytest.mark.parametrize(
    ("saved", "own"), [(torch.complex64, torch.float32), (torch.float4_e2m1fn_x2, torch.float32)], ids=str
)
def test_a_cast_that_torch_cannot_do_or_that_loses_a_part(saved: torch.dtype, own: torch.dtype, tmp_path: Path) -> None:
    with ckpt.Checkpointer(tmp_path) as ck:
        ck.save(1, {"x": random_bits((6,), saved)})
        refused_load(
            ck, {"x": torch.ones(6, dtype=own)}, ckpt.StateMismatch, ["x: cannot be cast", "float32"], cast=["x"]
        )


@pytest.mark.parametrize("shape", [(100, 300), (300, 101), (300, 100, 1), (30000,), ()], ids=str)
def test_another_shape(shape: tuple[int, ...], ck: ckpt.Checkpointer) -> None:
    words = [f"own: rank 0 has shape {list(shape)}, the checkpoint [300, 100]", "sizes it was saved with"]
    refused_load(ck, sample_state(20) | {"own": torch.ones(shape)}, ckpt.StateMismatch, words)


def test_a_step_that_is_not_there(ck: ckpt.Checkpointer) -> None:
    refused_load(ck, sample_state(20), ckpt.NothingCommitted, ["no committed step 7", "there are [1]", ck.url], step=7)


# (rows, start, stop) of the parts that one rank gives of a [6, 4] tensor, and what is wrong with them.
PARTS: dict[str, tuple[list[tuple[int, int]], list[str]]] = {
    "a gap at the start": ([(1, 6)], ["x", "no rank holds the elements [0:1, 0:4]", "check the layout"]),
    "a gap inside": ([(0, 2), (3, 6)], ["x", "no rank holds the elements [2:3, 0:4]", "check the layout"]),
    "nothing": ([], ["x", "no rank holds the elements [0:6, 0:4]", "check the layout"]),
    "an overlap": ([(0, 4), (3, 6)], ["x", "[0:4, 0:4] and [3:6, 0:4]", "overlap in [3:4, 0:4]", "identical boxes"]),
}


def _in_parts(rows: list[tuple[int, int]], seed: int) -> ckpt.ShardedTensor:
    local = random_bits((sum(b - a for a, b in rows), 4), torch.float32, seed)
    boxes, at = [], 0
    for a, b in rows:
        boxes.append(((a, 0), (b - a, 4), (at, 0)))
        at += b - a
    return ckpt.ShardedTensor(local, boxes, (6, 4))


def test_one_box_twice_is_refused_at_save_and_filled_twice_at_load(tmp_path: Path) -> None:
    twice = [(0, 3), (3, 6), (3, 6)]
    with ckpt.Checkpointer(tmp_path) as ck:
        with pytest.raises(ckpt.StateMismatch, match=r"x: rank 0 gives box \[3:6, 0:4\] twice; give each part .* once"):
            ck.save(1, {"x": _in_parts(twice, 1)})
        ck.save(2, {"x": labelled((6, 4))})
        target = _in_parts(twice, 2)
        assert ck.load({"x": target}) is not None
    assert raw(target.local) == raw(labelled((6, 4))) + raw(labelled((6, 4))[3:])


@pytest.mark.parametrize("kind", PARTS)
def test_coverage_that_is_not_exact(kind: str, tmp_path: Path) -> None:
    rows, words = PARTS[kind]
    with ckpt.Checkpointer(tmp_path) as ck:
        with pytest.raises(ckpt.StateMismatch) as caught:
            ck.save(1, {"x": _in_parts(rows, 1)})
        assert all(word in str(caught.value) for word in words)
        assert not (tmp_path / "attempts").exists() and ck.latest() is None
        ck.save(2, {"x": labelled((6, 4))})
        target = _in_parts(rows, 2)
        before = raw(target.local)
        with pytest.raises(ckpt.StateMismatch) as caught:
            ck.load({"x": target})
        assert all(word in str(caught.value) for word in words)
        assert raw(target.local) == before


@pytest.mark.parametrize(
    ("boxes", "words"),
    [
        ([((0, 0), (7, 4), (0, 0))], ["x: box [0:7, 0:4] leaves the global shape [6, 4]"]),
        ([((0, 0), (6, 4), (1, 0))], ["x: box [1:7, 0:4] leaves the local tensor of shape [6, 4]"]),
        ([((0,), (6,), (0,))], ["x: ", "leaves the global shape [6, 4]"]),
        ([((0, 0), (6,), (0, 0))], ["x: ", "differ in length", "give (global offset, extent, local offset)"]),
        ([((-1, 0), (6, 4), (0, 0))], ["x: ", "negative", "give (global offset, extent, local offset)"]),
        ([((0, 0), (6, 4), (0, 0, 0))], ["x: "]),
    ],
)
def test_boxes_that_fit_nowhere(boxes: list[Any], words: list[str], tmp_path: Path) -> None:
    with ckpt.Checkpointer(tmp_path) as ck, pytest.raises(ckpt.StateMismatch) as caught:
        ck.save(1, {"x": ckpt.ShardedTensor(torch.zeros(6, 4), boxes, (6, 4))})
    assert all(word in str(caught.value) for word in words)
