"""Which tensor of Hugging Face's is which part of which of Megatron Core's, for each family of models: data alone.

The tables follow from what both models do with their weights:

* Llama (`modeling_llama.py`) and Megatron both turn the two halves of a head by RoPE, so that rows of queries and keys
  keep their order. Megatron's `linear_qkv` has, for each group of heads that share a key and a value, the rows of its
  queries, of its key and of its value (`attention.py`, `get_query_key_value_tensors`); its gated `linear_fc1` has the
  gate, then the rest (`mlp.py`).
* GPT-2 (`modeling_gpt2.py`) keeps the weights of its `Conv1D` transposed, and queries, keys and values one after the
  other.
* Mixtral (`modeling_mixtral.py`) is Llama with experts: w1 is the gate, w3 goes up, w2 goes down.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Line:
    """hf, megatron: names; `{layer}` and `{expert}` are numbers, which are leading axes of Megatron's stacked tensors.
    rows: which rows of Megatron's tensor; columns: how many there are, if it is a matrix; the words are those of
    `naming.Sizes`. transposed: Hugging Face has columns first. when: it is there only if the model is said to have
    that."""

    hf: str
    megatron: str
    rows: str
    columns: str | None = None
    transposed: bool = False
    when: str | None = None


def _layer(hf: str, megatron: str, rows: str, columns: str | None = None, when: str | None = None) -> Line:
    return Line(f"model.layers.{{layer}}.{hf}", f"decoder.layers.{{layer}}.{megatron}", rows, columns, False, when)


_ATTENTION = (
    _layer("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight", "hidden"),
    *(
        _layer(f"self_attn.{hf}_proj.weight", "self_attention.linear_qkv.weight", rows, "hidden")
        for hf, rows in (("q", "query"), ("k", "key"), ("v", "value"))
    ),
    *(
        _layer(f"self_attn.{hf}_proj.bias", "self_attention.linear_qkv.bias", rows, when="attention_bias")
        for hf, rows in (("q", "query"), ("k", "key"), ("v", "value"))
    ),
    _layer("self_attn.o_proj.weight", "self_attention.linear_proj.weight", "hidden", "attended"),
    _layer("self_attn.o_proj.bias", "self_attention.linear_proj.bias", "hidden", when="attention_bias"),
)
_ENDS = (
    Line("model.embed_tokens.weight", "embedding.word_embeddings.weight", "vocabulary", "hidden"),
    Line("model.norm.weight", "decoder.final_layernorm.weight", "hidden"),
    Line("lm_head.weight", "output_layer.weight", "vocabulary", "hidden", when="output_layer"),
)

LLAMA = (
    *_ENDS,
    *_ATTENTION,
    _layer("post_attention_layernorm.weight", "mlp.linear_fc1.layer_norm_weight", "hidden"),
    _layer("mlp.gate_proj.weight", "mlp.linear_fc1.weight", "gate", "hidden"),
    _layer("mlp.up_proj.weight", "mlp.linear_fc1.weight", "up", "hidden"),
    _layer("mlp.down_proj.weight", "mlp.linear_fc2.weight", "hidden", "ffn"),
    _layer("mlp.gate_proj.bias", "mlp.linear_fc1.bias", "gate", when="mlp_bias"),
    _layer("mlp.up_proj.bias", "mlp.linear_fc1.bias", "up", when="mlp_bias"),
    _layer("mlp.down_proj.bias", "mlp.linear_fc2.bias", "hidden", when="mlp_bias"),
)

_EXPERT = "block_sparse_moe.experts.{expert}"
_EXPERTS = "mlp.experts.experts.{expert}"

MIXTRAL = (
    *_ENDS,
    *_ATTENTION,
    _layer("post_attention_layernorm.weight", "pre_mlp_layernorm.weight", "hidden"),
    _layer("block_sparse_moe.gate.weight", "mlp.router.weight", "experts", "hidden"),
    _layer(f"{_EXPERT}.w1.weight", f"{_EXPERTS}.linear_fc1.weight", "gate", "hidden"),
    _layer(f"{_EXPERT}.w3.weight", f"{_EXPERTS}.linear_fc1.weight", "up", "hidden"),
    _layer(f"{_EXPERT}.w2.weight", f"{_EXPERTS}.linear_fc2.weight", "hidden", "ffn"),
)


def _block(hf: str, megatron: str, rows: str, columns: str | None = None) -> Line:
    """A linear layer's weight and bias, or those of a norm."""
    hf, megatron = f"transformer.h.{{layer}}.{hf}", f"decoder.layers.{{layer}}.{megatron}"
    return Line(hf, megatron, rows, columns, transposed=columns is not None)


GPT2 = (
    Line("transformer.wte.weight", "embedding.word_embeddings.weight", "vocabulary", "hidden"),
    Line("transformer.wpe.weight", "embedding.position_embeddings.weight", "positions", "hidden"),
    Line("transformer.ln_f.weight", "decoder.final_layernorm.weight", "hidden"),
    Line("transformer.ln_f.bias", "decoder.final_layernorm.bias", "hidden"),
    Line("lm_head.weight", "output_layer.weight", "vocabulary", "hidden", when="output_layer"),
    _block("ln_1.weight", "self_attention.linear_qkv.layer_norm_weight", "hidden"),
    _block("ln_1.bias", "self_attention.linear_qkv.layer_norm_bias", "hidden"),
    _block("attn.c_attn.weight", "self_attention.linear_qkv.weight", "query_key_value", "hidden"),
    _block("attn.c_attn.bias", "self_attention.linear_qkv.bias", "query_key_value"),
    _block("attn.c_proj.weight", "self_attention.linear_proj.weight", "hidden", "attended"),
    _block("attn.c_proj.bias", "self_attention.linear_proj.bias", "hidden"),
    _block("ln_2.weight", "mlp.linear_fc1.layer_norm_weight", "hidden"),
    _block("ln_2.bias", "mlp.linear_fc1.layer_norm_bias", "hidden"),
    _block("mlp.c_fc.weight", "mlp.linear_fc1.weight", "ffn", "hidden"),
    _block("mlp.c_fc.bias", "mlp.linear_fc1.bias", "ffn"),
    _block("mlp.c_proj.weight", "mlp.linear_fc2.weight", "hidden", "ffn"),
    _block("mlp.c_proj.bias", "mlp.linear_fc2.bias", "hidden"),
)

FAMILIES = {"llama": LLAMA, "gpt2": GPT2, "mixtral": MIXTRAL}

SPELLINGS = {
    ".self_attention.linear_qkv.layer_norm_": ".input_layernorm.",
    ".mlp.linear_fc1.layer_norm_": ".pre_mlp_layernorm.",
}
"""What two of Megatron's layer specs call the same norms: fused with the layer that follows, and by themselves. The
tables have what Transformer Engine's spec writes."""

BUFFERS = (
    r"(transformer\.)?h\.\d+\.attn\.(bias|masked_bias)",
    r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",
)
"""Of Hugging Face's: constants, no weights, that older versions wrote down too."""
