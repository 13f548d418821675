"""The tables of names: against what each model does with its weights, any sizes, and what does not fit."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt.adapters.foreign.moved import Move, Moved
from ckpt.adapters.foreign.naming import Model, to_hf, to_megatron
from ckpt.adapters.foreign.naming_families import FAMILIES
from ckpt.adapters.foreign.naming_sizes import CONFIG, Sizes
from ckpt.adapters.foreign.slabs import slabs
from ckpt.adapters.foreign.witness import state_id_of
from ckpt.engine.stream import Content, Source
from ckpt.errors import CkptError, CorruptCheckpoint, StateMismatch, StoreError, Unsupported
from ckpt.geometry import Box, TensorSpec
from ckpt.state.dtypes import bits, dtype_name
from tests.support.raw import random_bits, raw


class InMemory:
    """A state at rest that lies in memory."""

    url = "memory"

    def __init__(self, tensors: dict[str, torch.Tensor], aliases: dict[str, str] | None = None) -> None:
        self.tensors = tensors
        specs = [TensorSpec(n, tuple(t.shape), dtype_name(t.dtype, n), t.element_size()) for n, t in tensors.items()]
        self.content = Content(tuple(sorted(specs)), aliases or {}, {"epoch": {"int": "3"}}, ({},), {}, "memory", 7)

    def read(self, name: str, box: Box) -> torch.Tensor:
        return bits(self.tensors[name])[box.slices].clone()


def whole(source: Source, slab: int = 64) -> dict[str, torch.Tensor]:
    """All tensors, read in small boxes."""
    found = {}
    for spec in source.content.tensors:
        found[spec.name] = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype))
        for box in slabs(spec.shape, spec.itemsize, slab):
            bits(found[spec.name])[box.slices] = source.read(spec.name, box)
    return found


def hf_state(model: Model, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return {n: random_bits(shape, dtype, i) for i, (n, shape) in enumerate(model.table().hf.items())}


def model_of(family: str, **changes: Any) -> Model:
    sizes = Sizes(2, 12, 6, 6 if family == "gpt2" else 3, 2, 10, 7, 5, 4, frozenset({"output_layer"}))
    return Model(family, replace(sizes, **changes), b"{}", Path("config.json"))


def expected(family: str, sizes: Sizes, hf: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What Megatron must hold, said with reshape, cat and stack: as converters of both libraries do it, no box used."""

    def grouped(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        parts = [t.reshape(sizes.groups, -1, *t.shape[1:]) for t in (q, k, v)]
        return torch.cat(parts, dim=1).flatten(0, 1)

    if family == "gpt2":
        of = [{n.split(".", 3)[3]: t for n, t in hf.items() if f"transformer.h.{i}." in n} for i in range(sizes.layers)]
        made = {
            "self_attention.linear_qkv.layer_norm_weight": [h["ln_1.weight"] for h in of],
            "self_attention.linear_qkv.layer_norm_bias": [h["ln_1.bias"] for h in of],
            "self_attention.linear_qkv.weight": [grouped(*h["attn.c_attn.weight"].T.chunk(3)) for h in of],
            "self_attention.linear_qkv.bias": [grouped(*h["attn.c_attn.bias"].chunk(3)) for h in of],
            "self_attention.linear_proj.weight": [h["attn.c_proj.weight"].T for h in of],
            "self_attention.linear_proj.bias": [h["attn.c_proj.bias"] for h in of],
            "mlp.linear_fc1.layer_norm_weight": [h["ln_2.weight"] for h in of],
            "mlp.linear_fc1.layer_norm_bias": [h["ln_2.bias"] for h in of],
            "mlp.linear_fc1.weight": [h["mlp.c_fc.weight"].T for h in of],
            "mlp.linear_fc1.bias": [h["mlp.c_fc.bias"] for h in of],
            "mlp.linear_fc2.weight": [h["mlp.c_proj.weight"].T for h in of],
            "mlp.linear_fc2.bias": [h["mlp.c_proj.bias"] for h in of],
        }
        ends = {
            "embedding.word_embeddings.weight": hf["transformer.wte.weight"],
            "embedding.position_embeddings.weight": hf["transformer.wpe.weight"],
            "decoder.final_layernorm.weight": hf["transformer.ln_f.weight"],
            "decoder.final_layernorm.bias": hf["transformer.ln_f.bias"],
        }
    else:
        of = [{n.split(".", 3)[3]: t for n, t in hf.items() if f"model.layers.{i}." in n} for i in range(sizes.layers)]
        qkv = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        made = {
            "self_attention.linear_qkv.layer_norm_weight": [h["input_layernorm.weight"] for h in of],
            "self_attention.linear_qkv.weight": [grouped(*(h[f"{n}.weight"] for n in qkv)) for h in of],
            "self_attention.linear_proj.weight": [h["self_attn.o_proj.weight"] for h in of],
        }
        if "attention_bias" in sizes.has:
            made["self_attention.linear_qkv.bias"] = [grouped(*(h[f"{n}.bias"] for n in qkv)) for h in of]
            made["self_attention.linear_proj.bias"] = [h["self_attn.o_proj.bias"] for h in of]
        norm = [h["post_attention_layernorm.weight"] for h in of]
        if family == "llama":
            made["mlp.linear_fc1.layer_norm_weight"] = norm
            for kind in ("weight", "bias") if "mlp_bias" in sizes.has else ("weight",):
                both = [torch.cat([h[f"mlp.gate_proj.{kind}"], h[f"mlp.up_proj.{kind}"]]) for h in of]
                made[f"mlp.linear_fc1.{kind}"] = both
                made[f"mlp.linear_fc2.{kind}"] = [h[f"mlp.down_proj.{kind}"] for h in of]
        else:
            moe, every = "block_sparse_moe", range(sizes.experts)
            made["pre_mlp_layernorm.weight"] = norm
            made["mlp.router.weight"] = [h[f"{moe}.gate.weight"] for h in of]
            made["mlp.experts.experts.linear_fc1.weight"] = [
                torch.stack([torch.cat([h[f"{moe}.experts.{e}.w{n}.weight"] for n in (1, 3)]) for e in every])
                for h in of
            ]
            made["mlp.experts.experts.linear_fc2.weight"] = [
                torch.stack([h[f"{moe}.experts.{e}.w2.weight"] for e in every]) for h in of
            ]
        ends = {
            "embedding.word_embeddings.weight": hf["model.embed_tokens.weight"],
            "decoder.final_layernorm.weight": hf["model.norm.weight"],
        }
    if "output_layer" in sizes.has:
        ends["output_layer.weight"] = hf["lm_head.weight"]
    return ends | {f"decoder.layers.{name}": torch.stack(layers) for name, layers in made.items()}


@st.composite
def models(draw: st.DrawFn) -> Model:
    family = draw(st.sampled_from(sorted(FAMILIES)))
    small = st.integers(1, 4)
    groups, per_group, dim = draw(small), draw(small), draw(small)
    if family == "gpt2":
        per_group = 1
    hidden = groups * per_group * dim if family == "gpt2" else draw(small) * 3
    has = draw(st.sets(st.sampled_from(["output_layer", "attention_bias", "mlp_bias"])))
    sizes = Sizes(
        draw(small),
        hidden,
        groups * per_group,
        groups,
        dim,
        draw(small),
        draw(small),
        draw(small),
        draw(small),
        frozenset(has),
    )
    return Model(family, sizes, b"{}", Path("config.json"))


def same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert {n: (tuple(t.shape), t.dtype, raw(t)) for n, t in found.items()} == {
        n: (tuple(t.shape), t.dtype, raw(t)) for n, t in wanted.items()
    }


@settings(deadline=None, max_examples=60)
@given(models(), st.sampled_from([torch.float32, torch.bfloat16, torch.float8_e4m3fn]), st.integers(1, 40))
def test_any_sizes_there_and_back(model: Model, dtype: torch.dtype, slab: int) -> None:
    hf = hf_state(model, dtype)
    there = to_megatron(InMemory(hf), model).source
    megatron = whole(there, slab)
    same(megatron, expected(model.family, model.sizes, hf))
    back = to_hf(InMemory(megatron), model)
    same(whole(back.source, slab), hf)
    assert state_id_of(back.source) == state_id_of(InMemory(hf)) and not back.left


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_other_spellings_of_both_sides(family: str) -> None:
    """Layers and experts one by one, norms of the other spec; and a base model, without its prefix."""
    model = model_of(family)
    hf = hf_state(model)
    megatron = whole(to_megatron(InMemory(hf), model).source)
    one_by_one = {}
    for name, tensor in megatron.items():
        if "decoder.layers." not in name:
            one_by_one[name] = tensor
        for layer in range(model.sizes.layers) if "decoder.layers." in name else ():
            own = name.replace("decoder.layers.", f"decoder.layers.{layer}.")
            experts = range(model.sizes.experts) if "experts" in name else (None,)
            for expert in experts:
                renamed = own.replace("experts.experts.", f"experts.experts.{expert}.")
                one_by_one[renamed] = tensor[layer] if expert is None else tensor[layer, expert]
    same(whole(to_hf(InMemory(one_by_one), model).source), hf)
    spelled = {}
    for name, tensor in megatron.items():
        for pair in ((".self_attention.linear_qkv.layer_norm_", ".input_layernorm."),):
            name = name.replace(*pair)
        norm = (".pre_mlp_layernorm.", ".mlp.linear_fc1.layer_norm_")
        name = name.replace(*norm) if norm[0] in name else name.replace(*norm[::-1])
        spelled[name] = tensor
    assert spelled.keys() != megatron.keys()
    same(whole(to_hf(InMemory(spelled), model).source), hf)
    bare = {n.removeprefix("model.").removeprefix("transformer."): t for n, t in hf.items()}
    same(whole(to_megatron(InMemory(bare), model).source), megatron)


def test_layers_and_experts_are_said_to_be_stacked() -> None:
    model = model_of("mixtral")
    specs = {t.name: t.stack for t in to_megatron(InMemory(hf_state(model)), model).source.content.tensors}
    assert specs["decoder.layers.mlp.experts.experts.linear_fc1.weight"] == 2
    assert specs["decoder.layers.mlp.router.weight"] == 1 and specs["output_layer.weight"] == 0


def test_padding_of_the_vocabulary_is_dropped_and_said() -> None:
    model = model_of("llama")
    hf = hf_state(model)
    megatron = whole(to_megatron(InMemory(hf), model).source)
    for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        megatron[name] = torch.cat([megatron[name], torch.ones(5, 12)])
    named = to_hf(InMemory(megatron), model)
    same(whole(named.source), hf)
    assert named.left["output_layer.weight"] == "rows 7 to 11 pad a vocabulary of 7: not carried"
    assert dict(named.source.content.left_out) == dict(named.left) and len(named.left) == 2


def test_constants_are_left_out_and_said() -> None:
    model = model_of("gpt2", has=frozenset())
    hf = hf_state(model)
    bare = {n.removeprefix("transformer."): t for n, t in hf.items()} | {"h.1.attn.bias": torch.ones(1, 1, 5, 5)}
    named = to_megatron(InMemory(bare), model)
    assert set(named.left) == {"h.1.attn.bias"}
    same(whole(named.source), expected("gpt2", model.sizes, hf))


def test_a_tied_output_layer_must_be_the_embeddings_bit_for_bit() -> None:
    model = model_of("llama", has=frozenset())
    hf = hf_state(model)
    hf["lm_head.weight"] = hf["model.embed_tokens.weight"].clone()
    megatron = whole(to_megatron(InMemory(hf), model).source)
    assert "output_layer.weight" not in megatron
    bits(hf["lm_head.weight"])[3, 5] ^= 1
    with pytest.raises(CorruptCheckpoint, match=r"model.embed_tokens.weight and lm_head.weight both have"):
        whole(to_megatron(InMemory(hf), model).source)
    hf["lm_head.weight"] = hf["lm_head.weight"][:, :3]
    with pytest.raises(StateMismatch, match="another shape"):
        to_megatron(InMemory(hf), model)
    tied = {n: t for n, t in hf.items() if n != "lm_head.weight"}
    source = InMemory(tied, {"lm_head.weight": "model.embed_tokens.weight"})
    same(whole(to_megatron(source, model).source), megatron)


def test_all_that_does_not_fit_is_listed_in_one_error() -> None:
    model = model_of("llama")
    hf = hf_state(model)
    hf["model.layers.2.mlp.up_proj.weight"] = torch.ones(1)
    hf["model.layers.0.self_attn.k_proj.weight"] = torch.ones(6, 13)
    del hf["model.norm.weight"], hf["model.layers.1.mlp.down_proj.weight"]
    with pytest.raises(StateMismatch) as caught:
        to_megatron(InMemory(hf), model)
    for part in (
        "missing: model.norm.weight, model.layers.1.mlp.down_proj.weight;",
        "unknown: model.layers.2.mlp.up_proj.weight;",
        "of another shape: model.layers.0.self_attn.k_proj.weight is [6, 13], not [6, 12];",
    ):
        assert part in str(caught.value)
    megatron = whole(to_megatron(InMemory(hf_state(model)), model).source)
    for change in ({"optimizer.state": torch.ones(2)}, {"embedding.word_embeddings.weight": torch.ones(6, 12)}):
        with pytest.raises(StateMismatch, match=next(iter(change))):
            to_hf(InMemory(megatron | change), model)
    with pytest.raises(StateMismatch, match="output_layer"):
        to_hf(InMemory(megatron), model_of("llama", has=frozenset()))


def test_parts_of_one_tensor_with_two_dtypes_are_refused() -> None:
    model = model_of("llama")
    hf = hf_state(model)
    hf["model.layers.1.self_attn.k_proj.weight"] = random_bits((6, 12), torch.bfloat16)
    with pytest.raises(StateMismatch, match=r"q_proj.weight is float32.*k_proj.weight is bfloat16.*linear_qkv"):
        to_megatron(InMemory(hf), model)


LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 12,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "intermediate_size": 10,
    "vocab_size": 7,
}


def test_what_a_config_leaves_out(tmp_path: Path) -> None:
    path = tmp_path / CONFIG
    path.write_text(json.dumps(LLAMA))
    assert Model.read("auto", path).sizes == Sizes(2, 12, 6, 3, 2, 10, 7, has=frozenset({"output_layer"}))
    path.write_text(json.dumps(LLAMA | {"num_key_value_heads": None, "head_dim": 5, "tie_word_embeddings": True}))
    assert Model.read("llama", path).sizes == Sizes(2, 12, 6, 6, 5, 10, 7)
    path.write_text(json.dumps({"n_layer": 1, "n_head": 2, "n_embd": 4, "vocab_size": 9, "n_positions": 3}))
    assert Model.read("gpt2", path).sizes == Sizes(1, 4, 2, 2, 2, 16, 9, 3)


@pytest.mark.parametrize(
    ("text", "kind", "word"),
    [
        ("", CorruptCheckpoint, "not JSON"),
        ("[" * 100000, CorruptCheckpoint, "not JSON"),
        ("[]", CorruptCheckpoint, "not a config.json"),
        ("{}", CkptError, "model_type None"),
        (json.dumps(LLAMA | {"model_type": ["llama"]}), CkptError, "model_type"),
        (json.dumps(LLAMA | {"model_type": "bloom"}), CkptError, "'bloom'; known are llama, gpt2, mixtral"),
        (json.dumps({k: v for k, v in LLAMA.items() if k != "vocab_size"}), CorruptCheckpoint, "vocab_size is None"),
        (json.dumps(LLAMA | {"hidden_size": 12.0}), CorruptCheckpoint, "hidden_size is 12.0"),
        (json.dumps(LLAMA | {"hidden_size": True}), CorruptCheckpoint, "hidden_size is True"),
        (json.dumps(LLAMA | {"num_hidden_layers": -2}), CorruptCheckpoint, "num_hidden_layers is -2"),
        (json.dumps(LLAMA | {"num_attention_heads": 1 << 70}), CorruptCheckpoint, "num_attention_heads"),
        (json.dumps(LLAMA | {"num_key_value_heads": 4}), CorruptCheckpoint, "4 groups"),
        (json.dumps(LLAMA | {"num_attention_heads": 99}), CorruptCheckpoint, "head_dim"),
        (json.dumps(LLAMA | {"mlp_bias": 1}), CorruptCheckpoint, "mlp_bias is 1"),
        (json.dumps(LLAMA | {"num_hidden_layers": 1 << 39}), Unsupported, "no model has"),
        (
            json.dumps(LLAMA | {"num_attention_heads": 1 << 39, "num_key_value_heads": 1 << 39, "head_dim": 1}),
            Unsupported,
            "no model has",
        ),
    ],
)
def test_a_config_that_is_none_is_refused(tmp_path: Path, text: str, kind: type[CkptError], word: str) -> None:
    path = tmp_path / CONFIG
    path.write_text(text)
    with pytest.raises(kind) as caught:
        to_megatron(InMemory({"x": torch.ones(1)}), Model.read("auto", path))
    assert word in str(caught.value) and str(path) in str(caught.value)


def test_a_config_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    for path in (tmp_path / CONFIG, tmp_path):
        with pytest.raises(StoreError, match="give --config"):
            Model.read("auto", path)


def test_moves_have_to_cover_what_they_make() -> None:
    source = InMemory({"a": torch.arange(6).reshape(2, 3), "b": torch.arange(3)})
    spec = TensorSpec("c", (3, 3), "int64", 8)
    rows = [
        Move("a", Box((0, 0), (2, 3)), "c", Box((0, 0), (2, 3))),
        Move("b", Box((0,), (3,)), "c", Box((2, 0), (1, 3))),
    ]
    assert whole(Moved(source, [spec], rows, {}, ""))["c"].tolist() == [[0, 1, 2], [3, 4, 5], [0, 1, 2]]
    turned = Move("a", Box((0, 0), (2, 3)), "c", Box((0, 0), (3, 2)), transposed=True)
    column = Move("b", Box((0,), (3,)), "c", Box((0, 2), (1, 3)))
    for moves in (rows[:1], [turned], [*rows, turned], [rows[0], column], []):
        with pytest.raises(CorruptCheckpoint, match="do not make up c"):
            Moved(source, [spec], moves, {}, "")
    with pytest.raises(ValueError, match="no box of the form"):
        Move("a", Box((0, 0), (2, 3)), "c", Box((0, 0), (3, 2)))
