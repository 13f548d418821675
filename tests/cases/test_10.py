"""Case 10: an asynchronous save holds the values at the call, whatever the trainer does next."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import ckpt
from tests.support.raw import raw


class Counter:
    def __init__(self, count: int) -> None:
        self.seen = [count]

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


def make(fill: float) -> dict[str, Any]:
    base = torch.full((64, 64), fill)
    model = nn.Linear(8, 8)
    with torch.no_grad():
        model.weight.fill_(fill)
        model.bias.fill_(fill)
    optimizer = torch.optim.AdamW(model.parameters())
    return {
        "large": torch.full((1250, 4096), fill),  # 20 MB
        "view": base[3:17, ::2],
        "array": np.full((100, 100), fill, dtype=np.float64),
        "model": model,
        "optimizer": optimizer,
        "list": [1, [2, fill]],
        "counts": {"a": int(fill), "b": {"c": "x" * int(fill)}},
        "loader": Counter(int(fill)),
        "rng": ckpt.RngState({"own": torch.Generator().manual_seed(int(fill))}),
    }


def spoil(state: dict[str, Any]) -> None:
    """Changes, replaces and frees everything."""
    state["large"].fill_(7)
    state["view"].fill_(7)
    state["array"][:] = 7
    state["model"].weight.data = torch.full((8, 8), 7.0)
    state["model"](torch.ones(1, 8)).sum().backward()
    state["optimizer"].step()
    state["optimizer"].param_groups[0]["lr"] = 7.0
    state["list"][1].append(7)
    state["counts"]["b"]["c"] = "changed"
    state["counts"]["d"] = 7
    state["loader"].seen.append(7)
    torch.manual_seed(7)
    random.seed(7)
    torch.rand(5, generator=state["rng"].generators["own"])
    state["large"].resize_(0)
    del state["large"], state["array"]


def digest(state: dict[str, Any]) -> dict[str, Any]:
    return {
        "tensors": [raw(state[k]) for k in ("large", "view")] + [raw(t) for t in state["model"].parameters()],
        "array": state["array"].tobytes(),
        "lr": state["optimizer"].param_groups[0]["lr"],
        "moments": [raw(t) for s in state["optimizer"].state.values() for t in s.values()],
        "plain": repr((state["list"], state["counts"], state["loader"].seen)),
        "own": state["rng"].generators["own"].get_state().tolist(),
        "draws": (torch.rand(3).tolist(), random.random()),
    }


def test_what_changes_after_the_call_is_not_in_the_checkpoint(tmp_path: Path) -> None:
    root, same = tmp_path / "async", tmp_path / "blocking"
    random.seed(1)
    torch.manual_seed(1)
    first, second = make(1.0), make(2.0)
    with ckpt.Checkpointer(same) as ck:
        ids = [ck.save(n, state).state_id for n, state in ((1, first), (2, second))]
    with ckpt.Checkpointer(root) as ck:
        one = ck.save_async(1, first)
        expected = [digest(first)]
        spoil(first)
        random.seed(1)
        torch.manual_seed(1)
        two = ck.save_async(2, second)  # begun before the first was asked for
        expected.append(digest(second))
        spoil(second)
        assert [one.result().state_id, two.result().state_id] == ids
    for step in (1, 2):
        state = make(5.0)
        with ckpt.Checkpointer(root, read_only=True) as ck:
            ck.load(state, step=step)
        assert digest(state) == expected[step - 1]


def test_unchanged_and_changed_states_are_told_apart(tmp_path: Path) -> None:
    state = {"x": torch.zeros(5), "n": 1}
    with ckpt.Checkpointer(tmp_path) as ck:
        ids = [ck.save_async(1, state).result().state_id, ck.save_async(2, state).result().state_id]
        state["x"][3] = 1
        ids.append(ck.save_async(3, state).result().state_id)
        state["n"] = 2
        ids.append(ck.save_async(4, state).result().state_id)
    assert ids[0] == ids[1] and len(set(ids)) == 3
