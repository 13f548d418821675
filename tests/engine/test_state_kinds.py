"""Every kind of entry that a state may hold comes back as it was, with torch.distributed and without it."""

import copy
import math
import struct
from collections import Counter, OrderedDict, defaultdict, namedtuple
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import ckpt
from tests.support.ranks import Crew
from tests.support.raw import attempt_folder, labelled, random_bits, raw, tree


def _round_trip(root: Path, state: Any, into: Any, **options: Any) -> ckpt.Restored:
    with ckpt.Checkpointer(root) as ck:
        receipt = ck.save(1, state)
        restored = ck.load(into, **options)
    assert restored is not None and restored.state_id == receipt.state_id
    return restored


# Modules


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


def _module_bits(module: nn.Module) -> dict[str, Any]:
    found = module.state_dict()
    return {k: raw(v) if isinstance(v, torch.Tensor) else v for k, v in found.items()}


def test_modules_with_buffers_and_extra_state_in_nested_dicts(tmp_path: Path) -> None:
    saved = {"models": {"student": _Block(1), "teacher": [_Block(3), {"ema": _Block(5)}]}, "x": {}}
    target: dict[str, Any] = {"models": {"student": _Block(11), "teacher": [_Block(13), {"ema": _Block(15)}]}, "x": {}}
    student, cache = target["models"]["student"], raw(target["models"]["student"].cache)
    addresses = {n: p.data_ptr() for n, p in student.named_parameters()}
    _round_trip(tmp_path, saved, target)
    for a, b in zip(_blocks(saved), _blocks(target), strict=True):
        assert _module_bits(a) == _module_bits(b)
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
    restored = _round_trip(tmp_path, saved, target)
    assert restored.tensors == 2 + 2 * 3
    assert _module_bits(target["model"]) == _module_bits(saved["model"])
    assert target["model"][0] is target["model"][2] is target["again"]


# Optimizers


def _net(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 6))


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    data = torch.from_numpy(np.random.default_rng(number).standard_normal((4, 6)).astype(np.float32))

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (model(data) - data).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)  # type: ignore[arg-type]


def _optimizer_bits(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    def plain(x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            return (str(x.dtype), tuple(x.shape), raw(x))
        if isinstance(x, float):
            return struct.pack("<d", x)
        if isinstance(x, Mapping):
            return {k: plain(v) for k, v in x.items()}
        if isinstance(x, list | tuple):
            return type(x), [plain(v) for v in x]
        return type(x), x

    return plain(optimizer.state_dict())  # type: ignore[no-any-return]


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
    model, other = _net(1), _net(2)
    optimizer, target = OPTIMIZERS[kind](model.parameters()), OPTIMIZERS[kind](other.parameters())
    for number in range(3):
        _step(model, optimizer, number)
    for number in range(4 if warm else 0):
        _step(other, target, 50 + number)
    _round_trip(tmp_path, {"model": model, "opt": optimizer}, {"model": other, "opt": target})
    assert _optimizer_bits(target) == _optimizer_bits(optimizer)
    for number in range(3, 6):
        _step(model, optimizer, number)
        _step(other, target, number)
    assert _optimizer_bits(target) == _optimizer_bits(optimizer)
    assert _module_bits(other) == _module_bits(model)


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
    _round_trip(tmp_path, {"m": emb, "o": optimizer}, {"m": cold_emb, "o": cold})
    assert type(cold.state[cold_emb.weight]["step"]) is int
    assert _optimizer_bits(cold) == _optimizer_bits(optimizer)


@pytest.mark.parametrize(
    "step", [torch.tensor(7.0), torch.tensor(7.0, dtype=torch.float64), 7], ids=["f32", "f64", "int"]
)
def test_the_step_counter_keeps_its_type(step: Any, tmp_path: Path) -> None:
    model, other = _net(1), _net(2)
    optimizer, cold = torch.optim.Adam(model.parameters()), torch.optim.Adam(other.parameters())
    _step(model, optimizer, 0)
    for state in optimizer.state.values():
        state["step"] = copy.copy(step) if isinstance(step, int) else step.clone()
    _round_trip(tmp_path, {"m": model, "o": optimizer}, {"m": other, "o": cold})
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
    _round_trip(tmp_path, saved, target)
    for n in "abcd":
        weight = target["model"][n].weight
        state = target["opt"].state[weight]
        assert raw(weight) == raw(saved["model"][n].weight)
        assert raw(state["exp_avg"]) == raw(torch.full((3, 3), 100.0 + ord(n)))
        assert raw(state["exp_avg_sq"]) == raw(torch.full((3, 3), -100.0 - ord(n)))
        assert raw(state["step"]) == raw(torch.tensor(100.0 + ord(n)))


def test_groups_keep_every_option_with_its_type(tmp_path: Path) -> None:
    def build(seed: int, **options: Any) -> dict[str, Any]:
        model = _net(seed)
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
    _round_trip(tmp_path, saved, target)
    assert _optimizer_bits(target["opt"]) == _optimizer_bits(saved["opt"])
    group = target["opt"].param_groups[0]
    assert group["lr_mult"] == 3 and type(group["lr_mult"]) is int and type(group["shape"]) is tuple
    assert raw(group["scale"]) == raw(torch.tensor(-0.0))
    assert group["betas"] == (0.9, 0.999) and type(group["betas"]) is tuple


class _OwnStateDict(torch.optim.SGD):
    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"master": torch.ones(3)}


def _refused_optimizers() -> dict[str, tuple[Callable[[], dict[str, Any]], type[Exception], str]]:
    def foreign() -> dict[str, Any]:
        return {"m": _net(1), "o": torch.optim.SGD([*_net(2).parameters()], lr=0.1)}

    def own() -> dict[str, Any]:
        model = _net(1)
        return {"m": model, "o": _OwnStateDict(model.parameters(), lr=0.1)}

    def dropped() -> dict[str, Any]:
        model = _net(1)
        optimizer = torch.optim.Adam(model.parameters())
        _step(model, optimizer, 0)
        optimizer.param_groups[0]["params"].pop()
        return {"m": model, "o": optimizer}

    def whole_state() -> dict[str, Any]:
        model = _net(1)
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
            before = _module_bits(target["model"]), _optimizer_bits(target["opt"])
            with pytest.raises(ckpt.StateMismatch, match=words):
                ck.load(target)
            assert (_module_bits(target["model"]), _optimizer_bits(target["opt"])) == before


def test_a_parameter_without_state_stays_without(tmp_path: Path) -> None:
    """A frozen parameter never had state, and gets none; one whose state was lost is an error by name."""
    model: Any = _net(1)
    other: Any = _net(2)
    for net in (model, other):
        net[0].bias.requires_grad_(False)
    optimizer, target = torch.optim.Adam(model.parameters()), torch.optim.Adam(other.parameters())
    _step(model, optimizer, 0)
    _round_trip(tmp_path, {"m": model, "o": optimizer}, {"m": other, "o": target})
    assert not target.state.get(other[0].bias) and len(target.state_dict()["state"]) == 3
    assert _optimizer_bits(target) == _optimizer_bits(optimizer)
    del optimizer.state[model[2].bias]["exp_avg"]
    warm = torch.optim.Adam(other.parameters())
    _step(other, warm, 0)
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
    _round_trip(tmp_path, saved, target)
    assert _optimizer_bits(target["opt"]) == _optimizer_bits(saved["opt"])
    assert raw(target["w"]) == raw(saved["w"]) and raw(target["s"].local) == raw(saved["s"].local)
    plain: dict[str, Any] = {"opt": torch.optim.Adam([w := torch.zeros(4, 3), s := torch.zeros(2, 3)]), "w": w, "s": s}
    with ckpt.Checkpointer(tmp_path) as ck:
        ck.load(plain)
    assert raw(s) == raw(labelled((2, 3)).flip(0))
    assert raw(plain["opt"].state[s]["exp_avg"]) == raw(10 + labelled((2, 3)).flip(0))


# Schedulers and other objects with a state_dict

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
        model = _net(seed)
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
    _round_trip(
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


Pair = namedtuple("Pair", ["left", "right"])


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


def _plain(node: Any) -> Any:
    if isinstance(node, torch.Tensor):
        return torch.Tensor, str(node.dtype), tuple(node.shape), raw(node)
    if isinstance(node, np.ndarray):
        return np.ndarray, node.dtype, node.shape, node.tobytes()
    if isinstance(node, Mapping):
        return type(node), [(k, _plain(v)) for k, v in node.items()]
    if isinstance(node, list | tuple):
        return type(node), [_plain(x) for x in node]
    if isinstance(node, float):
        return float, struct.pack("<d", node)
    return type(node), node


def test_objects_get_their_state_back_with_its_types_once_and_in_full(tmp_path: Path) -> None:
    saved, target = _Keeper(_content(3)), _Keeper(_content(8))
    before, live = _plain(_content(8)), target.content
    _round_trip(tmp_path, {"k": saved}, {"k": target})
    assert target.loads == 1
    assert _plain(target.content) == _plain(_content(3))
    assert target.content is not live and _plain(live) == before  # it was given a copy; what it held is untouched


@pytest.mark.parametrize("content", [{}, [], 5, (1, 2.5), torch.ones(3), [torch.ones(2), 3], None], ids=repr)
def test_objects_whose_state_is_no_dict(content: Any, tmp_path: Path) -> None:
    other = copy.deepcopy(content)
    if isinstance(other, torch.Tensor):
        other.zero_()
    saved, target = _Keeper(content), _Keeper(other)
    _round_trip(tmp_path, {"k": saved}, {"k": target})
    assert target.loads == 1 and _plain(target.content) == _plain(content)


def test_a_grad_scaler(tmp_path: Path) -> None:
    saved, target = torch.amp.GradScaler("cpu", init_scale=8.0), torch.amp.GradScaler("cpu")
    saved.scale(torch.ones(1))
    _round_trip(tmp_path, {"scaler": saved}, {"scaler": target})
    assert target.state_dict() == saved.state_dict()


# NumPy


NUMPY = ["?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16"]


@pytest.mark.parametrize("dtype", NUMPY)
def test_numpy_arrays_are_filled_in_place(dtype: str, tmp_path: Path) -> None:
    def build(seed: int) -> dict[str, Any]:
        size = np.dtype(dtype).itemsize
        flat = np.frombuffer(bytearray(np.random.default_rng(seed).bytes(60 * size)), dtype)
        return {
            "plain": flat[:12].reshape(3, 4),
            "fortran": np.asfortranarray(flat[12:24].reshape(3, 4)),
            "strided": flat[24:48].reshape(4, 6)[::2, 1::2],
            "scalar": flat[48:49].reshape(()),
            "empty": flat[:0].reshape(0, 3),
        }

    saved, target = build(1), build(2)
    held = {n: (a, a.ctypes.data, a.strides) for n, a in target.items()}
    _round_trip(tmp_path, saved, target)
    for name, (array, address, strides) in held.items():
        assert target[name] is array and (array.ctypes.data, array.strides) == (address, strides)
        assert (array.dtype, array.shape) == (saved[name].dtype, saved[name].shape)
        assert array.tobytes() == saved[name].tobytes()


def test_a_memory_mapped_array_is_filled_in_place(tmp_path: Path) -> None:
    target = np.memmap(tmp_path / "file", np.float32, "w+", shape=(50, 7))
    saved = labelled((50, 7)).numpy()
    _round_trip(tmp_path / "root", {"x": saved}, {"x": target})
    target.flush()
    assert (tmp_path / "file").read_bytes() == saved.tobytes()


NO_ARRAYS = {
    "strings": np.array(["a", "b"]),
    "objects": np.array([{}, None]),
    "dates": np.array(["2020-01-01"], "M8[D]"),
    "records": np.zeros(2, [("a", "i4"), ("b", "f8")]),
    "masked": np.ma.masked_array([1.0, 2.0], mask=[False, True]),
    "foreign byte order": np.arange(3, dtype=">i4"),
    "long double": np.zeros(3, np.longdouble),
    "a field of records": np.zeros(3, [("a", "i1"), ("b", "f8")])["b"],
}


@pytest.mark.parametrize("kind", NO_ARRAYS)
def test_arrays_that_torch_cannot_hold_are_refused_at_save(kind: str, tmp_path: Path) -> None:
    with ckpt.Checkpointer(tmp_path) as ck, pytest.raises(ckpt.Unsupported, match="x: a NumPy array"):
        ck.save(1, {"x": NO_ARRAYS[kind]})


def test_read_only_and_reversed_arrays_can_be_saved_but_not_filled(tmp_path: Path) -> None:
    fixed = np.arange(6.0)
    fixed.flags.writeable = False
    saved = {"fixed": fixed, "reversed": np.arange(6.0)[::-1], "spread": np.broadcast_to(np.float64(3), (2, 3))}
    target = {n: np.zeros(a.shape) for n, a in saved.items()}
    _round_trip(tmp_path, saved, target)
    assert {n: a.tobytes() for n, a in target.items()} == {n: a.tobytes() for n, a in saved.items()}
    for name, array in saved.items():
        before = array.tobytes()
        with ckpt.Checkpointer(tmp_path) as ck, pytest.raises(ckpt.Unsupported, match=f"{name}: .*copy it"):
            ck.load({**target, name: array})
        assert array.tobytes() == before


# Plain values, TrainState, declarations

VALUES: dict[str, Any] = {
    "int": -(2**70),
    "zero": 0,
    "bool": True,
    "float": 0.1,
    "minus zero": -0.0,
    "inf": -math.inf,
    "nan": struct.unpack("<d", bytes.fromhex("010000000000f47f"))[0],
    "complex": complex(-0.0, math.inf),
    "str": "naïve\n\0\ud800",
    "bytes": b"\0\xff",
    "none": None,
    "tuple": (1, (2.0, [True, ("x",)]), ()),
    "list": [[], {}, (), "", b""],
    "mixed keys": {(1, 2): "tuple", None: 0, True: 1, 2.5: "float", "s": 3},
    "ordered": [OrderedDict([("b", 1), ("a", 2)])],
    "counter": [Counter("hello")],
    "size": torch.Size([2, 3]),
    "dtype": torch.bfloat16,
    "device": torch.device("cuda", 3),
    "np.float32": np.float32(-0.0),
    "np.int16": np.int16(-5),
    "np.bool": np.True_,
    "np.complex": np.complex64(1 - 2j),
    "np.str": np.str_("ü"),
    "np.str empty": np.str_(""),
    "np.bytes": np.bytes_(b"ab"),
    "np.date": np.datetime64("2020-02-29T01:02:03.004", "ms"),
    "small tensor": {(0,): torch.tensor([1.0, -0.0], dtype=torch.bfloat16)},
}


def test_plain_values_are_replaced_with_exact_types_bits_and_order(tmp_path: Path) -> None:
    saved = {"values": dict(VALUES), "nested": {"deeper": [torch.zeros(2), dict(VALUES), VALUES["tuple"]]}}
    target: dict[str, Any] = {
        "values": dict.fromkeys(VALUES, "before"),
        "nested": {"deeper": [torch.ones(2), dict.fromkeys(VALUES, 0), None]},
    }
    values, deeper = target["values"], target["nested"]["deeper"]
    _round_trip(tmp_path, saved, target)
    assert target["values"] is values and target["nested"]["deeper"] is deeper  # replaced inside the dict and list
    assert _plain(target) == _plain(saved)


def test_a_tuple_with_tensors_and_values_is_made_anew(tmp_path: Path) -> None:
    saved = {"pair": Pair(torch.ones(2), 5), "plain": (1.5, torch.zeros(1), ("x", torch.ones(1)))}
    tensor = torch.zeros(2)
    target: dict[str, Any] = {"pair": Pair(tensor, 0), "plain": (None, torch.ones(1), (0, torch.zeros(1)))}
    _round_trip(tmp_path, saved, target)
    assert _plain(target) == _plain(saved)
    assert target["pair"].left is tensor


def test_train_state_keeps_values_wherever_they_stand(tmp_path: Path) -> None:
    def build(seed: int) -> ckpt.TrainState:
        model = _net(seed)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * seed, momentum=0.9)
        _step(model, optimizer, seed)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        return ckpt.TrainState(
            model=model,
            optimizer=optimizer,
            scheduler=scheduler,
            data=seed,
            epoch=seed,
            rng={"a": seed},
            ema=_net(seed),
        )

    saved, target = build(1), build(2)
    _round_trip(tmp_path / "top", saved, target)
    _same_train_state(saved, target)
    saved, target = build(3), build(4)
    nested = {"run": target, "n": 0}
    _round_trip(tmp_path / "nested", {"run": saved, "n": 1}, nested)
    _same_train_state(saved, target)
    assert nested["run"] is target and nested["n"] == 1
    plain = build(5)
    as_dict = {**plain.parts(), **plain.extra}
    with ckpt.Checkpointer(tmp_path / "top") as ck:  # a TrainState is the dict of its parts
        ck.load(as_dict)
    assert as_dict["data"] == as_dict["epoch"] == 1
    assert _module_bits(as_dict["model"]) == _module_bits(build(1).model)


def _same_train_state(a: ckpt.TrainState, b: ckpt.TrainState) -> None:
    assert _module_bits(a.model) == _module_bits(b.model)
    assert _module_bits(a.extra["ema"]) == _module_bits(b.extra["ema"])
    assert _optimizer_bits(a.optimizer) == _optimizer_bits(b.optimizer)
    assert (a.data, a.extra["epoch"], a.rng) == (b.data, b.extra["epoch"], b.rng)


def test_declared_values_come_back_declared(tmp_path: Path) -> None:
    saved = {"a": ckpt.per_rank((1, 2.0)), "b": ckpt.replicated(7), "c": ckpt.replicated(torch.ones(2))}
    tensor = torch.zeros(2)
    target: dict[str, Any] = {"a": ckpt.per_rank(None), "b": ckpt.replicated(0), "c": ckpt.replicated(tensor)}
    _round_trip(tmp_path, saved, target)
    assert target["a"] == ckpt.per_rank((1, 2.0)) and type(target["a"].value) is tuple
    assert target["b"] == ckpt.replicated(7)
    assert target["c"].value is tensor and raw(tensor) == raw(torch.ones(2))


def test_a_state_is_a_dict_or_a_train_state(tmp_path: Path) -> None:
    with ckpt.Checkpointer(tmp_path) as ck:
        for state in ([1], torch.ones(1), None, _net(1)):
            with pytest.raises(ckpt.Unsupported, match=r"pass a dict or a ckpt\.TrainState"):
                ck.save(1, state)  # type: ignore[arg-type]
        receipt = ck.save(1, {})  # nothing at all is a state too
        assert receipt.bytes == 0 and ck.load({}) is not None


# Several ranks

ranks = pytest.mark.ranks
Boxes = list[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]


@pytest.fixture(scope="module")
def crew() -> Iterator[Crew]:
    with Crew(4) as made:
        yield made


def _rows(world: int, rank: int, rows: int, columns: int) -> Boxes:
    """An uneven cut: the first rank has about half of the rows, the last one the rest, perhaps none."""
    cuts = [0, *(min(rows, rows // 2 + i * 3) for i in range(world - 1)), rows]
    a, b = cuts[rank], cuts[rank + 1]
    return [((a, 0), (b - a, columns), (0, 0))]


def _blocks_of(world: int, rank: int) -> Boxes:
    """A [7, 10] tensor in boxes of all sizes; a rank's local tensor is [n, 10] and holds several of them."""
    boxes = {
        3: [
            [((0, 0), (3, 10), (0, 0))],
            [((3, 0), (4, 4), (0, 0)), ((3, 4), (2, 6), (0, 4))],
            [((5, 4), (2, 6), (3, 1)), ((0, 0), (3, 10), (0, 0))],  # its second box is a replica of rank 0's
        ],
        2: [
            [((0, 0), (7, 1), (0, 9)), ((2, 1), (5, 9), (2, 0))],
            [((0, 1), (2, 4), (0, 0)), ((0, 5), (2, 5), (2, 5))],
        ],
        1: [[((0, 0), (7, 10), (0, 0))]],
    }
    return boxes[world][rank]  # type: ignore[return-value]


def _flat(world: int, rank: int) -> Boxes:
    """A flat ZeRO range of a [5, 6] tensor: one box for each row it touches, in a one-dimensional local tensor."""
    cuts = [30 * i // world + (i % 2) for i in range(world)] + [30]
    boxes: Boxes = []
    at = cuts[rank]
    while at < cuts[rank + 1]:
        row, column = divmod(at, 6)
        n = min(6 - column, cuts[rank + 1] - at)
        boxes.append(((row, column), (1, n), (at - cuts[rank],)))
        at += n
    return boxes


def _layers(world: int, rank: int) -> Boxes:
    """Layers of a [5, 4, 3] stack, dealt in turn, in a local [k, 4, 3] tensor."""
    return [((layer, 0, 0), (1, 4, 3), (i, 0, 0)) for i, layer in enumerate(range(rank, 5, world))]


SHARDED: dict[str, tuple[tuple[int, ...], torch.dtype, int, Callable[[int, int], Boxes]]] = {
    "blocks": ((7, 10), torch.float64, 0, _blocks_of),
    "flat": ((5, 6), torch.bfloat16, 0, _flat),
    "layers": ((5, 4, 3), torch.float32, 1, _layers),
    "uneven": ((10, 7), torch.uint8, 0, lambda w, r: _rows(w, r, 10, 7)),
    "few rows": ((2, 7), torch.int16, 0, lambda w, r: _rows(w, r, 2, 7)),
    "large": ((1303, 1001), torch.float32, 0, lambda w, r: _rows(w, r, 1303, 1001)),
    "long": ((300_007, 3), torch.complex64, 0, lambda w, r: _rows(w, r, 300_007, 3)),
}


def _local_shape(boxes: Boxes, dims: int) -> tuple[int, ...]:
    if not boxes:
        return (0,) * dims
    return tuple(max(at[-dims + i] + extent[-dims + i] for _, extent, at in boxes) for i in range(dims))


def _sharded_state(world: int, rank: int, filled: bool) -> dict[str, ckpt.ShardedTensor]:
    """This rank's parts, by plain slicing of the full tensors; or random ones to be filled."""
    state = {}
    for number, (name, (shape, dtype, stack, cut)) in enumerate(SHARDED.items()):
        full, boxes = random_bits(shape, dtype, 40 + number), cut(world, rank)
        dims = 1 if name == "flat" else len(shape)
        local = random_bits(_local_shape(boxes, dims), dtype, 900 + rank)
        if name == "blocks":
            local = torch.empty_like(local.t().contiguous()).t().copy_(local)  # a transposed local tensor
        if filled:
            for offset, extent, at in boxes:
                part = full[tuple(slice(o, o + e) for o, e in zip(offset, extent, strict=True))]
                where = tuple(slice(a, a + e) for a, e in zip(at, extent[-dims:], strict=True))
                local[where] = part.reshape(extent[-dims:])
        state[name] = ckpt.ShardedTensor(local, boxes, shape, stack)
    return state


def _group(n: int) -> Any:
    import torch.distributed as dist

    return dist.new_group(list(range(n)))


def _save_sharded(rank: int, world: int, root: str, n: int, step: int) -> str | None:
    group = _group(n)
    if rank >= n:
        return None
    with ckpt.Checkpointer(root, process_group=group) as ck:
        return ck.save(step, {"s": _sharded_state(n, rank, True), "n": 5}).state_id


def _load_sharded(rank: int, world: int, root: str, n: int) -> str | None:
    group = _group(n)
    if rank >= n:
        return None
    expected = _sharded_state(n, rank, True)
    state: dict[str, Any] = {"s": _sharded_state(n, rank, False), "n": 0}
    with ckpt.Checkpointer(root, process_group=group) as ck:
        restored = ck.load(state)
        assert restored is not None
        assert state["n"] == 5
        for name, entry in state["s"].items():
            assert raw(entry.local) == raw(expected[name].local), name
        return ck.save(restored.step + 1, state).state_id


@ranks
def test_sharded_tensors_go_from_3_ranks_to_2_to_1_and_back(crew: Crew, tmp_path: Path) -> None:
    """Several boxes on a rank, uneven and empty ones, replicas, flat ranges, stacked layers; cuts across objects."""
    first = crew.run(_save_sharded, str(tmp_path), 3, 1)[0]
    trees = [tree(attempt_folder(tmp_path) / "state")]
    manifests = [(attempt_folder(tmp_path) / "manifest.json").read_bytes()]
    ids = []
    for n in (2, 1, 3):
        if n == 1:
            full: dict[str, Any] = {n: random_bits(shape, dtype, 7) for n, (shape, dtype, _, _) in SHARDED.items()}
            full["layers"] = ckpt.ShardedTensor(full["layers"], _layers(1, 0), (5, 4, 3), 1)
            with ckpt.Checkpointer(tmp_path) as ck:
                ck.load({"s": full, "n": 0})
                for number, (name, (shape, dtype, _, _)) in enumerate(SHARDED.items()):
                    tensor = full[name].local if name == "layers" else full[name]
                    assert raw(tensor) == raw(random_bits(shape, dtype, 40 + number)), name
                ids.append(ck.save(9, {"s": full, "n": 5}).state_id)
        else:
            ids.append(crew.run(_load_sharded, str(tmp_path), n)[0])
        trees.append(tree(attempt_folder(tmp_path) / "state"))
        manifests.append((attempt_folder(tmp_path) / "manifest.json").read_bytes())
    assert ids == [first] * 3
    assert all(t == trees[0] for t in trees) and all(m == manifests[0] for m in manifests)


MESHES: dict[str, tuple[tuple[int, ...], list[str]]] = {
    "rows of 4": ((4,), ["S0"]),
    "columns of 4": ((4,), ["S1"]),
    "replicas": ((4,), ["R"]),
    "2x2 grid": ((2, 2), ["S0", "S1"]),
    "2x2 grid turned": ((2, 2), ["S1", "S0"]),
    "2x2 on one axis": ((2, 2), ["S0", "S0"]),
    "2 rows, replicated": ((2, 2), ["R", "S0"]),
    "2 columns, replicated": ((2, 2), ["S1", "R"]),
}
FULL: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
    "uneven": ((5, 7), torch.float32),
    "few": ((2, 3), torch.bfloat16),
    "one": ((1, 1), torch.int64),
    "none": ((0, 4), torch.float32),
    "cube": ((6, 5, 3), torch.float16),
    "large": ((603, 401), torch.float64),
}


def _chunk(size: int, parts: int, index: int) -> tuple[int, int]:
    """torch.chunk's rule, by which DTensor cuts: (start, stop) of a part; the last ones may be short or empty."""
    step = -(-size // parts)
    return min(size, step * index), min(size, step * (index + 1))


def _slices(shape: tuple[int, ...], mesh: tuple[int, ...], cuts: list[str], rank: int) -> tuple[slice, ...]:
    ranges = [(0, n) for n in shape]
    at = [rank] if len(mesh) == 1 else list(divmod(rank, mesh[1]))
    for parts, index, cut in zip(mesh, at, cuts, strict=True):
        if cut != "R":
            axis = int(cut[1])
            start, stop = ranges[axis]
            a, b = _chunk(stop - start, parts, index)
            ranges[axis] = (start + a, start + b)
    return tuple(slice(a, b) for a, b in ranges)


def _dtensors(kind: str, rank: int, filled: bool) -> dict[str, Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard

    shape, cuts = MESHES[kind]
    mesh = init_device_mesh("cpu", shape)
    placements = [Replicate() if c == "R" else Shard(int(c[1])) for c in cuts]
    state = {}
    for number, (name, (full_shape, dtype)) in enumerate(FULL.items()):
        full = random_bits(full_shape, dtype, 70 + number)
        local = full[_slices(full_shape, shape, cuts, rank)].contiguous()
        if not filled:
            local = random_bits(tuple(local.shape), dtype, 600)
        state[name] = DTensor.from_local(
            local, mesh, placements, run_check=False, shape=torch.Size(full_shape), stride=full.stride()
        )
    return state


def _dtensor_pairs(rank: int, world: int, root: str) -> list[str]:
    """Saves on every mesh, loads every one on every other; compares with plain slices of the full tensors."""
    ids = []
    for number, kind in enumerate(MESHES):
        with ckpt.Checkpointer(f"{root}/{number}") as ck:
            ids.append(ck.save(1, _dtensors(kind, rank, True)).state_id)
    for number in range(len(MESHES)):
        with ckpt.Checkpointer(f"{root}/{number}", read_only=True) as ck:
            for kind, (shape, cuts) in MESHES.items():
                state = _dtensors(kind, rank, False)
                assert ck.load(state) is not None
                for i, (name, (full_shape, dtype)) in enumerate(FULL.items()):
                    part = random_bits(full_shape, dtype, 70 + i)[_slices(full_shape, shape, cuts, rank)]
                    assert raw(state[name].to_local()) == raw(part), (number, kind, name)
    return ids


@ranks
@pytest.mark.slow
def test_dtensors_on_meshes_of_one_and_two_axes(crew: Crew, tmp_path: Path) -> None:
    ids = crew.run(_dtensor_pairs, str(tmp_path), timeout=240)
    assert len({x for one in ids for x in one}) == 1
    trees = [tree(attempt_folder(tmp_path / str(i)) / "state") for i in range(len(MESHES))]
    assert all(t == trees[0] for t in trees)
    plain = {n: torch.zeros(s, dtype=d) for n, (s, d) in FULL.items()}
    with ckpt.Checkpointer(tmp_path / "0") as ck:  # and without torch.distributed
        ck.load(plain)
        assert {n: raw(t) for n, t in plain.items()} == {
            n: raw(random_bits(s, d, 70 + i)) for i, (n, (s, d)) in enumerate(FULL.items())
        }
        assert ck.save(2, plain).state_id == ids[0][0]
    assert tree(attempt_folder(tmp_path / "0") / "state") == trees[0]


def _dtensor_model(rank: int, kind: str, label: float) -> tuple[nn.Module, torch.optim.Optimizer, dict[str, Any]]:
    """A module of DTensor parameters, one of them tied, and an Adam: with labelled state, or cold if label is 0."""
    from torch.distributed.tensor import DTensor

    shape, cuts = MESHES[kind]
    model = nn.Module()
    slices = {}
    for name, dtensor in _dtensors(kind, rank, True).items():
        if name in ("uneven", "few", "large"):
            float_local = dtensor.to_local().to(torch.float32)
            where = _slices(tuple(dtensor.shape), shape, cuts, rank)
            slices[name] = where
            local = (label + labelled(tuple(dtensor.shape)))[where].contiguous()
            assert local.shape == float_local.shape
            made = DTensor.from_local(
                local,
                dtensor.device_mesh,
                dtensor.placements,
                run_check=False,
                shape=dtensor.shape,
                stride=labelled(tuple(dtensor.shape)).stride(),
            )
            setattr(model, name, nn.Parameter(made))
    model.also_few = model.few
    optimizer = torch.optim.Adam(model.parameters())
    if label:
        parameter: Any
        for parameter in model.parameters():
            state = {"step": torch.tensor(label)}
            for key, more in (("exp_avg", 0.25), ("exp_avg_sq", 0.5)):
                like = parameter.detach().to_local() + more
                state[key] = DTensor.from_local(
                    like,
                    parameter.device_mesh,
                    parameter.placements,
                    run_check=False,
                    shape=parameter.shape,
                    stride=parameter.stride(),
                )
            optimizer.state[parameter] = state
    return model, optimizer, slices


def _dtensor_training(rank: int, world: int, root: str) -> None:
    model, optimizer, _ = _dtensor_model(rank, "rows of 4", 8.0)
    with ckpt.Checkpointer(root) as ck:
        ck.save(1, {"model": model, "opt": optimizer})
        for kind in ("2x2 grid", "replicas"):
            model, optimizer, slices = _dtensor_model(rank, kind, 0.0)
            ck.load({"opt": optimizer, "model": model})
            assert model.also_few is model.few
            for name, where in slices.items():
                parameter = getattr(model, name)
                state = optimizer.state[parameter]
                full = 8.0 + labelled(tuple(parameter.shape))
                assert raw(parameter.to_local()) == raw(full[where])
                assert raw(state["exp_avg"].to_local()) == raw((full + 0.25)[where])
                assert raw(state["exp_avg_sq"].to_local()) == raw((full + 0.5)[where])
                assert raw(state["step"]) == raw(torch.tensor(8.0))
                assert state["exp_avg"].placements == parameter.placements


@ranks
def test_dtensor_parameters_tied_ones_and_their_moments(crew: Crew, tmp_path: Path) -> None:
    """`few` has two rows on four ranks and two names: the ranks that hold nothing of it cannot see the tie."""
    crew.run(_dtensor_training, str(tmp_path))
    model = {"uneven": torch.zeros(5, 7), "few": torch.zeros(2, 3), "large": torch.zeros(603, 401)}
    with ckpt.Checkpointer(tmp_path) as ck:
        ck.load({"model": {**model, "also_few": torch.zeros(2, 3)}}, allow_extra=["opt/*"])
    assert {n: raw(t) for n, t in model.items()} == {n: raw(8.0 + labelled(tuple(t.shape))) for n, t in model.items()}


def _refused_dtensors(rank: int, world: int, root: str) -> list[str]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    mesh = init_device_mesh("cpu", (4,))
    pair = init_device_mesh("cpu", (2, 2))
    partial = DTensor.from_local(torch.ones(3), mesh, [Partial()], run_check=False)
    nested = DTensor.from_local(
        torch.ones(2), pair, [Replicate(), Shard(0)], run_check=False, shape=torch.Size([9]), stride=(1,)
    )
    found = []
    with ckpt.Checkpointer(root) as ck:
        for tensor in (partial, nested):
            try:
                ck.save(1, {"x": tensor})
            except ckpt.CkptError as error:
                found.append(f"{type(error).__name__}: {error}")
    return found


@ranks
def test_dtensors_whose_local_part_does_not_tell_are_refused(crew: Crew, tmp_path: Path) -> None:
    for partial, nested in crew.run(_refused_dtensors, str(tmp_path)):
        assert "Unsupported" in partial and "x: DTensor placement" in partial and "Shard and Replicate" in partial
        assert "StateMismatch" in nested and "x: local shape [2] of a DTensor that should have" in nested


def _pipeline(rank: int, world: int, root: str) -> str:
    """Each rank has entries of its own: tensors, values, an optimizer over its own layers; one is on all."""
    torch.manual_seed(5)  # the same full model everywhere, of which each rank keeps a layer
    full = nn.ModuleList([nn.Linear(4, 4) for _ in range(4)])
    mine = nn.ModuleDict({str(rank): full[rank]})
    optimizer = torch.optim.AdamW(mine.parameters(), lr=0.125)
    full[rank](torch.ones(1, 4)).sum().backward()
    optimizer.step()
    expected = _module_bits(mine), _optimizer_bits(optimizer)
    state: dict[str, Any] = {"model": mine, "opt": optimizer, "only": {f"rank{rank}": rank}, "all": 3}
    with ckpt.Checkpointer(root) as ck:
        state_id = ck.save(1, state).state_id
        other = nn.ModuleDict({str(3 - rank): nn.Linear(4, 4)})  # the stages the other way round
        fresh = torch.optim.AdamW(other.parameters())
        state = {"model": other, "opt": fresh, "only": {f"rank{3 - rank}": None}, "all": 0}
        assert ck.load(state) is not None
        assert state["only"] == {f"rank{3 - rank}": 3 - rank} and state["all"] == 3
        assert fresh.param_groups[0]["lr"] == 0.125
        again = nn.ModuleDict({str(rank): nn.Linear(4, 4)})
        own = torch.optim.AdamW(again.parameters())
        ck.load({"model": again, "opt": own, "only": {f"rank{rank}": None}, "all": 0})
        assert (_module_bits(again), _optimizer_bits(own)) == expected
        assert _module_bits(other) == {f"{3 - rank}.{n}": raw(_stepped(3 - rank)[n]) for n in ("weight", "bias")}
    return state_id


def _stepped(layer: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(5)
    full = nn.ModuleList([nn.Linear(4, 4) for _ in range(4)])
    optimizer = torch.optim.AdamW(full[layer].parameters(), lr=0.125)
    full[layer](torch.ones(1, 4)).sum().backward()
    optimizer.step()
    return dict(full[layer].named_parameters())


@ranks
def test_ranks_may_hold_different_entries_and_swap_them(crew: Crew, tmp_path: Path) -> None:
    ids = crew.run(_pipeline, str(tmp_path))
    assert len(set(ids)) == 1
    whole = nn.ModuleDict({str(i): nn.Linear(4, 4) for i in range(4)})
    state = {"model": whole, "only": {f"rank{i}": None for i in range(4)}, "all": 0}
    with ckpt.Checkpointer(tmp_path) as ck:
        ck.load(state, allow_extra=["opt/*"])
    assert state["only"] == {f"rank{i}": i for i in range(4)}
    assert _module_bits(whole) == {f"{i}.{n}": raw(_stepped(i)[n]) for i in range(4) for n in ("weight", "bias")}


def _replicas(rank: int, world: int, root: str) -> str:
    with ckpt.Checkpointer(root) as ck:
        return ck.save(
            1, {"t": random_bits((200, 100), torch.float32, 3), "s": random_bits((), torch.int8, 4), "v": 1}
        ).state_id


@ranks
def test_what_is_saved_with_torch_distributed_and_without_is_the_same(crew: Crew, tmp_path: Path) -> None:
    ids = crew.run(_replicas, str(tmp_path / "four"))
    alone = _replicas(0, 1, str(tmp_path / "one"))
    assert set(ids) == {alone}
    one, four = attempt_folder(tmp_path / "one"), attempt_folder(tmp_path / "four")
    assert tree(one / "state") == tree(four / "state")
    assert (one / "manifest.json").read_bytes() == (four / "manifest.json").read_bytes()
