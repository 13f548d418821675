"""Case 8: parameter groups come back whole and in order, also empty ones, every option with its value and its type."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckpt
from tests.engine.states import module_bits, optimizer_bits, round_trip, train_step, typed_bits
from tests.support.ranks import run_ranks

CUSTOM: dict[str, Any] = {
    "initial_lr": 0.1 + 0.2,
    "lr_mult": 3,
    "half": 3.0,
    "name": "décay",
    "nothing": None,
    "pair": (1, 2.5, "x"),
    "list": [1, (2,)],
    "flag": True,
    "empty": (),
    "negative_zero": -0.0,
    "rate": torch.tensor(-0.0),
    "nested": {"a": [1, (2,)], 3: b"\xff"},
}


class Net(nn.Module):
    """Three parameters of one shape; the data of `train_step` fits it."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.w, self.b, self.c = (nn.Parameter(torch.randn(6)) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x * self.w) * self.c + self.b


def _groups(optimizer: torch.optim.Optimizer) -> Any:
    """Options of every group in their order, with types and bits."""
    return [typed_bits({k: v for k, v in group.items() if k != "params"}) for group in optimizer.param_groups]


def _build(seed: int, members: list[str], custom: dict[str, Any], kind: Any = torch.optim.AdamW) -> dict[str, Any]:
    """A net whose groups have these parameters, each with rates of its own. A tensor is made anew for each group."""
    net = Net(seed)
    groups: list[dict[str, Any]] = [
        {
            "params": [getattr(net, n) for n in names],
            "lr": torch.tensor(0.1 * (at + seed)) if at == len(members) - 1 else 0.1 * (at + seed),
            "weight_decay": 0.01 * at * seed,
            **{k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in custom.items()},
        }
        for at, names in enumerate(members)
    ]
    if kind is torch.optim.AdamW:
        groups[0]["betas"] = (0.5 + 0.1 * seed, 0.9)
        return {"model": net, "opt": kind(groups, foreach=False)}
    return {"model": net, "opt": kind(groups, momentum=0.1 * seed)}


MEMBERS = {
    "in between": ["w", "", "bc"],
    "first": ["", "wb", "c"],
    "last": ["wb", "c", ""],
    "several": ["", "w", "", "", "b", "c"],
    "all": ["", ""],
    "none": ["w", "b", "c"],
}


@pytest.mark.parametrize("cold", [True, False], ids=["cold", "warm"])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
@pytest.mark.parametrize("members", MEMBERS)
def test_every_option_of_every_group_comes_back(members: str, kind: Any, cold: bool, tmp_path: Path) -> None:
    saved = _build(1, MEMBERS[members], CUSTOM, kind)
    target = _build(2, MEMBERS[members], dict.fromkeys(reversed(CUSTOM), "other"), kind)
    for number in range(3 if members != "all" else 0):
        train_step(saved["model"], saved["opt"], number)
        if not cold:
            train_step(target["model"], target["opt"], 9 + number)
    assert _groups(target["opt"]) != _groups(saved["opt"])
    round_trip(tmp_path, saved, target)
    assert _groups(target["opt"]) == _groups(saved["opt"])
    for number in range(3, 6 if members != "all" else 3):
        train_step(saved["model"], saved["opt"], number)
        train_step(target["model"], target["opt"], number)
    assert optimizer_bits(target["opt"]) == optimizer_bits(saved["opt"])
    assert module_bits(target["model"]) == module_bits(saved["model"])


def test_a_filled_group_stays_filled_for_what_shares_its_tensor(tmp_path: Path) -> None:
    """A rate in a 0-dim tensor that a schedule of the user's holds is filled, not replaced, in an empty group too."""
    saved, target = (_build(seed, ["wb", "c", ""], {}) for seed in (1, 2))
    rate = target["opt"].param_groups[2]["lr"]
    round_trip(tmp_path, saved, target)
    assert target["opt"].param_groups[2]["lr"] is rate
    assert typed_bits(rate) == typed_bits(saved["opt"].param_groups[2]["lr"])


def _more(target: dict[str, Any], at: int) -> None:
    target["opt"].param_groups[at]["extra"] = 1


def _fewer(target: dict[str, Any], at: int) -> None:
    del target["opt"].param_groups[at]["flag"]


@pytest.mark.parametrize("change", [_more, _fewer], ids=["one more", "one less"])
@pytest.mark.parametrize("at", [0, 1], ids=["filled", "empty"])
def test_a_group_with_other_options_is_refused(at: int, change: Any, tmp_path: Path) -> None:
    saved, target = (_build(seed, ["w", "", "bc"], CUSTOM) for seed in (1, 2))
    change(target, at)
    before = _groups(target["opt"]), module_bits(target["model"])
    with ckpt.Checkpointer(tmp_path) as ck:
        ck.save(1, saved)
        with pytest.raises(ckpt.StateMismatch, match=r"opt/.*(extra|flag).* use the optimizer it was saved with"):
            ck.load(target)
    assert (_groups(target["opt"]), module_bits(target["model"])) == before


@pytest.mark.parametrize("members", [["w", "bc"], ["w", "", "", "bc"]], ids=["one less", "one more"])
def test_another_number_of_empty_groups_is_refused(members: list[str], tmp_path: Path) -> None:
    saved, target = _build(1, ["w", "", "bc"], {}), _build(2, members, {})
    before = _groups(target["opt"])
    with ckpt.Checkpointer(tmp_path) as ck:
        ck.save(1, saved)
        with pytest.raises(ckpt.StateMismatch, match="opt/empty_groups/"):
            ck.load(target)
    assert _groups(target["opt"]) == before


def test_an_option_that_cannot_be_kept_is_refused_at_save(tmp_path: Path) -> None:
    saved = _build(1, ["w", "", "bc"], {})
    saved["opt"].param_groups[1]["schedule"] = lambda step: 0.1
    with ckpt.Checkpointer(tmp_path) as ck:
        with pytest.raises(ckpt.Unsupported, match=r"opt.*cannot keep a value of type builtins.function"):
            ck.save(1, saved)


# --- Pipeline stages: a group may have no parameter on a rank ---

STAGES = (["w"], ["c", "b"])  # decayed: w and c; not decayed: b


def _stage(seed: int, names: list[str]) -> dict[str, Any]:
    """The part of `Net` that a stage has. Groups: decayed, not decayed, and one that no stage has a member of."""
    whole = Net(seed)
    model = nn.ParameterDict({n: getattr(whole, n) for n in names})
    groups: list[dict[str, Any]] = [
        {"params": [model[n] for n in names if n != "b"], "weight_decay": 0.1 * seed, "pair": (1, 2.5 * seed)},
        {"params": [model[n] for n in names if n == "b"], "weight_decay": 0.0, "pair": None, "lr": 0.3 * seed},
        {"params": [], "lr": 0.7 * seed, "pair": (seed,)},
    ]
    for group in groups:
        group["lr_mult"] = 3 * seed
    return {"model": model, "opt": torch.optim.AdamW(groups, foreach=False)}


def _step(state: dict[str, Any], number: int) -> None:
    for name, parameter in state["model"].items():
        parameter.grad = torch.full_like(parameter, ord(name) + number)
    state["opt"].step()


def _two_stages(rank: int, world: int, root: str, root_of_one: str) -> list[Any]:
    """Saves from two stages and loads into other ones; then loads what one rank with everything saved."""
    layout = ckpt.Layout(pp=2)
    state, target, other = _stage(1, STAGES[rank]), _stage(2, STAGES[rank]), _stage(3, STAGES[rank])
    _step(state, 1)
    with ckpt.Checkpointer(root, layout) as ck:
        ck.save(1, state)
        ck.load(target)
    with ckpt.Checkpointer(root_of_one, layout) as ck:
        ck.load(other)
    assert _groups(target["opt"]) == _groups(state["opt"]) == _groups(other["opt"])
    found = []
    for one in (state, target, other):
        _step(one, 2)
        found.append((module_bits(one["model"]), _groups(one["opt"])))
    state["opt"].param_groups[1 - rank]["pair"] = "another"  # the second group is empty on rank 0
    with ckpt.Checkpointer(root, layout) as ck, pytest.raises(ckpt.StateMismatch) as error:
        ck.save(2, state)
    return [*found, str(error.value)]


@pytest.mark.ranks
def test_a_group_that_is_empty_on_one_stage(tmp_path: Path) -> None:
    one = _stage(1, ["w", "b", "c"])
    _step(one, 1)
    with ckpt.Checkpointer(tmp_path / "one") as ck:
        ck.save(1, one)
    ranks = run_ranks(2, _two_stages, str(tmp_path / "two"), str(tmp_path / "one"), timeout=60)
    merged = _stage(4, ["c", "b", "w"])
    with ckpt.Checkpointer(tmp_path / "two") as ck:
        ck.load(merged)
    assert _groups(merged["opt"]) == _groups(one["opt"])
    for state in (one, merged):
        _step(state, 2)
    assert module_bits(merged["model"]) == module_bits(one["model"])
    for names, (straight, resumed, from_one, refused) in zip(STAGES, ranks, strict=True):
        assert straight == resumed == from_one
        assert straight[0] == {n: module_bits(one["model"])[n] for n in names}
        assert "opt: parameter group" in refused and "pair" in refused and "same options on every rank" in refused
