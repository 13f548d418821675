"""The tiny GPT with Megatron Core's own optimizers, in training, and an oracle for their state.

    with parallel(dp=4), megatron_on_cpu():
        trainer = make_trainer(size, "zero", seed=1)
        loss = train_step(trainer, step)

The oracle knows nothing of ckpt. A whole state is one vector per kind of tensor (master, exp_avg, exp_avg_sq, step),
in the order of the parameters of `tiny_gpt`; `held` says what of it a rank's optimizer holds, from Megatron's own
ranges and `tiny_gpt`'s plain slicing. So vectors can be collected on one layout and expected on another.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from tests.support.gpt_oracle import GptSize, cut_local, full_tensors, labels
from tests.support.tiny_gpt import build_model, place
from tests.support.training import run_batch

MOMENTS = ("exp_avg", "exp_avg_sq")
KINDS = ("master", *MOMENTS, "step")


@dataclass
class MegatronTrainer:
    """A model in training by one of Megatron's optimizers. `wrapped` is Megatron's DDP around `model`."""

    size: GptSize
    kind: str
    model: Any
    wrapped: Any
    optimizer: Any
    scheduler: Any
    step: int = 0

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds. Plain values are put back into this dict, so keep it."""
        return {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler, "step": self.step}


def make_trainer(size: GptSize, kind: str, seed: int, **options: Any) -> MegatronTrainer:
    """This rank's model, DDP wrapper, optimizer and scheduler; needs `megatron_on_cpu()` and parallel state.

    kind: "zero" (DistributedOptimizer), "whole" (Float16OptimizerWithFloat16Params for 16-bit models, else
    FP32Optimizer), or "layerwise" (whole parameters, each owned by one data-parallel rank). options: more fields of
    OptimizerConfig; `frozen` freezes the word embedding and the layer 1, `bucket_size` is that of Megatron's buffers.
    """
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    frozen, bucket_size = options.pop("frozen", False), options.pop("bucket_size", None)
    model = build_model(size, seed)
    here = place()
    layer = 1 - here.pp_rank * (size.layers // here.pp)
    for name, parameter in model.named_parameters():
        if frozen and name.startswith(("embedding.word", f"decoder.layers.{layer}.")):
            parameter.requires_grad_(False)
    zero = kind == "zero"
    ddp = DistributedDataParallelConfig(
        use_distributed_optimizer=zero, grad_reduce_in_fp32=True, bucket_size=bucket_size, overlap_grad_reduce=False
    )
    wrapped = DistributedDataParallel(model.config, ddp, model)
    config = OptimizerConfig(
        optimizer="adam",
        lr=1e-3,
        min_lr=1e-5,
        weight_decay=0.01,
        clip_grad=1.0,
        bf16=size.dtype == torch.bfloat16 and kind != "layerwise",
        fp16=size.dtype == torch.float16,
        use_distributed_optimizer=zero,
        **options,
    )
    optimizer = get_megatron_optimizer(config, [wrapped], use_gloo_process_groups=False)
    if kind == "layerwise":
        optimizer = _layerwise(optimizer, replace(config, bf16=size.dtype == torch.bfloat16))
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=1e-3,
        min_lr=1e-5,
        lr_warmup_steps=16,
        lr_decay_steps=400,
        lr_decay_style="cosine",
        start_wd=0.01,
        end_wd=0.1,
        wd_incr_steps=300,
        wd_incr_style="linear",
    )
    return MegatronTrainer(size, kind, model, wrapped, optimizer, scheduler)


def _layerwise(optimizer: Any, config: Any) -> Any:
    from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer
    from megatron.core.process_groups_config import ProcessGroupCollection

    groups = ProcessGroupCollection.use_mpu_process_groups()
    singles = optimizer.chained_optimizers
    for single in singles:
        single.config = config
    made = LayerWiseDistributedOptimizer(singles, config, groups, [single.init_state_fn for single in singles])
    made.allgather_params = made.broadcast_params  # gloo cannot gather pieces of different length
    return made


def train_step(trainer: MegatronTrainer, batch: int = 8, micro: int = 2) -> float:
    """One optimizer step on the next global batch. Gives the mean loss over that batch, on every rank."""
    trainer.wrapped.zero_grad_buffer()
    trainer.optimizer.zero_grad()
    loss = run_batch(trainer.wrapped, trainer.size, trainer.step, batch, micro)
    trainer.optimizer.step()
    trainer.scheduler.step(increment=batch)
    trainer.step += 1
    return loss


# --- The oracle ---


def singles(optimizer: Any) -> list[Any]:
    """The optimizers of a chain, but those without any parameter in the job."""
    chained = getattr(optimizer, "chained_optimizers", [optimizer])
    return [single for single in chained if not single.is_stub_optimizer]


def positions(size: GptSize) -> dict[str, torch.Tensor]:
    """What every parameter of a rank (by local name, of the local shape) is of the vector of all parameters."""
    first, numbers = 0, {}
    for key, whole in full_tensors(replace(size, dtype=torch.float32)).items():
        numbers[key] = torch.arange(first, first + whole.numel()).reshape(whole.shape)
        first += whole.numel()
    return cut_local(size, place(), numbers)


def total(size: GptSize) -> int:
    """Length of the vector of all parameters."""
    return sum(whole.numel() for whole in full_tensors(replace(size, dtype=torch.float32)).values())


def stepped(trainer: MegatronTrainer) -> Iterator[tuple[str, torch.Tensor, torch.Tensor, Any]]:
    """(local name, positions, tensor that is stepped, inner optimizer) of all that this rank's optimizers hold; both
    tensors are flat."""
    where = positions(trainer.size)
    names = {id(parameter): name for name, parameter in trainer.model.named_parameters()}
    for single in singles(trainer.optimizer):
        if trainer.kind == "zero":
            for buffer, ranges in zip(single.buffers, single.gbuf_ranges, strict=True):
                for bucket in ranges[buffer.param_dtype, buffer.grad_dtype]:
                    for parameter, found in bucket["param_map"].items():
                        name, own = names[id(parameter)], found["param"]
                        piece = next(
                            p
                            for model, pieces in (
                                *zip(single.model_float16_groups, single.shard_fp32_from_float16_groups, strict=True),
                                *zip(single.model_fp32_groups, single.shard_fp32_groups, strict=True),
                            )
                            for m, p in zip(model, pieces, strict=True)
                            if m is parameter
                        )
                        yield name, where[name].reshape(-1)[own.start : own.end], piece, single.optimizer
        else:
            masters = {
                id(parameter.main_param): parameter for parameter in trainer.model.parameters() if _split(parameter)
            }
            for group in single.optimizer.param_groups:
                for tensor in group["params"]:
                    name = names[id(masters.get(id(tensor), tensor))]
                    yield name, where[name].reshape(-1), tensor, single.optimizer


def _split(parameter: torch.Tensor) -> bool:
    return getattr(parameter, "main_param", None) is not None


def held(trainer: MegatronTrainer) -> Iterator[tuple[str, str, torch.Tensor, torch.Tensor]]:
    """(local name, kind, positions, live tensor) of every tensor of the optimizer's state on this rank, masters of
    16-bit parameters included."""
    for name, where, tensor, inner in stepped(trainer):
        if trainer.size.dtype != torch.float32:
            yield name, "master", where, tensor
        for kind in ("exp_avg", "exp_avg_sq", "step"):
            yield name, kind, where, inner.state[tensor][kind]


Vectors = Mapping[str, torch.Tensor]


def collect(trainer: MegatronTrainer) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """By kind: positions and values of what this rank holds, to be put together by `whole`."""
    parts: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {}
    for _, kind, where, tensor in held(trainer):
        values = tensor.detach().reshape(-1).expand(where.numel()) if kind == "step" else tensor.detach().reshape(-1)
        parts.setdefault(kind, []).append((where, values))
    local = positions(trainer.size)
    parts["model"] = [(local[n].reshape(-1), p.detach().reshape(-1)) for n, p in trainer.model.named_parameters()]
    return {kind: tuple(map(torch.cat, zip(*found, strict=True))) for kind, found in parts.items()}  # type: ignore[misc]


def whole(size: GptSize, ranks: list[dict[str, tuple[torch.Tensor, torch.Tensor]]]) -> dict[str, torch.Tensor]:
    """The vectors of a state from what all ranks collected; holders of one element must agree on its bits. What nobody
    holds, because it is frozen, is 0."""
    vectors = {}
    for kind in ranks[0]:
        dtype = ranks[0][kind][1].dtype
        vector, seen = torch.zeros(total(size), dtype=dtype), torch.zeros(total(size), dtype=torch.bool)
        for found in ranks:
            where, values = found[kind]
            again = seen[where]
            assert bits(vector[where[again]]) == bits(values[again]), f"{kind}: ranks hold different bits"
            vector[where] = values
            seen[where] = True
        assert kind != "model" or bool(seen.all()), "no rank holds some of the model"
        vectors[kind] = vector
    return vectors


def labelled(size: GptSize) -> dict[str, torch.Tensor]:
    """Vectors in which every element of every kind has bits of its own; parameters are their masters, rounded."""
    count = total(size)
    vectors = {kind: labels(number * count, count, torch.float32) for number, kind in enumerate(("master", *MOMENTS))}
    vectors["model"] = vectors["master"].to(size.dtype)
    vectors["step"] = torch.full((count,), 7.0)
    return vectors


def fill(trainer: MegatronTrainer, vectors: Vectors) -> None:
    """Gives the model and a never-stepped optimizer the state that vectors tell."""
    for _, where, tensor, inner in stepped(trainer):
        inner.state[tensor] = {
            "step": vectors["step"][where[0]].clone(),
            **{kind: torch.empty_like(tensor, requires_grad=False) for kind in MOMENTS},
        }
    with torch.no_grad():
        for _, kind, where, tensor in held(trainer):
            if kind != "step":
                tensor.copy_(vectors[kind][where].reshape(tensor.shape))
        local = positions(trainer.size)
        for name, parameter in trainer.model.named_parameters():
            parameter.copy_(vectors["model"][local[name]])


def wrong(trainer: MegatronTrainer, vectors: Vectors) -> list[str]:
    """A line for each tensor of model and optimizer whose bits on this rank are not those of the vectors."""
    lines = []
    for name, kind, where, tensor in held(trainer):
        expected = (
            vectors[kind][where[:1]].reshape(()) if kind == "step" else vectors[kind][where].reshape(tensor.shape)
        )
        if (tensor.dtype, tensor.shape) != (expected.dtype, expected.shape) or bits(tensor) != bits(expected):
            lines.append(f"{name} ({kind})")
    return lines + [f"{name} (model)" for name in wrong_model(trainer, vectors)]


def wrong_model(trainer: MegatronTrainer, vectors: Vectors) -> list[str]:
    """Names of the parameters whose bits on this rank are not those of the vectors."""
    local = positions(trainer.size)
    named = trainer.model.named_parameters()
    return [name for name, parameter in named if bits(parameter) != bits(vectors["model"][local[name]])]


def bits(tensor: torch.Tensor) -> bytes:
    """A tensor's bytes in row-major order."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def elements(trainer: MegatronTrainer) -> int:
    """How many elements this rank's optimizers step: padding not counted."""
    return sum(math.prod(tensor.shape) for _, _, tensor, _ in stepped(trainer))
