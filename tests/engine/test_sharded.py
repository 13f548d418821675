"""Sharded tensors go from any cut over ranks to any other, and what is stored does not depend on the cut."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from tests.support.ranks import Crew
from tests.support.raw import attempt_folder, random_bits, raw, tree

pytestmark = pytest.mark.ranks

Boxes = list[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]


def _rows(world: int, rank: int, rows: int, columns: int) -> Boxes:
    """An uneven cut: the first rank has about half of the rows, the last one the rest, perhaps none."""
    cuts = [0, *(min(rows, rows // 2 + i * 3) for i in range(world - 1)), rows]
    a, b = cuts[rank], cuts[rank + 1]
    return [((a, 0), (b - a, columns), (0, 0))]


def _blocks_of(world: int, rank: int) -> Boxes:
    """A [7, 10] tensor in boxes of all sizes; a rank's local tensor is [n, 10] and holds several of them."""
    boxes = {
        3: [
            [((0, 0), (3, 10), (0, 0))],
            [((3, 0), (4, 4), (0, 0)), ((3, 4), (2, 6), (0, 4))],
            [((5, 4), (2, 6), (3, 1)), ((0, 0), (3, 10), (0, 0))],  # its second box is a replica of rank 0's
        ],
        2: [
            [((0, 0), (7, 1), (0, 9)), ((2, 1), (5, 9), (2, 0))],
            [((0, 1), (2, 4), (0, 0)), ((0, 5), (2, 5), (2, 5))],
        ],
        1: [[((0, 0), (7, 10), (0, 0))]],
    }
    return boxes[world][rank]  # type: ignore[return-value]


def _flat(world: int, rank: int) -> Boxes:
    """A flat ZeRO range of a [5, 6] tensor: one box for each row it touches, in a one-dimensional local tensor."""
    cuts = [30 * i // world + (i % 2) for i in range(world)] + [30]
    boxes: Boxes = []
    at = cuts[rank]
    while at < cuts[rank + 1]:
        row, column = divmod(at, 6)
        n = min(6 - column, cuts[rank + 1] - at)
        boxes.append(((row, column), (1, n), (at - cuts[rank],)))
        at += n
    return boxes


def _layers(world: int, rank: int) -> Boxes:
    """Layers of a [5, 4, 3] stack, dealt in turn, in a local [k, 4, 3] tensor."""
    return [((layer, 0, 0), (1, 4, 3), (i, 0, 0)) for i, layer in enumerate(range(rank, 5, world))]


SHARDED: dict[str, tuple[tuple[int, ...], torch.dtype, int, Callable[[int, int], Boxes]]] = {
    "blocks": ((7, 10), torch.float64, 0, _blocks_of),
    "flat": ((5, 6), torch.bfloat16, 0, _flat),
    "layers": ((5, 4, 3), torch.float32, 1, _layers),
    "uneven": ((10, 7), torch.uint8, 0, lambda w, r: _rows(w, r, 10, 7)),
    "few rows": ((2, 7), torch.int16, 0, lambda w, r: _rows(w, r, 2, 7)),
    "large": ((1303, 1001), torch.float32, 0, lambda w, r: _rows(w, r, 1303, 1001)),
    "long": ((300_007, 3), torch.complex64, 0, lambda w, r: _rows(w, r, 300_007, 3)),
}


def _local_shape(boxes: Boxes, dims: int) -> tuple[int, ...]:
    if not boxes:
        return (0,) * dims
    return tuple(max(at[-dims + i] + extent[-dims + i] for _, extent, at in boxes) for i in range(dims))


def _sharded_state(world: int, rank: int, filled: bool) -> dict[str, ckpt.ShardedTensor]:
    """This rank's parts, by plain slicing of the full tensors; or random ones to be filled."""
    state = {}
    for number, (name, (shape, dtype, stack, cut)) in enumerate(SHARDED.items()):
        full, boxes = random_bits(shape, dtype, 40 + number), cut(world, rank)
        dims = 1 if name == "flat" else len(shape)
        local = random_bits(_local_shape(boxes, dims), dtype, 900 + rank)
        if name == "blocks":
            local = torch.empty_like(local.t().contiguous()).t().copy_(local)  # a transposed local tensor
        if filled:
            for offset, extent, at in boxes:
                part = full[tuple(slice(o, o + e) for o, e in zip(offset, extent, strict=True))]
                where = tuple(slice(a, a + e) for a, e in zip(at, extent[-dims:], strict=True))
                local[where] = part.reshape(extent[-dims:])
        state[name] = ckpt.ShardedTensor(local, boxes, shape, stack)
    return state


def _group(n: int) -> Any:
    import torch.distributed as dist

    return dist.new_group(list(range(n)))


def _save_sharded(rank: int, world: int, root: str, n: int, step: int) -> str | None:
    group = _group(n)
    if rank >= n:
        return None
    with ckpt.Checkpointer(root, process_group=group) as ck:
        return ck.save(step, {"s": _sharded_state(n, rank, True), "n": 5}).state_id


def _load_sharded(rank: int, world: int, root: str, n: int) -> str | None:
    group = _group(n)
    if rank >= n:
        return None
    expected = _sharded_state(n, rank, True)
    state: dict[str, Any] = {"s": _sharded_state(n, rank, False), "n": 0}
    with ckpt.Checkpointer(root, process_group=group) as ck:
        restored = ck.load(state)
        assert restored is not None
        assert state["n"] == 5
        for name, entry in state["s"].items():
            assert raw(entry.local) == raw(expected[name].local), name
        return ck.save(restored.step + 1, state).state_id


def test_sharded_tensors_go_from_3_ranks_to_2_to_1_and_back(crew: Crew, tmp_path: Path) -> None:
    """Several boxes on a rank, uneven and empty ones, replicas, flat ranges, stacked layers; cuts across objects."""
    first = crew.run(_save_sharded, str(tmp_path), 3, 1)[0]
    trees = [tree(attempt_folder(tmp_path) / "state")]
    manifests = [(attempt_folder(tmp_path) / "manifest.json").read_bytes()]
    ids = []
    for n in (2, 1, 3):
        if n == 1:
            full: dict[str, Any] = {n: random_bits(shape, dtype, 7) for n, (shape, dtype, _, _) in SHARDED.items()}
            full["layers"] = ckpt.ShardedTensor(full["layers"], _layers(1, 0), (5, 4, 3), 1)
            with ckpt.Checkpointer(tmp_path) as ck:
                ck.load({"s": full, "n": 0})
                for number, (name, (shape, dtype, _, _)) in enumerate(SHARDED.items()):
                    tensor = full[name].local if name == "layers" else full[name]
                    assert raw(tensor) == raw(random_bits(shape, dtype, 40 + number)), name
                ids.append(ck.save(9, {"s": full, "n": 5}).state_id)
        else:
            ids.append(crew.run(_load_sharded, str(tmp_path), n)[0])
        trees.append(tree(attempt_folder(tmp_path) / "state"))
        manifests.append((attempt_folder(tmp_path) / "manifest.json").read_bytes())
    assert ids == [first] * 3
    assert all(t == trees[0] for t in trees) and all(m == manifests[0] for m in manifests)
