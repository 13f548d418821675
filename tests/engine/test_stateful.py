"""Schedulers and other objects with a state_dict get back their state with its types, once and in full."""

import copy
import struct
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.engine.states import Pair, round_trip, tiny_net, typed_bits
from tests.support.raw import random_bits

SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "step": lambda o: torch.optim.lr_scheduler.StepLR(o, 2, 0.3),
    "multi step": lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [2, 5, 5, 7], 0.3),
    "lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda e: 1 / (1 + e)),
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 9),
    "warm restarts": lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "one cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 1.0, total_steps=20),
    "cyclic": lambda o: torch.optim.lr_scheduler.CyclicLR(o, 0.01, 0.3, step_size_up=3, cycle_momentum=False),
    "plateau": lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=1),
    "sequential": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [torch.optim.lr_scheduler.LinearLR(o), torch.optim.lr_scheduler.MultiStepLR(o, [2, 4])],
        milestones=[3],
    ),
    "chained": lambda o: torch.optim.lr_scheduler.ChainedScheduler(
        [torch.optim.lr_scheduler.ConstantLR(o), torch.optim.lr_scheduler.ExponentialLR(o, 0.9)]
    ),
}


@pytest.mark.parametrize("tensor_lr", [False, True], ids=["float lr", "tensor lr"])
@pytest.mark.parametrize("kind", SCHEDULERS)
@pytest.mark.filterwarnings("ignore:Detected call of")
def test_schedulers_go_on_with_the_same_bits(kind: str, tensor_lr: bool, tmp_path: Path) -> None:
    if tensor_lr and kind in ("one cycle", "cyclic"):
        pytest.skip("torch itself fills such a lr in place and wants a schedule of its own")

    def build(seed: int) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
        model = tiny_net(seed)
        lr: Any = torch.tensor(0.1 * seed) if tensor_lr else 0.1 * seed
        optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
        return model, optimizer, SCHEDULERS[kind](optimizer)

    def advance(optimizer: torch.optim.Optimizer, scheduler: Any, steps: int) -> list[bytes]:
        rates = []
        for number in range(steps):
            optimizer.step()
            scheduler.step(*((1.0 + number % 3,) if kind == "plateau" else ()))
            rates += [struct.pack("<d", float(g["lr"])) for g in optimizer.param_groups]
        return rates

    model, optimizer, scheduler = build(1)
    advance(optimizer, scheduler, 4)
    other, fresh, target = build(2)
    # the scheduler before its optimizer: the order in the dict must not matter
    round_trip(
        tmp_path,
        {"sched": scheduler, "opt": optimizer, "model": model},
        {"sched": target, "opt": fresh, "model": other},
    )
    assert _types(target.state_dict()) == _types(scheduler.state_dict())
    assert advance(fresh, target, 8) == advance(optimizer, scheduler, 8)
    if kind == "multi step":
        assert type(target.milestones) is Counter and target.milestones == Counter([2, 5, 5, 7])


def _types(node: Any) -> Any:
    if isinstance(node, Mapping):
        return type(node), {k: _types(v) for k, v in node.items()}
    if isinstance(node, list | tuple):
        return type(node), [_types(x) for x in node]
    return type(node)


class _Keeper:
    """Gives out `content` and keeps what it is given; counts the calls."""

    def __init__(self, content: Any) -> None:
        self.content, self.loads = content, 0

    def state_dict(self) -> Any:
        return self.content

    def load_state_dict(self, state: Any) -> None:
        self.content = state
        self.loads += 1


def _content(seed: int) -> dict[str, Any]:
    return {
        "tensor": random_bits((3, 2), torch.float16, seed),
        "array": np.arange(seed, seed + 3),
        "count": Counter({2: seed, 5: 1}),
        "ordered": OrderedDict(z=seed, a=[seed, (seed,)]),
        "default": defaultdict(list, {1: [seed]}),
        "pair": Pair(random_bits((2,), torch.int64, seed), seed),
        "tuple": (seed, {"deep": random_bits((), torch.bool, seed)}),
        "list": [seed, random_bits((4,), torch.uint8, seed)],
        "empty": {},
        "none": None,
    }


def test_objects_get_their_state_back_with_its_types_once_and_in_full(tmp_path: Path) -> None:
    saved, target = _Keeper(_content(3)), _Keeper(_content(8))
    before, live = typed_bits(_content(8)), target.content
    round_trip(tmp_path, {"k": saved}, {"k": target})
    assert target.loads == 1
    assert typed_bits(target.content) == typed_bits(_content(3))
    assert target.content is not live and typed_bits(live) == before  # it was given a copy; what it held is untouched


@pytest.mark.parametrize("content", [{}, [], 5, (1, 2.5), torch.ones(3), [torch.ones(2), 3], None], ids=repr)
def test_objects_whose_state_is_no_dict(content: Any, tmp_path: Path) -> None:
    other = copy.deepcopy(content)
    if isinstance(other, torch.Tensor):
        other.zero_()
    saved, target = _Keeper(content), _Keeper(other)
    round_trip(tmp_path, {"k": saved}, {"k": target})
    assert target.loads == 1 and typed_bits(target.content) == typed_bits(content)


def test_a_grad_scaler(tmp_path: Path) -> None:
    saved, target = torch.amp.GradScaler("cpu", init_scale=8.0), torch.amp.GradScaler("cpu")
    saved.scale(torch.ones(1))
    round_trip(tmp_path, {"scaler": saved}, {"scaler": target})
    assert target.state_dict() == saved.state_dict()
