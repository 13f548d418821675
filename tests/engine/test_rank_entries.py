"""Ranks may hold entries of their own or all the same ones; what is stored does not depend on who held what."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckpt
from tests.engine.states import module_bits, optimizer_bits
from tests.support.ranks import Crew
from tests.support.raw import attempt_folder, random_bits, raw, tree

pytestmark = pytest.mark.ranks


def _pipeline(rank: int, world: int, root: str) -> str:
    """Each rank has entries of its own: tensors, values, an optimizer over its own layers; one is on all."""
    torch.manual_seed(5)  # the same full model everywhere, of which each rank keeps a layer
    full = nn.ModuleList([nn.Linear(4, 4) for _ in range(4)])
    mine = nn.ModuleDict({str(rank): full[rank]})
    optimizer = torch.optim.AdamW(mine.parameters(), lr=0.125)
    full[rank](torch.ones(1, 4)).sum().backward()
    optimizer.step()
    expected = module_bits(mine), optimizer_bits(optimizer)
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
        assert (module_bits(again), optimizer_bits(own)) == expected
        assert module_bits(other) == {f"{3 - rank}.{n}": raw(_stepped(3 - rank)[n]) for n in ("weight", "bias")}
    return state_id


def _stepped(layer: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(5)
    full = nn.ModuleList([nn.Linear(4, 4) for _ in range(4)])
    optimizer = torch.optim.AdamW(full[layer].parameters(), lr=0.125)
    full[layer](torch.ones(1, 4)).sum().backward()
    optimizer.step()
    return dict(full[layer].named_parameters())


def test_ranks_may_hold_different_entries_and_swap_them(crew: Crew, tmp_path: Path) -> None:
    ids = crew.run(_pipeline, str(tmp_path))
    assert len(set(ids)) == 1
    whole = nn.ModuleDict({str(i): nn.Linear(4, 4) for i in range(4)})
    state = {"model": whole, "only": {f"rank{i}": None for i in range(4)}, "all": 0}
    with ckpt.Checkpointer(tmp_path) as ck:
        ck.load(state, allow_extra=["opt/*"])
    assert state["only"] == {f"rank{i}": i for i in range(4)}
    assert module_bits(whole) == {f"{i}.{n}": raw(_stepped(i)[n]) for i in range(4) for n in ("weight", "bias")}


def _replicas(rank: int, world: int, root: str) -> str:
    with ckpt.Checkpointer(root) as ck:
        return ck.save(
            1, {"t": random_bits((200, 100), torch.float32, 3), "s": random_bits((), torch.int8, 4), "v": 1}
        ).state_id


def test_what_is_saved_with_torch_distributed_and_without_is_the_same(crew: Crew, tmp_path: Path) -> None:
    ids = crew.run(_replicas, str(tmp_path / "four"))
    alone = _replicas(0, 1, str(tmp_path / "one"))
    assert set(ids) == {alone}
    one, four = attempt_folder(tmp_path / "one"), attempt_folder(tmp_path / "four")
    assert tree(one / "state") == tree(four / "state")
    assert (one / "manifest.json").read_bytes() == (four / "manifest.json").read_bytes()
