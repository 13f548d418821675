"""Case 9: optimizer state follows the names of parameters through any order, grouping, freezing and pipeline split."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckpt
from tests.engine.states import module_bits, optimizer_bits, round_trip
from tests.support.ranks import run_ranks
from tests.support.raw import raw

SHAPE = (3, 3)
LABEL = {name: 100.0 + at for at, name in enumerate("abcde")}


def _build(names: str, groups: Sequence[str], *, warm: float = 0.0, frozen: str = "", rate: float = 1e-3) -> Any:
    """Equal linears by these names and an Adam over these groups of them. warm: added to the label of each weight and
    moment; without it the weights are 0 and the optimizer has never stepped. frozen: do not require gradients."""
    model: Any = nn.ModuleDict({n: nn.Linear(*SHAPE, bias=False) for n in names})
    for n in names:
        model[n].weight.requires_grad_(n not in frozen)
        model[n].weight.data.fill_(LABEL[n] + warm if warm else 0)
    optimizer = torch.optim.Adam([{"params": [model[n].weight for n in g], "lr": rate} for g in groups])
    for n in "".join(groups) if warm else "":
        weight = model[n].weight
        if weight.requires_grad:
            optimizer.state[weight] = _state(n, warm)
    return {"model": model, "opt": optimizer}


def _state(name: str, warm: float) -> dict[str, torch.Tensor]:
    value = LABEL[name] + warm
    return {
        "step": torch.tensor(value),
        "exp_avg": torch.full(SHAPE, value),
        "exp_avg_sq": torch.full(SHAPE, -value),
    }


SAVED = 1000.0  # what the labels of the saved state have besides


def _check(state: Any, names: str, stateless: str = "") -> None:
    """That these parameters have the saved weights and moments, which tell their names."""
    for n in names:
        weight = state["model"][n].weight
        assert raw(weight) == raw(torch.full(SHAPE, LABEL[n] + SAVED)), n
        found = state["opt"].state.get(weight, {})
        expected = {} if n in stateless else _state(n, SAVED)
        assert {k: raw(v) for k, v in found.items()} == {k: raw(v) for k, v in expected.items()}, n


ORDERS = {
    "the same": ("abcd", ["abcd"]),
    "listed in reverse": ("abcd", ["dcba"]),
    "defined in reverse": ("dcba", ["dcba"]),
    "two groups": ("abcd", ["db", "ca"]),
    "two groups, otherwise": ("cadb", ["a", "cdb"]),
    "a group each": ("badc", ["c", "b", "d", "a"]),
}


@pytest.mark.parametrize("cold", [True, False], ids=["cold", "warm"])
@pytest.mark.parametrize("loaded", ORDERS)
@pytest.mark.parametrize("saved", ["the same", "two groups", "a group each"])
def test_moments_follow_names(saved: str, loaded: str, cold: bool, tmp_path: Path) -> None:
    source = _build(*ORDERS[saved], warm=SAVED)
    target = _build(*ORDERS[loaded], warm=0 if cold else 5)
    round_trip(tmp_path, source, target)
    _check(target, "abcd")


@pytest.mark.parametrize("listed", [True, False], ids=["listed", "not listed"])
@pytest.mark.parametrize("cold", [True, False], ids=["cold", "warm"])
def test_a_frozen_parameter_shifts_nothing(cold: bool, listed: bool, tmp_path: Path) -> None:
    """Frozen when saved and when loaded: it has no state, and takes none of another."""
    names = "abcd" if listed else "abd"
    source = _build("abcd", [names], warm=SAVED, frozen="c")
    target = _build("dcba", [names[::-1]], warm=0 if cold else 5, frozen="c")
    round_trip(tmp_path, source, target)
    _check(target, "abcd", stateless="c")


def test_freezing_and_thawing_between_save_and_load(tmp_path: Path) -> None:
    """Frozen since, and still listed: it keeps its moments. No longer listed: they are refused by name. Thawed since:
    it has none, if its options were saved."""
    source = _build("abcd", ["abcd"], warm=SAVED)
    with ckpt.Checkpointer(tmp_path) as ck:
        ck.save(1, source)
        listed = _build("abcd", ["dcba"], frozen="c")
        ck.load(listed)
        _check(listed, "abcd")
        absent = _build("abcd", ["dba"], frozen="c")
        _refused(ck, absent, ["opt/param_groups/model/c.weight", "opt/state/model/c.weight/exp_avg", "allow_extra"])
        ck.load(absent, allow_extra=["opt/*/model/c.weight*"])
        _check(absent, "abcd", stateless="c")
        ck.save(2, _build("abcd", ["abcd"], warm=SAVED, frozen="c"))
        thawed = _build("abcd", ["bdac"])
        ck.load(thawed)
        _check(thawed, "abcd", stateless="c")


def _refused(ck: ckpt.Checkpointer, target: Any, words: list[str], **options: Any) -> None:
    before = module_bits(target["model"]), optimizer_bits(target["opt"])
    with pytest.raises(ckpt.StateMismatch) as error:
        ck.load(target, **options)
    assert (module_bits(target["model"]), optimizer_bits(target["opt"])) == before
    assert [word for word in words if word not in str(error.value)] == [], str(error.value)


def test_a_missing_or_extra_name_is_an_error_that_lists_it(tmp_path: Path) -> None:
    with ckpt.Checkpointer(tmp_path) as ck:
        ck.save(1, _build("abcd", ["abcd"], warm=SAVED))
        for warm in (0.0, 5.0):
            _refused(ck, _build("abc", ["abc"], warm=warm), ["model/d.weight", "opt/state/model/d.weight/exp_avg"])
            _refused(ck, _build("abcde", ["abcde"], warm=warm), ["model/e.weight", "opt/param_groups/model/e.weight"])
            renamed = _build("abce", ["abce"], warm=warm)
            _refused(ck, renamed, ["model/e.weight", "allow_missing"])
            _refused(ck, renamed, ["model/d.weight", "allow_extra"], allow_missing=["*e.weight*"])
        ck.save(2, _build("abcd", ["abc"], warm=SAVED))  # d has a weight, and is in no group
        _refused(ck, _build("abcd", ["abcd"], warm=5.0), ["opt/state/model/d.weight/exp_avg"])
        _refused(ck, _build("abcd", ["abcd"]), ["opt/param_groups/model/d.weight"])


def test_a_group_that_mixes_what_was_saved_with_other_options_is_refused(tmp_path: Path) -> None:
    source = _build("abcd", ["ab", "cd"], warm=SAVED)
    source["opt"].param_groups[1]["lr"] = 0.5
    with ckpt.Checkpointer(tmp_path) as ck:
        ck.save(1, source)
        _refused(ck, _build("abcd", ["abc", "d"]), ["c.weight: saved with other options than"])
        target = _build("abcd", ["dc", "a", "b"])
        ck.load(target)
    _check(target, "abcd")
    assert [g["lr"] for g in target["opt"].param_groups] == [0.5, 1e-3, 1e-3]


# --- Pipeline stages: each rank's optimizer counts from 0 ---


def _load_stages(rank: int, world: int, whole: str, split: str) -> None:
    """Loads what one rank saved into two stages, then saves from other stages."""
    for names, groups, warm in ((("ab", "cd"), (["ab"], ["d", "c"]), 0), (("da", "bc"), (["a", "d"], ["cb"]), 5)):
        target = _build(names[rank], groups[rank], warm=warm)
        with ckpt.Checkpointer(whole, ckpt.Layout(pp=2)) as ck:
            ck.load(target)
        _check(target, names[rank])
    source = _build(("ca", "bd")[rank], (["ac"], ["bd"])[rank], warm=SAVED)
    with ckpt.Checkpointer(split, ckpt.Layout(pp=2)) as ck:
        ck.save(1, source)
        other = _build(("ca", "bd")[rank], (["a", "c"], ["d", "b"])[rank])
        ck.load(other)
        _check(other, ("ca", "bd")[rank])
        extra = _build(("ca", "bde")[rank], (["ca"], ["bde"])[rank])
        _refused(ck, extra, ["model/e.weight"])


@pytest.mark.ranks
def test_moments_follow_names_over_pipeline_stages(tmp_path: Path) -> None:
    with ckpt.Checkpointer(tmp_path / "whole") as ck:
        ck.save(1, _build("abcd", ["abcd"], warm=SAVED))
    run_ranks(2, _load_stages, str(tmp_path / "whole"), str(tmp_path / "split"), timeout=60)
    target = _build("dbca", ["cb", "da"])
    with ckpt.Checkpointer(tmp_path / "split") as ck:
        ck.load(target)
    _check(target, "abcd")
