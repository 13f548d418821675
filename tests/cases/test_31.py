"""Case 31, pytorch-163548: planning cost.

The fault: validating the global plan takes minutes at 1000 tensors x 1000 shards, for its pairwise overlap test, and
the memory of rank 0 grows with the world. Here the cost grows with the number of boxes, and one planted gap or overlap
is still found. (All of 1024 ranks x 1000 tensors: tests/geometry/test_scale.py.)
"""

from pathlib import Path

import pytest
import torch

import ckpt
from ckpt.engine.merge import Union, check_cover, declare_tensors, union_of
from ckpt.geometry import Box, Plan, TensorSpec, write_plan
from ckpt.state import Captured, LocalTensor, Shard
from tests.support.raw import attempt_folder, log_records, raw

TENSORS = 100
ROWS = 3079  # no multiple of a world: the cuts are uneven
BUDGET = 16 << 20


def _declaration(rank: int, world: int, shift: int = 0, tensor: int = -1) -> bytes:
    """What a rank says of its shard of each tensor; `shift` moves its shard of one of them by some rows."""
    captured = Captured()
    for number in range(TENSORS):
        a, b = ROWS * rank // world, ROWS * (rank + 1) // world
        moved = shift if number == tensor else 0
        view = torch.empty(b - a, 4, device="meta")
        spec = TensorSpec(f"layer.{number:03}", (ROWS, 4), "float32", 4)
        captured.tensors[spec.name] = LocalTensor(spec, [Shard(Box((a + moved, 0), (b - a, 4)), view)])
    return declare_tensors(captured)


def _planned(declarations: list[bytes]) -> tuple[Union, Plan]:
    """Merged, checked, planned."""
    union = union_of(declarations)
    check_cover(union)
    plan = write_plan(union.catalogue, union.holdings, len(declarations), BUDGET)
    return union, plan


@pytest.mark.timeout(200)  # pairwise tests of this many boxes would take hours
def test_plans_of_a_thousand_ranks_are_whole_and_end_in_time() -> None:
    before = _memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # sets the high-water mark back to what is in use
    for world in (64, 256, 1024):
        union, plan = _planned([_declaration(r, world) for r in range(world)])
        assert [len(h.boxes) for h in union.holdings] == [world] * TENSORS
        objects = [(u.array, u.index) for u in plan.units]
        assert sorted(objects) == sorted((o.array, o.index) for o in union.catalogue.objects())
        assert len(set(objects)) == len(objects)
    assert _memory("VmHWM") - before < 3 << 30


def _memory(kind: str) -> int:
    """Bytes of this process's memory, from /proc/self/status."""
    (line,) = [x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(f"{kind}:")]
    return int(line.split()[1]) << 10


@pytest.mark.parametrize(("shift", "words"), [(1, "no rank holds the elements"), (-1, "overlap in")])
def test_one_planted_fault_among_a_hundred_thousand_boxes_is_found(shift: int, words: str) -> None:
    world = 1024
    declarations = [_declaration(r, world) for r in range(world)]
    declarations[700] = _declaration(700, world, shift, tensor=61)
    with pytest.raises(ckpt.StateMismatch, match=f"layer.061.*{words}"):
        _planned(declarations)


@pytest.mark.slow
def test_ten_thousand_tiny_tensors_make_few_files(tmp_path: Path) -> None:
    """Saved and loaded for real; 50,000 are only planned, in tests/geometry/test_scale.py, for the time it takes."""
    count = 10_000
    flat = torch.arange(count * 3, dtype=torch.float32)
    saved = {str(i): flat[3 * i : 3 * i + 3] for i in range(count)}
    into = torch.zeros(count * 3)
    target = {str(i): into[3 * i : 3 * i + 3] for i in range(count)}
    with ckpt.Checkpointer(tmp_path) as ck:
        ck.save(1, saved)
        ck.load(target)
    assert raw(into) == raw(flat)
    files = [f for f in attempt_folder(tmp_path).rglob("*") if f.is_file()]
    assert len(files) + len(log_records(tmp_path)) < 15
    assert sum(f.stat().st_size for f in files if f.name == "manifest.json") < 400 * count
