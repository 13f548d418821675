"""The oracle against reality: Megatron's own parameters and the global offsets of its sharded_state_dict."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from tests.support.gpt_oracle import GptSize, Place, expected_local, full_tensors, labels
from tests.support.megatron_cpu import megatron_on_cpu
from tests.support.ranks import Crew
from tests.support.tiny_gpt import build_model, label_model, parallel, place, raw_bytes, wrong_bits

DENSE = GptSize()
GROUPED = GptSize(kv_groups=4, heads=8, ffn=96, vocab=64, gated=False, tied=True)
EXPERTS = GptSize(experts=4)

# tp, pp, dp, ep, etp
LAYOUTS = [
    (2, 2, 1, 1, None),
    (4, 1, 1, 1, None),
    (1, 4, 1, 1, None),
    (2, 1, 2, 1, None),
    (1, 2, 2, 1, None),
    (1, 1, 4, 1, None),
]
EXPERT_LAYOUTS = [
    (2, 1, 2, 2, None),
    (1, 1, 4, 4, None),
    (1, 2, 2, 2, None),
    (2, 2, 1, 2, 1),
    (4, 1, 1, 2, 2),
]


@pytest.fixture(scope="module")
def crew() -> Iterator[Crew]:
    with Crew(4) as four:
        yield four


def _check(rank: int, world: int, size: GptSize, layout: tuple[int, int, int, int, int | None]) -> set[str]:
    """Label a model, then read it through Megatron's eyes. Gives the logical tensors that this rank has."""
    tp, pp, dp, ep, etp = layout
    with parallel(tp, pp, dp, ep, etp=etp):
        return _check_here(size, seed=rank)


def _check_here(size: GptSize, seed: int) -> set[str]:
    with megatron_on_cpu():
        model = build_model(size, seed)
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories

    assert wrong_bits(model), "a fresh model must not hold the labels by chance"
    local = expected_local(size, place())
    real = {name: (param.shape, param.dtype) for name, param in model.named_parameters()}
    assert real == {name: (tensor.shape, tensor.dtype) for name, tensor in local.items()}

    label_model(model)
    assert wrong_bits(model) == []
    full = full_tensors(size)
    sharded = model.sharded_state_dict()
    apply_factories(sharded)
    held = set()
    for entry in sharded.values():
        for shard in entry if isinstance(entry, list) else [entry]:
            if not isinstance(shard, ShardedTensor):
                continue
            whole = full[shard.key]
            assert shard.global_shape == tuple(whole.shape), shard.key
            extents = (1,) * shard.prepend_axis_num + tuple(shard.local_shape)
            box = tuple(slice(o, o + n) for o, n in zip(shard.global_offset, extents, strict=True))
            assert raw_bytes(shard.data) == raw_bytes(whole[box]), (shard.key, shard.global_offset)
            held.add(shard.key)

    label_model(model, shift=3)
    assert len(wrong_bits(model)) == len(local)
    return held


@pytest.mark.ranks
@pytest.mark.parametrize("size", [DENSE, GROUPED], ids=["gated", "grouped-tied"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_dense_model_matches_megatron(crew: Crew, size: GptSize, layout: tuple[int, int, int, int, None]) -> None:
    held = crew.run(_check, size, layout)
    assert set().union(*held) == set(full_tensors(size))


@pytest.mark.ranks
@pytest.mark.parametrize("layout", EXPERT_LAYOUTS, ids=str)
def test_experts_match_megatron(crew: Crew, layout: tuple[int, int, int, int, int | None]) -> None:
    held = crew.run(_check, EXPERTS, layout)
    assert set().union(*held) == set(full_tensors(EXPERTS))


@pytest.mark.ranks
def test_bfloat16_model_matches_megatron(crew: Crew) -> None:
    for size in (replace(DENSE, dtype=torch.bfloat16), replace(EXPERTS, dtype=torch.bfloat16, tied=True)):
        crew.run(_check, size, (2, 2, 1, 1, None))


def _label_adam(rank: int, world: int) -> tuple[int, int]:
    with parallel(tp=2, pp=2):
        with megatron_on_cpu():
            model = build_model(DENSE, seed=1)
        optimizer = torch.optim.AdamW(model.parameters())
        label_model(model, optimizer)
        good = wrong_bits(model, optimizer)
        first = next(iter(optimizer.state.values()))
        first["exp_avg"].view(-1)[3] = 0
        return len(good), len(wrong_bits(model, optimizer))


@pytest.mark.ranks
def test_moments_are_labelled_and_compared(crew: Crew) -> None:
    assert crew.run(_label_adam) == [(0, 1)] * 4


def test_labels_are_finite_and_distinct() -> None:
    bits = torch.cat([t.reshape(-1).view(torch.int32) for t in full_tensors(DENSE).values()])
    moments = torch.cat([t.reshape(-1).view(torch.int32) for t in full_tensors(DENSE, 2).values()])
    assert len(torch.cat([bits, moments]).unique()) == 2 * len(bits)
    assert torch.isfinite(bits.view(torch.float32)).all()
    far = labels((1 << 24) - 5, 10, torch.float32)
    assert len(far.view(torch.int32).unique()) == 10 and torch.isfinite(far).all()

    half = labels(0, 1 << 18, torch.bfloat16)
    assert torch.isfinite(half).all()
    for distance in (1, 2, 31, 32, 64, 2048, 4096):
        assert (half[distance:].view(torch.int16) == half[:-distance].view(torch.int16)).float().mean() < 1e-3


def test_gated_and_fused_cuts_by_hand() -> None:
    """Two cuts that plain row slicing would get wrong or right by luck, spelled out on a tiny model."""
    size = GptSize(layers=2, hidden=8, heads=4, kv_groups=2, ffn=4)
    full = full_tensors(size)
    second = expected_local(size, Place(tp=2, tp_rank=1))

    fc1 = full["decoder.layers.mlp.linear_fc1.weight"][1]  # rows 0-3 are the gate, 4-7 are up
    assert raw_bytes(second["decoder.layers.1.mlp.linear_fc1.weight"]) == raw_bytes(fc1[[2, 3, 6, 7]])
    qkv = full["decoder.layers.self_attention.linear_qkv.weight"][0]  # group: 2 queries, key, value, 2 rows each
    assert raw_bytes(second["decoder.layers.0.self_attention.linear_qkv.weight"]) == raw_bytes(qkv[8:16])
    fc2 = full["decoder.layers.mlp.linear_fc2.weight"][0]
    assert raw_bytes(second["decoder.layers.0.mlp.linear_fc2.weight"]) == raw_bytes(fc2[:, 2:4])


def test_rows_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="do not divide"):
        expected_local(GptSize(vocab=255), Place(tp=2))
