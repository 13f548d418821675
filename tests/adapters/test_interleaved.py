"""Interleaved pipeline stages (a list of model chunks on each rank) and uneven splits of the layers, saved on one
arrangement and loaded on another: names and stacks are those of one pipeline stage, and every bit is where plain
slicing puts it. All arrangements write the same files, so each loads those of only one other.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt import Layout
from tests.support.gpt_oracle import GptSize, cut_local, full_tensors
from tests.support.layouts import attempts, different, start
from tests.support.megatron_cpu import megatron_on_cpu
from tests.support.ranks import Crew
from tests.support.raw import raw
from tests.support.roots import Root
from tests.support.tiny_gpt import build_model, label_model, parallel, place, wrong_bits

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

WORLD = 4


@dataclass(frozen=True)
class Arrangement:
    """A layout, the number of layers of each stage where they are not even, and what Megatron is told of that."""

    layout: Layout
    split: tuple[int, ...] = ()
    options: dict[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.layout}{list(self.split) or ''}"


def _first(layers: int) -> dict[str, int]:
    return {"num_layers_in_first_pipeline_stage": layers}


def _last(layers: int) -> dict[str, int]:
    return {"num_layers_in_last_pipeline_stage": layers}


EVERY = [
    Arrangement(Layout(dp=4)),
    Arrangement(Layout(pp=2, dp=2)),
    Arrangement(Layout(tp=2, pp=2, vpp=2)),
    Arrangement(Layout(pp=4, vpp=2)),
    Arrangement(Layout(tp=2, pp=2), (7, 1), _last(1)),
    Arrangement(Layout(pp=4), (1, 2, 2, 3), _first(1) | _last(3)),
    Arrangement(Layout(pp=2, dp=2, vpp=2), (1, 3, 1, 3), _first(2)),
]
TIED = [EVERY[n] for n in (0, 2, 4)]
SIZES = {  # with TP 2 a rank has five rows of gate and five of up
    "untied": (GptSize(layers=8, hidden=16, heads=2, ffn=10, vocab=64, seq=8), EVERY),
    "tied": (GptSize(layers=8, hidden=16, heads=2, ffn=10, vocab=64, seq=8, tied=True), TIED),
}


@pytest.fixture(scope="module")
def crew() -> Iterator[Crew]:
    with start(WORLD) as crew:
        yield crew


# --- On a rank ---


def _chunks(size: GptSize, on: Arrangement, seed: int) -> list[Any]:
    """This rank's model, as Megatron's get_model gives it: a list, also of one."""
    places = [replace(place(), vpp=on.layout.vpp, chunk=n, split=on.split) for n in range(on.layout.vpp)]
    return [build_model(size, seed, here, **on.options) for here in places]


def _adam(chunks: list[Any], label: bool) -> torch.optim.AdamW:
    """An AdamW over all chunks; its moments have labels, or it has never stepped."""
    optimizer = torch.optim.AdamW([p for chunk in chunks for p in chunk.parameters()])
    if label:
        for chunk in chunks:
            part = torch.optim.AdamW(chunk.parameters())
            label_model(chunk, part)
            optimizer.state.update(part.state)
    return optimizer


def _wrong(chunks: list[Any], optimizer: torch.optim.Optimizer) -> list[str]:
    lines = [f"chunk {n}: {line}" for n, chunk in enumerate(chunks) for line in wrong_bits(chunk, optimizer)]
    return lines + [f"step {s['step']}" for s in optimizer.state.values() if raw(s["step"]) != raw(torch.tensor(7.0))]


def _save_all(rank: int, world: int, size: GptSize, every: list[Arrangement], folder: str) -> list[tuple[str, int]]:
    """Saves the labelled state on each arrangement; gives its id, and the number of layers that lie here."""
    found = []
    for number, on in enumerate(every):
        with parallel(on.layout.tp, on.layout.pp, on.layout.dp, vpp=on.layout.vpp), megatron_on_cpu():
            chunks = _chunks(size, on, seed=1)
            state = {"model": chunks, "optimizer": _adam(chunks, label=True)}
            with ckpt.Checkpointer(f"{folder}/{number}", on.layout) as ck:
                found.append((ck.save(1, state).state_id, sum(len(chunk.decoder.layers) for chunk in chunks)))
    return found


def _load_all(rank: int, world: int, size: GptSize, every: list[Arrangement], folder: str) -> list[str]:
    """Loads on each arrangement what the one before it saved, into another random init and an optimizer without state;
    gives lines for all that is wrong."""
    lines = []
    for number, on in enumerate(every):
        with parallel(on.layout.tp, on.layout.pp, on.layout.dp, vpp=on.layout.vpp), megatron_on_cpu():
            chunks = _chunks(size, on, seed=2)
            optimizer = _adam(chunks, label=False)
            with ckpt.Checkpointer(f"{folder}/{(number or len(every)) - 1}", on.layout, read_only=True) as ck:
                restored = ck.load({"model": chunks, "optimizer": optimizer})
            assert restored is not None and restored.verified
            lines += [f"{on}: {line}" for line in _wrong(chunks, optimizer)]
    return lines


@pytest.mark.parametrize("kind", SIZES)
def test_each_arrangement_loads_what_another_saved(crew: Crew, tmp_path: Path, kind: str) -> None:
    size, every = SIZES[kind]
    saved = crew.run(_save_all, size, every, str(tmp_path), timeout=120)
    assert {state_id for of_rank in saved for state_id, _ in of_rank} == {saved[0][0][0]}
    for number, on in enumerate(every):
        copies = on.layout.tp * on.layout.dp
        assert sum(of_rank[number][1] for of_rank in saved) == size.layers * copies, on
        assert different(*attempts(Root(f"{tmp_path}/{number}")), *attempts(Root(f"{tmp_path}/0"))) == [], on
    for lines in crew.run(_load_all, size, every, str(tmp_path), timeout=180):
        assert lines == []
    whole = full_tensors(size)
    found = {key: torch.zeros_like(tensor) for key, tensor in whole.items()}
    with ckpt.Checkpointer(tmp_path / "2") as ck:  # without Megatron: layers are stacked in the order of the model
        ck.load({"model": found}, allow_extra=["optimizer/*"])
    assert [key for key in whole if raw(found[key]) != raw(whole[key])] == []


# --- Megatron's DistributedOptimizer over the chunks of a rank ---


def _trained(chunks: list[Any], step: bool) -> tuple[list[Any], Any]:
    """Chunks in Megatron's DDP and their optimizer, after one step on labelled gradients, or none. The step is by
    element, so that it has the same bits on each arrangement."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    ddp = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
    wrapped = [DistributedDataParallel(c.config, ddp, c, disable_bucketing=n > 0) for n, c in enumerate(chunks)]
    config = OptimizerConfig(optimizer="adam", lr=0.01, clip_grad=0.0, bf16=True, use_distributed_optimizer=True)
    optimizer = get_megatron_optimizer(config, wrapped, use_gloo_process_groups=False)
    if step:
        for chunk in chunks:
            label_model(chunk)
            gradients = cut_local(chunk.gpt_size, chunk.gpt_place, full_tensors(chunk.gpt_size, 5))
            for name, parameter in chunk.named_parameters():
                parameter.main_grad.copy_(gradients[name].float().clamp(-1, 1))
        optimizer.reload_model_params()
        optimizer.step()
    return wrapped, optimizer


def _save_megatron(
    rank: int, world: int, size: GptSize, every: list[Arrangement], folder: str
) -> tuple[list[str], dict[str, torch.Tensor]]:
    """Ids of the trained state on each arrangement; and the whole model on the first, which has one pipeline stage."""
    ids, model = [], {}
    for number, on in enumerate(every):
        with parallel(on.layout.tp, on.layout.pp, on.layout.dp, vpp=on.layout.vpp), megatron_on_cpu():
            chunks = _chunks(size, on, seed=1)
            wrapped, optimizer = _trained(chunks, step=True)
            with ckpt.Checkpointer(f"{folder}/{number}", on.layout) as ck:
                ids.append(ck.save(1, {"model": wrapped, "optimizer": optimizer}).state_id)
            if number == 0:
                model = {n: p.detach().view(torch.int16).clone() for n, p in chunks[0].named_parameters()}
    return ids, model


def _load_megatron(
    rank: int, world: int, size: GptSize, every: list[Arrangement], folder: str, full: dict[str, torch.Tensor]
) -> tuple[list[str], list[str]]:
    """Loads on each arrangement what the next one saved; gives what is wrong in the model, and the ids when the state
    is saved again."""
    lines, ids = [], []
    for number, on in enumerate(every):
        with parallel(on.layout.tp, on.layout.pp, on.layout.dp, vpp=on.layout.vpp), megatron_on_cpu():
            chunks = _chunks(size, on, seed=2)
            wrapped, optimizer = _trained(chunks, step=False)
            state = {"model": wrapped, "optimizer": optimizer}
            with ckpt.Checkpointer(f"{folder}/{(number + 1) % len(every)}", on.layout, read_only=True) as ck:
                assert ck.load(state) is not None
            for chunk in chunks:
                wanted = cut_local(size, chunk.gpt_place, full)
                found = {n: p.detach().view(torch.int16) for n, p in chunk.named_parameters()}
                assert found.keys() == wanted.keys()
                lines += [f"{on}: chunk {chunk.gpt_place.chunk}: {n}" for n in found if raw(found[n]) != raw(wanted[n])]
            with ckpt.Checkpointer(f"{folder}/again-{number}", on.layout) as ck:
                ids.append(ck.save(1, state).state_id)
    return lines, ids


def test_with_megatrons_distributed_optimizer(crew: Crew, tmp_path: Path) -> None:
    """16-bit chunks, and fp32 masters and moments in flat pieces: one state, one id, on each arrangement."""
    size = replace(SIZES["untied"][0], dtype=torch.bfloat16)
    every = [EVERY[n] for n in (0, 2, 6)]
    saved = crew.run(_save_megatron, size, every, str(tmp_path), timeout=120)
    ids, whole = saved[0]
    assert len({state_id for of_rank, _ in saved for state_id in of_rank}) == 1
    names = full_tensors(size)
    full = {key: _stacked(key, tensor.shape, whole) for key, tensor in names.items()}
    for lines, again in crew.run(_load_megatron, size, every, str(tmp_path), full, timeout=180):
        assert (lines, again) == ([], ids)


def _stacked(key: str, shape: tuple[int, ...], whole: dict[str, torch.Tensor]) -> torch.Tensor:
    """A logical tensor from the parameters of a model with all layers."""
    if not key.startswith("decoder.layers."):
        return whole[key]
    local = key.removeprefix("decoder.layers.")
    local = local.replace("self_attention.linear_qkv.layer_norm_", "input_layernorm.")
    local = local.replace("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm.")
    found = torch.stack([whole[f"decoder.layers.{n}.{local}"] for n in range(shape[0])])
    assert found.numel() == math.prod(shape)
    return found


# --- A list of modules that are no chunks of one model ---


def _two_models(rank: int, world: int, size: GptSize, folder: str) -> list[str]:
    with parallel(tp=2, dp=2), megatron_on_cpu():
        actor, critic = build_model(size, seed=1), build_model(size, seed=2)
        kept = {n: raw(p) for n, p in critic.named_parameters()}
        with ckpt.Checkpointer(folder) as ck:
            ck.save(1, {"models": [actor, critic]})
            for model in (actor, critic):
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.zero_()
            ck.load({"models": [actor, critic]})
        return [n for n, p in critic.named_parameters() if raw(p) != kept[n]]


def test_a_list_of_whole_models_is_no_list_of_chunks(crew: Crew, tmp_path: Path) -> None:
    """Two models of the same shapes keep a name each."""
    size = replace(SIZES["untied"][0], layers=2)
    assert crew.run(_two_models, size, str(tmp_path), timeout=60) == [[]] * WORLD
