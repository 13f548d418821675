"""A small real Megatron Core GPTModel for any layout, to be held against the oracle (`gpt_oracle`).

with parallel(tp=2, pp=2):
    with megatron_on_cpu():
        model = build_model(GptSize(), seed=1)
    label_model(model)
    ...
    assert wrong_bits(model) == []
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from tests.support.gpt_oracle import EXP_AVG, EXP_AVG_SQ, PARAM, GptSize, Place, expected_local
from tests.support.megatron_cpu import PLAIN, megatron_on_cpu


def initialize(
    tp: int = 1, pp: int = 1, dp: int = 1, ep: int = 1, seed: int = 1, etp: int | None = None, vpp: int = 1
) -> None:
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
        vpp if vpp > 1 else None,
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
    tp: int = 1, pp: int = 1, dp: int = 1, ep: int = 1, seed: int = 1, etp: int | None = None, vpp: int = 1
) -> Iterator[None]:
    """`initialize` for the time of a with statement, `destroy` after it, also after an error.

    It holds `megatron_on_cpu()` only while it initialises; training within it needs that too.
    """
    with megatron_on_cpu():
        initialize(tp, pp, dp, ep, seed, etp, vpp)
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


def make_config(size: GptSize, here: Place, **options: Any) -> Any:
    """The TransformerConfig of a size at a place. options: more fields, or other values."""
    from megatron.core.transformer.transformer_config import TransformerConfig

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
    fields: dict[str, Any] = dict(
        num_layers=size.layers,
        hidden_size=size.hidden,
        num_attention_heads=size.heads,
        num_query_groups=size.groups,
        ffn_hidden_size=size.ffn_size,
        tensor_model_parallel_size=here.tp,
        pipeline_model_parallel_size=here.pp,
        virtual_pipeline_model_parallel_size=here.vpp if here.vpp > 1 else None,
        params_dtype=size.dtype,
        pipeline_dtype=size.dtype,
        bf16=size.dtype == torch.bfloat16,
        gated_linear_unit=size.gated,
        activation_func=torch.nn.functional.silu if size.gated else torch.nn.functional.gelu,
        hidden_dropout=size.dropout,
        attention_dropout=size.dropout,
        **experts,
    )
    return TransformerConfig(**(PLAIN | fields | options))


def build_model(size: GptSize, seed: int, here: Place | None = None, **options: Any) -> Any:
    """This rank's part of a GPTModel, with a random init that depends on the seed. Needs `megatron_on_cpu()`.

    Replicas start equal if they are given one seed. here: where the part lies, for one of several chunks or an uneven
    split; `place()` unless given. options: more fields of the TransformerConfig. `model.gpt_size` is the size,
    `model.gpt_place` the place.
    """
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    here = here or place()
    config = make_config(size, here, finalize_model_grads_func=finalize_model_grads, **options)
    # CPU initialisation draws whole weights and cuts them: TP and DP ranks must draw the same.
    torch.manual_seed(seed * 1000 + here.stage)
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(num_experts=size.experts, moe_grouped_gemm=False),
        vocab_size=size.vocab,
        max_sequence_length=size.seq,
        pre_process=here.stage == 0,
        post_process=here.is_last_stage,
        share_embeddings_and_output_weights=size.tied,
        vp_stage=here.chunk if here.vpp > 1 else None,
    ).to(size.dtype)
    model.gpt_size, model.gpt_place = size, here
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
            wanted[which] = expected_local(model.gpt_size, model.gpt_place, which + shift)
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
    missing = set(expected_local(model.gpt_size, model.gpt_place)) - seen
    return wrong + [f"{name}: not in the model" for name in sorted(missing)]


def _words(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(torch.int16 if tensor.element_size() == 2 else torch.int32)


def raw_bytes(tensor: torch.Tensor) -> bytes:
    """The tensor's bytes in row-major order, whatever its strides."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
