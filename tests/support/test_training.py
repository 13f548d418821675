"""The training loop: it learns, every layout sees the same batches, and replicas stay equal byte for byte."""

import hashlib
import math
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.support.gpt_oracle import GptSize, cut_local, full_tensors
from tests.support.megatron_cpu import megatron_on_cpu
from tests.support.ranks import Crew
from tests.support.tiny_gpt import parallel, place, raw_bytes
from tests.support.training import global_batch, make_trainer, train_step

TIED = GptSize(tied=True, kv_groups=4, heads=8)
DENSE = GptSize()
EXPERTS = GptSize(experts=4)

Layout = tuple[int, int, int, int]  # tp, pp, dp, ep
Digests = dict[str, str]


@pytest.fixture(scope="module")
def crew() -> Iterator[Crew]:
    with Crew(4) as four:
        yield four


def _digests(trainer: Any) -> Digests:
    """A digest of each parameter and each entry of its optimizer state, by its place in the logical model."""
    from megatron.core.dist_checkpointing.mapping import apply_factories

    sharded = trainer.model.sharded_state_dict()
    apply_factories(sharded)
    found = {}
    for name, param in trainer.model.named_parameters():
        entry = sharded[name]
        shards = entry if isinstance(entry, list) else [entry]
        where = " ".join(f"{shard.key}{tuple(shard.global_offset)}" for shard in shards)
        found[where] = hashlib.sha256(raw_bytes(param)).hexdigest()
        for slot, tensor in trainer.optimizer.state[param].items():
            found[f"{where} {slot}"] = hashlib.sha256(raw_bytes(tensor)).hexdigest()
    return found


def _train(rank: int, world: int, size: GptSize, layout: Layout, steps: int) -> tuple[list[float], Digests]:
    tp, pp, dp, ep = layout
    with parallel(tp, pp, dp, ep), megatron_on_cpu():
        trainer = make_trainer(size, seed=11)
        losses = [train_step(trainer, step) for step in range(steps)]
        return losses, _digests(trainer)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("size", "layout"),
    [
        (DENSE, (2, 2, 1, 1)),
        (TIED, (2, 2, 1, 1)),
        (TIED, (1, 2, 2, 1)),
        (DENSE, (2, 1, 2, 1)),
        (DENSE, (4, 1, 1, 1)),
        (DENSE, (1, 1, 4, 1)),
        (TIED, (1, 4, 1, 1)),
        (EXPERTS, (1, 1, 4, 4)),
        (EXPERTS, (1, 2, 2, 2)),
    ],
    ids=str,
)
def test_replicas_stay_equal_byte_for_byte(crew: Crew, size: GptSize, layout: Layout) -> None:
    results = crew.run(_train, size, layout, 3)

    losses = [result[0] for result in results]
    assert losses.count(losses[0]) == len(losses), "every rank must be told the same loss"
    assert losses[0][-1] < losses[0][0]
    replicas = defaultdict(list)
    for _, found in results:
        for where, digest in found.items():
            replicas[where].append(digest)
    differ = [where for where, digests in replicas.items() if len(set(digests)) > 1]
    assert differ == []
    assert any(len(digests) > 1 for digests in replicas.values()) or layout == (1, 4, 1, 1)
    moved = [where for where in replicas if where.endswith("exp_avg")]
    assert moved and all(f"{where[: -len(' exp_avg')]} step" in replicas for where in moved)


def _train_from(rank: int, world: int, size: GptSize, layout: Layout, steps: int) -> list[float]:
    """Train from weights that do not depend on the layout: Megatron's own init draws per stage."""
    generator = torch.Generator().manual_seed(5)
    full = {
        name: torch.ones(tensor.shape)
        if name.endswith("norm_weight") or name.endswith("norm.weight")
        else torch.empty(tensor.shape).normal_(0, 0.02, generator=generator)
        for name, tensor in full_tensors(size).items()
    }
    with parallel(*layout), megatron_on_cpu():
        trainer = make_trainer(size, seed=1)
        local = cut_local(size, place(), full)
        for name, param in trainer.model.named_parameters():
            param.detach().copy_(local[name])
        return [train_step(trainer, step) for step in range(steps)]


@pytest.mark.ranks
@pytest.mark.parametrize("size", [DENSE, TIED, EXPERTS], ids=["untied", "tied", "experts"])
def test_layouts_train_alike(crew: Crew, size: GptSize) -> None:
    """The same batches and start give the same losses up to rounding: cuts, averaging and schedule agree."""
    layouts = [(1, 1, 4, 1), (4, 1, 1, 1), (1, 4, 1, 1), (2, 2, 1, 1), (1, 2, 2, 1)]
    if size.experts is not None:
        layouts = [(1, 1, 4, 1), (1, 1, 4, 4), (1, 2, 2, 2)]
    runs = [crew.run(_train_from, size, layout, 4)[0] for layout in layouts]
    assert runs[0][0] == pytest.approx(math.log(size.vocab), rel=0.02)  # it knows nothing yet
    for losses in runs[1:]:
        assert losses == pytest.approx(runs[0], rel=1e-4)


def test_a_batch_is_a_function_of_the_step() -> None:
    assert raw_bytes(global_batch(3, 16, 32)) == raw_bytes(global_batch(3, 16, 32))
    assert raw_bytes(global_batch(3, 16, 32)) != raw_bytes(global_batch(4, 16, 32))
    assert global_batch(3, 16, 32).shape == (16, 33)
