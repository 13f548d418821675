"""Case 2, pytorch-150862: empty shards.

The fault: where a dimension does not fill all ranks, some hold nothing; the save fails, or an empty shard whose offset
is that of a real one wins the de-duplication and the real one is dropped. Here every length, saved on any number of
ranks, comes back on any other: declared shards, DTensors, and optimizer moments of the same shapes.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor import empty as empty_dtensor

import ckpt
from ckpt.geometry import Box, Catalogue, Holdings, TensorSpec, read_plan, write_plan
from tests.cases.turns import turns
from tests.support.ranks import Crew
from tests.support.raw import labelled, raw, tree

LENGTHS = (0, 1, 2, 3, 5, 6, 7, 9)
WORLDS = (8, 4, 3, 2, 1)
SHAPES: list[tuple[int, ...]] = [*((n,) for n in LENGTHS), (5, 0), (0, 3), (3, 0, 2), (5, 2)]
MOMENTS = ("exp_avg", "exp_avg_sq")

# Where a rank that has nothing says that its shard begins: at the end, at the start as rank 0's does, or not at all.
EMPTY = ("end", "start", "none")


def _full(shape: tuple[int, ...], which: int) -> torch.Tensor:
    return labelled(shape) + 1000.0 * (1 + which)


def _rows(n: int, rank: int, world: int) -> tuple[int, int]:
    step = -(-n // world)
    return min(n, step * rank), min(n, step * (rank + 1))


def _boxes(shape: tuple[int, ...], rank: int, world: int, empty: str) -> list[Any]:
    a, b = _rows(shape[0], rank, world)
    if a == b and empty == "none":
        return []
    begin = 0 if a == b and empty == "start" else a
    rest = shape[1:]
    return [((begin, *(0 for _ in rest)), (b - a, *rest), (0,) * len(shape))]


class _State:
    """What one of `world` ranks holds of the state: labelled, or -1 all over with an optimizer that never stepped."""

    def __init__(self, rank: int, world: int, mesh: Any, *, label: bool) -> None:
        self.local: dict[str, list[torch.Tensor]] = {}  # what is expected and found, by name
        declared, tensors, parameters = {}, {}, {}
        for number, shape in enumerate(SHAPES):
            a, b = _rows(shape[0], rank, world)
            parameter = nn.Parameter(self._part(shape, a, b, 0, label))
            boxes = _boxes(shape, rank, world, EMPTY[number % 3])
            declared[str(shape)] = ckpt.ShardedTensor(parameter, boxes, shape)
            tensors[str(shape)] = self._dtensor(shape, a, b, mesh, label)
            parameters[str(shape)] = parameter
        self.optimizer = torch.optim.AdamW(parameters.values())
        self.parameters, self.tensors = parameters, tensors
        if label:
            for shape in SHAPES:
                a, b = _rows(shape[0], rank, world)
                moments = {key: self._part(shape, a, b, 1 + n, True) for n, key in enumerate(MOMENTS)}
                self.optimizer.state[parameters[str(shape)]] = {"step": torch.tensor(3.0), **moments}
        self.state = {"declared": declared, "dtensors": tensors, "optimizer": self.optimizer}

    @staticmethod
    def _part(shape: tuple[int, ...], a: int, b: int, which: int, label: bool) -> torch.Tensor:
        return _full(shape, which)[a:b].clone() if label else torch.full((b - a, *shape[1:]), -1.0)

    def _dtensor(self, shape: tuple[int, ...], a: int, b: int, mesh: Any, label: bool) -> DTensor:
        made = empty_dtensor(*shape, device_mesh=mesh, placements=[Shard(0)])
        made.to_local().copy_(self._part(shape, a, b, 3, label))
        return made

    def wrong(self, rank: int, world: int) -> list[str]:
        lines = []
        for shape in SHAPES:
            a, b = _rows(shape[0], rank, world)
            parameter = self.parameters[str(shape)]
            moments = self.optimizer.state.get(parameter, {})
            found = [parameter.detach(), *(moments.get(key) for key in MOMENTS), self.tensors[str(shape)].to_local()]
            for which, tensor in enumerate(found):
                wanted = _full(shape, which)[a:b]
                if tensor is None or (tensor.shape, raw(tensor)) != (wanted.shape, raw(wanted)):
                    lines.append(f"{shape} {which}: {None if tensor is None else tensor.tolist()}")
            if "step" not in moments or raw(moments["step"]) != raw(torch.tensor(3.0)):
                lines.append(f"{shape}: step {moments.get('step')}")
        return lines


def _matrix(rank: int, world: int, folder: str) -> tuple[list[str], list[str], list[int]]:
    """Every world in turn on the first ranks of the crew: all save, then all load what each saved. Gives what is wrong,
    and the state ids and sizes of the saves of which this rank was a part."""
    from torch.distributed.device_mesh import DeviceMesh

    lines, ids, sizes = [], [], []
    for loading, number, saved, group in turns(rank, WORLDS):
        n = WORLDS[number]
        here = _State(rank, n, DeviceMesh.from_group(group, "cpu"), label=not loading)
        with ckpt.Checkpointer(f"{folder}/{WORLDS[saved]}", process_group=group, read_only=loading) as ck:
            if loading:
                assert ck.load(here.state) is not None
                lines += [f"{WORLDS[saved]} -> {n}: {line}" for line in here.wrong(rank, n)]
            else:
                receipt = ck.save(1, here.state)
                ids.append(receipt.state_id)
                sizes.append(receipt.bytes)
    return lines, ids, sizes


@pytest.fixture(scope="module")
def crew() -> Iterator[Crew]:
    with Crew(max(WORLDS)) as made:
        yield made


@pytest.mark.ranks
@pytest.mark.slow
def test_every_length_comes_back_from_any_world_on_any_other(crew: Crew, tmp_path: Path) -> None:
    visits = crew.run(_matrix, str(tmp_path), timeout=180)
    assert [line for lines, _, _ in visits for line in lines] == []
    assert len(visits[0][1]) == len(WORLDS) and len({i for _, ids, _ in visits for i in ids}) == 1
    elements = sum(labelled(shape).numel() for shape in SHAPES)
    assert {size for _, _, sizes in visits for size in sizes} == {4 * (4 * elements + len(SHAPES))}  # nothing is padded
    stored = [[t for name, t in tree(tmp_path / str(n)).items() if "/state/" in name] for n in WORLDS]
    assert stored.count(stored[0]) == len(WORLDS) and stored[0]


def _one_rank_lacks_its_piece(rank: int, world: int, root: str) -> str:
    """Rank 1 says that it holds nothing, at the offset of what it should hold."""
    local = labelled((4,))[rank : rank + 1] if rank != 1 else torch.empty(0)
    entry = ckpt.ShardedTensor(local, [((rank,), (local.numel(),), (0,))], (4,))
    group = dist.new_group(list(range(4)))
    if rank >= 4:
        return ""
    with ckpt.Checkpointer(root, process_group=group) as ck, pytest.raises(ckpt.StateMismatch) as error:
        ck.save(1, {"x": entry})
    return str(error.value)


@pytest.mark.ranks
def test_an_empty_shard_covers_nothing(crew: Crew, tmp_path: Path) -> None:
    for said in crew.run(_one_rank_lacks_its_piece, str(tmp_path), timeout=60)[:4]:
        assert "x: no rank holds the elements [1:2]" in said


def _held(n: int, world: int, empty: Sequence[int]) -> list[tuple[int, Box]]:
    """The rows of each rank; one that has none gives an empty box at an offset of its own choice."""
    held = []
    for rank in range(world):
        a, b = _rows(n, rank, world)
        held.append((rank, Box((a if a < b else min(n, empty[rank]),), (b - a,))))
    return held


def _covered(boxes: Sequence[Box]) -> list[int]:
    return sorted(i for box in boxes for i in range(box.offset[0], box.stop[0]))


@given(
    n=st.integers(0, 40),
    world=st.integers(1, 9),
    other=st.integers(1, 9),
    empty=st.lists(st.integers(0, 40), min_size=9, max_size=9),
)
def test_plans_move_each_index_once(n: int, world: int, other: int, empty: list[int]) -> None:
    """Of a save, and of a load on another number of ranks: each index is taken from one holder, and put to each that
    wants it, once."""
    catalogue = Catalogue.of([TensorSpec("x", (n,), "float32", 4, 0)])
    saved = write_plan(catalogue, [Holdings.of(_held(n, world, empty))], world, 64)
    loaded = read_plan(catalogue, {0: Holdings.of(_held(n, other, empty))}, other, 64)
    for plan, ranks in ((saved, world), (loaded, other)):
        links = [link for unit in plan.units for link in unit.links]
        assert all(_rows(n, r, ranks)[0] <= link.box.offset[0] for link in links for r in link.ranks)
        assert _covered([link.box for link in links]) == list(range(n))
