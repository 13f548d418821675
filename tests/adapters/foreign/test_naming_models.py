"""Real models of transformers as real models of Megatron Core: the same logits, and back again with equal bytes."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file

import ckpt
from ckpt.cli.reshard import reshard
from tests.adapters.foreign.hf_models import (
    PADDED,
    VOCABULARY,
    logits_of,
    megatron_logits,
    megatron_model,
    save_hf,
)
from tests.support.megatron_cpu import megatron_on_cpu
from tests.support.ranks import Crew
from tests.support.raw import log_records, raw
from tests.support.tiny_gpt import parallel

INTO = ("--rename", "^", "model/", "--rename", r"\.pre_mlp_layernorm\.", ".mlp.linear_fc1.layer_norm_")
"""Where the state has the model, and what Megatron's local spec calls a norm."""
OUT_OF = ("--select", "model/*", "--rename", "^model/", "")


@pytest.fixture(scope="module")
def crew() -> Iterator[Crew]:
    with Crew(2) as two:
        yield two


def run(*arguments: object) -> Any:
    done = CliRunner().invoke(reshard, [*map(str, arguments), "--verify", "--json"])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def ids(root: Path) -> set[str]:
    return {r["state_id"] for r in log_records(root).values() if r["kind"] == "commit"}


def _load_run_save(rank: int, world: int, family: str, root: str, to: str, tokens: torch.Tensor) -> torch.Tensor:
    """Loads a model cut over TP, with a padded vocabulary where the padding may go, and saves it under another root."""
    padded = family == "gpt2"
    with parallel(tp=world), megatron_on_cpu():
        model = megatron_model(family, world, PADDED if padded else VOCABULARY + 1)
        options: Any = {"vocabulary": ckpt.Vocabulary(VOCABULARY, padding="drop")}
        with ckpt.Checkpointer(root, read_only=True) as ck:
            assert ck.load({"model": model}, **options) is not None
        found = megatron_logits(model, tokens)[..., :VOCABULARY]
        with ckpt.Checkpointer(to) as ck:
            ck.save(5, {"model": model, "epoch": 2})
    return found


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral"])
def test_logits_agree_and_every_byte_comes_back(crew: Crew, tmp_path: Path, family: str) -> None:
    model = save_hf(family, tmp_path / "hf")
    there = run(tmp_path / "hf", tmp_path / "root", "--names", "auto", "--step", 5, *INTO)
    assert there["names"]["family"] == family and there["names"]["to"] == "megatron"
    tokens = torch.randint(VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(3))
    found = crew.run(_load_run_save, family, str(tmp_path / "root"), str(tmp_path / "trained"), tokens)
    # The kernels differ, so here, and nowhere else, numbers may differ by rounding.
    expected = logits_of(model, tokens)
    assert expected.abs().max() > 1
    for logits in found:
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    names = ("--names", family, "--config", tmp_path / "hf/config.json")
    back = run(tmp_path / "trained", tmp_path / "back", "--format", "hf", *names, *OUT_OF)
    assert "pad a vocabulary of 61" in back["not_carried"]["embedding.word_embeddings.weight"]
    old, new = (load_file(tmp_path / folder / "model.safetensors") for folder in ("hf", "back"))
    assert {n: (t.dtype, t.shape, raw(t)) for n, t in new.items()} == {
        n: (t.dtype, t.shape, raw(t)) for n, t in old.items()
    }
    assert (tmp_path / "back/config.json").read_bytes() == (tmp_path / "hf/config.json").read_bytes()
    again = type(model).from_pretrained(tmp_path / "back", attn_implementation="eager")
    assert raw(logits_of(again.eval(), tokens)) == raw(expected)
    run(tmp_path / "back", tmp_path / "again", "--names", "auto", *INTO)
    assert ids(tmp_path / "again") == ids(tmp_path / "root")
