"""Case 7: fp32 masters of 16-bit parameters come back bit for bit, or what hides them is refused. None is rebuilt."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ckpt
from tests.support.ranks import run_ranks
from tests.support.raw import raw

SHAPES = {"a": (10,), "b": (7,), "c": (3,), "d": ()}
BEYOND = 2.0**-12  # added to a master, 1 + this is 1 in bfloat16


class Momentum(torch.optim.Optimizer):
    """Gradient descent with momentum, one element like another, whose moments have a dtype of their own."""

    def __init__(self, parameters: Any, moments: torch.dtype) -> None:
        super().__init__(parameters, {"lr": 0.125, "moments": moments})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state.setdefault("step", 0)
                moment = state.setdefault("moment", torch.zeros_like(parameter, dtype=group["moments"]).detach())
                state["step"] += 1
                moment.copy_(0.9 * moment.float() + parameter.grad.float())
                parameter.data.add_(-group["lr"] * moment.to(parameter.dtype))


def _gradient(number: torch.Tensor, step: int) -> torch.Tensor:
    """The gradient of the elements with these numbers at a step, the same wherever they lie."""
    return ((number * 37 + step * 11) % 29 - 14).float() / 64


class Job:
    """A model of `working` dtype in training. masters: fp32 copies that are stepped in its place. world, rank: of ranks
    that have a piece each of what is stepped (ZeRO), cut from all of it."""

    def __init__(
        self, seed: int, working: torch.dtype, masters: bool, moments: torch.dtype, rank: int = 0, world: int = 1
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        whole = {n: torch.randn(s, generator=generator) + 2 for n, s in SHAPES.items()}
        self.working = {n: x.to(working) for n, x in whole.items()}
        self.masters = masters
        self.cuts = {n: _cut(x.numel(), rank, world) for n, x in whole.items()}
        split = world > 1
        stepped = whole if masters else self.working
        self.stepped = {n: self._piece(n, x).clone() if masters or split else x for n, x in stepped.items()}
        for x in self.stepped.values():
            x.requires_grad_()
        self.numbers = {n: self._piece(n, torch.arange(x.numel()).reshape(x.shape)) for n, x in whole.items()}
        self.optimizer = Momentum(list(self.stepped.values()), moments)
        self.steps, self.split = 0, split

    def _piece(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        start, stop = self.cuts[name]
        return whole[start:stop] if whole.dim() else whole

    def state(self) -> dict[str, Any]:
        state: dict[str, Any] = {"opt": self.optimizer, "steps": self.steps, "model": self.working}
        if self.split:
            pieces = {n: self._declared(n, x) for n, x in self.stepped.items()}
            state = {**state, "model": self.working if self.masters else {}, "masters": pieces}
        elif self.masters:
            state["masters"] = self.stepped
        return state

    def _declared(self, name: str, piece: torch.Tensor) -> ckpt.ShardedTensor:
        start, stop = self.cuts[name]
        if not SHAPES[name]:
            return ckpt.ShardedTensor(piece, [((), (), ())], ())
        boxes = [((start,), (stop - start,), (0,))] if stop > start else []
        return ckpt.ShardedTensor(piece, boxes, SHAPES[name])

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.steps += 1
            for name, x in self.stepped.items():
                x.grad = _gradient(self.numbers[name], self.steps).to(x.dtype)
            self.optimizer.step()
        if self.masters and not self.split:
            for name, x in self.stepped.items():
                self.working[name].copy_(x.detach())

    def bits(self) -> dict[str, tuple[bytes, bytes, Any]]:
        """What is stepped, its moments and its count of steps."""
        return {n: self._bits(x) for n, x in self.stepped.items()}

    def _bits(self, x: torch.Tensor) -> tuple[bytes, bytes, Any]:
        state = self.optimizer.state[x]
        return raw(x), raw(state["moment"]), (type(state["step"]), state["step"], state["moment"].dtype)

    def working_bits(self) -> dict[str, bytes]:
        return {n: raw(x) for n, x in self.working.items()}


def _cut(numel: int, rank: int, world: int) -> tuple[int, int]:
    size = -(-numel // world)
    return min(numel, rank * size), min(numel, (rank + 1) * size)


Options = tuple[torch.dtype, bool, torch.dtype]

SWEEP: dict[str, Options] = {
    "fp32": (torch.float32, False, torch.float32),
    "fp32, bf16 moments": (torch.float32, False, torch.bfloat16),
    "bf16": (torch.bfloat16, False, torch.bfloat16),
    "bf16, fp32 moments": (torch.bfloat16, False, torch.float32),
    "bf16 with masters": (torch.bfloat16, True, torch.float32),
    "bf16 with masters, bf16 moments": (torch.bfloat16, True, torch.bfloat16),
    "fp16 with masters": (torch.float16, True, torch.float32),
}


def _trained(kind: str) -> Job:
    """A whole job after 5 steps, whose masters no 16-bit number has."""
    job = Job(1, *SWEEP[kind])
    job.train(5)
    if job.masters:
        with torch.no_grad():
            for name, x in job.stepped.items():
                x.copy_(job.working[name].float() + BEYOND * (1 + job.numbers[name]) / 16)
                assert raw(x) != raw(x.to(job.working[name].dtype).float())
                job.working[name].copy_(x)
    return job


@pytest.mark.parametrize("cold", [True, False], ids=["cold", "warm"])
@pytest.mark.parametrize("kind", SWEEP)
def test_what_is_stepped_comes_back_bit_for_bit(kind: str, cold: bool, tmp_path: Path) -> None:
    job, resumed = _trained(kind), Job(2, *SWEEP[kind])
    if not cold:
        resumed.train(2)
    saved, working = job.bits(), job.working_bits()
    with ckpt.Checkpointer(tmp_path) as ck:
        receipt = ck.save(5, job.state())
        state = resumed.state()
        ck.load(state)
        assert (resumed.bits(), resumed.working_bits(), state["steps"]) == (saved, working, 5)
        resumed.steps = state["steps"]
        assert ck.save(6, resumed.state()).state_id == receipt.state_id
    for one in (job, resumed):
        one.train(5)
    assert (resumed.bits(), resumed.working_bits()) == (job.bits(), job.working_bits()) and job.bits() != saved


def _zero(rank: int, world: int, root: str) -> list[str]:
    """Two ranks save pieces of a job; four load pieces of another cut, and go on. Gives what was not as it must be."""
    wrong = []
    two = dist.new_group([0, 1])
    for kind, options in SWEEP.items():
        whole = _trained(kind)
        if rank < 2:
            with ckpt.Checkpointer(f"{root}/{kind}", ckpt.Layout(dp=2), process_group=two) as ck:
                ck.save(5, _pieces_of(whole, options, rank, 2).state())
        dist.barrier()
        resumed = Job(3, *options, rank, 4)
        with ckpt.Checkpointer(f"{root}/{kind}", ckpt.Layout(dp=4)) as ck:
            ck.load(resumed.state())
        resumed.steps = 5
        for steps in (0, 5):
            resumed.train(steps)
            if resumed.masters and not steps and resumed.working_bits() != whole.working_bits():
                wrong.append(f"{kind}: working copies")
            whole.train(steps)
            if resumed.bits() != _pieces_of(whole, options, rank, 4).bits():
                wrong.append(f"{kind}: pieces after {steps} steps")
    return wrong


def _pieces_of(whole: Job, options: Options, rank: int, world: int) -> Job:
    """A rank's part of a job."""
    job = Job(4, *options, rank, world)
    job.train(1)
    with torch.no_grad():
        for name, x in job.stepped.items():
            state, own = whole.optimizer.state[whole.stepped[name]], job.optimizer.state[x]
            x.copy_(job._piece(name, whole.stepped[name]))
            own["moment"].copy_(job._piece(name, state["moment"]))
            own["step"] = state["step"]
            job.working[name].copy_(whole.working[name])
    job.steps = whole.steps
    return job


@pytest.mark.ranks
def test_split_over_two_ranks_and_then_over_four(tmp_path: Path) -> None:
    assert run_ranks(4, _zero, str(tmp_path), timeout=90) == [[]] * 4


# --- What hides masters ---


class Wrapper:
    """Steps masters of its own, and tells only the inner optimizer's state, as Lightning's and DeepSpeed's do."""

    def __init__(self, job: Job) -> None:
        self.job, self.masters = job, list(job.stepped.values())

    def step(self) -> None:
        self.job.train(1)

    def zero_grad(self) -> None:
        self.job.optimizer.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        return self.job.optimizer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.job.optimizer.load_state_dict(state)


class Telling(Wrapper):
    """Tells its masters too, in a list."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "masters": self.masters}


class Hiding(Momentum):
    """A torch optimizer over the 16-bit parameters that keeps masters in an attribute."""

    def __init__(self, job: Job) -> None:
        super().__init__(list(job.working.values()), torch.float32)
        self.masters = {"of all": list(job.stepped.values())}


class Overriding(Momentum):
    """The same, and tells them in a state_dict of its own."""

    def __init__(self, job: Job) -> None:
        super().__init__(list(job.working.values()), torch.float32)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "masters": [torch.ones(3)]}


HIDING: dict[str, tuple[Callable[[Job], Any], type[Exception], str]] = {
    "a wrapper": (Wrapper, ckpt.Unsupported, "opt: Wrapper acts as an optimizer .*fp32 masters, say.* with a name"),
    "a wrapper that tells them": (Telling, ckpt.Unsupported, "opt: Telling acts as an optimizer"),
    "an attribute": (
        Hiding,
        ckpt.Unsupported,
        r"opt: Hiding keeps a tensor of shape \[10\] in its attribute 'masters'",
    ),
    "a state_dict": (Overriding, ckpt.Unsupported, "opt: Overriding has a state_dict of its own"),
    "an optimizer alone": (lambda job: job.optimizer, ckpt.StateMismatch, "opt: a parameter of shape .* add the model"),
}


@pytest.mark.parametrize("loading", [False, True], ids=["save", "load"])
@pytest.mark.parametrize("kind", HIDING)
def test_what_hides_masters_is_refused(kind: str, loading: bool, tmp_path: Path) -> None:
    make, error, words = HIDING[kind]
    job, other = _trained("bf16 with masters"), Job(2, *SWEEP["bf16 with masters"])
    before = other.working_bits()
    with ckpt.Checkpointer(tmp_path) as ck:
        ck.save(5, job.state())
        with pytest.raises(error, match=words):
            if loading:
                ck.load({"model": other.working, "opt": make(other)}, allow_extra=["*"])
            else:
                ck.save(6, {"model": job.working, "opt": make(job)})
        assert ck.latest() == 5
    assert other.working_bits() == before


def test_masters_that_were_not_saved_are_not_made_from_the_working_copy(tmp_path: Path) -> None:
    job, other = _trained("bf16 with masters"), Job(2, *SWEEP["bf16 with masters"])
    before = [raw(x) for x in other.stepped.values()]
    with ckpt.Checkpointer(tmp_path) as ck:
        ck.save(5, {"model": job.working, "steps": 5})
        with pytest.raises(ckpt.StateMismatch, match=r"the checkpoint has no masters/a, masters/b.*allow_missing"):
            ck.load(other.state())
    assert [raw(x) for x in other.stepped.values()] == before
