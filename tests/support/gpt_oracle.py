"""What each parameter of a small Megatron GPT must hold on each rank of any layout, bit for bit.

It knows nothing of ckpt and imports no Megatron: it makes each complete logical tensor (`full_tensors`), labelled so
that every element says which one it is, and cuts a rank's part out by plain slicing (`cut_local`, `expected_local`).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

PARAM, EXP_AVG, EXP_AVG_SQ = 0, 1, 2
"""Which labels: the parameters' or an Adam moment's. Any other small number gives a set of its own."""


@dataclass(frozen=True)
class GptSize:
    """What the model is, whatever the layout. `ffn` is 4 x hidden, `kv_groups` is heads, unless given. `dropout` is of
    hidden states and of attention."""

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
    dropout: float = 0.0

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
    """The layout and a rank's coordinates in it. Experts are cut by `etp` and `ep`, all else by `tp`.

    Each pipeline rank has `vpp` chunks of the model, of which this is number `chunk`: rank r has the stages r, r + pp,
    r + 2 pp, … of the model. `split` has the number of layers of each stage, where they are not even.
    """

    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1
    tp_rank: int = 0
    pp_rank: int = 0
    ep_rank: int = 0
    etp_rank: int = 0
    vpp: int = 1
    chunk: int = 0
    split: tuple[int, ...] = ()

    @property
    def stage(self) -> int:
        return self.chunk * self.pp + self.pp_rank

    @property
    def is_last_stage(self) -> bool:
        return self.stage == self.vpp * self.pp - 1

    def layers(self, count: int) -> range:
        """Which of a model's `count` layers are here."""
        stages = self.vpp * self.pp
        sizes = self.split or (count // stages,) * stages
        first = sum(sizes[: self.stage])
        return range(first, first + sizes[self.stage])


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
    first_stage, last_stage = place.stage == 0, place.is_last_stage
    local: dict[str, torch.Tensor] = {}
    for rule in _rules(size):
        whole = full[rule.key]
        if (rule.where == "embedding" and first_stage) or (rule.where == "head" and last_stage):
            local[rule.key] = _tp_part(whole, rule.cut, size, place.tp, place.tp_rank)
        if rule.where not in ("layer", "expert"):
            continue
        for index, number in enumerate(place.layers(size.layers)):
            of_layer = whole[number]
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
