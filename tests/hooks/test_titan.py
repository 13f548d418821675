"""What `TitanCheckpointer` makes of parts, containers and loaders. Their real loops are in test_examples."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckpt
from ckpt.trainer.hooks.titan import TitanCheckpointer
from tests.support.raw import raw


class Loader:
    """A loader of one data-parallel rank, with the state_dict that torchtitan's GrainDataLoader has."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world, self.at = rank, world, 0

    def state_dict(self) -> dict[str, Any]:
        place = {"next": self.at, "buffers": [None] * self.at}
        return {"version": 1, "dp_world_size": self.world, f"dp_rank_{self.rank}": place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state[f"dp_rank_{self.rank}"]["next"]
        assert len(state[f"dp_rank_{self.rank}"]["buffers"]) == self.at


class Stage(nn.Module):
    """A part of a model of `layers`, by their numbers in the whole."""

    def __init__(self, *layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(i): nn.Linear(3, 3) for i in layers})


def hook(root: Path, parts: list[nn.Module], loader: Any = None, **more: Any) -> tuple[TitanCheckpointer, list[Any]]:
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1, momentum=0.9) for part in parts]
    return TitanCheckpointer(root, model_parts=parts, optimizers=optimizers, dataloader=loader, **more), optimizers


def test_parts_and_a_rank_s_loader_come_back(tmp_path: Path) -> None:
    parts, loader = [Stage(0, 2), Stage(1)], Loader(0, 1)
    first, optimizers = hook(tmp_path / "root", list(parts), loader, every_steps=2)
    assert not first.load()
    for step in range(1, 4):
        for part, optimizer in zip(parts, optimizers, strict=True):
            sum(layer(torch.ones(3)).sum() for layer in part.layers.values()).backward()
            optimizer.step()
        loader.at += 1
        assert first.save(step, last_step=step == 3) == (step > 1)
    first.close()

    again, fresh = [Stage(0, 2), Stage(1)], Loader(0, 1)
    second, others = hook(tmp_path / "root", list(again), fresh)
    assert second.load() and fresh.at == 3
    second.close()
    for one, other in zip(parts, again, strict=True):
        for a, b in zip(one.parameters(), other.parameters(), strict=True):
            assert raw(a) == raw(b)
    for one, other in zip(optimizers, others, strict=True):
        for a, b in zip(one.param_groups[0]["params"], other.param_groups[0]["params"], strict=True):
            assert raw(one.state[a]["momentum_buffer"]) == raw(other.state[b]["momentum_buffer"])
    with ckpt.Checkpointer(tmp_path / "root", read_only=True) as ck:
        assert ck.steps() == [2, 3]
        whole = Stage(0, 1, 2)  # the names are those of the whole model
        ck.load({"model": whole}, allow_extra=["optimizer/*", "rng/*", "dataloader/*"])
    assert raw(whole.layers["1"].weight) == raw(parts[1].layers["1"].weight)

    third, _ = hook(tmp_path / "root", [Stage(0, 2), Stage(1)], Loader(0, 1))
    assert third.load(2) and third.run.saved == 2
    third.close()


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    first, _ = hook(tmp_path / "root", [Stage(0)], Loader(0, 1))
    first.save(1, last_step=True)
    first.close()
    part, other = Stage(0), Loader(0, 2)
    before = raw(part.layers["0"].weight)
    second, _ = hook(tmp_path / "root", [part], other)
    with pytest.raises(ckpt.StateMismatch, match="dp_world_size=1, this run has 2"):
        second.load()
    second.close()
    assert raw(part.layers["0"].weight) == before and other.at == 0

    with pytest.raises(ckpt.Unsupported, match=r"layers\.0\.weight: two model parts have it"):
        hook(tmp_path / "root", [Stage(0), Stage(0)])
    with pytest.raises(ckpt.StateMismatch, match="model is the name of a part"):
        hook(tmp_path / "root", [Stage(0)], states={"model": 1})
    with pytest.raises(ckpt.Unsupported, match="does not say which rank's it is"):
        hook(tmp_path / "root", [Stage(0)], nn.Linear(1, 1))
