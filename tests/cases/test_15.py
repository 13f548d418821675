"""Case 15, automodel-2511: tied embeddings.

The fault: the head is left out as "tied", by the model's configuration, though in memory it had become a tensor of its
own: a resume overwrites it with the embedding. Or a tied pair comes back as two tensors. Here memory decides: what is
one tensor is stored once and stays one, with one set of moments; what is two keeps both values; and what cannot be both
is refused by name.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckpt
from tests.engine.states import module_bits, optimizer_bits
from tests.support.ranks import Crew
from tests.support.raw import attempt_folder, labelled, raw

VOCAB, HIDDEN = 7, 4
MATRIX = VOCAB * HIDDEN * 4  # bytes


class Lm(nn.Module):
    """An embedding and a head. tied: whether they are one tensor; the configuration says so in any case."""

    def __init__(self, tied: bool, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.config = {"tie_word_embeddings": True}
        self.emb = nn.Embedding(VOCAB, HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)
        if tied:
            self.head.weight = self.emb.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.emb(tokens))  # type: ignore[no-any-return]


def _state(tied: bool, seed: int, steps: int = 0) -> dict[str, Any]:
    model = Lm(tied, seed)
    state = {"model": model, "opt": torch.optim.AdamW(model.parameters(), lr=0.1)}
    for _ in range(steps):
        _step(state)
    return state


def _step(state: dict[str, Any]) -> None:
    state["opt"].zero_grad()
    state["model"](torch.arange(VOCAB)).square().sum().backward()
    state["opt"].step()


def _bits(state: dict[str, Any]) -> Any:
    return module_bits(state["model"]), optimizer_bits(state["opt"])


def _is_tied(model: Lm) -> bool:
    return model.emb.weight.data_ptr() == model.head.weight.data_ptr()


# --- (a) one tensor under two names ---


def test_one_tensor_is_stored_once_and_stays_one(tmp_path: Path) -> None:
    saved, target = _state(True, 1, steps=3), _state(True, 2)
    with ckpt.Checkpointer(tmp_path) as ck:
        receipt = ck.save(1, saved)
        ck.load(target)
    assert receipt.bytes == 3 * MATRIX + 4  # the weight, two moments, one count of steps
    manifest = json.loads((attempt_folder(tmp_path) / "manifest.json").read_text())
    assert manifest["aliases"] == {"model/head.weight": "model/emb.weight"}
    for number in range(4):
        assert _is_tied(target["model"]) and target["model"].head.weight is target["model"].emb.weight
        assert len(target["opt"].state) == 1, number
        assert _bits(target) == _bits(saved), number
        _step(saved)
        _step(target)


def test_an_alias_that_building_the_model_broke(tmp_path: Path) -> None:
    """`to_empty` makes two tensors of one. Both get the value; an optimizer over the two is told that there was one."""
    saved = _state(True, 1, steps=2)
    with torch.device("meta"):
        broken = Lm(True, 2)
    broken.to_empty(device="cpu")
    assert not _is_tied(broken)
    state = {"model": broken, "opt": torch.optim.AdamW(broken.parameters())}
    with ckpt.Checkpointer(tmp_path) as ck:
        ck.save(1, saved)
        before = _bits(state)
        with pytest.raises(ckpt.StateMismatch, match=r"has no opt/param_groups/model/head\.weight"):
            ck.load(state)
        assert _bits(state) == before
        ck.load({"model": broken}, allow_extra=["opt/*"])
        assert module_bits(broken) == module_bits(saved["model"]) and not _is_tied(broken)
        broken.head.weight = broken.emb.weight  # tied again, it goes on
        state["opt"] = torch.optim.AdamW(broken.parameters())
        ck.load(state)
    assert _bits(state) == _bits(saved)


# --- (b) two tensors that the configuration calls one ---


def test_two_tensors_keep_their_values_whatever_the_configuration_says(tmp_path: Path) -> None:
    saved, target = _state(False, 1, steps=3), _state(False, 2)
    assert raw(saved["model"].emb.weight) != raw(saved["model"].head.weight)
    with ckpt.Checkpointer(tmp_path) as ck:
        receipt = ck.save(1, saved)
        ck.load(target)
    assert receipt.bytes == 6 * MATRIX + 8 and not _is_tied(target["model"])
    assert _bits(target) == _bits(saved)


def test_two_values_do_not_fit_into_one_tensor(tmp_path: Path) -> None:
    target = _state(True, 2, steps=1)
    with ckpt.Checkpointer(tmp_path) as ck:
        ck.save(1, _state(False, 1, steps=1))
        before = _bits(target)
        for state, extra in ((target, []), ({"model": target["model"]}, ["opt/*"])):
            with pytest.raises(
                ckpt.StateMismatch, match=r"model/head\.weight: shares its memory with model/emb\.weight"
            ):
                ck.load(state, allow_extra=extra)
            assert _bits(target) == before


def test_two_equal_tensors_fit_into_one(tmp_path: Path) -> None:
    saved, target = Lm(False, 1), Lm(True, 2)
    with torch.no_grad():
        saved.head.weight.copy_(saved.emb.weight)
    with ckpt.Checkpointer(tmp_path) as ck:
        assert ck.save(1, {"model": saved}).bytes == 2 * MATRIX
        ck.load({"model": target})
    assert module_bits(target) == module_bits(saved) and _is_tied(target)


# --- (c) pipeline stages with a copy each ---


@pytest.fixture(scope="module")
def crew() -> Iterator[Crew]:
    with Crew(2) as made:
        yield made


class _Stage(nn.Module):
    """The first stage has the embedding, the last one the head."""

    def __init__(self, rank: int, weight: torch.Tensor) -> None:
        super().__init__()
        part = (nn.Embedding(VOCAB, HIDDEN), nn.Linear(HIDDEN, VOCAB, bias=False))[rank]
        part.weight = nn.Parameter(weight.clone())
        self.add_module(("emb", "head")[rank], part)

    @property
    def weight(self) -> torch.Tensor:
        return next(self.parameters()).detach()


def _named_by_stage(rank: int, world: int, folder: str) -> list[bool]:
    """From one stage with a tied pair to two stages, and what two stages save, equal and different."""
    stage = _Stage(rank, torch.zeros(VOCAB, HIDDEN))
    with ckpt.Checkpointer(f"{folder}/one", read_only=True) as ck:
        ck.load({"model": stage})
    came = raw(stage.weight) == raw(labelled((VOCAB, HIDDEN)))
    for name, change in (("equal", 0.0), ("different", 1.0 * rank)):
        with ckpt.Checkpointer(f"{folder}/{name}") as ck:
            ck.save(1, {"model": _Stage(rank, labelled((VOCAB, HIDDEN)) + change)})
    return [came]


@pytest.mark.ranks
def test_stages_with_a_name_each(crew: Crew, tmp_path: Path) -> None:
    tied = Lm(True, 1)
    with torch.no_grad():
        tied.emb.weight.copy_(labelled((VOCAB, HIDDEN)))
    with ckpt.Checkpointer(tmp_path / "one") as ck:
        ck.save(1, {"model": tied})
    assert crew.run(_named_by_stage, str(tmp_path), timeout=60) == [[True], [True]]
    target = Lm(True, 2)
    with ckpt.Checkpointer(tmp_path / "equal") as ck:
        ck.load({"model": target})
    assert raw(target.emb.weight) == raw(labelled((VOCAB, HIDDEN))) and _is_tied(target)
    with ckpt.Checkpointer(tmp_path / "different") as ck:
        with pytest.raises(ckpt.StateMismatch, match=r"model/head\.weight: shares its memory .* untie them"):
            ck.load({"model": target})
        untied = Lm(False, 3)
        ck.load({"model": untied})
    assert raw(untied.head.weight) == raw(labelled((VOCAB, HIDDEN)) + 1)


def _copies(weight: torch.Tensor, moment: float) -> dict[str, Any]:
    """A stage whose copy has the name of the embedding, as Megatron's last stage has, and its optimizer."""
    parameter = nn.Parameter(weight.clone())
    optimizer = torch.optim.AdamW([parameter])
    moments = {key: torch.full_like(weight, moment) for key in ("exp_avg", "exp_avg_sq")}
    optimizer.state[parameter] = {"step": torch.tensor(2.0), **moments}
    return {"model": {"emb.weight": parameter}, "opt": optimizer}


def _one_name(rank: int, world: int, folder: str) -> list[str]:
    said = []
    weight = labelled((VOCAB, HIDDEN))
    with ckpt.Checkpointer(folder) as ck:
        for state in (_copies(weight + rank, 5.0), _copies(weight, 5.0 + rank)):
            with pytest.raises(ckpt.StateMismatch) as error:
                ck.save(1, state)
            said.append(str(error.value))
        assert ck.latest() is None
        ck.save(1, _copies(weight, 5.0))
        target = _copies(weight - 1 - rank, 1.0)
        ck.load(target)
    [(parameter, state)] = target["opt"].state.items()
    assert raw(parameter) == raw(weight) and raw(state["exp_avg"]) == raw(torch.full_like(weight, 5.0))
    return said


@pytest.mark.ranks
def test_stages_with_one_name_must_have_equal_copies(crew: Crew, tmp_path: Path) -> None:
    for weight, moment in crew.run(_one_name, str(tmp_path), timeout=60):
        assert "model/emb.weight: " in weight and "opt/state/model/emb.weight/exp_avg" in moment
        assert "different bits" in weight and "different bits" in moment


# --- (d) views that overlap ---


def _views(kind: str, seed: int) -> dict[str, torch.Tensor]:
    base = labelled((6, 6)) + 100 * seed
    return {
        "overlapping": {"a": base[:4], "b": base[2:]},
        "one in the other": {"a": base, "b": base[2:4, 1:3]},
        "transposed": {"a": base, "b": base.t()},
        "flat": {"a": base, "b": base.view(-1)},
        "another dtype": {"a": base, "b": base.view(torch.int32)},
        "the same": {"a": base[1:4], "b": base[1:4]},
        "apart": {"a": base[::2], "b": base[1::2]},
    }[kind]


@pytest.mark.parametrize("kind", ["overlapping", "one in the other", "transposed", "flat", "another dtype"])
def test_views_that_share_a_part_are_refused_by_name(kind: str, tmp_path: Path) -> None:
    """Copies of them are carried; into views that overlap nothing is loaded either."""
    words = r"a and b overlap in memory without being the same view; make one of them a copy"
    saved, target = _views(kind, 1), _views(kind, 2)
    before = {n: raw(t) for n, t in target.items()}
    with ckpt.Checkpointer(tmp_path) as ck:
        with pytest.raises(ckpt.StateMismatch, match=words):
            ck.save(1, saved)
        ck.save(1, {n: t.clone() for n, t in saved.items()})
        with pytest.raises(ckpt.StateMismatch, match=words):
            ck.load(target)
        assert {n: raw(t) for n, t in target.items()} == before
        copies = {n: t.clone() for n, t in target.items()}
        ck.load(copies)
    assert {n: raw(t) for n, t in copies.items()} == {n: raw(t) for n, t in saved.items()}


@pytest.mark.parametrize("kind", ["the same", "apart"])
def test_views_of_one_memory_that_are_the_same_or_apart_are_exact(kind: str, tmp_path: Path) -> None:
    saved, target = _views(kind, 1), _views(kind, 2)
    with ckpt.Checkpointer(tmp_path) as ck:
        receipt = ck.save(1, saved)
        ck.load(target)
    assert {n: raw(t) for n, t in target.items()} == {n: raw(t) for n, t in saved.items()}
    assert receipt.bytes == 18 * 4 * (1 if kind == "the same" else 2)
