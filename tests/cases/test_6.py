"""Case 6: after a load every rank's 16-bit working copy is the saved master, rounded, also of what another rank owns.

Four ranks, as TP 2 x DP 2 and as DP 4: Megatron's layer-wise optimizer, where one rank owns each parameter, its
DistributedOptimizer, where each owns a flat piece, and masters by hand. All is done in one launch of processes.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ckpt
from ckpt import Layout
from tests.support import megatron_trainer as mt
from tests.support.gpt_oracle import GptSize
from tests.support.layouts import attempts, different, start
from tests.support.megatron_cpu import megatron_on_cpu
from tests.support.ranks import Crew
from tests.support.raw import raw
from tests.support.roots import Root
from tests.support.tiny_gpt import parallel

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

SIZE = GptSize(layers=2, hidden=16, heads=2, ffn=24, vocab=128, seq=16, dtype=torch.bfloat16)
LAYOUTS = (Layout(tp=2, dp=2), Layout(dp=4))
KINDS = ("layerwise", "zero")
STEPS = 2


@pytest.fixture(scope="module")
def crew() -> Iterator[Crew]:
    with start(4) as crew:
        yield crew


@dataclass(frozen=True)
class Setup:
    """A layout with the kind of optimizer on it."""

    layout: Layout
    kind: str

    def __str__(self) -> str:
        return f"{self.kind}-{self.layout}"


SETUPS = [Setup(layout, kind) for layout in LAYOUTS for kind in KINDS]
SOURCES = [Setup(Layout(tp=2, dp=2), kind) for kind in KINDS]


def _save(rank: int, world: int, setup: Setup, root: str) -> dict[str, Any]:
    """Trains, saves, and tells what this rank then holds, and the losses after."""
    layout = setup.layout
    with parallel(layout.tp, layout.pp, layout.dp), megatron_on_cpu():
        trainer = mt.make_trainer(SIZE, setup.kind, seed=1)
        for _ in range(STEPS):
            mt.train_step(trainer)
        with ckpt.Checkpointer(root, layout) as ck:
            ck.save(STEPS, trainer.state())
        held = mt.collect(trainer)
        return {"held": held, "owned": mt.elements(trainer), "losses": [mt.train_step(trainer) for _ in range(2)]}


def _load(rank: int, world: int, setup: Setup, source: str, vectors: dict[str, torch.Tensor], again: str) -> Any:
    """Loads into another random init, warm or cold, and before the first forward: names of what is not as saved, and of
    working copies that are not their masters, rounded. Saves again at once. Then the losses."""
    layout = setup.layout
    with parallel(layout.tp, layout.pp, layout.dp), megatron_on_cpu():
        trainer = mt.make_trainer(SIZE, setup.kind, seed=2 + rank)
        wrong = [] if mt.wrong_model(trainer, vectors) else ["the random init had the saved parameters"]
        state = trainer.state()
        with ckpt.Checkpointer(source, layout, read_only=True) as ck:
            loaded = ck.load(state)
        assert loaded is not None
        rounded = vectors | {"model": vectors["master"].to(torch.bfloat16)}
        wrong += mt.wrong(trainer, vectors) + [f"{n} (rounded)" for n in mt.wrong_model(trainer, rounded)]
        trainer.step = state["step"]
        with ckpt.Checkpointer(again, layout) as ck:
            saved = ck.save(STEPS, trainer.state())
        return wrong, loaded.state_id == saved.state_id, [mt.train_step(trainer) for _ in range(2)]


@pytest.mark.timeout(200)
@pytest.mark.parametrize("source", SOURCES, ids=str)
def test_every_rank_has_the_saved_working_copy_and_saves_the_same_bytes(
    crew: Crew, tmp_path: Path, source: Setup
) -> None:
    root = str(tmp_path / "saved")
    saved = crew.run(_save, source, root, timeout=90)
    vectors = mt.whole(SIZE, [rank["held"] for rank in saved])
    masters = vectors["master"]
    assert mt.bits(masters.to(torch.bfloat16).float()) != mt.bits(masters), "masters that a rebuilt copy would lose"
    assert mt.bits(masters.to(torch.bfloat16)) == mt.bits(vectors["model"])
    assert max(rank["owned"] for rank in saved) < mt.total(SIZE), "no rank owns all"
    for setup in SETUPS:
        again = str(tmp_path / f"again-{setup}")
        for wrong, same_id, losses in crew.run(_load, setup, root, vectors, again, timeout=90):
            assert (wrong, same_id) == ([], True), setup
            assert losses == saved[0]["losses"] or setup != source, setup
        assert different(*attempts(Root(root)), *attempts(Root(again))) == [], setup


def _apart(rank: int, world: int, kind: str, root: str) -> list[str]:
    """What saves say where one rank's working copy is not what its owner's master makes of it: the fault itself, once
    on a rank that does not own the parameter and once on all ranks."""
    said = []
    with parallel(dp=4), megatron_on_cpu():
        for bad in ([3], [0, 1, 2, 3]):
            trainer = mt.make_trainer(SIZE, kind, seed=1)
            mt.train_step(trainer)
            with torch.no_grad():
                parameter = dict(trainer.model.named_parameters())["decoder.layers.0.mlp.linear_fc2.weight"]
                parameter.view(torch.int16)[0, 0] ^= int(rank in bad)  # in place: it is a view of Megatron's buffer
            with ckpt.Checkpointer(root, Layout(dp=4)) as ck, pytest.raises(ckpt.StateMismatch) as error:
                ck.save(1, trainer.state())
            assert ck.latest() is None
            said.append(str(error.value))
            dist.barrier()
    return said


@pytest.mark.timeout(200)
@pytest.mark.parametrize("kind", KINDS)
def test_working_copies_that_have_come_apart_are_refused(crew: Crew, tmp_path: Path, kind: str) -> None:
    for on_one, on_all in crew.run(_apart, kind, str(tmp_path / "root"), timeout=90):
        assert "linear_fc2.weight" in on_one and ("different bits" in on_one or "fp32 master" in on_one), on_one
        assert "linear_fc2.weight: element [0, 0, 0]" in on_all and "its fp32 master" in on_all, on_all


# --- By hand: masters that one rank owns, in a dict ---

SHAPES = {"a": (3, 2), "b": (5,), "c": (2, 2), "d": (), "e": (4,)}


class ByHand:
    """16-bit parameters on every rank, fp32 masters with moments of those that this rank owns."""

    def __init__(self, seed: int, rank: int, world: int) -> None:
        torch.manual_seed(seed)
        masters = {n: torch.randn(s) for n, s in SHAPES.items()}
        self.working = {n: x.bfloat16() for n, x in masters.items()}
        self.owned = {n: x.requires_grad_() for at, (n, x) in enumerate(masters.items()) if at % world == rank}
        self.optimizer = torch.optim.Adam(self.owned.values() or [torch.zeros(0)], lr=0.01, foreach=False)

    def state(self) -> dict[str, Any]:
        return {"working": self.working, "masters": self.owned, "opt": self.optimizer}

    def train(self, group: Any, rank: int, world: int) -> None:
        for name, x in self.owned.items():
            x.grad = torch.full(x.shape, float(ord(name)) / 100)
        self.optimizer.step()
        for at, (name, copy) in enumerate(self.working.items()):
            if at % world == rank:
                copy.copy_(self.owned[name].detach())
            dist.broadcast(copy, at % world, group=group)

    def bits(self) -> dict[str, Any]:
        return {
            n: [raw(x), *(raw(v) for _, v in sorted(self.optimizer.state[x].items()))] for n, x in self.owned.items()
        }


def _by_hand(rank: int, world: int, root: str) -> Any:
    """Two ranks save; four load, and save at once. Gives what each held: of the two, and of the four."""
    two, source = dist.new_group([0, 1]), None
    if rank < 2:
        source = ByHand(1, rank, 2)
        for _ in range(3):
            source.train(two, rank, 2)
        with ckpt.Checkpointer(root, Layout(dp=2), process_group=two) as ck:
            ck.save(1, source.state())
    dist.barrier()
    target = ByHand(2 + rank, rank, 4)
    with ckpt.Checkpointer(root, Layout(dp=4)) as ck:
        loaded = ck.load(target.state())
        assert loaded is not None and ck.save(2, target.state()).state_id == loaded.state_id
    rounded = {n: raw(x.detach().bfloat16()) for n, x in target.owned.items()}
    working = [{n: raw(x) for n, x in job.working.items()} for job in (source or target, target)]
    return working, rounded, {} if source is None else source.bits(), target.bits()


def test_masters_by_hand_on_two_ranks_and_then_on_four(crew: Crew, tmp_path: Path) -> None:
    ranks = crew.run(_by_hand, str(tmp_path / "root"), timeout=60)
    expected = ranks[0][0][0]
    saved = {**ranks[0][2], **ranks[1][2]}
    rounded = {n: data for _, own, _, _ in ranks for n, data in own.items()}
    assert rounded == expected and set(saved) == set(SHAPES)
    for working, _, _, masters in ranks:
        assert working[1] == expected
        assert masters == {n: saved[n] for n in masters}
