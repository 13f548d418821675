"""`ckpt-reshard --names`: which way, what is said, what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.cli.test_reshard import document, ids, run
from tests.support.raw import random_bits, raw, tree

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 12,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "intermediate_size": 10,
    "vocab_size": 7,
    "tie_word_embeddings": True,
}


@pytest.fixture
def hf(tmp_path: Path) -> Path:
    """A tied Llama of two layers."""
    rows = {"self_attn.q_proj": (12, 12), "self_attn.k_proj": (6, 12), "self_attn.v_proj": (6, 12)}
    rows |= {
        "self_attn.o_proj": (12, 12),
        "mlp.gate_proj": (10, 12),
        "mlp.up_proj": (10, 12),
        "mlp.down_proj": (12, 10),
    }
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (7, 12), "model.norm.weight": (12,)}
    for layer in (0, 1):
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in rows.items()}
        norms = ("input_layernorm", "post_attention_layernorm")
        shapes |= {f"model.layers.{layer}.{norm}.weight": (12,) for norm in norms}
    folder = tmp_path / "hf"
    folder.mkdir()
    tensors = {n: random_bits(shape, torch.bfloat16, i) for i, (n, shape) in enumerate(shapes.items())}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=3))
    return folder


@pytest.mark.parametrize("between", ["ckpt", "dcp"])
def test_there_and_back(hf: Path, tmp_path: Path, between: str) -> None:
    there = document(hf, tmp_path / "a", "--format", between, "--names", "auto", "--step", 3, "--verify")
    assert there["tensors"] == 8 and there["names"]["to"] == "megatron" and there["names"]["family"] == "llama"
    old = there["names"]["tensors"]["decoder.layers.mlp.linear_fc1.weight"]
    assert old == [f"model.layers.{i}.mlp.{n}_proj.weight" for n in ("gate", "up") for i in (0, 1)]
    names = ("--names", "llama", "--config", hf / "config.json")
    back = document(tmp_path / "a", tmp_path / "b", "--format", "hf", *names, "--verify")
    assert back["not_carried"] == {} and back["names"]["to"] == "hf"
    assert (tmp_path / "b/config.json").read_bytes() == (hf / "config.json").read_bytes()
    one, other = (load_file(folder / "model.safetensors") for folder in (hf, tmp_path / "b"))
    assert {n: (t.shape, raw(t)) for n, t in one.items()} == {n: (t.shape, raw(t)) for n, t in other.items()}
    again = document(tmp_path / "b", tmp_path / "c", "--names", "auto", "--step", 3)
    assert again["destination"]["state_id"] == there["destination"]["state_id"]


def test_changes_speak_of_megatrons_names(hf: Path, tmp_path: Path) -> None:
    made = document(hf / "model.safetensors", tmp_path / "a", "--names", "auto", "--step", 1, "--rename", "^", "model/")
    assert ["decoder.final_layernorm.weight", "bfloat16", "model/decoder.final_layernorm.weight", "bfloat16"] in made[
        "changes"
    ]["changed"]
    options = ("--format", "hf", "--names", "auto", "--config", hf / "config.json")
    assert run(tmp_path / "a", tmp_path / "b", *options).exit_code == 6
    done = run(tmp_path / "a", tmp_path / "b", *options, "--rename", "^model/", "", "--dtype", "float32")
    assert done.exit_code == 0, done.output
    lines = [line.split() for line in done.stdout.splitlines()]
    assert ["embedding.word_embeddings.weight", "->", "model.embed_tokens.weight"] in lines
    assert load_file(tmp_path / "b/model.safetensors")["model.norm.weight"].dtype == torch.float32


@pytest.mark.parametrize("options", [("--names", "auto"), ("--select", "model.norm.weight")])
def test_a_flipped_bit_is_seen_by_the_sidecar_of_the_old_names(hf: Path, tmp_path: Path, options: Any) -> None:
    document(hf, tmp_path / "a", "--names", "auto", "--step", 1)
    document(tmp_path / "a", tmp_path / "b", "--format", "hf", "--names", "auto", "--config", hf / "config.json")
    file = tmp_path / "b/model.safetensors"
    data = bytearray(file.read_bytes())
    data[-100] ^= 1
    file.write_bytes(data)
    done = run(tmp_path / "b", tmp_path / "c", *options)
    assert done.exit_code == 1 and "damaged" in done.stderr and not (tmp_path / "c").exists()


def test_what_is_refused(hf: Path, tmp_path: Path) -> None:
    document(hf, tmp_path / "a", "--names", "auto", "--step", 1)
    before = tree(tmp_path)
    for arguments, code, word in (
        ((tmp_path / "a", tmp_path / "b", "--format", "hf", "--names", "llama"), 2, "--config"),
        ((hf, tmp_path / "b", "--step", 1, "--config", hf / "config.json"), 2, "--names"),
        ((hf, tmp_path / "b", "--step", 1, "--names", "bloom"), 2, "bloom"),
        ((hf, tmp_path / "b", "--step", 1, "--names", "gpt2"), 1, "n_embd"),
        ((hf, tmp_path / "b", "--step", 1, "--names", "mixtral"), 1, "num_local_experts"),
        ((hf, tmp_path / "b", "--step", 1, "--names", "auto", "--config", tmp_path / "none"), 3, "none"),
        ((tmp_path / "a", tmp_path / "b", "--names", "auto", "--config", tmp_path), 3, str(tmp_path)),
    ):
        done = run(*arguments)
        assert done.exit_code == code and word in done.stderr and "Traceback" not in done.stderr, done.output
    assert tree(tmp_path) == before and ids(tmp_path / "a")
