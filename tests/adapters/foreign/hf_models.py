"""Small models of transformers, saved by its own `save_pretrained`, and the same models of the real Megatron Core."""

from functools import partial
from pathlib import Path
from typing import Any

import torch

from tests.support.megatron_cpu import PLAIN

VOCABULARY, PADDED = 61, 64
HEADS, GROUPS, EXPERTS = 4, 2, 4


def hf_model(family: str, seed: int = 1, **options: Any) -> Any:
    """A model with random weights, norms and biases too, so that none is a constant."""
    import transformers

    llama: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": HEADS,
        "num_key_value_heads": GROUPS,
        "max_position_embeddings": 32,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    }
    gpt2: dict[str, Any] = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": HEADS, "n_positions": 16}
    gpt2 |= {"bos_token_id": 0, "eos_token_id": 0}
    mixtral = llama | {"num_local_experts": EXPERTS, "num_experts_per_tok": 2}
    configs: dict[str, Any] = {
        "llama": partial(transformers.LlamaConfig, **llama),
        "gpt2": partial(transformers.GPT2Config, **gpt2),
        "mixtral": partial(transformers.MixtralConfig, **mixtral),
    }
    config = configs[family](**options)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    draw = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape, generator=draw) * 0.3
    return model


def save_hf(family: str, folder: Path, seed: int = 1, **options: Any) -> Any:
    """The model, which is also saved."""
    model = hf_model(family, seed, **options)
    model.save_pretrained(folder)
    return model


def logits_of(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(tokens).logits  # type: ignore[no-any-return]


def megatron_model(family: str, tp: int, vocabulary: int) -> Any:
    """A GPTModel of the same sizes, for whose options Megatron has these of its command line: Llama and Mixtral
    `--normalization RMSNorm --swiglu --disable-bias-linear --position-embedding-type rope`, GPT-2 none. Needs
    `megatron_on_cpu()`."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    gpt2, experts = family == "gpt2", EXPERTS if family == "mixtral" else None
    options: dict[str, Any] = {}
    if experts:
        options = {"num_moe_experts": experts, "moe_router_topk": 2, "moe_token_dispatcher_type": "alltoall"}
        options |= {"moe_router_load_balancing_type": "none"}
    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=HEADS,
        num_query_groups=HEADS if gpt2 else GROUPS,
        ffn_hidden_size=128 if gpt2 else 48,
        tensor_model_parallel_size=tp,
        gated_linear_unit=not gpt2,
        activation_func=partial(torch.nn.functional.gelu, approximate="tanh") if gpt2 else torch.nn.functional.silu,
        normalization="LayerNorm" if gpt2 else "RMSNorm",
        add_bias_linear=gpt2,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        **PLAIN,
        **options,
    )
    spec = get_gpt_layer_local_spec(
        num_experts=experts, moe_grouped_gemm=False, normalization="LayerNorm" if gpt2 else "RMSNorm"
    )
    model: Any = GPTModel(
        config,
        spec,
        vocab_size=vocabulary,
        max_sequence_length=16,
        position_embedding_type="learned_absolute" if gpt2 else "rope",
        parallel_output=False,
        share_embeddings_and_output_weights=gpt2,
    )
    return model.eval()


def megatron_logits(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Needs `megatron_on_cpu()`."""
    length = tokens.shape[1]
    future = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
    with torch.no_grad():
        return model(tokens, torch.arange(length).expand_as(tokens), future)  # type: ignore[no-any-return]
