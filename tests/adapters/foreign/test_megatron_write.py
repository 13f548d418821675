"""Checkpoints of ours in Megatron's `torch_dist`: loaded by the real `dist_checkpointing.load` on other layouts."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt.adapters.foreign.changes import Changed, Changes
from ckpt.adapters.foreign.formats import detect
from ckpt.adapters.foreign.into import open_session, save_from
from ckpt.adapters.foreign.megatron_read import MegatronCheckpoint
from ckpt.adapters.foreign.sidecar import NAME
from ckpt.adapters.foreign.witness import state_id_of
from ckpt.engine.rest import CommittedState
from ckpt.errors import CkptError, CorruptCheckpoint, Unsupported
from ckpt.geometry import Box
from ckpt.state.values import encode
from tests.adapters.foreign.in_pieces import write
from tests.support.at_rest import committed
from tests.support.gpt_oracle import GptSize
from tests.support.megatron_cpu import megatron_on_cpu
from tests.support.ranks import Crew
from tests.support.raw import random_bits, raw, tree
from tests.support.tiny_gpt import build_model, label_model, parallel, wrong_bits

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

SIZES = {
    "dense": GptSize(),
    "tied": GptSize(kv_groups=4, heads=8, ffn=96, vocab=64, gated=False, tied=True),
    "experts": GptSize(experts=4, ffn=32),
}
CHANGES = Changes(select=("model/*", "epoch", "schedule*"), rename=(("^model/", ""),))


@pytest.fixture(scope="module")
def crew() -> Iterator[Crew]:
    with Crew(2) as two:
        yield two


def _save(rank: int, world: int, root: str, size: str, layout: dict[str, int]) -> None:
    with parallel(**layout), megatron_on_cpu():
        model = build_model(SIZES[size], seed=1)
        label_model(model)
        with ckpt.Checkpointer(root) as ck:
            ck.save(40, {"model": model, "epoch": 3, "schedule": {"rate": 0.5, "steps": (4, 5)}})


def _load(rank: int, world: int, folder: str, size: str, layout: dict[str, int]) -> tuple[list[str], Any]:
    from megatron.core import dist_checkpointing

    with parallel(**layout), megatron_on_cpu():
        model = build_model(SIZES[size], seed=9)
        found = dist_checkpointing.load({"model": model.sharded_state_dict()}, folder)
        model.load_state_dict(found.pop("model"))
        return wrong_bits(model), found


@pytest.mark.parametrize(
    ("size", "one", "other"),
    [
        ("dense", {"tp": 2}, {"pp": 2}),
        ("tied", {"pp": 2}, {"tp": 2}),
        ("experts", {"dp": 2, "ep": 2}, {"pp": 2}),
        ("experts", {"tp": 2}, {"dp": 2, "ep": 2}),
    ],
)
def test_megatron_loads_every_bit_on_another_layout(
    crew: Crew, tmp_path: Path, size: str, one: dict[str, int], other: dict[str, int]
) -> None:
    crew.run(_save, str(tmp_path / "root"), size, one)
    source = committed(tmp_path / "root")
    state_id = write("megatron", Changed(source, CHANGES), tmp_path / "megatron", file_bytes=50_000)
    assert len(list((tmp_path / "megatron").glob("*.distcp"))) > 2
    assert detect(tmp_path / "megatron") == "megatron"
    common = {"epoch": 3, "schedule": {"rate": 0.5, "steps": (4, 5)}, "iteration": 40}
    assert crew.run(_load, str(tmp_path / "megatron"), size, other) == [([], common)] * 2
    back = MegatronCheckpoint(tmp_path / "megatron")
    assert back.content.state_id == state_id and back.content.step == 40 and not back.content.left_out
    made = save_from(
        open_session(str(tmp_path / "again")), Changed(back, Changes(rename=(("^(?=[deo].*[.])", "model/"),))), 40
    )
    assert made.record.document["state_id"] == source.content.state_id
    assert (committed(tmp_path / "again").content.tensors, committed(tmp_path / "again").content.values) == (
        source.content.tensors,
        source.content.values,
    )


@pytest.fixture
def state() -> dict[str, Any]:
    w = random_bits((300, 200), torch.bfloat16)
    return {"w": w, "tied": w, "epoch": 3, "lr": {"now": 0.5, "of": [1, (2.0, None)]}, "rng": ckpt.per_rank({"s": 1})}


def saved(root: Path, state: dict[str, Any]) -> CommittedState:
    with ckpt.Checkpointer(root) as ck:
        ck.save(7, state)
    return committed(root)


def test_what_the_format_lacks_is_in_the_sidecar(tmp_path: Path, state: dict[str, Any]) -> None:
    source = saved(tmp_path / "root", state)
    folder = tmp_path / "megatron"
    assert write("megatron", source, folder) == source.content.state_id
    common = torch.load(folder / "common.pt", weights_only=True)
    assert common == {"epoch": 3, "lr": {"now": 0.5, "of": [1, (2.0, None)]}, "iteration": 7}
    assert json.loads((folder / "metadata.json").read_text())["sharded_backend"] == "torch_dist"
    back = MegatronCheckpoint(folder)
    assert (back.content.aliases, back.content.values, back.content.ranks, back.content.step) == (
        source.content.aliases,
        source.content.values,
        source.content.ranks,
        7,
    )
    assert state_id_of(back) == source.content.state_id
    for common["epoch"] in (4, 3.0, None):
        torch.save(common, folder / "common.pt")
        with pytest.raises(CorruptCheckpoint, match=f"epoch is not what {NAME} has"):
            MegatronCheckpoint(folder)
    torch.save({**common, "epoch": 3, "added": 1}, folder / "common.pt")
    with pytest.raises(CorruptCheckpoint, match=f"added is not what {NAME} has"):
        MegatronCheckpoint(folder)
    torch.save(common, folder / "common.pt")
    (folder / NAME).unlink()
    assert MegatronCheckpoint(folder).content.values["common.pt/epoch"] is None


def test_without_a_sidecar_values_come_back_as_those_of_common(tmp_path: Path, state: dict[str, Any]) -> None:
    write("megatron", saved(tmp_path / "root", state), tmp_path / "a", with_sidecar=False)
    first = MegatronCheckpoint(tmp_path / "a")
    assert set(first.content.values) == {"common.pt/epoch", "common.pt/lr", "common.pt/iteration"}
    assert first.content.step == 7 and raw(first.read("w", Box.whole((300, 200)))) == raw(state["w"])
    write("megatron", first, tmp_path / "b", with_sidecar=False)
    again = MegatronCheckpoint(tmp_path / "b")
    assert (again.content.values, again.content.tensors) == (first.content.values, first.content.tensors)
    assert state_id_of(again) == state_id_of(first)


def test_objects_of_megatron_stay_where_they_were(tmp_path: Path) -> None:
    key = "decoder.layers.mlp.linear_fc1._extra_state/shard_1_2"
    weight = random_bits((2, 4, 3), torch.float32)
    source = saved(tmp_path / "root", {"decoder.layers.mlp.linear_fc1.weight": weight, key: "kept"})
    write("megatron", source, tmp_path / "a", with_sidecar=False)
    found = MegatronCheckpoint(tmp_path / "a").content.values
    other = key.replace("/", "%2F")
    assert found[other] == source.content.values[other] and found[other.replace("1_2", "0_2")] == encode([None], key)
    assert set(found) == {other, other.replace("1_2", "0_2"), "common.pt/iteration"}


@pytest.mark.parametrize(
    ("values", "kind", "word"),
    [
        ({"a": 1, "common.pt": {"a": 2}}, CkptError, "a and common.pt/a: have one place"),
        ({"a": {"b": 1}, "common.pt": {"a": 2}}, CkptError, "have one place"),
    ],
)
def test_values_that_have_no_place_are_refused(
    tmp_path: Path, values: dict[str, Any], kind: type[CkptError], word: str
) -> None:
    source = saved(tmp_path / "root", {"w": torch.ones(2), **values})
    before = tree(tmp_path)
    with pytest.raises(kind, match=word):
        write("megatron", source, tmp_path / "a")
    assert tree(tmp_path) == before and not (tmp_path / "a").exists()


def test_a_value_that_megatron_could_not_read_is_refused(tmp_path: Path) -> None:
    import numpy as np

    source = saved(tmp_path / "root", {"w": torch.ones(2), "rate": np.float64(0.5)})
    with pytest.raises(Unsupported, match=r"rate: a float64, which torch's weights-only loader"):
        write("megatron", source, tmp_path / "a")
    assert not (tmp_path / "a").exists()
