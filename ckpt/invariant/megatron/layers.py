"""Megatron's layers with one kernel call for each granule. Parameters, and the names they are saved by, are Megatron's.

Each class is a subclass of Megatron's own where that has parameters, and overrides `forward` alone. Megatron builds
modules from classes, so each model gets subclasses that know its `Granules` (`_bound`).
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP as MegatronMLP
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import TransformerLayer as MegatronLayer
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules

from ckpt.errors import CkptError, Unsupported
from ckpt.invariant.attention import attend
from ckpt.invariant.gradients import Parts
from ckpt.invariant.granules import Granules
from ckpt.invariant.linear import column, row
from ckpt.invariant.norm import fork, norm
from ckpt.invariant.residual import bias_dropout_add


class ColumnParallelLinear(tensor_parallel.ColumnParallelLinear):  # type: ignore[misc]
    """A GEMM for each virtual shard of the output features. `stride` 2 is Megatron's fused gate and up."""

    granules: Granules
    use = ""

    def __init__(self, *args: Any, stride: int = 1, **kwargs: Any) -> None:
        super().__init__(*args, stride=stride, **kwargs)
        self.stride = stride
        self.granules.per_shard(self.output_size // stride, f"{type(self).__name__}'s number of output features")

    def parts(self, extent: int) -> list[Parts]:
        """Which of this rank's rows each of its virtual shards has: a run in each of `stride` equal blocks."""
        return self.granules.runs(extent, self.stride)

    def outputs(self, x: torch.Tensor, weight: torch.nn.Parameter | None = None) -> tuple[torch.Tensor, ...]:
        """The output of each virtual shard of this rank, with the bias."""
        used = self.weight if weight is None else weight
        return column(x, used, self.bias, self.granules, self.parts(used.shape[0]), self.use)

    def forward(
        self, input_: torch.Tensor, weight: torch.nn.Parameter | None = None, runtime_gather_output: Any = None
    ) -> tuple[torch.Tensor, None]:
        if self.gather_output or runtime_gather_output or self.stride != 1:
            raise Unsupported("a column-parallel layer gives its outputs by virtual shards; do not gather them")
        outputs = self.outputs(input_, weight)
        return (outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)), None


class OutputLayer(ColumnParallelLinear):
    """Logits; where the weight is the embedding's, its gradient is kept apart from that of the embedding."""

    use = "head"


class RowParallelLinear(tensor_parallel.RowParallelLinear):  # type: ignore[misc]
    """A GEMM for each virtual shard of the input features, and the tree over them."""

    granules: Granules

    def __init__(self, input_size: int, *args: Any, **kwargs: Any) -> None:
        super().__init__(input_size, *args, **kwargs)
        self.granules.per_shard(input_size, "a row-parallel layer's number of input features")
        if not (self.input_is_parallel and self.skip_bias_add):
            raise Unsupported("a row-parallel layer takes parallel inputs, and its bias is added after it")

    def parts(self, extent: int) -> list[Parts]:
        """Which of this rank's columns each of its virtual shards has."""
        return self.granules.runs(extent)

    def total(self, shards: list[torch.Tensor]) -> tuple[torch.Tensor, torch.nn.Parameter | None]:
        return row(shards, self.weight, self.granules, self.parts(self.weight.shape[1])), self.bias

    def forward(self, input_: torch.Tensor) -> tuple[torch.Tensor, torch.nn.Parameter | None]:
        return self.total(list(input_.chunk(len(self.granules.shards), -1)))


class CoreAttention(torch.nn.Module):
    """Causal attention for each virtual shard of heads."""

    granules: Granules

    def __init__(
        self, config: Any, layer_number: int, attn_mask_type: Any, softmax_scale: Any = None, **_: Any
    ) -> None:
        super().__init__()
        if attn_mask_type != AttnMaskType.causal:
            raise Unsupported(f"layer {layer_number}: attention of kind {attn_mask_type} has no invariant form")
        self.config, self.layer_number, self.scale = config, layer_number, softmax_scale
        self.granules.per_shard(config.num_attention_heads, "the number of attention heads")
        self.granules.per_shard(config.num_query_groups, "the number of query groups")

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Any = None,
        packed_seq_params: Any = None,
    ) -> torch.Tensor:
        """query [tokens, samples, heads, head dim], key and value [.., groups, ..] -> [tokens, samples, features]."""
        if attention_bias is not None or packed_seq_params is not None:
            raise Unsupported(f"layer {self.layer_number}: attention bias and packed sequences have no invariant form")
        _check_causal(attention_mask, query.shape[0], self.layer_number)
        shards = self.granules.shards
        pieces = zip(shards, *(x.chunk(len(shards), 2) for x in (query, key, value)), strict=True)
        p = self.config.attention_dropout if self.training else 0.0
        options = {"layer": self.layer_number, "p": p, "scale": self.scale}
        return torch.cat([attend(q, k, v, s, self.granules, **options).flatten(2) for s, q, k, v in pieces], -1)


class MLP(MegatronMLP):  # type: ignore[misc]
    """Both GEMMs and the activation for each virtual shard of the feed-forward features."""

    def forward(
        self, hidden_states: torch.Tensor, per_token_scale: Any = None, **_: Any
    ) -> tuple[torch.Tensor, torch.nn.Parameter | None]:
        active = [self._active(out) for out in self.linear_fc1.outputs(hidden_states)]
        total: tuple[torch.Tensor, torch.nn.Parameter | None] = self.linear_fc2.total(active)
        return total

    def _active(self, x: torch.Tensor) -> torch.Tensor:
        if not self.config.gated_linear_unit:
            result: torch.Tensor = self.config.activation_func(x)
            return result
        gate, up = (part.contiguous() for part in x.chunk(2, -1))
        gated: torch.Tensor = self.config.activation_func(gate) * up
        return gated


class Norm(torch.nn.Module):
    """Layer norm or RMS norm, as the configuration says, over fixed runs of tokens; also with sequence parallelism."""

    granules: Granules

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.kind, self.eps = config.normalization, eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        plain = torch.zeros(hidden_size, dtype=config.params_dtype)
        self.bias = torch.nn.Parameter(plain) if self.kind == "LayerNorm" else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return norm(x, self.weight, self.bias, self.granules, kind=self.kind, eps=self.eps)


class TransformerLayer(MegatronLayer):  # type: ignore[misc]
    """A layer whose sums, dropout and residual stream are written down."""

    granules: Granules

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.mlp.__class__ = MLP  # it is Megatron's until here, which a layer builds with its process group

    def forward(
        self, hidden_states: torch.Tensor, attention_mask: Any = None, rotary_pos_emb: Any = None, **others: Any
    ) -> tuple[torch.Tensor, None]:
        given = [name for name, value in others.items() if value is not None and name not in _HARMLESS]
        if given:
            raise Unsupported(f"layer {self.layer_number}: {', '.join(given)} has no invariant form")
        x, residual = fork(hidden_states)
        out, bias = self.self_attention(
            self.input_layernorm(x), attention_mask=attention_mask, rotary_pos_emb=rotary_pos_emb
        )
        x, residual = fork(self._joined(out, bias, residual, "attention output"))
        out, bias = self.mlp(self.pre_mlp_layernorm(x))
        return self._joined(out, bias, residual, "feed-forward output"), None

    def _joined(self, out: torch.Tensor, bias: Any, residual: torch.Tensor, purpose: str) -> torch.Tensor:
        p = self.hidden_dropout if self.training else 0.0
        return bias_dropout_add(out, bias, residual, p, self.granules, purpose, self.layer_number)


_HARMLESS = {"rotary_pos_cos", "rotary_pos_sin", "rotary_pos_cos_sin", "sequence_len_offset", "context_mask"}


def block_spec(config: Any, granules: Granules, vp_stage: int | None = None) -> TransformerBlockSubmodules:
    """The layers of this pipeline stage, and its last norm, for a `GPTModel` of Megatron Core."""
    check_config(config, granules)
    local = get_gpt_layer_local_spec(normalization=config.normalization).submodules
    normed = _bound(Norm, granules)
    column_linear, row_linear = _bound(ColumnParallelLinear, granules), _bound(RowParallelLinear, granules)
    attention = SelfAttentionSubmodules(
        linear_qkv=column_linear,
        core_attention=_bound(CoreAttention, granules),
        linear_proj=row_linear,
        q_layernorm=IdentityOp,
        k_layernorm=IdentityOp,
    )
    causal = {"attn_mask_type": AttnMaskType.causal}
    layer = ModuleSpec(
        module=_bound(TransformerLayer, granules),
        submodules=TransformerLayerSubmodules(
            input_layernorm=normed,
            self_attention=ModuleSpec(module=SelfAttention, params=causal, submodules=attention),
            pre_mlp_layernorm=normed,
            mlp=ModuleSpec(
                module=MegatronMLP,
                params={"ffn_hidden_size": config.ffn_hidden_size},
                submodules=MLPSubmodules(linear_fc1=column_linear, linear_fc2=row_linear),
            ),
            sharded_state_dict_keys_map=local.sharded_state_dict_keys_map,
        ),
    )
    return TransformerBlockSubmodules(
        layer_specs=[layer] * get_num_layers_to_build(config, vp_stage), layer_norm=normed
    )


def check_config(config: Any, granules: Granules) -> None:
    """Raises Unsupported for what has no invariant form, and CkptError for what contradicts the contract."""
    refused = {
        "num_moe_experts": None,
        "context_parallel_size": 1,
        "expert_model_parallel_size": 1,
        "recompute_granularity": None,
        "gradient_accumulation_fusion": False,
        "apply_query_key_layer_scaling": False,
        "layernorm_zero_centered_gamma": False,
        "multi_latent_attention": False,
        "fp32_residual_connection": False,
        "fp16": False,
        "fp8": None,
        "mtp_num_layers": None,
        "window_size": None,
        "qk_layernorm": False,
        "activation_func_clamp_value": None,
        "bias_activation_fusion": False,
        "apply_rope_fusion": False,
        "defer_embedding_wgrad_compute": False,
    }
    for name, plain in refused.items():
        if (found := getattr(config, name, plain)) != plain:
            raise Unsupported(f"{name}={found!r} has no layout-invariant form here; set it to {plain!r}")
    wanted = {
        "calculate_per_token_loss": True,  # the one division comes after the last sum
        "params_dtype": granules.contract.dtype,
        "sequence_parallel": granules.sequence_parallel if granules.ranks > 1 else config.sequence_parallel,
    }
    for name, value in wanted.items():
        if (found := getattr(config, name)) != value:
            raise CkptError(f"{name} of the configuration is {found!r}; the numerics contract wants {value!r}")


def _bound(module: type, granules: Granules) -> type:
    return type(module.__name__, (module,), {"granules": granules})


def _check_causal(mask: torch.Tensor | None, tokens: int, layer: int) -> None:
    """Raises Unsupported for a mask (True is hidden) that is not the causal one."""
    if mask is None:
        return
    future = torch.ones(tokens, tokens, dtype=torch.bool, device=mask.device).triu(1)
    if mask.dtype != torch.bool or not bool((mask == future).all()):
        raise Unsupported(f"layer {layer}: only the causal attention mask has an invariant form; give None or that one")
