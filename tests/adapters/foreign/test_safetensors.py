"""safetensors: what ckpt writes is read by the real library, and what that writes by ckpt, with every bit right."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import ckpt
from ckpt.adapters.foreign.into import open_session, save_from
from ckpt.adapters.foreign.safetensors_read import DTYPES, SafetensorsCheckpoint
from ckpt.adapters.foreign.sidecar import NAME
from ckpt.errors import CkptError, CorruptCheckpoint, StoreError, Unsupported
from tests.adapters.foreign.drawn import states
from tests.adapters.foreign.in_pieces import write
from tests.support.at_rest import committed
from tests.support.raw import random_bits, raw


def imported(folder: Path, root: Path, step: int = 1) -> str:
    return str(save_from(open_session(str(root)), SafetensorsCheckpoint(folder), step).record.document["state_id"])


def loaded(root: Path, like: dict[str, torch.Tensor]) -> dict[str, bytes]:
    """The bits that a Checkpointer places into tensors of these shapes and dtypes."""
    into = {name: torch.zeros(t.shape, dtype=t.dtype) for name, t in like.items()}
    with ckpt.Checkpointer(root, read_only=True) as ck:
        assert ck.load(into) is not None
    return {name: raw(t) for name, t in into.items()}


@settings(max_examples=8, suppress_health_check=[HealthCheck.too_slow])
@given(states(DTYPES), st.sampled_from([10**3, 10**9]))
def test_a_round_trip_keeps_the_state_id(
    tmp_path_factory: pytest.TempPathFactory, state: dict[str, Any], size: int
) -> None:
    tmp = tmp_path_factory.mktemp("hf")
    with ckpt.Checkpointer(tmp / "a") as ck:
        expected = ck.save(1, state).state_id
    source = committed(tmp / "a")
    assert write("hf", source, tmp / "hf", file_bytes=size) == expected
    assert imported(tmp / "hf", tmp / "b") == expected
    again = committed(tmp / "b")
    assert (again.content.tensors, again.content.ranks) == (source.content.tensors, source.content.ranks)
    assert again.content.aliases == source.content.aliases


def test_the_library_reads_every_dtype_that_is_written(tmp_path: Path) -> None:
    state = {name: random_bits((37, 11), getattr(torch, name), n) for n, name in enumerate(DTYPES)}
    state |= {"big": random_bits((1300, 1000), torch.float32), "empty": torch.empty(0, 4), "scalar": torch.tensor(3.5)}
    with ckpt.Checkpointer(tmp_path / "a") as ck:
        ck.save(1, {"m": state})
    write("hf", committed(tmp_path / "a"), tmp_path / "hf", file_bytes=3000)
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(set(index.values())) > 1 and index.keys() == {f"m.{name}" for name in state}
    for name, tensor in state.items():
        found = load_file(tmp_path / "hf" / index[f"m.{name}"])[f"m.{name}"]
        assert (found.shape, found.dtype, raw(found)) == (tensor.shape, tensor.dtype, raw(tensor)), name


def test_files_of_the_library_are_read(tmp_path: Path) -> None:
    state = {f"model.{name}": random_bits((37, 11), getattr(torch, name), n) for n, name in enumerate(DTYPES)}
    state |= {"a/b": random_bits((1500, 1000), torch.bfloat16), "~1": torch.empty(0, 4), "": torch.tensor(3.5)}
    folder = tmp_path / "hf"
    folder.mkdir()
    names = sorted(state)
    files = {"x-1.safetensors": names[:7], "x-2.safetensors": names[7:]}
    for file, keys in files.items():
        save_file({key: state[key] for key in keys}, folder / file, metadata={"format": "pt", "author": "me"})
    weights = {key: file for file, keys in files.items() for key in keys}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weights}))
    (folder / "config.json").write_text("{}")
    imported(folder, tmp_path / "b")
    assert loaded(tmp_path / "b", state) == {name: raw(t) for name, t in state.items()}
    left_out = SafetensorsCheckpoint(folder).content.left_out
    assert left_out.keys() == {"config.json", "x-1.safetensors: author", "x-2.safetensors: author"}
    (folder / "model.safetensors.index.json").unlink()
    assert imported(folder, tmp_path / "c") == committed(tmp_path / "b").content.state_id
    imported(folder / "x-1.safetensors", tmp_path / "d")
    assert loaded(tmp_path / "d", {k: state[k] for k in names[:7]}) == {k: raw(state[k]) for k in names[:7]}


@pytest.fixture
def tied(tmp_path: Path) -> Path:
    weight = random_bits((30, 20), torch.float32)
    with ckpt.Checkpointer(tmp_path / "a") as ck:
        ck.save(1, {"embed": weight, "out": weight, "other": random_bits((200, 90), torch.float32, 1), "v": 1})
    write("hf", committed(tmp_path / "a"), tmp_path / "hf")
    return tmp_path / "hf"


@pytest.mark.parametrize("key", ["other", "embed", "out"])
def test_a_change_of_the_file_is_seen_by_the_state_id(tied: Path, tmp_path: Path, key: str) -> None:
    tensors = load_file(tied / "model.safetensors")
    tensors[key].view(torch.uint8)[7, 7] ^= 1
    save_file(tensors, tied / "model.safetensors")
    with pytest.raises(CorruptCheckpoint):
        imported(tied, tmp_path / "b")
    assert (
        not list((tmp_path / "b").rglob("receipts/*")) and open_session(str(tmp_path / "b")).log.read().newest() is None
    )
    (tied / NAME).unlink()
    imported(tied, tmp_path / "c")
    assert loaded(tmp_path / "c", tensors) == {name: raw(t) for name, t in tensors.items()}


@pytest.mark.parametrize(
    "change",
    [
        {"aliases": {"out": ["out", "nobody"]}},
        {"aliases": {"out": ["embed", "embed"]}},
        {"tensors": []},
        {"tensors": [["embed", "embed", 9], ["other", "other", 0]]},
        {"tensors": [["embed", "~x", 0], ["other", "other", 0]], "aliases": {"out": ["out", "~x"]}},
        {"values": {"v": {"int": "1e9"}}},
        {"values": {"v": {"evil": 1}}},
        {"values": 7},
        {"ranks": []},
        {"step": "3"},
        {"step": -1},
        {"state_id": None},
        {"format": 99},
        {"tensors": "x"},
        {"state_id": "0" * 64},
    ],
)
def test_a_forged_sidecar_is_refused(tied: Path, tmp_path: Path, change: dict[str, Any]) -> None:
    document = json.loads((tied / NAME).read_bytes())
    document.update(change)
    (tied / NAME).write_text(json.dumps(document, sort_keys=True, separators=(",", ":")))
    with pytest.raises(CkptError, match=r"sidecar|says that it is"):
        imported(tied, tmp_path / "b")
    assert open_session(str(tmp_path / "b")).log.read().newest() is None


def test_what_the_format_lacks_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    with ckpt.Checkpointer(tmp_path / "a") as ck:
        ck.save(1, {"z": random_bits((3,), torch.complex128), "w": torch.ones(3)})
    with pytest.raises(Unsupported, match="z: "):
        write("hf", committed(tmp_path / "a"), tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


def test_a_failed_write_leaves_nothing_and_a_full_folder_is_left_alone(tmp_path: Path) -> None:
    with ckpt.Checkpointer(tmp_path / "a") as ck:
        ck.save(1, {"w": random_bits((1300, 1000), torch.float32), "v": random_bits((900, 90), torch.float32)})
    source = committed(tmp_path / "a")
    big = max(
        (f for f in (tmp_path / "a").rglob("*") if "tensors/w" in str(f) and f.is_file()),
        key=lambda f: f.stat().st_size,
    )
    data = bytearray(big.read_bytes())
    data[5000] ^= 1
    big.write_bytes(data)
    for there in (False, True):
        if there:
            (tmp_path / "hf").mkdir()
        with pytest.raises(CorruptCheckpoint, match="tensors/w"):
            write("hf", source, tmp_path / "hf", file_bytes=10**5)
        assert (tmp_path / "hf").exists() == there and not list(tmp_path.glob("hf/*"))
    (tmp_path / "hf" / "mine").write_text("x")
    with pytest.raises(StoreError, match="not empty"):
        write("hf", source, tmp_path / "hf")
    assert [p.name for p in (tmp_path / "hf").iterdir()] == ["mine"]
