"""Case 29, pytorch-192485: the dtype table.

The fault: integer, bool or newer dtypes crash a size table that was written for floats. Here each dtype that torch has
is either carried with the same bytes, sharded too, or refused at save, not at load, by its name.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import ckpt
from ckpt.state.dtypes import STORED
from tests.support.ranks import Crew
from tests.support.raw import random_bits, raw

ALL = sorted({str(d).removeprefix("torch."): d for d in vars(torch).values() if isinstance(d, torch.dtype)}.items())
CARRIED = {name: dtype for name, dtype in ALL if name in STORED}
REFUSED = {name: dtype for name, dtype in ALL if name not in STORED}
SHAPES = [(), (0,), (3, 5), (33_000, 3)]


def test_the_dtypes_people_train_with_are_carried() -> None:
    wanted = (
        "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 bfloat16 float32 float64 complex32 complex64 "
        "complex128 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu float4_e2m1fn_x2"
    )
    assert set(CARRIED) == set(wanted.split())


@pytest.mark.parametrize("name", CARRIED)
def test_random_bytes_of_a_carried_dtype_come_back(name: str, tmp_path: Path) -> None:
    saved = {str(shape): random_bits(shape, CARRIED[name], 1) for shape in SHAPES}
    target = {str(shape): random_bits(shape, CARRIED[name], 2) for shape in SHAPES}
    with ckpt.Checkpointer(tmp_path) as ck:
        ck.save(1, saved)
        ck.load(target)
    for shape, tensor in target.items():
        assert tensor.dtype is CARRIED[name] and raw(tensor) == raw(saved[shape])


@pytest.mark.parametrize("name", REFUSED)
def test_any_other_dtype_is_refused_at_save_by_its_name(name: str, tmp_path: Path) -> None:
    tensor = torch.zeros(16, dtype=torch.uint8).view(REFUSED[name])
    with ckpt.Checkpointer(tmp_path) as ck:
        for state in ({"x": tensor}, {"x": {(1,): tensor}}, {"x": REFUSED[name]}):
            with pytest.raises(
                ckpt.Unsupported, match=f"x.*: dtype {name} is not carried .* convert it, or leave it out"
            ):
                ck.save(1, state)
        assert not (tmp_path / "attempts").exists()


ROWS = {2: [0, 4, 7], 3: [0, 3, 3, 7]}  # uneven; the middle one of three has none


def _part(rank: int, world: int, dtype: torch.dtype, filled: bool) -> ckpt.ShardedTensor:
    a, b = ROWS[world][rank : rank + 2]
    local = random_bits((7, 5), dtype, 3)[a:b].clone() if filled else random_bits((b - a, 5), dtype, 4)
    return ckpt.ShardedTensor(local, [((a, 0), (b - a, 5), (0, 0))], (7, 5))


def _on(rank: int, world: int, root: str, n: int) -> None:
    import torch.distributed as dist

    group = dist.new_group(list(range(n)))
    if rank >= n:
        return
    with ckpt.Checkpointer(root, process_group=group) as ck:
        if n == 2:
            ck.save(1, {name: _part(rank, n, dtype, True) for name, dtype in CARRIED.items()})
            return
        target = {name: _part(rank, n, dtype, False) for name, dtype in CARRIED.items()}
        assert ck.load(target) is not None
        for name, dtype in CARRIED.items():
            assert raw(target[name].local) == raw(_part(rank, n, dtype, True).local), name


@pytest.fixture(scope="module")
def crew() -> Iterator[Crew]:
    with Crew(3) as made:
        yield made


@pytest.mark.ranks
def test_every_carried_dtype_sharded_over_2_ranks_then_3(crew: Crew, tmp_path: Path) -> None:
    crew.run(_on, str(tmp_path), 2)
    crew.run(_on, str(tmp_path), 3)
