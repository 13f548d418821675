"""The numerics contract: kept with every checkpoint; a load says what it promises, or refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ckpt
from ckpt.errors import CkptError, StateMismatch
from ckpt.invariant import Contract, Granules
from tests.support.ranks import Crew


@pytest.mark.parametrize(
    "bad",
    [
        {"shards": 0},
        {"batch": True},
        {"microbatch": 5},
        {"leaf": 3},
        {"dtype": torch.float16},
    ],
    ids=str,
)
def test_what_makes_no_contract_is_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(CkptError):
        Contract(**({"shards": 4, "batch": 8, "microbatch": 1} | bad))


def test_a_load_says_its_level(tmp_path: Path) -> None:
    state = {"x": torch.arange(9.0)}
    with ckpt.Checkpointer(tmp_path, contract=Contract(4, 8)) as ck:
        ck.save(1, state)
        ck.save_async(2, state).result(60)
        for step in (1, 2):
            restored = ck.load(state, step, level="trajectory-exact")
            assert restored is not None and restored.level == "trajectory-exact" and restored.differences == ()
    with ckpt.Checkpointer(tmp_path, contract=Contract(8, 8, 2)) as ck:
        restored = ck.load(state)
        assert restored is not None and restored.level == "state-exact"
        assert restored.differences == (
            "logical microbatch: 1 in the checkpoint, 2 here",
            "logical shards: 4 in the checkpoint, 8 here",
        )
    with ckpt.Checkpointer(tmp_path) as ck:
        restored = ck.load(state)
        assert restored is not None and restored.level == "state-exact"
        ck.save(3, state)
    with ckpt.Checkpointer(tmp_path, contract=Contract(4, 8)) as ck:
        restored = ck.load(state)
        assert restored is not None and restored.differences == (
            "numerics contract: none was saved with the checkpoint",
        )


def test_what_cannot_be_kept_is_refused_by_name_with_nothing_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ckpt.Checkpointer(tmp_path, contract=Contract(4, 8, seed=1)) as ck:
        ck.save(1, {"x": torch.ones(3), "n": 1})
    target = {"x": torch.zeros(3), "n": 0}
    for contract, said in (
        (Contract(4, 8, seed=2), "logical seed: 1 in the checkpoint, 2 here"),
        (Contract(4, 8, seed=1, optimizer="mine"), "logical optimizer"),
        (None, "none was given to this Checkpointer"),
    ):
        with ckpt.Checkpointer(tmp_path, contract=contract) as ck:
            with pytest.raises(StateMismatch, match=said):
                ck.load(target, level="trajectory-exact")
            assert target["n"] == 0 and not torch.any(target["x"])
    monkeypatch.setenv("MKL_CBWR", "AVX2")
    with ckpt.Checkpointer(tmp_path, contract=Contract(4, 8, seed=1)) as ck:
        with pytest.raises(StateMismatch, match="environment settings"):
            ck.load(target, level="trajectory-exact")
        with pytest.raises(CkptError, match="level='exact' must be"):
            ck.load(target, level="exact")  # type: ignore[arg-type]
        assert ck.load(target, level="state-exact") is not None and target["n"] == 1


def _open(rank: int, world: int, root: str) -> str:
    try:
        with ckpt.Checkpointer(root, contract=Contract(4, 8, seed=rank)):
            return "opened"
    except StateMismatch as error:
        return str(error)


@pytest.mark.ranks
def test_ranks_with_different_contracts_are_told(tmp_path: Path) -> None:
    with Crew(2) as crew:
        for said in crew.run(_open, str(tmp_path)):
            assert "ranks 0 and 1 have different numerics contracts" in said


def _granules(rank: int, world: int, shards: int, sequence_parallel: bool) -> str:
    try:
        granules = Granules(Contract(shards, 8), dist.group.WORLD, sequence_parallel=sequence_parallel)
    except CkptError as error:
        return str(error)
    return f"{granules.shards}"


@pytest.mark.ranks
def test_shards_that_do_not_go_round_are_refused() -> None:
    with Crew(2) as crew:
        assert crew.run(_granules, 3, False) == ["range(0, 2)", "range(2, 3)"]
        for said in crew.run(_granules, 1, False):
            assert said.startswith("2 tensor-parallel ranks share 1 virtual shards; use fewer ranks")
        for said in crew.run(_granules, 3, True):
            assert "over 2 ranks needs a multiple of as many virtual shards, not 3" in said
