"""DTensors go from any mesh and placements to any other, as do parameters and moments made of them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckpt
from tests.support.ranks import Crew
from tests.support.raw import attempt_folder, labelled, random_bits, raw, tree

pytestmark = pytest.mark.ranks

MESHES: dict[str, tuple[tuple[int, ...], list[str]]] = {
    "rows of 4": ((4,), ["S0"]),
    "columns of 4": ((4,), ["S1"]),
    "replicas": ((4,), ["R"]),
    "2x2 grid": ((2, 2), ["S0", "S1"]),
    "2x2 grid turned": ((2, 2), ["S1", "S0"]),
    "2x2 on one axis": ((2, 2), ["S0", "S0"]),
    "2 rows, replicated": ((2, 2), ["R", "S0"]),
    "2 columns, replicated": ((2, 2), ["S1", "R"]),
    "FSDP over TP rows": ((2, 2), ["T0", "S0"]),
    "FSDP over TP columns": ((2, 2), ["T1", "S1"]),
}
"""Mesh and how its axes cut: S along a tensor's axis, T the same after the other mesh axis (strided), R not."""
FULL: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
    "uneven": ((5, 7), torch.float32),
    "few": ((2, 3), torch.bfloat16),
    "one": ((1, 1), torch.int64),
    "none": ((0, 4), torch.float32),
    "cube": ((6, 5, 3), torch.float16),
    "large": ((603, 401), torch.float64),
}


def _chunk(size: int, parts: int, index: int) -> tuple[int, int]:
    """torch.chunk's rule, by which DTensor cuts: (start, stop) of a part; the last ones may be short or empty."""
    step = -(-size // parts)
    return min(size, step * index), min(size, step * (index + 1))


def _slices(shape: tuple[int, ...], mesh: tuple[int, ...], cuts: list[str], rank: int) -> tuple[slice, ...]:
    ranges = [(0, n) for n in shape]
    at = [rank] if len(mesh) == 1 else list(divmod(rank, mesh[1]))
    for parts, index, cut in sorted(zip(mesh, at, cuts, strict=True), key=lambda one: one[2][0] == "T"):
        if cut != "R":
            axis = int(cut[1])
            start, stop = ranges[axis]
            a, b = _chunk(stop - start, parts, index)
            ranges[axis] = (start + a, start + b)
    return tuple(slice(a, b) for a, b in ranges)


def _placements(mesh: tuple[int, ...], cuts: list[str]) -> list[Any]:
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    make = {"S": Shard, "T": lambda axis: _StridedShard(axis, split_factor=mesh[1])}
    return [Replicate() if cut == "R" else make[cut[0]](int(cut[1])) for cut in cuts]


def _dtensors(kind: str, rank: int, filled: bool) -> dict[str, Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor

    shape, cuts = MESHES[kind]
    mesh = init_device_mesh("cpu", shape)
    placements = _placements(shape, cuts)
    state = {}
    for number, (name, (full_shape, dtype)) in enumerate(FULL.items()):
        full = random_bits(full_shape, dtype, 70 + number)
        local = full[_slices(full_shape, shape, cuts, rank)].contiguous()
        if not filled:
            local = random_bits(tuple(local.shape), dtype, 600)
        state[name] = DTensor.from_local(
            local, mesh, placements, run_check=False, shape=torch.Size(full_shape), stride=full.stride()
        )
    return state


def _dtensor_pairs(rank: int, world: int, root: str) -> list[str]:
    """Saves on every mesh, loads every one on every other; compares with plain slices of the full tensors."""
    ids = []
    for number, kind in enumerate(MESHES):
        with ckpt.Checkpointer(f"{root}/{number}") as ck:
            ids.append(ck.save(1, _dtensors(kind, rank, True)).state_id)
    for number in range(len(MESHES)):
        with ckpt.Checkpointer(f"{root}/{number}", read_only=True) as ck:
            for kind, (shape, cuts) in MESHES.items():
                state = _dtensors(kind, rank, False)
                assert ck.load(state) is not None
                for i, (name, (full_shape, dtype)) in enumerate(FULL.items()):
                    part = random_bits(full_shape, dtype, 70 + i)[_slices(full_shape, shape, cuts, rank)]
                    assert raw(state[name].to_local()) == raw(part), (number, kind, name)
    return ids


@pytest.mark.slow
def test_dtensors_on_meshes_of_one_and_two_axes(crew: Crew, tmp_path: Path) -> None:
    ids = crew.run(_dtensor_pairs, str(tmp_path), timeout=240)
    assert len({x for one in ids for x in one}) == 1
    trees = [tree(attempt_folder(tmp_path / str(i)) / "state") for i in range(len(MESHES))]
    assert all(t == trees[0] for t in trees)
    plain = {n: torch.zeros(s, dtype=d) for n, (s, d) in FULL.items()}
    with ckpt.Checkpointer(tmp_path / "0") as ck:  # and without torch.distributed
        ck.load(plain)
        assert {n: raw(t) for n, t in plain.items()} == {
            n: raw(random_bits(s, d, 70 + i)) for i, (n, (s, d)) in enumerate(FULL.items())
        }
        assert ck.save(2, plain).state_id == ids[0][0]
    assert tree(attempt_folder(tmp_path / "0") / "state") == trees[0]


def _dtensor_model(rank: int, kind: str, label: float) -> tuple[nn.Module, torch.optim.Optimizer, dict[str, Any]]:
    """A module of DTensor parameters, one of them tied, and an Adam: with labelled state, or cold if label is 0."""
    from torch.distributed.tensor import DTensor

    shape, cuts = MESHES[kind]
    model = nn.Module()
    slices = {}
    for name, dtensor in _dtensors(kind, rank, True).items():
        if name in ("uneven", "few", "large"):
            float_local = dtensor.to_local().to(torch.float32)
            where = _slices(tuple(dtensor.shape), shape, cuts, rank)
            slices[name] = where
            local = (label + labelled(tuple(dtensor.shape)))[where].contiguous()
            assert local.shape == float_local.shape
            made = DTensor.from_local(
                local,
                dtensor.device_mesh,
                dtensor.placements,
                run_check=False,
                shape=dtensor.shape,
                stride=labelled(tuple(dtensor.shape)).stride(),
            )
            setattr(model, name, nn.Parameter(made))
    model.also_few = model.few
    optimizer = torch.optim.Adam(model.parameters())
    if label:
        parameter: Any
        for parameter in model.parameters():
            state = {"step": torch.tensor(label)}
            for key, more in (("exp_avg", 0.25), ("exp_avg_sq", 0.5)):
                like = parameter.detach().to_local() + more
                state[key] = DTensor.from_local(
                    like,
                    parameter.device_mesh,
                    parameter.placements,
                    run_check=False,
                    shape=parameter.shape,
                    stride=parameter.stride(),
                )
            optimizer.state[parameter] = state
    return model, optimizer, slices


def _dtensor_training(rank: int, world: int, root: str) -> None:
    model, optimizer, _ = _dtensor_model(rank, "rows of 4", 8.0)
    with ckpt.Checkpointer(root) as ck:
        ck.save(1, {"model": model, "opt": optimizer})
        for kind in ("2x2 grid", "replicas"):
            model, optimizer, slices = _dtensor_model(rank, kind, 0.0)
            ck.load({"opt": optimizer, "model": model})
            assert model.also_few is model.few
            for name, where in slices.items():
                parameter = getattr(model, name)
                state = optimizer.state[parameter]
                full = 8.0 + labelled(tuple(parameter.shape))
                assert raw(parameter.to_local()) == raw(full[where])
                assert raw(state["exp_avg"].to_local()) == raw((full + 0.25)[where])
                assert raw(state["exp_avg_sq"].to_local()) == raw((full + 0.5)[where])
                assert raw(state["step"]) == raw(torch.tensor(8.0))
                assert state["exp_avg"].placements == parameter.placements


def test_dtensor_parameters_tied_ones_and_their_moments(crew: Crew, tmp_path: Path) -> None:
    """`few` has two rows on four ranks and two names: the ranks that hold nothing of it cannot see the tie."""
    crew.run(_dtensor_training, str(tmp_path))
    model = {"uneven": torch.zeros(5, 7), "few": torch.zeros(2, 3), "large": torch.zeros(603, 401)}
    with ckpt.Checkpointer(tmp_path) as ck:
        ck.load({"model": {**model, "also_few": torch.zeros(2, 3)}}, allow_extra=["opt/*"])
    assert {n: raw(t) for n, t in model.items()} == {n: raw(8.0 + labelled(tuple(t.shape))) for n, t in model.items()}


def _refused_dtensors(rank: int, world: int, root: str) -> list[str]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    mesh = init_device_mesh("cpu", (4,))
    pair = init_device_mesh("cpu", (2, 2))
    partial = DTensor.from_local(torch.ones(3), mesh, [Partial()], run_check=False)
    nested = DTensor.from_local(
        torch.ones(2), pair, [Replicate(), Shard(0)], run_check=False, shape=torch.Size([9]), stride=(1,)
    )
    found = []
    with ckpt.Checkpointer(root) as ck:
        for tensor in (partial, nested):
            try:
                ck.save(1, {"x": tensor})
            except ckpt.CkptError as error:
                found.append(f"{type(error).__name__}: {error}")
    return found


def test_dtensors_whose_local_part_does_not_tell_are_refused(crew: Crew, tmp_path: Path) -> None:
    for partial, nested in crew.run(_refused_dtensors, str(tmp_path)):
        assert "Unsupported" in partial and "x: DTensor placement" in partial and "Shard and Replicate" in partial
        assert "StateMismatch" in nested and "x: local shape [2] of a DTensor that should have" in nested
