"""Case 23: a schedule goes on with the bits of the run that never stopped, wherever between two steps it was saved."""

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as schedules

import ckpt
from tests.engine.states import tiny_net
from tests.support.megatron_cpu import megatron_on_cpu

pytestmark = pytest.mark.filterwarnings("ignore:Detected call of")  # torch's, for a step before the optimizer's first

Optimizer = torch.optim.Optimizer


class Decay:
    """A schedule with state of its own, which LambdaLR keeps."""

    def __init__(self, rate: float) -> None:
        self.rate = rate

    def __call__(self, epoch: int) -> float:
        return 1 / (1 + self.rate * epoch)


def _sequential(optimizer: Optimizer, scale: float) -> Any:
    parts = [schedules.LinearLR(optimizer, 0.1 * scale), schedules.StepLR(optimizer, 2, 0.3 * scale)]
    return schedules.SequentialLR(optimizer, parts, milestones=[4])


def _chained(optimizer: Optimizer, scale: float) -> Any:
    inner = [schedules.ConstantLR(optimizer, 0.5 * scale, 3), schedules.ExponentialLR(optimizer, 0.9 * scale)]
    return schedules.ChainedScheduler(inner)


SCHEDULES: dict[str, Callable[[Optimizer, float], Any]] = {
    "step": lambda o, s: schedules.StepLR(o, 2, 0.3 * s),
    "lambda": lambda o, s: schedules.LambdaLR(o, lambda epoch: 1 / (1 + epoch)),
    "lambda object": lambda o, s: schedules.LambdaLR(o, Decay(0.7 * s)),
    "cosine": lambda o, s: schedules.CosineAnnealingLR(o, int(9 * s)),
    "one cycle": lambda o, s: schedules.OneCycleLR(o, 0.9 * s, total_steps=int(30 * s)),
    "plateau": lambda o, s: schedules.ReduceLROnPlateau(o, factor=0.5 * s, patience=1),
    "sequential": _sequential,
    "chained": _chained,
}
TENSOR_RATES = ("step", "plateau", "chained")
KINDS = [(kind, False) for kind in SCHEDULES] + [(kind, True) for kind in TENSOR_RATES]


class Run:
    """A run that counts its steps. One step is four actions, between which a save may come. scale: of the schedule's
    own numbers, such as the steps that it is made for."""

    def __init__(self, kind: str, tensor_rate: bool, seed: int = 1, scale: float = 1.0) -> None:
        self.kind = kind
        self.model = tiny_net(seed)
        rates = [0.1 * seed, 0.01 * seed]
        groups = [{"params": layer.parameters(), "lr": r} for layer, r in zip(self._layers(), rates, strict=True)]
        if tensor_rate:
            groups = [{**g, "lr": torch.tensor(g["lr"])} for g in groups]
        self.optimizer = torch.optim.SGD(groups, momentum=0.9, foreach=False)
        self.schedule = SCHEDULES[kind](self.optimizer, scale)
        self.state = {"model": self.model, "sched": self.schedule, "opt": self.optimizer, "step": 0, "actions": 0}

    def _layers(self) -> list[nn.Module]:
        return [self.model[0], self.model[2]]

    def go(self, actions: int) -> list[bytes]:
        """Goes on by so many actions; gives the rates after each, as bits, and the step."""
        return [self._act() for _ in range(actions)]

    def _act(self) -> bytes:
        action = self.state["actions"] % 4
        if action == 0:
            self.model(torch.linspace(-1, 1, 6)).square().sum().backward()
        elif action == 1:
            self.optimizer.step()
            self.optimizer.zero_grad()
        elif action == 2:
            metric = 1.0 + self.state["step"] % 3
            self.schedule.step(*((metric,) if self.kind == "plateau" else ()))
        else:
            self.state["step"] += 1
        self.state["actions"] += 1
        rates = [float(g["lr"]) for g in self.optimizer.param_groups]
        return struct.pack("<2dq", *rates, self.state["step"])


POINTS = {
    "before the first step": 0,
    "in the first, after the optimizer": 2,
    "before a step": 12,
    "after the optimizer": 14,
    "after both": 15,
}


@pytest.mark.parametrize(("kind", "tensor_rate"), KINDS)
def test_the_next_rates_have_the_same_bits_for_each_save_point(kind: str, tensor_rate: bool, tmp_path: Path) -> None:
    """A new run gets them, one that has stepped, and one whose schedule was made with other numbers: the saved
    one is what goes on. Loading twice counts nothing twice."""
    with ckpt.Checkpointer(tmp_path) as ck:
        for point, actions in POINTS.items():
            straight = Run(kind, tensor_rate)
            straight.go(actions)
            ck.save(actions, straight.state)
            expected = straight.go(20)
            assert len(set(expected)) > 5
            new = Run(kind, tensor_rate, seed=2)
            begun = Run(kind, tensor_rate, seed=3)
            begun.go(9 if actions > 1 else 0)  # where the saved optimizer had stepped
            shorter = Run(kind, tensor_rate, seed=2, scale=0.8)
            for resumed in (new, begun, shorter):
                ck.load(resumed.state)
                if resumed is begun:
                    ck.load(resumed.state)
                assert resumed.go(20) == expected, point


def test_save_points_differ() -> None:
    """The control: being one action off shows in what follows."""
    for kind in SCHEDULES:
        run = Run(kind, False)
        run.go(14)
        late = Run(kind, False)
        late.go(14)
        late.schedule.step(*((9.0,) if kind == "plateau" else ()))
        late.schedule.step(*((9.0,) if kind == "plateau" else ()))
        assert run.go(20) != late.go(20), kind


def test_a_schedule_of_another_kind_is_refused(tmp_path: Path) -> None:
    saved, other = Run("cosine", False), Run("step", False, seed=2)
    before = [float(g["lr"]) for g in other.optimizer.param_groups]
    with ckpt.Checkpointer(tmp_path) as ck:
        ck.save(1, saved.state)
        with pytest.raises(ckpt.StateMismatch, match=r"sched/(gamma|step_size|T_max)"):
            ck.load(other.state)
    assert [float(g["lr"]) for g in other.optimizer.param_groups] == before


# --- Megatron Core's scheduler, whose own load_state_dict adds the saved steps to those it has ---


class MegatronRun:
    """A run with Megatron's scheduler of rates and weight decays. use: take the schedule from the checkpoint."""

    def __init__(self, use: bool = False, decay_steps: int = 400) -> None:
        from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

        self.model = tiny_net(1)
        self.optimizer = torch.optim.SGD([{"params": self.model.parameters(), "wd_mult": 1.0, "lr_mult": 0.5}], lr=1.0)
        self.scheduler = OptimizerParamScheduler(
            self.optimizer,
            init_lr=0.0,
            max_lr=0.3,
            min_lr=0.01,
            lr_warmup_steps=16,
            lr_decay_steps=decay_steps,
            lr_decay_style="cosine",
            start_wd=0.01,
            end_wd=0.1,
            wd_incr_steps=300,
            wd_incr_style="linear",
            use_checkpoint_opt_param_scheduler=use,
            override_opt_param_scheduler=False,
        )
        self.state = {"scheduler": self.scheduler, "opt": self.optimizer, "model": self.model}

    def go(self, steps: int) -> list[bytes]:
        found = []
        for _ in range(steps):
            self.scheduler.step(increment=8)
            group = self.optimizer.param_groups[0]
            found.append(struct.pack("<2dq", group["lr"], group["weight_decay"], self.scheduler.num_steps))
        return found


@pytest.mark.parametrize("begun", [0, 5], ids=["new", "begun"])
@pytest.mark.parametrize("steps", [0, 1, 2, 7])
def test_megatrons_steps_are_not_counted_twice(steps: int, begun: int, tmp_path: Path) -> None:
    pytest.importorskip("megatron.core")
    with megatron_on_cpu():
        straight = MegatronRun()
        straight.go(steps)
        with ckpt.Checkpointer(tmp_path) as ck:
            ck.save(1, straight.state)
            expected = straight.go(5)
            for use, length in ((False, 400), (True, 999)):
                resumed = MegatronRun(use, length)
                resumed.go(begun)
                for _ in range(2):
                    ck.load(resumed.state)
                    assert resumed.scheduler.num_steps == 8 * steps
                assert resumed.go(5) == expected
            other = MegatronRun(decay_steps=999)
            with pytest.raises(ckpt.StateMismatch, match=r"scheduler/.*: the checkpoint has 400, the scheduler 999"):
                ck.load(other.state)
