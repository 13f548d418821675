"""A small real Megatron Core GPTModel for any layout, and what each of its parameters must hold, bit for bit.

The oracle (`full_tensors`, `expected_local`) knows nothing of ckpt and imports no Megatron: it makes each
complete logical tensor, labelled so that every element says which one it is, and cuts a rank's part out by
plain slicing. Tests load a checkpoint into a model and compare its raw bytes with that (`wrong_bits`).

    with parallel(tp=2, pp=2):
        with megatron_on_cpu():
            model = build_model(GptSize(), seed=1)
        label_model(model)
        ...
        assert wrong_bits(model) == []
"""

import contextlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from tests.support.megatron_cpu import megatron_on_cpu

PARAM, EXP_AVG, EXP_AVG_SQ = 0, 1, 2
"""Which labels: the parameters' or an Adam moment's. Any other small number gives a set of its own."""


@dataclass(frozen=True)
class GptSize:
    """What the model is, whatever the layout. `ffn` is 4 x hidden, `kv_groups` is heads, unless given."""

    layers: int = 4
    hidden: int = 64
    heads: int = 4
    ffn: int | None = None
    vocab: int = 256
    seq: int = 32
    kv_groups: int | None = None
    gated: bool = True
    experts: int | None = None
    tied: bool = False
    dtype: torch.dtype = torch.float32

    @property
    def ffn_size(self) -> int:
        return self.ffn or 4 * self.hidden

    @property
    def groups(self) -> int:
        return self.kv_groups or self.heads

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


@dataclass(frozen=True)
class Place:
    """The layout and a rank's coordinates in it. Experts are cut by `etp` and `ep`, all else by `tp`."""

    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1
    tp_rank: int = 0
    pp_rank: int = 0
    ep_rank: int = 0
    etp_rank: int = 0


# --- The oracle ---


@dataclass(frozen=True)
class _Rule:
    """One logical tensor: its key, its name on a rank, the shape of one layer's slice, and how TP cuts that.

    `where` is the part of the model: embedding (first stage), layer, expert, or head (last stage). Outside of
    the layers the local name is the key.
    """

    key: str
    local: str
    shape: tuple[int, ...]
    cut: str
    where: str


def _rules(size: GptSize) -> list[_Rule]:
    h, f = size.hidden, size.ffn_size
    qkv = (size.heads + 2 * size.groups) * size.head_dim
    bias = size.experts is None
    rules = [
        _Rule("embedding.word_embeddings.weight", "", (size.vocab, h), "rows", "embedding"),
        _Rule("embedding.position_embeddings.weight", "", (size.seq, h), "whole", "embedding"),
    ]

    def layer(name: str, local: str, shape: tuple[int, ...], cut: str) -> None:
        local = f"decoder.layers.{{layer}}.{local}"
        rules.append(_Rule(f"decoder.layers.{name}", local, shape, cut, "layer"))

    def linear(name: str, out: int, into: int, cut: str) -> None:
        layer(f"{name}.weight", f"{name}.weight", (out, into), cut)
        if bias:  # that of a linear cut by columns is added after the sum over TP, so it is whole on every rank
            layer(f"{name}.bias", f"{name}.bias", (out,), "whole" if cut == "columns" else cut)

    def norm(name: str, local: str) -> None:
        for part in ("weight", "bias"):
            layer(f"{name}_{part}", f"{local}.{part}", (h,), "whole")

    fc1 = (f * 2, "gated") if size.gated else (f, "rows")
    norm("self_attention.linear_qkv.layer_norm", "input_layernorm")
    linear("self_attention.linear_qkv", qkv, h, "groups")
    linear("self_attention.linear_proj", h, size.heads * size.head_dim, "columns")
    norm("mlp.linear_fc1.layer_norm", "pre_mlp_layernorm")
    if size.experts is None:
        linear("mlp.linear_fc1", fc1[0], h, fc1[1])
        linear("mlp.linear_fc2", h, f, "columns")
    else:
        layer("mlp.router.weight", "mlp.router.weight", (size.experts, h), "whole")
        for name, shape, cut in (("linear_fc1", (fc1[0], h), fc1[1]), ("linear_fc2", (h, f), "columns")):
            local = f"decoder.layers.{{layer}}.mlp.experts.local_experts.{{expert}}.{name}.weight"
            key = f"decoder.layers.mlp.experts.experts.{name}.weight"
            rules.append(_Rule(key, local, shape, cut, "expert"))
    for part in ("weight", "bias"):
        rules.append(_Rule(f"decoder.final_layernorm.{part}", "", (h,), "whole", "head"))
    if not size.tied:
        rules.append(_Rule("output_layer.weight", "", (size.vocab, h), "rows", "head"))
    return rules


def _full_shape(rule: _Rule, size: GptSize) -> tuple[int, ...]:
    if rule.where == "expert":
        return (size.layers, size.experts or 0, *rule.shape)
    return (size.layers, *rule.shape) if rule.where == "layer" else rule.shape


def labels(first: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """`count` finite numbers whose bits tell element `first`, `first + 1`, … apart.

    float32: distinct for all numbers below 100 x 2^24: the low 24 bits of the number, mixed, are mantissa and
    sign, the rest moves the exponent. bfloat16 has too few bits for that: it gets 14 mixed ones, so near
    numbers differ and any two are equal with a chance of 2^-14.
    """
    index = torch.arange(first, first + count, dtype=torch.int64)
    if dtype == torch.float32:
        mixed = (index * 0x9E3779B1) & 0xFFFFFF
        bits = ((mixed >> 23) << 31) | ((100 + (index >> 24)) << 23) | (mixed & 0x7FFFFF)
        return torch.where(bits >= 1 << 31, bits - (1 << 32), bits).to(torch.int32).view(torch.float32)
    if dtype == torch.bfloat16:
        mixed = ((index * 0x9E3779B1) & 0xFFFFFFFF) >> 18
        bits = ((mixed >> 13) << 15) | ((64 + ((mixed >> 7) & 0x3F)) << 7) | (mixed & 0x7F)
        return torch.where(bits >= 1 << 15, bits - (1 << 16), bits).to(torch.int16).view(torch.bfloat16)
    raise ValueError(f"no labels for {dtype}")


def full_tensors(size: GptSize, which: int = PARAM) -> dict[str, torch.Tensor]:
    """Every complete logical tensor, labelled, by its canonical (Megatron sharded) name.

    A layer's tensors are stacked over the layers, an expert's over layers and experts.
    """
    rules = _rules(size)
    counts = [math.prod(_full_shape(rule, size)) for rule in rules]
    first = which * sum(counts)
    full = {}
    for rule, count in zip(rules, counts, strict=True):
        full[rule.key] = labels(first, count, size.dtype).reshape(_full_shape(rule, size))
        first += count
    return full


def _tp_part(tensor: torch.Tensor, cut: str, size: GptSize, parts: int, part: int) -> torch.Tensor:
    """One TP rank's part of one layer's tensor."""

    def rows(whole: torch.Tensor) -> torch.Tensor:
        count, rest = divmod(whole.shape[0], parts)
        if rest:
            raise ValueError(f"{whole.shape[0]} rows do not divide by {parts}")
        return whole[part * count : (part + 1) * count]

    if cut == "whole":
        return tensor
    if cut == "rows":
        return rows(tensor)
    if cut == "columns":
        return rows(tensor.T).T
    if cut == "gated":
        half = tensor.shape[0] // 2
        return torch.cat([rows(tensor[:half]), rows(tensor[half:])])
    if cut == "groups":  # each query group has its queries, then its key, then its value
        by_group = tensor.reshape(size.groups, -1, *tensor.shape[1:])
        return rows(by_group).flatten(0, 1)
    raise ValueError(cut)


def expected_local(size: GptSize, place: Place, which: int = PARAM) -> dict[str, torch.Tensor]:
    """What each entry of `named_parameters()` must hold at a place: copies of slices of `full_tensors`."""
    return cut_local(size, place, full_tensors(size, which))


def cut_local(size: GptSize, place: Place, full: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The parts that a place has of any complete tensors with the names and shapes of `full_tensors`."""
    first_stage, last_stage = place.pp_rank == 0, place.pp_rank == place.pp - 1
    per_stage = size.layers // place.pp
    local: dict[str, torch.Tensor] = {}
    for rule in _rules(size):
        whole = full[rule.key]
        if (rule.where == "embedding" and first_stage) or (rule.where == "head" and last_stage):
            local[rule.key] = _tp_part(whole, rule.cut, size, place.tp, place.tp_rank)
        if rule.where not in ("layer", "expert"):
            continue
        for index in range(per_stage):
            of_layer = whole[place.pp_rank * per_stage + index]
            if rule.where == "layer":
                name = rule.local.format(layer=index)
                local[name] = _tp_part(of_layer, rule.cut, size, place.tp, place.tp_rank)
                continue
            per_rank = of_layer.shape[0] // place.ep
            for expert in range(per_rank):
                name = rule.local.format(layer=index, expert=expert)
                of_expert = of_layer[place.ep_rank * per_rank + expert]
                local[name] = _tp_part(of_expert, rule.cut, size, place.etp, place.etp_rank)
    if size.tied and last_stage and not first_stage:  # the last stage keeps its own copy of the embedding
        whole = full["embedding.word_embeddings.weight"]
        local["output_layer.weight"] = _tp_part(whole, "rows", size, place.tp, place.tp_rank)
    return {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in local.items()}


# --- The model ---


def initialize(tp: int = 1, pp: int = 1, dp: int = 1, ep: int = 1, seed: int = 1, etp: int | None = None) -> None:
    """Set Megatron's parallel state up over the gloo world, which must have tp x pp x dp ranks.

    Needs `megatron_on_cpu()`. Experts are cut by `etp`, which is `tp` unless given; etp x ep must divide
    tp x dp. After `destroy()` it may be called again, so one set of processes can host layouts in turn.
    """
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    if dist.get_world_size() != tp * pp * dp:
        raise ValueError(f"tp{tp} x pp{pp} x dp{dp} is not the world of {dist.get_world_size()} ranks")
    parallel_state.initialize_model_parallel(
        tp,
        pp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=etp,
        create_gloo_process_groups=False,
    )
    model_parallel_cuda_manual_seed(seed)


def destroy(barrier: bool = True) -> None:
    """Undo `initialize`, its process groups too; the world's own group stays.

    Collective: without the barrier a rank could close connections that another still reads. Leave it out
    after an error, when the others may not come.
    """
    from megatron.core import parallel_state

    groups = [group for group in parallel_state._global_process_group_list or [] if group is not None]
    if barrier:
        dist.barrier()
    parallel_state.destroy_model_parallel()
    for group in groups:
        dist.destroy_process_group(group)


@contextlib.contextmanager
def parallel(
    tp: int = 1, pp: int = 1, dp: int = 1, ep: int = 1, seed: int = 1, etp: int | None = None
) -> Iterator[None]:
    """`initialize` for the time of a with statement, `destroy` after it, also after an error.

    It holds `megatron_on_cpu()` only while it initialises; training within it needs that too.
    """
    with megatron_on_cpu():
        initialize(tp, pp, dp, ep, seed, etp)
    try:
        yield
    except BaseException:
        destroy(barrier=False)
        raise
    destroy()


def place() -> Place:
    """Where this rank is, as Megatron's parallel state says."""
    from megatron.core import parallel_state as ps

    return Place(
        tp=ps.get_tensor_model_parallel_world_size(),
        pp=ps.get_pipeline_model_parallel_world_size(),
        ep=ps.get_expert_model_parallel_world_size(),
        etp=ps.get_expert_tensor_parallel_world_size(),
        tp_rank=ps.get_tensor_model_parallel_rank(),
        pp_rank=ps.get_pipeline_model_parallel_rank(),
        ep_rank=ps.get_expert_model_parallel_rank(),
        etp_rank=ps.get_expert_tensor_parallel_rank(),
    )


def build_model(size: GptSize, seed: int) -> Any:
    """This rank's part of a GPTModel, with a random init that depends on the seed. Needs `megatron_on_cpu()`.

    Replicas start equal if they are given one seed. `model.gpt_size` is the size.
    """
    from megatron.core import parallel_state as ps
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    here = place()
    experts: dict[str, Any] = {}
    if size.experts is not None:
        experts = {
            "num_moe_experts": size.experts,
            "moe_router_topk": min(2, size.experts),
            "moe_token_dispatcher_type": "alltoall",
            "moe_grouped_gemm": False,
            "add_bias_linear": False,
            "expert_model_parallel_size": here.ep,
            "expert_tensor_parallel_size": here.etp,
        }
    config = TransformerConfig(
        num_layers=size.layers,
        hidden_size=size.hidden,
        num_attention_heads=size.heads,
        num_query_groups=size.groups,
        ffn_hidden_size=size.ffn_size,
        tensor_model_parallel_size=here.tp,
        pipeline_model_parallel_size=here.pp,
        params_dtype=size.dtype,
        pipeline_dtype=size.dtype,
        bf16=size.dtype == torch.bfloat16,
        gated_linear_unit=size.gated,
        activation_func=torch.nn.functional.silu if size.gated else torch.nn.functional.gelu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        finalize_model_grads_func=finalize_model_grads,
        **experts,
    )
    # CPU initialisation draws whole weights and cuts them: TP and DP ranks must draw the same.
    torch.manual_seed(seed * 1000 + here.pp_rank)
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(num_experts=size.experts, moe_grouped_gemm=False),
        vocab_size=size.vocab,
        max_sequence_length=size.seq,
        pre_process=ps.is_pipeline_first_stage(),
        post_process=ps.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=size.tied,
    ).to(size.dtype)
    model.gpt_size = size
    return model


# --- Model and oracle together ---


def _held(model: Any, optimizer: torch.optim.Optimizer | None) -> Iterator[tuple[str, torch.Tensor, int]]:
    """(local parameter name, live tensor, which labels): the parameters and, if given, Adam's moments."""
    for name, param in model.named_parameters():
        yield name, param.detach(), PARAM
        if optimizer is not None:
            yield name, optimizer.state[param]["exp_avg"], EXP_AVG
            yield name, optimizer.state[param]["exp_avg_sq"], EXP_AVG_SQ


def _against_oracle(
    model: Any, optimizer: torch.optim.Optimizer | None, shift: int
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor | None]]:
    wanted: dict[int, dict[str, torch.Tensor]] = {}
    for name, tensor, which in _held(model, optimizer):
        if which not in wanted:
            wanted[which] = expected_local(model.gpt_size, place(), which + shift)
        yield f"{name} ({('param', 'exp_avg', 'exp_avg_sq')[which]})", tensor, wanted[which].get(name)


def label_model(model: Any, optimizer: torch.optim.Optimizer | None = None, shift: int = 0) -> None:
    """Overwrite every parameter, and the moments and step (7) of an Adam over them, with their labels.

    `shift` (3, 6, …) gives another set of labels, for a second state.
    """
    if optimizer is not None:
        for group in optimizer.param_groups:
            for param in group["params"]:
                optimizer.state[param] = {
                    "step": torch.tensor(7.0),
                    "exp_avg": torch.empty_like(param, requires_grad=False),
                    "exp_avg_sq": torch.empty_like(param, requires_grad=False),
                }
    for name, tensor, wanted in _against_oracle(model, optimizer, shift):
        if wanted is None:
            raise KeyError(f"the oracle does not know {name}")
        tensor.copy_(wanted)


def wrong_bits(model: Any, optimizer: torch.optim.Optimizer | None = None, shift: int = 0) -> list[str]:
    """A line for each tensor whose shape, dtype or raw bytes are not what the oracle says."""
    wrong = []
    seen = set()
    for name, tensor, wanted in _against_oracle(model, optimizer, shift):
        seen.add(name.split(" ")[0])
        if wanted is None:
            wrong.append(f"{name}: unknown to the oracle")
        elif (tensor.shape, tensor.dtype) != (wanted.shape, wanted.dtype):
            found, expected = (f"{t.dtype} {tuple(t.shape)}" for t in (tensor, wanted))
            wrong.append(f"{name}: {found}, not {expected}")
        elif raw_bytes(tensor) != raw_bytes(wanted):
            differ = int((_words(tensor) != _words(wanted)).sum())
            wrong.append(f"{name}: {differ} of {tensor.numel()} elements differ")
    missing = set(expected_local(model.gpt_size, place())) - seen
    return wrong + [f"{name}: not in the model" for name in sorted(missing)]


def _words(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(torch.int16 if tensor.element_size() == 2 else torch.int32)


def raw_bytes(tensor: torch.Tensor) -> bytes:
    """The tensor's bytes in row-major order, whatever its strides."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
