"""Modules come back in place: parameters, buffers, extra state and ties; one that hides its tensors is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckpt
from tests.engine.states import module_bits, round_trip
from tests.support.raw import random_bits, raw


class _Block(nn.Module):
    """Parameters, buffers (one not persistent), extra state, an int buffer, a submodule with extra state of its own."""

    def __init__(self, seed: int, inner: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(random_bits((5, 3), torch.float32, seed))
        self.frozen = nn.Parameter(random_bits((4,), torch.bfloat16, seed), requires_grad=False)
        self.register_parameter("absent", None)
        self.register_buffer("running", random_bits((3,), torch.float64, seed))
        self.register_buffer("batches", torch.tensor(seed))
        self.register_buffer("cache", random_bits((3,), torch.float32, seed), persistent=False)
        self.calls = {"seed": seed, "pair": (seed, 0.5)}
        self.norm = nn.BatchNorm1d(3)
        self.norm.running_mean.uniform_(-seed, seed)
        self.inner = _Block(seed + 1, inner=False) if inner else None

    def get_extra_state(self) -> dict[str, Any]:
        return self.calls

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.calls = state


def test_modules_with_buffers_and_extra_state_in_nested_dicts(tmp_path: Path) -> None:
    saved = {"models": {"student": _Block(1), "teacher": [_Block(3), {"ema": _Block(5)}]}, "x": {}}
    target: dict[str, Any] = {"models": {"student": _Block(11), "teacher": [_Block(13), {"ema": _Block(15)}]}, "x": {}}
    student, cache = target["models"]["student"], raw(target["models"]["student"].cache)
    addresses = {n: p.data_ptr() for n, p in student.named_parameters()}
    round_trip(tmp_path, saved, target)
    for a, b in zip(_blocks(saved), _blocks(target), strict=True):
        assert module_bits(a) == module_bits(b)
        assert type(b.calls["pair"]) is tuple and a.inner and b.inner and b.inner.calls == a.inner.calls
    assert target["models"]["student"] is student and raw(student.cache) == cache
    assert {n: p.data_ptr() for n, p in student.named_parameters()} == addresses
    assert all(p.requires_grad == (n.split(".")[-1] != "frozen") for n, p in student.named_parameters())


def _blocks(state: dict[str, Any]) -> list[_Block]:
    return [state["models"]["student"], state["models"]["teacher"][0], state["models"]["teacher"][1]["ema"]]


class _Renaming(nn.Linear):
    """A module whose hook gives a copy instead of the live parameter: it could be saved, but never filled in place."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self._register_state_dict_hook(lambda _m, d, p, _l: d.update({p + "weight": d[p + "weight"].clone()}))


def test_a_module_that_hides_its_live_tensors_is_refused_at_save(tmp_path: Path) -> None:
    with ckpt.Checkpointer(tmp_path) as ck:
        with pytest.raises(
            ckpt.Unsupported, match=r"m/weight: .* none of its parameters and buffers .* pass the tensors"
        ):
            ck.save(1, {"m": _Renaming()})


def test_a_shared_module_is_stored_once_and_its_optimizer_finds_it(tmp_path: Path) -> None:
    def build(seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        shared = nn.Linear(4, 4)
        model = nn.Sequential(shared, nn.ReLU(), shared)
        optimizer = torch.optim.Adam(model.parameters())
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        return {"model": model, "again": shared, "optimizer": optimizer}

    saved, target = build(1), build(2)
    restored = round_trip(tmp_path, saved, target)
    assert restored.tensors == 2 + 2 * 3
    assert module_bits(target["model"]) == module_bits(saved["model"])
    assert target["model"][0] is target["model"][2] is target["again"]
