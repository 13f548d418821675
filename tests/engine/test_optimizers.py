"""Optimizers go on as if never stopped, by parameter name; what would be lost or does not fit is refused."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckpt
from tests.engine.states import module_bits, optimizer_bits, round_trip, tiny_net, train_step
from tests.support.raw import labelled, random_bits, raw

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "sgd momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adam fused": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
    "adam amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True, foreach=False),
    "adam tensor lr": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01), foreach=False),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, betas=(0.8, 0.95)),
    "adamax": lambda p: torch.optim.Adamax(p),
    "nadam": lambda p: torch.optim.NAdam(p),
    "radam": lambda p: torch.optim.RAdam(p),
    "rmsprop": lambda p: torch.optim.RMSprop(p, momentum=0.5, centered=True),
    "rprop": lambda p: torch.optim.Rprop(p),
    "asgd": lambda p: torch.optim.ASGD(p),
    "adagrad": lambda p: torch.optim.Adagrad(p),
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "adafactor": lambda p: torch.optim.Adafactor(p),
    "lbfgs": lambda p: torch.optim.LBFGS(p, max_iter=3, history_size=3),
}


@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_an_optimizer_goes_on_as_if_never_stopped(kind: str, warm: bool, tmp_path: Path) -> None:
    """A cold optimizer gets all its state, tensors and plain values; the next steps are the same bits."""
    model, other = tiny_net(1), tiny_net(2)
    optimizer, target = OPTIMIZERS[kind](model.parameters()), OPTIMIZERS[kind](other.parameters())
    for number in range(3):
        train_step(model, optimizer, number)
    for number in range(4 if warm else 0):
        train_step(other, target, 50 + number)
    round_trip(tmp_path, {"model": model, "opt": optimizer}, {"model": other, "opt": target})
    assert optimizer_bits(target) == optimizer_bits(optimizer)
    for number in range(3, 6):
        train_step(model, optimizer, number)
        train_step(other, target, number)
    assert optimizer_bits(target) == optimizer_bits(optimizer)
    assert module_bits(other) == module_bits(model)


def test_an_optimizer_with_plain_state_values(tmp_path: Path) -> None:
    """SparseAdam counts steps in a plain int; a cold one gets it, and its type."""

    def build(seed: int, steps: int) -> tuple[nn.Embedding, torch.optim.SparseAdam]:
        torch.manual_seed(seed)
        emb = nn.Embedding(5, 3, sparse=True)
        optimizer = torch.optim.SparseAdam(list(emb.parameters()))
        for _ in range(steps):
            emb(torch.tensor([1, 2])).sum().backward()
            optimizer.step()
        return emb, optimizer

    (emb, optimizer), (cold_emb, cold) = build(1, 3), build(2, 0)
    round_trip(tmp_path, {"m": emb, "o": optimizer}, {"m": cold_emb, "o": cold})
    assert type(cold.state[cold_emb.weight]["step"]) is int
    assert optimizer_bits(cold) == optimizer_bits(optimizer)


@pytest.mark.parametrize(
    "step", [torch.tensor(7.0), torch.tensor(7.0, dtype=torch.float64), 7], ids=["f32", "f64", "int"]
)
def test_the_step_counter_keeps_its_type(step: Any, tmp_path: Path) -> None:
    model, other = tiny_net(1), tiny_net(2)
    optimizer, cold = torch.optim.Adam(model.parameters()), torch.optim.Adam(other.parameters())
    train_step(model, optimizer, 0)
    for state in optimizer.state.values():
        state["step"] = copy.copy(step) if isinstance(step, int) else step.clone()
    round_trip(tmp_path, {"m": model, "o": optimizer}, {"m": other, "o": cold})
    for state in cold.state.values():
        assert type(state["step"]) is type(step) and float(state["step"]) == 7.0
        assert not isinstance(step, torch.Tensor) or state["step"].dtype is step.dtype


def _labelled_adam(names: list[str], groups: list[list[str]], label: float, **options: Any) -> dict[str, Any]:
    """Four equal linears; each moment is a constant that tells its parameter (0 to leave the optimizer cold)."""
    model: Any = nn.ModuleDict({n: nn.Linear(3, 3, bias=False) for n in names})
    optimizer = torch.optim.Adam([{"params": [model[n].weight for n in g]} for g in groups], **options)
    if label:
        for n in names:
            weight = model[n].weight
            value = label + ord(n)
            optimizer.state[weight] = {
                "step": torch.tensor(value),
                "exp_avg": torch.full_like(weight, value).detach(),
                "exp_avg_sq": torch.full_like(weight, -value).detach(),
            }
    return {"model": model, "opt": optimizer}


@pytest.mark.parametrize("cold", [True, False])
@pytest.mark.parametrize(
    ("names", "groups"),
    [("dcba", ["dcba"]), ("abcd", ["da", "cb"]), ("badc", ["a", "b", "c", "d"])],
    ids=["reversed", "two groups", "four groups"],
)
def test_moments_follow_names_not_positions(names: str, groups: list[str], cold: bool, tmp_path: Path) -> None:
    saved = _labelled_adam(list("abcd"), [list("abcd")], 100.0)
    target = _labelled_adam(list(names), [list(g) for g in groups], 0.0 if cold else 500.0)
    round_trip(tmp_path, saved, target)
    for n in "abcd":
        weight = target["model"][n].weight
        state = target["opt"].state[weight]
        assert raw(weight) == raw(saved["model"][n].weight)
        assert raw(state["exp_avg"]) == raw(torch.full((3, 3), 100.0 + ord(n)))
        assert raw(state["exp_avg_sq"]) == raw(torch.full((3, 3), -100.0 - ord(n)))
        assert raw(state["step"]) == raw(torch.tensor(100.0 + ord(n)))


def test_groups_keep_every_option_with_its_type(tmp_path: Path) -> None:
    def build(seed: int, **options: Any) -> dict[str, Any]:
        model = tiny_net(seed)
        first, second = list(model[0].parameters()), list(model[2].parameters())
        groups = [{"params": first, **options}, {"params": second, **{k: None for k in options}, "lr": 0.5}]
        return {"model": model, "opt": torch.optim.AdamW(groups, lr=0.25 * seed)}

    custom = {
        "initial_lr": 0.1 + 0.2,
        "lr_mult": 3,
        "name": "décay",
        "nothing": None,
        "shape": (1, 2.0, "x"),
        "scale": torch.tensor(-0.0),
        "flag": True,
        "nested": {"a": [1, (2,)], 3: b"\xff"},
    }
    saved = build(1, **custom)
    target = build(2, **{k: "other" for k in custom})
    round_trip(tmp_path, saved, target)
    assert optimizer_bits(target["opt"]) == optimizer_bits(saved["opt"])
    group = target["opt"].param_groups[0]
    assert group["lr_mult"] == 3 and type(group["lr_mult"]) is int and type(group["shape"]) is tuple
    assert raw(group["scale"]) == raw(torch.tensor(-0.0))
    assert group["betas"] == (0.9, 0.999) and type(group["betas"]) is tuple


class _OwnStateDict(torch.optim.SGD):
    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"master": torch.ones(3)}


def _refused_optimizers() -> dict[str, tuple[Callable[[], dict[str, Any]], type[Exception], str]]:
    def foreign() -> dict[str, Any]:
        return {"m": tiny_net(1), "o": torch.optim.SGD([*tiny_net(2).parameters()], lr=0.1)}

    def own() -> dict[str, Any]:
        model = tiny_net(1)
        return {"m": model, "o": _OwnStateDict(model.parameters(), lr=0.1)}

    def dropped() -> dict[str, Any]:
        model = tiny_net(1)
        optimizer = torch.optim.Adam(model.parameters())
        train_step(model, optimizer, 0)
        optimizer.param_groups[0]["params"].pop()
        return {"m": model, "o": optimizer}

    def whole_state() -> dict[str, Any]:
        model = tiny_net(1)
        optimizer = torch.optim.Adam(model.parameters())
        optimizer.state["shared"] = {"count": 3}  # type: ignore[index]
        return {"m": model, "o": optimizer}

    def odd_shape() -> dict[str, Any]:
        local = nn.Parameter(torch.zeros(2, 3))
        optimizer = torch.optim.Adam([local])
        optimizer.state[local] = {"row": torch.zeros(2)}
        return {"w": ckpt.ShardedTensor(local, [((0, 0), (2, 3), (0, 0))], (4, 3)), "o": optimizer}

    return {
        "a foreign parameter": (foreign, ckpt.StateMismatch, r"o: a parameter of shape \[5, 6\] .* add the model"),
        "a state_dict of its own": (own, ckpt.Unsupported, r"o: _OwnStateDict has a state_dict of its own,.* inside"),
        "state of a dropped parameter": (dropped, ckpt.Unsupported, r"o: .* a tensor of shape \[6\].* remove it"),
        "state of no parameter": (whole_state, ckpt.Unsupported, r"o: .* 'shared', which is in none .* remove it"),
        "state of another shape, sharded": (odd_shape, ckpt.Unsupported, r"o/state/w/row: .* shape \[2\] .* sharded"),
    }


@pytest.mark.parametrize("kind", _refused_optimizers())
def test_optimizers_that_would_lose_something_are_refused_at_save(kind: str, tmp_path: Path) -> None:
    make, error, words = _refused_optimizers()[kind]
    with ckpt.Checkpointer(tmp_path) as ck, pytest.raises(error, match=words):
        ck.save(1, make())


def test_groups_that_do_not_fit_are_refused_at_load_with_nothing_changed(tmp_path: Path) -> None:
    saved = _labelled_adam(list("ab"), [["a"], ["b"]], 100.0)
    saved["opt"].param_groups[1]["lr"] = 0.5
    with ckpt.Checkpointer(tmp_path) as ck:
        ck.save(1, saved)
        merged = _labelled_adam(list("ab"), [["a", "b"]], 0.0)
        added = _labelled_adam(list("ab"), [["a"], ["b"]], 0.0)
        added["opt"].param_groups[0]["extra"] = 1
        other = _labelled_adam(list("ab"), [["a"], ["b"]], 0.0)
        other["opt"] = torch.optim.SGD([{"params": [other["model"][n].weight]} for n in "ab"], lr=0.1)
        for target, words in (
            (merged, "opt/param_groups/model/b.weight: saved with other options than opt/param_groups/model/a.weight"),
            (added, r"its parameter group has options \['extra'\] that the checkpoint lacks.*use the optimizer"),
            (other, "use the optimizer it was saved with"),
        ):
            before = module_bits(target["model"]), optimizer_bits(target["opt"])
            with pytest.raises(ckpt.StateMismatch, match=words):
                ck.load(target)
            assert (module_bits(target["model"]), optimizer_bits(target["opt"])) == before


def test_a_parameter_without_state_stays_without(tmp_path: Path) -> None:
    """A frozen parameter never had state, and gets none; one whose state was lost is an error by name."""
    model: Any = tiny_net(1)
    other: Any = tiny_net(2)
    for net in (model, other):
        net[0].bias.requires_grad_(False)
    optimizer, target = torch.optim.Adam(model.parameters()), torch.optim.Adam(other.parameters())
    train_step(model, optimizer, 0)
    round_trip(tmp_path, {"m": model, "o": optimizer}, {"m": other, "o": target})
    assert not target.state.get(other[0].bias) and len(target.state_dict()["state"]) == 3
    assert optimizer_bits(target) == optimizer_bits(optimizer)
    del optimizer.state[model[2].bias]["exp_avg"]
    warm = torch.optim.Adam(other.parameters())
    train_step(other, warm, 0)
    with ckpt.Checkpointer(tmp_path) as ck:
        ck.save(2, {"m": model, "o": optimizer})
        with pytest.raises(ckpt.StateMismatch, match=r"has no o/state/m/2\.bias/exp_avg; allow_missing"):
            ck.load({"m": other, "o": warm})


def test_an_optimizer_over_plain_tensors_of_the_state(tmp_path: Path) -> None:
    def build(seed: int, steps: int) -> dict[str, Any]:
        w = random_bits((4, 3), torch.int32, seed).to(torch.float32).requires_grad_()
        part = nn.Parameter(torch.full((2, 3), float(seed)))
        optimizer = torch.optim.Adam([w, part])
        for _ in range(steps):
            w.grad, part.grad = torch.ones_like(w), torch.full_like(part, 2.0)
            optimizer.step()
        boxes = [((0, 0), (1, 3), (1, 0)), ((1, 0), (1, 3), (0, 0))]  # the rows the other way round
        return {"opt": optimizer, "w": w, "s": ckpt.ShardedTensor(part, boxes, (2, 3))}

    saved, target = build(1, 2), build(2, 0)
    with torch.no_grad():
        saved["s"].local.copy_(labelled((2, 3)))
        saved["opt"].state[saved["s"].local]["exp_avg"].copy_(10 + labelled((2, 3)))
    round_trip(tmp_path, saved, target)
    assert optimizer_bits(target["opt"]) == optimizer_bits(saved["opt"])
    assert raw(target["w"]) == raw(saved["w"]) and raw(target["s"].local) == raw(saved["s"].local)
    plain: dict[str, Any] = {"opt": torch.optim.Adam([w := torch.zeros(4, 3), s := torch.zeros(2, 3)]), "w": w, "s": s}
    with ckpt.Checkpointer(tmp_path) as ck:
        ck.load(plain)
    assert raw(s) == raw(labelled((2, 3)).flip(0))
    assert raw(plain["opt"].state[s]["exp_avg"]) == raw(10 + labelled((2, 3)).flip(0))
