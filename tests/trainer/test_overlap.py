"""Saves that copy beside the training: what is saved is the state of the moment of the call, or nothing."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckpt
from ckpt.engine import staging
from tests.support.ranks import Crew
from tests.support.raw import raw

WORLD = 2


class Net(nn.Module):
    """A weight that is trained, one that is frozen, and a buffer that the forward pass changes."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(300, 200)
        self.frozen = nn.Parameter(torch.randn(50, 60), requires_grad=False)
        self.norm = nn.BatchNorm1d(200)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.norm(self.body(x)).square().mean()
        return found


def make(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    net = Net()
    optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    return {"net": net, "optimizer": optimizer, "scheduler": scheduler, "rng": ckpt.RngState(), "step": 0}


def forward(state: dict[str, Any]) -> None:
    state["optimizer"].zero_grad()
    state["net"](torch.randn(16, 300)).backward()


def train(state: dict[str, Any], first: int, steps: int = 1) -> None:
    for step in range(first, first + steps):
        forward(state)
        state["optimizer"].step()
        state["scheduler"].step()
        state["step"] = step


def bits(state: dict[str, Any]) -> Any:
    inner = state["optimizer"].state_dict()
    moments = {(p, k): raw(v) for p, own in inner["state"].items() for k, v in own.items()}
    tensors = {name: raw(t) for name, t in state["net"].state_dict().items()}
    return (
        tensors,
        moments,
        inner["param_groups"],
        state["scheduler"].state_dict(),
        state["step"],
        torch.get_rng_state(),
    )


def same(one: Any, other: Any) -> bool:
    return bool(one[:-1] == other[:-1] and raw(one[-1]) == raw(other[-1]))


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """Copies in another thread than this one wait until it is called."""
    go, here, real = threading.Event(), threading.current_thread(), staging.copy_boxes

    def slow(pairs: Any) -> None:
        if threading.current_thread() is not here:
            assert go.wait(60)
        real(pairs)

    monkeypatch.setattr(staging, "copy_boxes", slow)
    yield go.set
    go.set()


def reloaded(root: Path, step: int) -> Any:
    other = make(99)
    with ckpt.Checkpointer(root, read_only=True) as reader:
        done = reader.load(other, step)
        assert done is not None and done.verified
    return bits(other)


def test_forward_and_backward_go_on_and_the_step_waits(tmp_path: Path, gate: Callable[[], None]) -> None:
    state = make(1)
    train(state, 1)
    with ckpt.Checkpointer(tmp_path, overlap=True, timeout=60) as ck:
        wanted = bits(state)
        pending = ck.save_async(1, state)
        state["step"] = 7
        forward(state)  # changes the buffers and the random stream
        with torch.no_grad():
            state["net"].frozen.fill_(3)
        assert not pending.done()
        stepped = threading.Event()

        def step() -> None:
            state["optimizer"].step()
            stepped.set()

        stepping = threading.Thread(target=step)
        stepping.start()
        assert not stepped.wait(0.3) and raw(state["net"].body.weight) == wanted[0]["body.weight"]
        gate()
        pending.captured()
        assert stepped.wait(30)
        stepping.join()
        assert pending.result(60).step == 1
        assert raw(state["net"].body.weight) != wanted[0]["body.weight"]
        assert same(reloaded(tmp_path, 1), wanted)
        train(state, 2)
        assert ck.save_async(2, state).result(60).state_id == ck.save(3, state).state_id
    assert not state["optimizer"]._optimizer_step_pre_hooks


def in_place(state: dict[str, Any]) -> str:
    with torch.no_grad():
        state["net"].body.weight[3].mul_(2)
    return "net/body.weight"


def a_moment(state: dict[str, Any]) -> str:
    state["optimizer"].state[state["net"].body.bias]["exp_avg"].zero_()
    return "optimizer/state/net/body.bias/exp_avg"


@pytest.mark.parametrize("change", [in_place, a_moment])
def test_what_changes_beside_the_copy_voids_the_save(
    tmp_path: Path, gate: Callable[[], None], change: Callable[[Any], str]
) -> None:
    state = make(1)
    train(state, 1)
    with ckpt.Checkpointer(tmp_path, overlap=True, timeout=60) as ck:
        pending = ck.save_async(1, state)
        name = change(state)
        gate()
        with pytest.raises(ckpt.StateMismatch, match="changed while it was copied beside the training") as error:
            pending.result(60)
        assert name.split("/")[-1] in str(error.value)
        assert ck.save_async(2, state).result(60).step == 2
        assert ck.steps() == [2]
        assert same(reloaded(tmp_path, 2), bits(state))


def test_what_is_rebound_beside_the_copy_is_saved_as_it_was(tmp_path: Path, gate: Callable[[], None]) -> None:
    state = make(1)
    train(state, 1)
    with ckpt.Checkpointer(tmp_path, overlap=True, timeout=60) as ck:
        wanted = bits(state)
        pending = ck.save_async(1, state)
        for parameter in state["net"].parameters():
            parameter.data = torch.zeros_like(parameter)
        state["optimizer"].state.clear()
        gate()
        pending.result(60)
        assert same(reloaded(tmp_path, 1), wanted)


def test_after_step_overlaps_and_its_schedule_holds(tmp_path: Path) -> None:
    state = make(1)
    kept = {}
    with ckpt.Checkpointer(tmp_path, overlap=True, every_steps=2, timeout=60) as ck:
        for step in range(1, 9):
            train(state, step)
            if step % 2 == 0:
                kept[step] = bits(state)
            ck.after_step(step, state)
    for step, wanted in kept.items():
        assert same(reloaded(tmp_path, step), wanted)


def test_an_error_of_the_copy_itself_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state, real, here = make(1), staging.copy_boxes, threading.current_thread()

    def failing(pairs: Any) -> None:
        if threading.current_thread() is not here:
            raise MemoryError("no more")
        real(pairs)

    with ckpt.Checkpointer(tmp_path, overlap=True, timeout=60) as ck:
        monkeypatch.setattr(staging, "copy_boxes", failing)
        ck.save_async(1, state).captured()
        monkeypatch.setattr(staging, "copy_boxes", real)
        with pytest.raises(ckpt.CkptError, match=r"the save of step 1 in the background failed.*MemoryError: no more"):
            ck.save_async(2, state)
        assert ck.save_async(3, state).result(60).step == 3


# --- ranks ---


@pytest.fixture(scope="module")
def crew() -> Iterator[Crew]:
    with Crew(WORLD) as crew:
        yield crew


def one_rank_changes(rank: int, world: int, root: str) -> tuple[str, list[int]]:
    state = make(1)
    train(state, 1)
    real, here = staging.copy_boxes, threading.current_thread()

    def slow(pairs: Any) -> None:
        if threading.current_thread() is not here:
            time.sleep(0.5)
        real(pairs)

    staging.copy_boxes = slow  # type: ignore[assignment]
    try:
        with ckpt.Checkpointer(root, ckpt.Layout(dp=world), overlap=True, timeout=60) as ck:
            ck.save_async(1, state).result(60)
            pending = ck.save_async(2, state)
            if rank == 1:
                in_place(state)
            error = pending.exception(60)
            pending = ck.save_async(3, make(5))
            pending.captured()
            assert pending.result(60).step == 3
            return f"{type(error).__name__}: {error}", ck.steps()
    finally:
        staging.copy_boxes = real


@pytest.mark.ranks
def test_all_ranks_hear_of_a_change_on_one(crew: Crew, tmp_path: Path) -> None:
    found = crew.run(one_rank_changes, str(tmp_path / "root"), timeout=90)
    for said, steps in found:
        assert steps == [1, 3] and said.startswith("StateMismatch") and "body.weight: changed while" in said
    assert "rank 1 failed" in found[0][0]
