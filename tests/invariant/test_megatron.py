"""The invariant layers on Megatron Core: Megatron's own model, by the same names; what has no form is refused."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt.errors import CkptError, Unsupported
from ckpt.invariant import Contract
from tests.support.gpt_oracle import GptSize
from tests.support.megatron_cpu import megatron_on_cpu
from tests.support.ranks import Crew
from tests.support.tiny_gpt import parallel

pytestmark = [pytest.mark.ranks]

SIZES = {
    "gated": GptSize(layers=2, hidden=64, heads=8, kv_groups=4, vocab=256, seq=32),
    "tied": GptSize(layers=2, hidden=64, heads=4, vocab=256, seq=32, gated=False, tied=True),
}
CONTRACT = Contract(4, 4, 2)


@pytest.fixture(scope="module")
def crew() -> Iterator[Crew]:
    with Crew(2) as crew:
        yield crew


def _both(rank: int, world: int, root: str, size: GptSize, layout: dict[str, int]) -> dict[str, Any]:
    """Megatron's own model saves; the invariant one loads that; then both run one batch forward and backward."""
    from tests.support.invariant_megatron import make_trainer, train_step
    from tests.support.megatron_trainer import make_trainer as make_ordinary
    from tests.support.megatron_trainer import train_step as ordinary_step

    torch.set_num_threads(1)
    with parallel(**layout), megatron_on_cpu():
        ordinary = make_ordinary(size, "whole", seed=3)
        trainer = make_trainer(size, CONTRACT, clip=1.0)
        shape = ckpt.Layout(**layout)
        with ckpt.Checkpointer(root, layout=shape) as ck:
            ck.save(1, {"model": ordinary.model})
            restored = ck.load({"model": trainer.chunks[0]})
        keys = [sorted(model.sharded_state_dict()) for model in (ordinary.model, trainer.chunks[0])]
        plain = ordinary_step(ordinary, batch=4, micro=2)
        loss, _ = train_step(trainer)
        gradients = [
            {name: p.main_grad.clone() for name, p in model.named_parameters()}
            for model in (ordinary.model, trainer.chunks[0])
        ]
    assert restored is not None
    return {"keys": keys, "losses": (plain, loss), "gradients": gradients}


@pytest.mark.parametrize("layout", [{"tp": 2}, {"pp": 2}, {"dp": 2}], ids=lambda x: next(iter(x)))
@pytest.mark.parametrize("name", SIZES)
def test_it_is_megatrons_model_to_rounding(crew: Crew, tmp_path: Path, name: str, layout: dict[str, int]) -> None:
    """Losses and clipped gradients; Megatron's optimizer clips in place, so both are after it."""
    for found in crew.run(_both, str(tmp_path), SIZES[name], layout):
        assert found["keys"][0] == found["keys"][1]
        plain, loss = found["losses"]
        assert abs(loss / plain - 1) < 1e-5
        for name_, gradient in found["gradients"][0].items():
            torch.testing.assert_close(found["gradients"][1][name_], gradient, rtol=2e-3, atol=2e-6, msg=name_)


def _refused(rank: int, world: int, what: dict[str, Any], moved: dict[str, Any]) -> str:
    from megatron.core.transformer.transformer_config import TransformerConfig

    from ckpt.invariant import Granules
    from ckpt.invariant import megatron as im

    with parallel(dp=2), megatron_on_cpu():
        options: dict[str, Any] = {
            "num_layers": 2,
            "hidden_size": 64,
            "num_attention_heads": 4,
            "use_cpu_initialization": True,
            "gradient_accumulation_fusion": False,
            "calculate_per_token_loss": True,
            "bias_activation_fusion": False,
            "apply_rope_fusion": False,
        }
        granules = Granules(replace(CONTRACT, **moved))
        try:
            im.GPTModel(TransformerConfig(**(options | what)), granules, vocab_size=256, max_sequence_length=32)
        except (Unsupported, CkptError) as error:
            return f"{type(error).__name__}: {error}"
        return "built"


@pytest.mark.parametrize(
    ("what", "moved", "said"),
    [
        ({}, {}, "^built$"),
        ({"num_moe_experts": 4}, {}, "^Unsupported: num_moe_experts=4 has no layout-invariant form"),
        ({"context_parallel_size": 2}, {}, "^Unsupported: context_parallel_size=2 has no layout-invariant form"),
        ({"recompute_granularity": "selective"}, {}, "^Unsupported: recompute_granularity='selective'"),
        ({"calculate_per_token_loss": False}, {}, "^CkptError: calculate_per_token_loss of the configuration is False"),
        ({}, {"dtype": torch.bfloat16}, "^CkptError: params_dtype of the configuration is torch.float32"),
        ({"num_attention_heads": 2}, {}, "^CkptError: the number of attention heads is 2, not a multiple of the 4"),
        ({}, {"shards": 3, "batch": 6}, "^CkptError: .*not a multiple of the 3 virtual shards"),
    ],
)
def test_what_has_no_invariant_form_is_refused(
    crew: Crew, what: dict[str, Any], moved: dict[str, Any], said: str
) -> None:
    for answer in crew.run(_refused, what, moved):
        assert re.search(said, answer), answer


def _masked(rank: int, world: int) -> list[str]:
    from tests.support.invariant_megatron import make_trainer

    found = []
    with parallel(dp=2), megatron_on_cpu():
        trainer = make_trainer(SIZES["gated"], CONTRACT)
        tokens = torch.zeros(2, 32, dtype=torch.int64)
        positions = torch.arange(32).expand(2, 32).contiguous()
        causal = torch.triu(torch.ones(1, 1, 32, 32, dtype=torch.bool), 1)
        for mask in (None, causal, torch.zeros_like(causal)):
            try:
                trainer.chunks[0](tokens, positions, mask, labels=tokens)
                found.append("ran")
            except Unsupported as error:
                found.append(str(error))
    return found


def test_only_the_causal_mask_is_taken(crew: Crew) -> None:
    for none, causal, full in crew.run(_masked):
        assert none == causal == "ran" and "only the causal attention mask" in full


def _bare(rank: int, world: int) -> str:
    """A parameter that no granule layer delivers for is found at the end of the step."""
    from tests.support.invariant_megatron import make_trainer, train_step

    with parallel(dp=2), megatron_on_cpu():
        trainer = make_trainer(SIZES["gated"], CONTRACT)
        trainer.chunks[0].register_parameter("stray", torch.nn.Parameter(torch.ones(3)))
        try:
            train_step(trainer)
        except CkptError as error:
            return str(error)
    return "trained"


def test_a_parameter_outside_of_granules_is_named(crew: Crew) -> None:
    for said in crew.run(_bare):
        assert "chunk 0: module.stray got no gradient" in said
