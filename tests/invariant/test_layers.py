"""The granule layers compute what plain torch computes, to rounding, for any number of virtual shards."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import ckpt
from ckpt import invariant as inv
from ckpt.errors import CkptError
from ckpt.invariant.granules import aligned
from tests.support.raw import raw
from tools.reference_gpt import Config, Model, Place, Trainer

BATCH = 6


def make(shards: int, **options: Any) -> Trainer:
    config = Config(inv.Contract(shards, BATCH, 2), layers=2, dropout=0.0, **options)
    return Trainer(Model(config, Place.here(ckpt.Layout())))


def batch(config: Config, seed: int = 1) -> torch.Tensor:
    shape = (config.contract.batch, config.tokens + 1)
    return torch.randint(0, config.vocab, shape, generator=torch.Generator().manual_seed(seed))


def plain_loss(trainer: Trainer, p: dict[str, torch.Tensor], words: torch.Tensor) -> torch.Tensor:
    """The mean loss, in plain torch operations on whole tensors, in fp64; biases of norms may be missing."""
    c = trainer.model.config
    size, shards = c.hidden // c.heads, c.contract.shards

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        if c.norm == "LayerNorm":
            return F.layer_norm(x, x.shape[-1:], p[name], p[f"{name}.bias"])
        return F.rms_norm(x, x.shape[-1:], p[name], 1e-5)

    x = p["embedding"][words[:, :-1]] + p["positions"]
    for layer in range(c.layers):
        qkv = norm(x, f"{layer}.norm1") @ p[f"{layer}.qkv"].t() + p[f"{layer}.qkv.bias"]
        heads, groups = c.heads // shards, c.groups // shards
        parts = qkv.view(*qkv.shape[:2], shards, -1, size).split([heads, groups, groups], 3)
        q, k, v = (part.flatten(2, 3).transpose(1, 2) for part in parts)
        k, v = (t.repeat_interleave(heads // groups, 1) for t in (k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + out @ p[f"{layer}.proj"].t() + p[f"{layer}.proj.bias"]
        up = norm(x, f"{layer}.norm2") @ p[f"{layer}.fc1"].t()
        if c.gated:
            gate, up = up.view(*up.shape[:2], shards, 2, -1).unbind(3)
            up = (F.silu(gate) * up).flatten(2)
        else:
            up = F.gelu(up, approximate="tanh")
        x = x + up @ p[f"{layer}.fc2"].t()
    logits = norm(x, "norm") @ p["embedding" if c.tied else "head"].t()
    return F.cross_entropy(logits.flatten(0, 1), words[:, 1:].flatten())


SETTINGS = [
    pytest.param({}, id="plain"),
    pytest.param({"gated": True, "norm": "RMSNorm", "tied": True}, id="gated, tied, RMSNorm"),
    pytest.param({"heads": 12, "groups": 6}, id="grouped heads"),
]


@pytest.mark.parametrize("shards", [1, 2, 6])
@pytest.mark.parametrize("options", SETTINGS)
def test_loss_and_gradients_are_those_of_plain_torch(shards: int, options: dict[str, Any]) -> None:
    trainer = make(shards, **options)
    model, words = trainer.model, batch(trainer.model.config)
    p = {name: value.detach().double().requires_grad_() for name, value in model.parameters.items()}
    wanted = plain_loss(trainer, p, words)
    wanted.backward()

    model.granules.gradients.begin(range(3))
    losses = []
    for number, part in enumerate(words.split(2)):
        loss = model.forward(number, None, part)
        loss.backward()
        losses.append(float(loss.detach()))
    count = words.shape[0] * model.config.tokens
    assert math.isclose(sum(losses) / count, float(wanted.detach()), rel_tol=1e-5)
    for name, gradient in trainer._gradients(count).items():
        expected = p[name].grad
        assert expected is not None
        torch.testing.assert_close(gradient.double(), expected, rtol=2e-4, atol=2e-7, msg=lambda m, n=name: f"{n}: {m}")
    assert all(parameter.grad is None for parameter in model.parameters.values())


def test_training_lowers_the_loss() -> None:
    trainer = make(2)
    words = batch(trainer.model.config)
    losses = [trainer.step(words).loss for _ in range(12)]
    assert losses[-1] < 0.8 * losses[0]


def test_dropout_follows_the_step_and_the_seed_alone() -> None:
    def losses(seed: int) -> list[str]:
        config = Config(inv.Contract(2, BATCH, seed=seed), layers=1, dropout=0.3)
        model = Model(config, Place.here(ckpt.Layout()))
        found = []
        for _ in range(2):
            found.append(float(model.forward(0, None, batch(config)[:1]).detach()).hex())
            found.append(float(model.forward(0, None, batch(config)[:1]).detach()).hex())
            model.granules.rng.advance()
        return found

    one = losses(1)
    assert one == losses(1) and one[0] == one[1] and one[2] == one[3] and one[0] != one[2]
    assert losses(2)[0] != one[0]


def test_a_granule_begins_at_an_aligned_address() -> None:
    whole = torch.arange(64.0)
    for start in range(5):
        part = aligned(whole[start : start + 20])
        assert part.data_ptr() % 64 == 0 and raw(part) == raw(whole[start : start + 20])
    assert aligned(torch.arange(12.0).view(3, 4).t()).is_contiguous()


@pytest.mark.parametrize(
    "options", [{"vocab": 263}, {"tokens": 23}, {"heads": 4}, {"groups": 4}, {"ffn": 100}], ids=lambda o: next(iter(o))
)
def test_sizes_that_do_not_divide_are_named(options: dict[str, Any]) -> None:
    ((name, value),) = options.items()
    with pytest.raises(CkptError, match=f"{name} is {value}, not a multiple of the 6 virtual shards"):
        make(6, **options)


def test_a_sequence_that_does_not_divide_is_refused() -> None:
    trainer = make(6)
    with pytest.raises(CkptError, match="20 tokens on a rank with 6 of the 6 runs"):
        trainer.step(batch(trainer.model.config)[:, :21])


def test_a_word_beyond_the_vocabulary_is_refused() -> None:
    trainer = make(2)
    words = batch(trainer.model.config)
    words[0, 3] = 264
    with pytest.raises(CkptError, match="to 264 with a vocabulary of 264"):
        trainer.step(words)
