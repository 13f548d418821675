"""Case 12, pytorch-126881: silently skipped keys.

The fault: a load goes by the keys that the target has, so what a fresh optimizer or loader does not have yet is left
out without a word, and training goes on from defaults. Here a target that has never stepped gets all of its state; a
name that is missing, extra or another one is an error that says it; and a parameter that never had state is not taken
for one whose state was lost.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckpt
from tests.engine.states import module_bits, optimizer_bits, typed_bits
from tests.support.ranks import Crew
from tests.support.raw import forge_pinned, labelled, raw

# --- Targets that have never stepped ---


class Loader:
    """A data loader whose state is made when the first batch is drawn, or (lazy) is not even there before."""

    def __init__(self, lazy: bool = False) -> None:
        self.state: dict[str, Any] = {} if lazy else {"epoch": 0, "seen": [], "buffer": torch.zeros(4), "last": None}

    def draw(self) -> None:
        seen = [*self.state.get("seen", []), (len(self.state), "sample")]
        self.state = {"epoch": 3, "seen": seen, "buffer": labelled((4,)) + len(seen), "last": -0.0}

    def state_dict(self) -> dict[str, Any]:
        return dict(self.state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = dict(state)


def _run(seed: int, steps: int) -> dict[str, Any]:
    """A run with all that one may hold: model, optimizer, schedule, an average of the weights, and a loader."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 6))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, amsgrad=True)
    state = {
        "model": model,
        "opt": optimizer,
        "schedule": torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=50),
        "plateau": torch.optim.lr_scheduler.ReduceLROnPlateau(torch.optim.SGD([torch.zeros(1)], lr=1.0)),
        "average": torch.optim.swa_utils.AveragedModel(model),
        "loader": Loader(),
        "step": 0,
    }
    for _ in range(steps):
        _step(state)
    return state


def _step(state: dict[str, Any]) -> None:
    state["step"] += 1
    data = labelled((4, 6)) / 24 * state["step"]
    state["opt"].zero_grad()
    loss = state["model"](data).square().mean()
    loss.backward()
    state["opt"].step()
    state["schedule"].step()
    state["plateau"].step(loss.item())
    state["average"].update_parameters(state["model"])
    state["loader"].draw()


def _bits(state: dict[str, Any]) -> Any:
    found = [typed_bits(state[key].state_dict()) for key in ("schedule", "plateau", "loader")]
    found += [module_bits(state[key]) for key in ("model", "average")]
    return [*found, optimizer_bits(state["opt"]), state["step"]]


def test_a_cold_target_gets_all_that_was_saved(tmp_path: Path) -> None:
    saved, cold, warm = _run(1, steps=3), _run(2, steps=0), _run(3, steps=5)
    with ckpt.Checkpointer(tmp_path) as ck:
        receipt = ck.save(3, saved)
        for target in (cold, warm):
            restored = ck.load(target)
            assert restored is not None and restored.bytes == receipt.bytes
            assert _bits(target) == _bits(saved)
    for _ in range(3):
        for state in (saved, cold, warm):
            _step(state)
        assert _bits(cold) == _bits(saved) and _bits(warm) == _bits(saved)


def test_a_loader_that_has_no_keys_yet_is_refused_by_name_not_skipped(tmp_path: Path) -> None:
    loader, lazy = Loader(), Loader(lazy=True)
    loader.draw()
    with ckpt.Checkpointer(tmp_path) as ck:
        ck.save(1, {"loader": loader})
        with pytest.raises(ckpt.StateMismatch, match=r"the checkpoint has no loader"):
            ck.load({"loader": lazy})
        names = r"holds loader/buffer, loader/epoch, loader/last, loader/seen, which no rank's state has"
        with pytest.raises(ckpt.StateMismatch, match=names):
            ck.load({"loader": lazy}, allow_missing=["loader"])
        assert lazy.state == {}
        lazy.draw()  # once it has its keys, it is filled
        ck.load({"loader": lazy})
    assert typed_bits(lazy.state) == typed_bits(loader.state)


# --- Names that are missing, extra, or others ---


def _net(names: str, seed: int, steps: int = 0) -> dict[str, Any]:
    """Linear layers by these names, each with an Adam state."""
    torch.manual_seed(seed)
    model = nn.ModuleDict({n: nn.Linear(3, 3, bias=False) for n in names})
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for _ in range(steps):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 0.5)
        optimizer.step()
    return {"model": model, "opt": optimizer}


def _net_bits(state: dict[str, Any]) -> Any:
    return module_bits(state["model"]), optimizer_bits(state["opt"])


def _moments(state: dict[str, Any], parameter: torch.Tensor) -> dict[str, bytes]:
    return {key: raw(x) for key, x in state["opt"].state[parameter].items()}


NAMES: dict[str, tuple[str, list[str], list[str]]] = {
    # the target's layers; words of the first refusal; and of what is still refused when missing names are allowed
    "one more": ("abcd", ["has no model/d.weight, opt/param_groups/model/d.weight", "allow_missing"], []),
    "one less": ("ab", ["holds model/c.weight, opt/param_groups/model/c.weight, opt/state/model/c.weight/"], []),
    "one renamed": ("abx", ["has no model/x.weight, opt/param_groups/model/x.weight"], ["holds model/c.weight, opt/"]),
}


@pytest.mark.parametrize("cold", [True, False], ids=["cold", "warm"])
@pytest.mark.parametrize("kind", NAMES)
def test_other_names_are_refused_by_name(kind: str, cold: bool, tmp_path: Path) -> None:
    names, words, then = NAMES[kind]
    saved, target = _net("abc", 1, steps=3), _net(names, 2, steps=0 if cold else 1)
    missing = ["*/[dx].weight", "*/[dx].weight/*"]
    with ckpt.Checkpointer(tmp_path) as ck:
        ck.save(1, saved)
        before = _net_bits(target)
        for allowed, expected in (([], words), (missing, then)):
            if expected:
                with pytest.raises(ckpt.StateMismatch) as error:
                    ck.load(target, allow_missing=allowed)
                assert all(word in str(error.value) for word in expected), str(error.value)
                assert _net_bits(target) == before
        ck.load(target, allow_missing=missing, allow_extra=["*c.weight*"])
    for n in set(names) & set("abc"):
        mine, other = target["model"][n].weight, saved["model"][n].weight
        assert raw(mine) == raw(other)
        assert _moments(target, mine) == _moments(saved, other)
    for n in set(names) - set("abc"):  # keeps what it had
        state = target["opt"].state.get(target["model"][n].weight, {})
        assert (state == {}) is cold


def _without(document: dict[str, Any], name: str) -> None:
    """Takes a tensor out of a manifest."""
    kept = [n for n, t in enumerate(document["tensors"]) if name not in str(t)]
    assert len(kept) == len(document["tensors"]) - 1
    document["tensors"] = [document["tensors"][n] for n in kept]


def test_a_moment_that_was_taken_out_of_the_checkpoint(tmp_path: Path) -> None:
    """Even where every checksum was made to fit, the state id does not."""
    with ckpt.Checkpointer(tmp_path) as ck:
        ck.save(1, _net("ab", 1, steps=3))
    forge_pinned(tmp_path, "manifest.json", lambda d: _without(d, "opt/state/model/b.weight/exp_avg'"))
    target = _net("ab", 2)
    before = _net_bits(target)
    with ckpt.Checkpointer(tmp_path) as ck:
        with pytest.raises(ckpt.CorruptCheckpoint, match=r"manifest\.json: .* contradicts itself"):
            ck.load(target)
    assert _net_bits(target) == before


def test_a_moment_that_was_lost_before_the_save(tmp_path: Path) -> None:
    saved, target = _net("ab", 1, steps=3), _net("ab", 2, steps=1)
    del saved["opt"].state[saved["model"]["b"].weight]["exp_avg"]
    with ckpt.Checkpointer(tmp_path) as ck:
        ck.save(1, saved)
        before = _net_bits(target)
        with pytest.raises(ckpt.StateMismatch, match=r"has no opt/state/model/b\.weight/exp_avg;"):
            ck.load(target)
    assert _net_bits(target) == before


# --- Never had state, or lost it ---


def _partly_trained(seed: int, steps: int, unused: str) -> dict[str, Any]:
    """Some parameters have never had a gradient, though they are trained."""
    state = _net("abc", seed)
    for _ in range(steps):
        _train(state, unused)
    return state


def _train(state: dict[str, Any], unused: str) -> None:
    for n, layer in state["model"].items():
        layer.weight.grad = None if n in unused else torch.full_like(layer.weight, 0.5)
    state["opt"].step()


def test_a_parameter_that_never_had_a_gradient_has_none_after_a_load(tmp_path: Path) -> None:
    """No state is not a state of zeros: its first step is number one, whenever it comes."""
    saved, target = _partly_trained(1, 3, unused="b"), _net("abc", 2)
    with ckpt.Checkpointer(tmp_path) as ck:
        ck.save(1, saved)
        ck.load(target)
    assert not target["opt"].state.get(target["model"]["b"].weight)
    assert _net_bits(target) == _net_bits(saved)
    for state in (saved, target):
        _train(state, unused="")
    steps = {n: target["opt"].state[layer.weight]["step"].item() for n, layer in target["model"].items()}
    assert steps == {"a": 4.0, "b": 1.0, "c": 4.0}
    assert _net_bits(target) == _net_bits(saved)


def test_state_that_the_checkpoint_has_not_is_kept_only_where_that_is_allowed(tmp_path: Path) -> None:
    saved, target = _partly_trained(1, 3, unused="b"), _net("abc", 2, steps=2)
    weight = target["model"]["b"].weight
    before, own = _net_bits(target), typed_bits(target["opt"].state[weight])
    words = "has no " + ", ".join(f"opt/state/model/b.weight/{key}" for key in ("exp_avg", "exp_avg_sq", "step"))
    with ckpt.Checkpointer(tmp_path) as ck:
        ck.save(1, saved)
        with pytest.raises(ckpt.StateMismatch, match=words):
            ck.load(target)
        assert _net_bits(target) == before
        ck.load(target, allow_missing=["opt/state/model/b.weight/*"])
    assert raw(weight) == raw(saved["model"]["b"].weight)
    assert typed_bits(target["opt"].state[weight]) == own


# --- The same in a stack of layers, of which each rank has one ---


def _layer(rank: int, seed: float, steps: int, *, used: bool) -> dict[str, Any]:
    parameter = nn.Parameter(torch.full((2, 3), seed + rank))
    optimizer = torch.optim.Adam([parameter], lr=0.1)
    for _ in range(steps if used else 0):
        parameter.grad = torch.full_like(parameter, 0.5)
        optimizer.step()
    box = ((rank, 0, 0), (1, 2, 3), (0, 0))
    return {"w": ckpt.ShardedTensor(parameter, [box], (2, 2, 3), stack=1), "opt": optimizer}


def _error(action: Callable[[], Any]) -> str:
    with pytest.raises(ckpt.StateMismatch) as error:
        action()
    return str(error.value)


def _stack(rank: int, world: int, folder: str) -> dict[str, str]:
    said = {}
    saved, cold = _layer(rank, 1.0, 3, used=rank == 0), _layer(rank, 5.0, 0, used=False)
    with ckpt.Checkpointer(f"{folder}/never") as ck:
        ck.save(1, saved)
        ck.load(cold)
        assert optimizer_bits(cold["opt"]) == optimizer_bits(saved["opt"])
        assert raw(cold["w"].local) == raw(saved["w"].local)
        assert bool(cold["opt"].state.get(cold["w"].local)) is (rank == 0)
        warm = _layer(rank, 5.0, 2, used=True)
        said["warm"] = _error(lambda: ck.load(warm))
        assert raw(warm["w"].local) == raw(_layer(rank, 5.0, 2, used=True)["w"].local)
    with ckpt.Checkpointer(f"{folder}/lost") as ck:
        lost = _layer(rank, 1.0, 3, used=True)
        if rank == 1:
            del lost["opt"].state[lost["w"].local]["exp_avg"]
        said["lost"] = _error(lambda: ck.save(1, lost))
        assert ck.latest() is None
    return said


@pytest.fixture(scope="module")
def crew() -> Iterator[Crew]:
    with Crew(2) as made:
        yield made


@pytest.mark.ranks
def test_a_layer_without_state_is_not_a_layer_that_lost_it(crew: Crew, tmp_path: Path) -> None:
    for said in crew.run(_stack, str(tmp_path), timeout=60):
        assert "opt/state/w/exp_avg" in said["warm"] and "allow_missing" in said["warm"]
        assert "opt/state/w/exp_avg: no rank holds the elements [1:2" in said["lost"]
