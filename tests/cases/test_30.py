"""Case 30, zarr-1977: 0-dim and zero-size tensors.

The fault: scalar and zero-length tensors fail in chunk arithmetic: a division by a zero chunk size, no dimension to
shard. Here their exact shape, dtype and bits come back, replicated or owned by one rank, on worlds of other sizes.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import zarr
from torch import nn

import ckpt
from tests.support.ranks import Crew
from tests.support.raw import attempt_folder, random_bits, raw

SHAPES: list[tuple[int, ...]] = [(), (0,), (3, 0, 2), (1,), (1, 1, 1), (0, 0), (1, 0), (70_000, 0)]
DTYPES = [torch.float32, torch.int64, torch.bool, torch.bfloat16, torch.complex128]
OWNED: list[tuple[int, ...]] = [(0,), (3, 0, 2), (1,), (1, 1, 1), (1, 5), (2, 3)]


def _plain(seed: int) -> dict[str, torch.Tensor]:
    return {f"{d} {s}": random_bits(s, d, seed) for d in DTYPES for s in SHAPES}


def _owned(rank: int, world: int, seed: int) -> dict[str, ckpt.ShardedTensor]:
    """Tensors of few rows, cut over the ranks by torch.chunk's rule: most ranks have an empty part."""
    parts = {}
    for shape in OWNED:
        step = -(-shape[0] // world) if shape[0] else 0
        a, b = min(shape[0], step * rank), min(shape[0], step * (rank + 1))
        local = random_bits(shape, torch.float32, seed)[a:b].clone()
        box = ((a, *(0 for _ in shape[1:])), tuple(local.shape), (0,) * len(shape))
        parts[str(shape)] = ckpt.ShardedTensor(local, [box], shape)
    return parts


def _adam(seed: int, steps: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(steps):
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    return {"model": model, "opt": optimizer}


def _state(rank: int, world: int, seed: int, steps: int) -> dict[str, Any]:
    return {"plain": _plain(seed), "owned": _owned(rank, world, seed), "adam": _adam(seed, steps)}


def _check(state: dict[str, Any], rank: int, world: int) -> None:
    expected = _state(rank, world, 1, 3)
    for name, tensor in state["plain"].items():
        other = expected["plain"][name]
        assert (tensor.dtype, tensor.shape, raw(tensor)) == (other.dtype, other.shape, raw(other)), name
    for name, part in state["owned"].items():
        assert raw(part.local) == raw(expected["owned"][name].local), name
    for mine, other in zip(state["adam"]["model"].parameters(), expected["adam"]["model"].parameters(), strict=True):
        step, wanted = state["adam"]["opt"].state[mine]["step"], expected["adam"]["opt"].state[other]["step"]
        assert (step.shape, step.dtype, raw(step)) == ((), torch.float32, raw(wanted))


def _on(rank: int, world: int, root: str, n: int, save: bool) -> None:
    import torch.distributed as dist

    group = dist.new_group(list(range(n)))
    if rank >= n:
        return
    with ckpt.Checkpointer(root, process_group=group) as ck:
        if save:
            ck.save(1, _state(rank, n, 1, 3))
        state = _state(rank, n, 2, 0)
        assert ck.load(state) is not None
        _check(state, rank, n)


@pytest.fixture(scope="module")
def crew() -> Iterator[Crew]:
    with Crew(4) as made:
        yield made


@pytest.mark.ranks
def test_on_4_ranks_then_3_2_and_1(crew: Crew, tmp_path: Path) -> None:
    for n, save in ((4, True), (3, False), (2, False), (4, False)):
        crew.run(_on, str(tmp_path), n, save)
    state = _state(0, 1, 2, 0)
    with ckpt.Checkpointer(tmp_path) as ck:
        ck.load(state)
    _check(state, 0, 1)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_state_of_nothing_else(shape: tuple[int, ...], tmp_path: Path) -> None:
    """One tensor alone, so that an array may have no element and no object at all."""
    saved, target = random_bits(shape, torch.float32, 1), random_bits(shape, torch.float32, 2)
    with ckpt.Checkpointer(tmp_path) as ck:
        receipt = ck.save(1, {"x": saved})
        restored = ck.load({"x": target})
    assert restored is not None and restored.tensors == 1 and receipt.bytes == saved.numel() * 4
    assert (target.shape, raw(target)) == (shape, raw(saved))
    array = zarr.open_group(attempt_folder(tmp_path) / "state", mode="r")["packed/float32"]
    assert isinstance(array, zarr.Array) and array.shape == (saved.numel(),)
    assert array.attrs["tensors"] == [["x", list(shape), 0]]


def test_a_zero_size_tensor_is_still_missed(tmp_path: Path) -> None:
    """No bytes, but part of the state: missing, extra or of another shape it is an error."""
    with ckpt.Checkpointer(tmp_path) as ck:
        ck.save(1, {"x": torch.zeros(3, 0), "y": torch.ones(2)})
        for state, words in (
            ({"y": torch.zeros(2)}, "the checkpoint holds x, which"),
            ({"x": torch.zeros(3, 0), "y": torch.zeros(2), "z": torch.zeros(0)}, "the checkpoint has no z"),
            ({"x": torch.zeros(0, 3), "y": torch.zeros(2)}, r"x: rank 0 has shape \[0, 3\], the checkpoint \[3, 0\]"),
            ({"x": torch.zeros(3, 0, dtype=torch.int8), "y": torch.zeros(2)}, "x: rank 0 has dtype int8"),
        ):
            with pytest.raises(ckpt.StateMismatch, match=words):
                ck.load(state)
