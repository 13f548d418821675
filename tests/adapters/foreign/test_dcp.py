"""torch.distributed.checkpoint: what ckpt writes is read by the real library, what that writes by ckpt, bit by bit."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, settings
from torch.distributed.checkpoint.metadata import MetadataIndex

import ckpt
from ckpt.adapters.foreign.dcp_read import DcpCheckpoint
from ckpt.adapters.foreign.into import open_session, save_from
from ckpt.adapters.foreign.sidecar import NAME
from ckpt.errors import CorruptCheckpoint
from ckpt.state.dtypes import STORED
from ckpt.state.values import decode
from tests.adapters.foreign.drawn import states
from tests.adapters.foreign.forging import metadata_of, replace_item, saved
from tests.adapters.foreign.in_pieces import write
from tests.support.at_rest import committed
from tests.support.ranks import Crew
from tests.support.raw import random_bits, raw

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


@pytest.fixture(scope="module")
def crew() -> Iterator[Crew]:
    with Crew(4) as four:
        yield four


def imported(folder: Path, root: Path) -> str:
    return str(save_from(open_session(str(root)), DcpCheckpoint(folder), 1).record.document["state_id"])


def loaded(root: Path, like: dict[str, torch.Tensor]) -> dict[str, bytes]:
    """The bits that a Checkpointer places into tensors of these shapes and dtypes, all of them below "m"."""
    into = {name: random_bits(tuple(t.shape), t.dtype, 99) for name, t in like.items()}
    with ckpt.Checkpointer(root, read_only=True) as ck:
        assert ck.load({"m": into}, allow_extra=("*",)) is not None
    return {name: raw(t) for name, t in into.items()}


def tensors() -> dict[str, torch.Tensor]:
    """One of every dtype, and the shapes that are special."""
    state = {name: random_bits((37, 11), getattr(torch, name), n) for n, name in enumerate(sorted(STORED))}
    state |= {f"{name}.scalar": random_bits((), getattr(torch, name), n) for n, name in enumerate(sorted(STORED))}
    for name in ("bool", "bool.scalar"):  # the library copies bools as numbers, which makes all but 0 into 1
        state[name] = (state[name].view(torch.uint8) % 2).bool()
    state["transposed"] = random_bits((500, 300), torch.complex128).T
    state["strided"] = random_bits((40, 50, 6), torch.bfloat16, 4)[::2, 3:40:3, 1]
    state["permuted"] = random_bits((70, 20, 30), torch.float16, 5).permute(2, 0, 1)
    state["big"] = random_bits((1300, 1000), torch.float32, 6)
    state["empty"] = torch.empty(3, 0, 5)
    return state


# A state of every kind


@settings(max_examples=8, suppress_health_check=[HealthCheck.too_slow])
@given(states(STORED))
def test_a_round_trip_keeps_the_state_id(tmp_path_factory: pytest.TempPathFactory, state: dict[str, Any]) -> None:
    tmp = tmp_path_factory.mktemp("dcp")
    with ckpt.Checkpointer(tmp / "a") as ck:
        expected = ck.save(1, state).state_id
    source = committed(tmp / "a")
    assert write("dcp", source, tmp / "dcp") == expected
    assert imported(tmp / "dcp", tmp / "b") == expected
    again = committed(tmp / "b")
    assert (again.content.tensors, again.content.ranks) == (source.content.tensors, source.content.ranks)
    assert again.content.aliases == source.content.aliases


def _save_stacked(rank: int, world: int, root: str) -> str:
    """Two ranks have a stacked tensor of 3 + 3 layers, and something of their own."""
    whole = random_bits((world * 3, 600, 700), torch.bfloat16, 3)
    box = ((rank * 3, 0, 0), (3, 600, 700), (0, 0, 0))
    mine = whole[rank * 3 : rank * 3 + 3].clone()
    state = {"layers": ckpt.ShardedTensor(mine, [box], tuple(whole.shape)), "own": ckpt.per_rank({"rank": rank})}
    with ckpt.Checkpointer(root) as ck:
        return ck.save(1, state).state_id


def test_ranks_and_their_own_values_come_back(crew: Crew, tmp_path: Path) -> None:
    expected = crew.run(_save_stacked, str(tmp_path / "a"))[0]
    source = committed(tmp_path / "a")
    assert len(source.content.ranks) == 4
    write("dcp", source, tmp_path / "dcp")
    assert imported(tmp_path / "dcp", tmp_path / "b") == expected
    assert committed(tmp_path / "b").content.ranks == source.content.ranks
    assert expected == crew.run(_load_stacked, str(tmp_path / "b"))[0]


def _load_stacked(rank: int, world: int, root: str) -> str:
    whole = random_bits((world * 3, 600, 700), torch.bfloat16, 3)
    mine = torch.zeros_like(whole[:3])
    state: dict[str, Any] = {
        "layers": ckpt.ShardedTensor(mine, [((rank * 3, 0, 0), (3, 600, 700), (0, 0, 0))], tuple(whole.shape)),
        "own": ckpt.per_rank({"rank": -1}),
    }
    with ckpt.Checkpointer(root, read_only=True) as ck:
        restored = ck.load(state)
    assert restored is not None and raw(mine) == raw(whole[rank * 3 : rank * 3 + 3])
    assert state["own"] == {"rank": rank} or state["own"].value == {"rank": rank}, state["own"]
    return restored.state_id


def test_an_object_that_is_not_what_the_sidecar_has_is_an_error(tmp_path: Path) -> None:
    with ckpt.Checkpointer(tmp_path / "a") as ck:
        ck.save(1, {"w": torch.ones(3), "epoch": 3})
    write("dcp", committed(tmp_path / "a"), tmp_path / "dcp")
    meta = metadata_of(tmp_path / "dcp")
    replace_item(tmp_path / "dcp", meta, meta.storage_data[MetadataIndex("epoch")], saved(4))
    with pytest.raises(CorruptCheckpoint, match=f"epoch is not what {NAME} has"):
        DcpCheckpoint(tmp_path / "dcp")
    (tmp_path / "dcp" / NAME).unlink()
    assert DcpCheckpoint(tmp_path / "dcp").content.values["epoch"] == {"int": "4"}


# The real library


def test_what_the_library_saves_in_one_process_is_read(tmp_path: Path) -> None:
    state = tensors()
    values = {"epoch": 3, "lr": 1e-4, "names": "a", "raw": b"\x00\xff", "none": None, "z": 1j, "set": {1, 2}}
    dcp.save({"m": state, **values}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    found = DcpCheckpoint(tmp_path / "dcp").content
    assert found.left_out.keys() == {"set"} and "set" in found.left_out["set"]
    assert {name: decode(v, name) for name, v in found.values.items()} == {
        k: v for k, v in values.items() if k != "set"
    }
    imported(tmp_path / "dcp", tmp_path / "b")
    assert loaded(tmp_path / "b", state) == {name: raw(t) for name, t in state.items()}


def _fsdp_and_tp(rank: int, world: int, folder: str) -> dict[str, Any]:
    """A model under TP 2 and FSDP2 2 after one step of Adam, saved by the library; gives its complete tensors' bits."""
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor, init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(48, 33 * 2), torch.nn.ReLU(), torch.nn.Linear(66, 48))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    model(torch.randn(4, 48)).square().sum().backward()
    optimizer.step()
    states = get_state_dict(model, optimizer)
    state = {"model": states[0], "optim": states[1], "step": 7}
    dcp.save(state, checkpoint_id=folder)
    found = {}

    def gather(path: str, node: Any) -> None:
        if isinstance(node, dict):
            for key, value in node.items():
                gather(f"{path}/{key}" if path else str(key), value)
        elif isinstance(node, torch.Tensor):
            whole = node.full_tensor() if isinstance(node, DTensor) else node
            found[path] = (str(whole.dtype).removeprefix("torch."), tuple(whole.shape), raw(whole))

    gather("", state)
    return found


def test_a_checkpoint_of_fsdp_and_tp_is_read_with_every_bit(crew: Crew, tmp_path: Path) -> None:
    expected = crew.run(_fsdp_and_tp, str(tmp_path / "dcp"))[0]
    source = DcpCheckpoint(tmp_path / "dcp")
    assert {t.name: (t.dtype, t.shape) for t in source.content.tensors} == {n: e[:2] for n, e in expected.items()}
    assert any(len(chunks) == 4 for chunks in source._chunks.values())
    assert source.content.left_out == {} and source.content.values["step"] == {"int": "7"}
    imported(tmp_path / "dcp", tmp_path / "b")
    into = {name: torch.zeros(e[1], dtype=getattr(torch, e[0])) for name, e in expected.items()}
    nested: dict[str, Any] = {}
    for name, tensor in into.items():
        *path, last = name.split("/")
        node = nested
        for key in path:
            node = node.setdefault(key, {})
        node[last] = tensor
    with ckpt.Checkpointer(tmp_path / "b", read_only=True) as ck:
        assert ck.load(nested, allow_extra=("*",)) is not None
    assert {name: raw(t) for name, t in into.items()} == {name: e[2] for name, e in expected.items()}


def _load_by_library(rank: int, world: int, folder: str) -> dict[str, bytes]:
    """Into DTensors cut on a mesh of another shape, uneven."""
    from torch.distributed.tensor import Replicate, Shard, init_device_mesh, zeros

    mesh = init_device_mesh("cpu", (4, 1))
    wanted = tensors()
    state: dict[str, Any] = {}
    for name, tensor in wanted.items():
        cut = tensor.dim() and tensor.dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int64)
        dims = (Shard(tensor.dim() - 1) if cut else Replicate(), Replicate())
        if cut:
            state[name] = zeros(tuple(tensor.shape), dtype=tensor.dtype, device_mesh=mesh, placements=dims)
        else:
            state[name] = torch.zeros(tensor.shape, dtype=tensor.dtype)
    nested = {"m": state, "epoch": -1}
    dcp.load(nested, checkpoint_id=folder)
    assert nested["epoch"] == 3
    for name, tensor in state.items():
        whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        assert (whole.shape, raw(whole)) == (wanted[name].shape, raw(wanted[name])), name
    dist.barrier()
    return {}


def test_the_library_reads_what_is_written_on_another_mesh(crew: Crew, tmp_path: Path) -> None:
    with ckpt.Checkpointer(tmp_path / "a") as ck:
        ck.save(1, {"m": tensors(), "epoch": 3})
    write("dcp", committed(tmp_path / "a"), tmp_path / "dcp")
    crew.run(_load_by_library, str(tmp_path / "dcp"))


def test_the_names_of_nested_lists_and_numbers_are_those_of_the_library(tmp_path: Path) -> None:
    state = {"a": {"b.c": torch.ones(3), "5": {"d": torch.arange(4)}}, "l": [torch.zeros(2), torch.ones(2)]}
    with ckpt.Checkpointer(tmp_path / "a") as ck:
        ck.save(1, state)
    write("dcp", committed(tmp_path / "a"), tmp_path / "ours", with_sidecar=False)
    dcp.save(state, checkpoint_id=tmp_path / "theirs", no_dist=True)
    found = [dcp.FileSystemReader(tmp_path / x).read_metadata().state_dict_metadata for x in ("ours", "theirs")]
    assert found[0].keys() == found[1].keys()
    assert imported(tmp_path / "ours", tmp_path / "b") == imported(tmp_path / "theirs", tmp_path / "c")
    assert imported(tmp_path / "ours", tmp_path / "d") == committed(tmp_path / "a").content.state_id
