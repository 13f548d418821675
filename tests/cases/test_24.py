"""Case 24, asi-2714: a silent dtype cast.

The fault: a load into a target of another dtype casts without a word (int32 16777217 came back as 16777216.0), step
counters change their type, moments are rounded or falsely widened. Here another dtype is refused before anything
changes, unless the cast is asked for by name; and what a step counter is (int, or a tensor of some dtype) is kept.
"""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import ckpt
from tests.support.raw import raw

# Values that the other dtypes cannot hold, or hold only by accident.
SAVED: dict[str, torch.Tensor] = {
    "int32": torch.tensor([16777217, -16777217, 2**31 - 1], dtype=torch.int32),
    "int64": torch.tensor([2**53 + 1, -(2**53) - 1, 2**63 - 1]),
    "float32": torch.tensor([1 + 2**-20, -0.0, 3.4e38]),
    "float64": torch.tensor([1 + 2**-50, -0.0, 1e300], dtype=torch.float64),
    "bool": torch.tensor([True, False, True]),
    "uint8": torch.tensor([0, 1, 255], dtype=torch.uint8),
    "bfloat16": torch.tensor([1.0, -0.0, 256.0], dtype=torch.bfloat16),
}
TARGETS = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.int32,
    torch.int64,
    torch.float64,
    torch.uint8,
    torch.bool,
]
PAIRS = [(name, dtype) for name in SAVED for dtype in TARGETS if str(dtype) != f"torch.{name}"]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("casts")
    with ckpt.Checkpointer(folder) as ck:
        ck.save(1, {**SAVED, "packed beside": torch.ones(3)})
    return folder


def _rest(name: str) -> dict[str, torch.Tensor]:
    return {n: torch.zeros_like(t) for n, t in SAVED.items() if n != name} | {"packed beside": torch.zeros(3)}


@pytest.mark.parametrize(("name", "dtype"), PAIRS, ids=[f"{n} to {str(d)[6:]}" for n, d in PAIRS])
def test_another_dtype_is_refused_or_cast_by_name(name: str, dtype: torch.dtype, root: Path) -> None:
    target = {**_rest(name), name: torch.ones(3, dtype=dtype)}
    before = {n: raw(t) for n, t in target.items()}
    with ckpt.Checkpointer(root, read_only=True) as ck:
        with pytest.raises(ckpt.StateMismatch) as caught:
            ck.load(target)
        said = f"{name}: rank 0 has dtype {str(dtype)[6:]}, the checkpoint {name}"
        assert said in str(caught.value) and f"cast=['{name}']" in str(caught.value)
        assert {n: raw(t) for n, t in target.items()} == before
        ck.load(target, cast=[name])
    assert target[name].dtype is dtype
    assert raw(target[name]) == raw(SAVED[name].to(dtype))
    assert all(raw(target[n]) == raw(t) for n, t in SAVED.items() if n != name)


def test_a_numpy_target_of_another_dtype_is_refused(root: Path) -> None:
    array = np.ones(3, np.float64)
    with ckpt.Checkpointer(root, read_only=True) as ck:
        with pytest.raises(ckpt.StateMismatch, match="int64: rank 0 has dtype float64, the checkpoint int64"):
            ck.load({**_rest("int64"), "int64": array})
        assert array.tobytes() == np.ones(3).tobytes()


def test_a_cast_names_what_it_casts_and_nothing_else(root: Path) -> None:
    target = {n: torch.zeros(3, dtype=torch.float32) for n in SAVED} | {"packed beside": torch.zeros(3)}
    with ckpt.Checkpointer(root, read_only=True) as ck:
        with pytest.raises(ckpt.StateMismatch, match=r"bool: rank 0 has dtype float32"):
            ck.load(target, cast=["int*", "uint8", "bf*", "float64"])
        ck.load(target, cast=["*"])
    assert {n: raw(target[n]) for n in SAVED} == {n: raw(t.to(torch.float32)) for n, t in SAVED.items()}


def test_plain_values_keep_the_type_they_were_saved_with(tmp_path: Path) -> None:
    saved = {"step": 2**53 + 1, "lr": 1.0, "flag": True, "np": np.int64(3), "none": None}
    target: dict[str, Any] = {"step": 0.0, "lr": 1, "flag": 1, "np": 3, "none": 0}
    with ckpt.Checkpointer(tmp_path) as ck:
        ck.save(1, saved)
        ck.load(target)
    assert {k: (type(v), v) for k, v in target.items()} == {k: (type(v), v) for k, v in saved.items()}


# What an optimizer's step counter may be.
STEPS: dict[str, Callable[[], Any]] = {
    "float32 tensor": lambda: torch.tensor(16777216.0),
    "float64 tensor": lambda: torch.tensor(2.0**53 - 1, dtype=torch.float64),
    "int64 tensor": lambda: torch.tensor(2**53 + 1),
    "int": lambda: 2**53 + 1,
}


def _adam(step: Callable[[], Any] | None, **options: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """A state of a linear and its Adam, and the optimizer's state of the weight (cold where `step` is None)."""
    model = nn.Linear(3, 2, bias=False)
    optimizer = torch.optim.Adam(model.parameters(), **options)
    if step is not None:
        moments = {k: torch.full_like(model.weight, 1 + 2**-20).detach() for k in ("exp_avg", "exp_avg_sq")}
        optimizer.state[model.weight] = {"step": step(), **moments}
    return {"model": model, "opt": optimizer}, optimizer.state[model.weight]


@pytest.mark.parametrize("kind", STEPS)
@pytest.mark.parametrize("options", [{}, {"foreach": False}, {"foreach": True}, {"fused": True}], ids=str)
def test_a_cold_optimizer_gets_the_step_as_it_was(kind: str, options: dict[str, Any], tmp_path: Path) -> None:
    saved, _ = _adam(STEPS[kind], foreach=False)
    target, state = _adam(None, **options)
    with ckpt.Checkpointer(tmp_path) as ck:
        ck.save(1, saved)
        ck.load(target)
    step, expected = state["step"], STEPS[kind]()
    assert type(step) is type(expected)
    if isinstance(step, torch.Tensor):
        assert (step.dtype, step.shape, raw(step)) == (expected.dtype, (), raw(expected))
    else:
        assert step == expected
    assert state["exp_avg"].dtype is torch.float32 and raw(state["exp_avg"]) == raw(torch.full((2, 3), 1 + 2**-20))
    assert target["opt"].param_groups[0]["foreach"] is False and not target["opt"].param_groups[0]["fused"]


@pytest.mark.parametrize(("there", "here"), list(itertools.permutations(STEPS, 2)))
def test_a_step_of_another_kind_is_refused(there: str, here: str, tmp_path: Path) -> None:
    saved, _ = _adam(STEPS[there])
    target, state = _adam(STEPS[here])
    with ckpt.Checkpointer(tmp_path) as ck:
        ck.save(1, saved)
        with pytest.raises(ckpt.StateMismatch, match="opt/state/model/weight/step"):
            ck.load(target)
    assert type(state["step"]) is type(STEPS[here]()) and state["step"] == STEPS[here]()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_moments_are_neither_rounded_nor_widened(dtype: torch.dtype, tmp_path: Path) -> None:
    saved, _ = _adam(STEPS["float32 tensor"])
    target, state = _adam(STEPS["float32 tensor"])
    state["exp_avg"] = torch.ones(2, 3, dtype=dtype)
    with ckpt.Checkpointer(tmp_path) as ck:
        ck.save(1, saved)
        with pytest.raises(ckpt.StateMismatch, match=f"opt/state/model/weight/exp_avg: .*{str(dtype)[6:]}.*float32"):
            ck.load(target)
    assert raw(state["exp_avg"]) == raw(torch.ones(2, 3, dtype=dtype))
