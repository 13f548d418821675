"""Older Megatron checkpoints, a file for each rank: put together against the oracle of the tiny model."""

import argparse
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt.adapters.foreign.formats import detect
from ckpt.adapters.foreign.into import open_session, save_from
from ckpt.adapters.foreign.mp_rank_files import FILE
from ckpt.adapters.foreign.mp_rank_read import MpRankCheckpoint
from ckpt.adapters.foreign.slabs import slabs
from ckpt.adapters.foreign.witness import state_id_of
from ckpt.engine.stream import Source
from ckpt.errors import CkptError, CorruptCheckpoint, StoreError, Unsupported
from ckpt.geometry import Box
from ckpt.state.dtypes import bits
from tests.support.gpt_oracle import GptSize, Place, expected_local, full_tensors
from tests.support.megatron_cpu import megatron_on_cpu
from tests.support.ranks import Crew
from tests.support.raw import raw, tree
from tests.support.tiny_gpt import build_model, label_model, parallel

SIZES = {
    "dense": GptSize(),
    "tied": GptSize(kv_groups=4, heads=8, ffn=96, vocab=64, gated=False, tied=True, dtype=torch.bfloat16),
    "experts": GptSize(experts=4, ffn=32),
}
REST = {"iteration": 40, "checkpoint_version": 3.0, "opt_param_scheduler": {"num_steps": 640, "max_lr": 1e-3}}


def folder_of(root: Path, tp_rank: int, pp: int, pp_rank: int) -> Path:
    return root / (f"mp_rank_{tp_rank:02d}" + (f"_{pp_rank:03d}" if pp > 1 else ""))


def write(root: Path, size: GptSize, tp: int = 1, pp: int = 1, vpp: int = 1, **more: Any) -> None:
    """Files as Megatron-LM leaves them, of labelled tensors."""
    for tp_rank in range(tp):
        for pp_rank in range(pp):
            models = {}
            for chunk in range(vpp):
                at = Place(tp, pp, etp=tp, tp_rank=tp_rank, pp_rank=pp_rank, etp_rank=tp_rank, vpp=vpp, chunk=chunk)
                local: dict[str, Any] = expected_local(size, at)
                local |= {n.replace(".weight", "._extra_state"): None for n in local if re.search(r"linear.*weight", n)}
                models["model" if vpp == 1 else f"model{chunk}"] = local
            args = argparse.Namespace(tensor_model_parallel_size=tp, rank=tp_rank)
            folder = folder_of(root, tp_rank, pp, pp_rank)
            folder.mkdir(parents=True)
            rng = [{"torch_rng_state": torch.tensor([tp_rank, pp_rank])}]
            state = models | REST | {"args": args, "rng_state": rng, "optimizer": {"flat": torch.ones(9)}} | more
            torch.save(state, folder / FILE)


def whole(source: Source) -> dict[str, bytes]:
    found = {}
    for spec in source.content.tensors:
        tensor = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype))
        for box in slabs(spec.shape, spec.itemsize, 5000):
            bits(tensor)[box.slices] = source.read(spec.name, box)
        found[spec.name] = raw(tensor)
    return found


def change(file: Path, how: Any) -> None:
    state = torch.load(file, weights_only=False)
    torch.save(how(state) or state, file)


@pytest.mark.parametrize(
    ("size", "tp", "pp", "vpp"),
    [
        ("dense", 1, 1, 1),
        ("dense", 2, 2, 1),
        ("dense", 4, 1, 1),
        ("dense", 1, 2, 2),
        ("tied", 2, 2, 1),
        ("tied", 4, 1, 1),
        ("experts", 2, 2, 1),
        ("experts", 1, 1, 1),
    ],
)
def test_every_bit_is_the_oracles(tmp_path: Path, size: str, tp: int, pp: int, vpp: int) -> None:
    write(tmp_path / "old", SIZES[size], tp, pp, vpp)
    assert detect(tmp_path / "old") == "mp_rank"
    source = MpRankCheckpoint(tmp_path / "old")
    expected = full_tensors(SIZES[size])
    assert {t.name: t.shape for t in source.content.tensors} == {n: tuple(t.shape) for n, t in expected.items()}
    assert whole(source) == {n: raw(t) for n, t in expected.items()}
    stacks = {t.name: t.stack for t in source.content.tensors}
    assert stacks == {n: ("decoder.layers" in n) + (".experts.experts." in n) for n in expected}
    assert source.content.step == 40 and set(source.content.values) == set(REST)
    left_out = source.content.left_out
    assert "flat for each rank" in left_out["optimizer"] and "Namespace" in left_out["args"] and "rng_state" in left_out
    record = save_from(open_session(str(tmp_path / "root")), source, 40).record
    assert record.document["state_id"] == state_id_of(MpRankCheckpoint(tmp_path / "old"))


@pytest.fixture(scope="module")
def crew() -> Iterator[Crew]:
    with Crew(2) as two:
        yield two


def _save(rank: int, world: int, root: str, size: str, tp: int, pp: int) -> None:
    """What `generate_state_dict` of Megatron-LM takes of a model."""
    with parallel(tp, pp), megatron_on_cpu():
        model = build_model(SIZES[size], seed=1)
        label_model(model)
        at = model.gpt_place
        folder = folder_of(Path(root), at.tp_rank, pp, at.pp_rank)
        folder.mkdir(parents=True)
        torch.save({"model": model.state_dict_for_save_checkpoint(), **REST}, folder / FILE)


@pytest.mark.parametrize("size", sorted(SIZES))
@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2)])
def test_files_of_real_models(crew: Crew, tmp_path: Path, size: str, tp: int, pp: int) -> None:
    crew.run(_save, str(tmp_path / "old"), size, tp, pp)
    source = MpRankCheckpoint(tmp_path / "old")
    assert whole(source) == {n: raw(t) for n, t in full_tensors(SIZES[size]).items()}


def test_layers_that_differ_keep_their_numbers(tmp_path: Path) -> None:
    write(tmp_path, SIZES["dense"], tp=2, pp=2)
    name = "decoder.layers.1.self_attention.linear_proj.bias"

    def without(state: dict[str, Any]) -> None:
        del state["model"][name]

    for tp_rank in (0, 1):
        change(folder_of(tmp_path, tp_rank, 2, 1) / FILE, without)
    found, expected = whole(MpRankCheckpoint(tmp_path)), full_tensors(SIZES["dense"])
    by_number = {}
    for full, tensor in expected.items():
        if "decoder.layers." not in full:
            by_number[full] = raw(tensor)
        for layer in range(4) if "decoder.layers." in full else ():
            by_number[full.replace("decoder.layers.", f"decoder.layers.{layer}.")] = raw(tensor[layer])
    del by_number["decoder.layers.3.self_attention.linear_proj.bias"]
    assert found == by_number


def test_weights_of_grouped_experts_and_fused_norms(tmp_path: Path) -> None:
    """As Transformer Engine's layers call them."""
    write(tmp_path, SIZES["experts"], tp=2)

    def renamed(state: dict[str, Any]) -> None:
        for name in list(state["model"]):
            new = name.replace("input_layernorm.", "self_attention.linear_qkv.layer_norm_")
            parts = new.split(".")
            if "local_experts" in parts:
                at = parts.index("local_experts")
                new = ".".join([*parts[:at], *parts[at + 2 :]]) + parts[at + 1]
            state["model"][new] = state["model"].pop(name)

    for tp_rank in (0, 1):
        change(folder_of(tmp_path, tp_rank, 1, 0) / FILE, renamed)
    source = MpRankCheckpoint(tmp_path)
    names = (".mlp.linear_fc1.layer_norm_", ".pre_mlp_layernorm.")
    assert whole(source) == {n.replace(*names): raw(t) for n, t in full_tensors(SIZES["experts"]).items()}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("decoder.final_layernorm.weight", CorruptCheckpoint),
        ("decoder.layers.1.mlp.linear_fc2.bias", CorruptCheckpoint),
    ],
)
def test_copies_that_differ_by_a_bit_are_an_error(tmp_path: Path, name: str, kind: type[CkptError]) -> None:
    write(tmp_path, SIZES["dense"], tp=2)

    def flipped(state: dict[str, Any]) -> None:
        bits(state["model"][name])[5] ^= 1

    change(tmp_path / "mp_rank_01" / FILE, flipped)
    with pytest.raises(kind, match=f"mp_rank_00/0/{name} and mp_rank_01/0/{name} both have"):
        whole(MpRankCheckpoint(tmp_path))


def test_an_output_layer_of_its_own_stays(tmp_path: Path) -> None:
    """One bit less than the embeddings is a tensor of its own."""
    write(tmp_path, SIZES["tied"], tp=2, pp=2)

    def flipped(state: dict[str, Any]) -> None:
        bits(state["model"]["output_layer.weight"])[3, 4] ^= 1

    change(tmp_path / "mp_rank_01_001" / FILE, flipped)
    source = MpRankCheckpoint(tmp_path)
    embeddings = full_tensors(SIZES["tied"])["embedding.word_embeddings.weight"]
    found = source.read("output_layer.weight", Box.whole(tuple(embeddings.shape)))
    bits(embeddings)[32 + 3, 4] ^= 1
    assert raw(found) == raw(embeddings)


def test_values_that_differ_are_left_out_and_said(tmp_path: Path) -> None:
    write(tmp_path, SIZES["dense"], tp=2)
    change(tmp_path / "mp_rank_01" / FILE, lambda state: {**state, "checkpoint_version": 2.0, "extra": 1})
    (tmp_path / "mp_rank_00" / "distrib_optim.pt").write_bytes(b"x")
    content = MpRankCheckpoint(tmp_path).content
    for name in ("checkpoint_version", "extra"):
        assert content.left_out[name] == "is not the same in all files"
    assert "not read" in content.left_out["mp_rank_00/distrib_optim.pt"]


# What is refused


class Payload:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.path}",)


def refused(root: Path, kind: type[CkptError] | tuple[type[CkptError], ...], word: str = "") -> None:
    before = tree(root)
    with pytest.raises(kind) as caught:
        state_id_of(MpRankCheckpoint(root))
    assert str(root) in str(caught.value) and word in str(caught.value), str(caught.value)
    assert tree(root) == before


def test_folders_that_do_not_make_a_layout(tmp_path: Path) -> None:
    refused(tmp_path, StoreError, "no folders mp_rank_XX")
    write(tmp_path / "a", SIZES["dense"], tp=2, pp=2)
    (tmp_path / "a/mp_rank_01_001").rename(tmp_path / "aside")
    refused(tmp_path / "a", CorruptCheckpoint, "tensor rank 1, pipeline rank 1")
    (tmp_path / "aside").rename(tmp_path / "a/mp_rank_01_001_002")
    refused(tmp_path / "a", Unsupported, "expert parallelism")
    (tmp_path / "a/mp_rank_01_001_002").rename(tmp_path / "a/mp_rank_zz")
    refused(tmp_path / "a", CorruptCheckpoint, "mp_rank_zz")
    write(tmp_path / "b", SIZES["experts"])
    (tmp_path / "b/mp_rank_00").rename(tmp_path / "b/mp_rank_00_000")
    write(tmp_path / "c", SIZES["experts"])
    (tmp_path / "c/mp_rank_00").rename(tmp_path / "b/mp_rank_00_001")
    refused(tmp_path / "b", Unsupported, "expert parallelism")


def test_files_that_do_not_fit(tmp_path: Path) -> None:
    write(tmp_path, SIZES["dense"], tp=2)
    file = tmp_path / "mp_rank_01" / FILE
    data = file.read_bytes()
    name = "decoder.layers.2.mlp.linear_fc2.weight"

    def check(how: Any, kind: type[CkptError], word: str) -> None:
        change(file, how)
        refused(tmp_path, kind, word)
        file.write_bytes(data)

    def in_model(new: dict[Any, Any]) -> Any:
        return lambda state: {**state, "model": {**state["model"], **new}}

    check(in_model({name: torch.ones(64, 64)}), CorruptCheckpoint, "linear_fc2.weight")
    check(in_model({name: torch.ones(64, 128, dtype=torch.bfloat16)}), CorruptCheckpoint, "bfloat16")
    check(in_model({"decoder.layers.9.mlp.linear_fc2.bias": torch.ones(64)}), CorruptCheckpoint, "layers.9")
    check(in_model({"language_model": {"embedding": torch.ones(2)}}), Unsupported, "before Megatron Core")
    check(in_model({7: torch.ones(2)}), CorruptCheckpoint, "7 is no name")
    check(lambda state: [1], CorruptCheckpoint, "holds a list")
    check(lambda state: {"model": [1]}, CorruptCheckpoint, "not a state dict")
    check(lambda state: {"iteration": 4}, CorruptCheckpoint, "chunks")
    check(lambda state: {"model1": state["model"]}, CorruptCheckpoint, "chunks")
    check(lambda state: {**state, "model": {}}, CorruptCheckpoint, "only one of the two")
    check(lambda state: {**state, "model1": {}}, CorruptCheckpoint, "chunks")
    for rank in (0, 1):
        change(tmp_path / f"mp_rank_0{rank}" / FILE, in_model({"decoder.layers.2.mlp.odd.weight": torch.ones(2)}))
    refused(tmp_path, Unsupported, "mlp.odd.weight")
    for rank in (0, 1):
        change(tmp_path / f"mp_rank_0{rank}" / FILE, lambda state: {**state, "model": {}})
    refused(tmp_path, CorruptCheckpoint, "no tensors")


def test_code_does_not_run(tmp_path: Path) -> None:
    write(tmp_path / "old", SIZES["dense"])
    evil = tmp_path / "evil"
    file = tmp_path / "old/mp_rank_00" / FILE
    change(file, lambda state: {**state, "args": Payload(evil), "model": {**state["model"], "x": Payload(evil)}})
    evil.unlink(missing_ok=True)
    content = MpRankCheckpoint(tmp_path / "old").content
    assert "args" in content.left_out and "mp_rank_00/0/x" in content.left_out
    torch.save(Payload(evil), file)
    refused(tmp_path / "old", CorruptCheckpoint, FILE)
    assert not evil.exists()


def test_damage_is_an_error_or_changes_nothing(tmp_path: Path) -> None:
    size = GptSize(layers=1, hidden=8, heads=2, vocab=16, seq=4)
    write(tmp_path, size, tp=2)
    file = tmp_path / "mp_rank_01" / FILE
    data, expected, seen = file.read_bytes(), state_id_of(MpRankCheckpoint(tmp_path)), 0
    for keep in (0, 1, 7, len(data) // 3, len(data) // 2, len(data) - 1):
        file.write_bytes(data[:keep])
        refused(tmp_path, CkptError)
    for n, at in enumerate(range(0, len(data), max(1, len(data) // 250))):
        spoiled = bytearray(data)
        spoiled[at] ^= 1 << n % 8
        file.write_bytes(spoiled)
        try:
            assert state_id_of(MpRankCheckpoint(tmp_path)) == expected, at
        except CkptError as error:
            assert str(tmp_path) in str(error)
            seen += 1
    assert seen > 20
    file.unlink()
    refused(tmp_path, CorruptCheckpoint, "missing")
    file.mkdir()
    refused(tmp_path, CkptError, FILE)
