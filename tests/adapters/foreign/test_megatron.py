"""Checkpoints of the real Megatron Core, `dist_checkpointing.save`, read against the oracle of the tiny model."""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt.adapters.foreign.formats import detect
from ckpt.adapters.foreign.into import open_session, save_from
from ckpt.adapters.foreign.megatron_read import MegatronCheckpoint
from tests.support.gpt_oracle import GptSize, full_tensors
from tests.support.megatron_cpu import megatron_on_cpu
from tests.support.ranks import Crew
from tests.support.raw import raw
from tests.support.tiny_gpt import build_model, label_model, parallel

SIZES = {"dense": GptSize(), "grouped": GptSize(kv_groups=4, heads=8, ffn=96, vocab=64, gated=False, tied=True)}
LAYOUTS = [("dense", 2, 1), ("dense", 1, 2), ("grouped", 2, 1), ("grouped", 1, 2)]


@pytest.fixture(scope="module")
def crew() -> Iterator[Crew]:
    with Crew(2) as two:
        yield two


def _save(rank: int, world: int, folder: str, size: str, tp: int, pp: int) -> None:
    """Labels a model and saves it as Megatron-LM does, with arguments that no plain reader knows."""
    from megatron.core import dist_checkpointing

    with parallel(tp, pp), megatron_on_cpu():
        model = build_model(SIZES[size], seed=1)
        label_model(model)
        state: dict[str, Any] = dict(model.sharded_state_dict())
        state |= {"iteration": 40, "checkpoint_version": 3.0, "args": argparse.Namespace(lr=0.1)}
        state["opt_param_scheduler"] = {"num_steps": 640, "max_lr": 1e-3}
        Path(folder).mkdir(exist_ok=True)
        dist_checkpointing.save(state, folder)


@pytest.mark.parametrize(("size", "tp", "pp"), LAYOUTS)
def test_every_bit_is_the_oracles(crew: Crew, tmp_path: Path, size: str, tp: int, pp: int) -> None:
    folder = tmp_path / "megatron"
    crew.run(_save, str(folder), size, tp, pp)
    assert detect(folder) == "megatron"
    source = MegatronCheckpoint(folder)
    expected = full_tensors(SIZES[size])
    assert source.content.step == 40
    assert source.content.values["common.pt/iteration"] == {"int": "40"}
    assert "argparse.Namespace" in source.content.left_out["common.pt: args"]
    assert {t.name: t.shape for t in source.content.tensors} == {n: tuple(t.shape) for n, t in expected.items()}
    save_from(open_session(str(tmp_path / "root")), source, 40)
    into = {name: torch.zeros_like(t) for name, t in expected.items()}
    with ckpt.Checkpointer(tmp_path / "root", read_only=True) as ck:
        assert ck.load(into, allow_extra=("common.pt/*", "*._extra_state*")) is not None
    assert {n: raw(t) for n, t in into.items()} == {n: raw(t) for n, t in expected.items()}
