"""The state of a LogicalRng: two numbers that a checkpoint carries."""

from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt.errors import CkptError, StateMismatch
from ckpt.random import LogicalRng, dropout
from tests.random.test_streams import raw


def train(state: dict[str, Any], until: int) -> list[bytes]:
    """Steps of a model with dropout; returns what each mask was."""
    rng, masks = state["rng"], []
    while rng.step < until:
        batch = rng.stream("noise").normal((4, 16))
        hidden = dropout(state["model"](batch), 0.5, rng.stream("dropout", 0))
        masks.append(raw((hidden != 0).detach()))
        hidden.square().mean().backward()
        state["optimizer"].step()
        state["optimizer"].zero_grad()
        rng.advance()
    return masks


def fresh(seed: int) -> dict[str, Any]:
    model = torch.nn.Linear(16, 16)
    return {"model": model, "optimizer": torch.optim.Adam(model.parameters()), "rng": LogicalRng(seed)}


def test_a_checkpoint_carries_it(tmp_path: Path) -> None:
    first = fresh(5)
    train(first, 3)
    with ckpt.Checkpointer(tmp_path / "root") as checkpointer:
        receipt = checkpointer.save(3, first)
    straight = train(first, 6)

    resumed = fresh(0)
    resumed["rng"].advance(40)
    with ckpt.Checkpointer(tmp_path / "root") as checkpointer:
        restored = checkpointer.load(resumed)
        assert restored is not None
        assert resumed["rng"].state_dict() == {"seed": 5, "step": 3}
        assert checkpointer.save(3, resumed).state_id == receipt.state_id
    assert train(resumed, 6) == straight
    assert raw(resumed["model"].weight.detach()) == raw(first["model"].weight.detach())


def test_round_trip_at_the_ends_of_the_range(tmp_path: Path) -> None:
    state = ckpt.TrainState(rng=LogicalRng(2**64 - 1, 2**63))
    with ckpt.Checkpointer(tmp_path / "root") as checkpointer:
        checkpointer.save(0, state)
        target = ckpt.TrainState(rng=LogicalRng(0))
        checkpointer.load(target)
    assert target.rng.state_dict() == {"seed": 2**64 - 1, "step": 2**63}


def test_advance() -> None:
    rng = LogicalRng(1, 2)
    before = rng.stream("a")
    rng.advance()
    rng.advance(4)
    assert (rng.seed, rng.step, repr(rng)) == (1, 7, "LogicalRng(seed=1, step=7)")
    assert before == LogicalRng(1, 2).stream("a") != rng.stream("a")
    assert rng.fixed("a") == LogicalRng(1, 2).fixed("a")
    for bad in (-1, 2**64, True):
        with pytest.raises(CkptError, match="step"):
            rng.advance(bad)
    assert rng.step == 7


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"seed": 1},
        {"seed": 1, "step": 2, "scheme": 2},
        {"seed": 1, "step": -1},
        {"seed": 1.0, "step": 0},
        {"seed": True, "step": 0},
        {"seed": 2**64, "step": 0},
        {"seed": None, "step": 0},
    ],
    ids=str,
)
def test_a_bad_state_changes_nothing(state: dict[str, Any]) -> None:
    rng = LogicalRng(3, 4)
    with pytest.raises(StateMismatch, match="LogicalRng"):
        rng.load_state_dict(state)
    assert rng.state_dict() == {"seed": 3, "step": 4}
