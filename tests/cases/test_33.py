"""Case 33, zarr-487: huge tensors.

The fault: chunks over 2 GiB are refused by the codec, and 32-bit sizes and indices overflow at 2, 4 and 5 GB. Here no
stored object is larger than 16 MiB, whatever the shape, and positions are exact past 2^31 and 2^32.
"""

import itertools
import math
from pathlib import Path

import numpy as np
import pytest
import torch

import ckpt
from ckpt.fingerprint import add
from ckpt.fingerprint.digest import box_digest
from ckpt.geometry import Box, Catalogue, Holdings, TensorSpec, canonical_grid, read_plan, write_plan
from tests.support.raw import raw

MIB = 1 << 20
HUGE: dict[str, tuple[tuple[int, ...], int, int]] = {  # shape, bytes per element, stacked axes
    "70000 x 70000 fp32": ((70_000, 70_000), 4, 0),
    "2^31 + 7 bytes": ((2**31 + 7,), 1, 0),
    "2^32 + 5 bf16": ((2**32 + 5,), 2, 0),
    "2^40 + 1 bytes": ((2**40 + 1,), 1, 0),
    "strides past 2^32": ((3, 2**17 + 1, 2**16 + 3), 2, 0),
    "one long row": ((1, 2**33 + 3), 4, 0),
    "one long column": ((2**33 + 3, 1), 8, 0),
    "stacked experts": ((96, 128, 8193, 4097), 2, 2),
    "complex128": ((2**15 + 1, 2**17 + 1), 16, 0),
}


@pytest.mark.parametrize("kind", HUGE)
def test_chunks_stay_small_and_tile_the_tensor(kind: str) -> None:
    shape, itemsize, stack = HUGE[kind]
    grid = canonical_grid(shape, itemsize, stack)
    assert math.prod(grid.cell) * itemsize <= 17 * MIB  # whole chunks, rounded up
    assert math.prod(grid.chunk) * itemsize <= 2 * MIB
    for axis, count in enumerate(grid.counts):
        assert (count - 1) * grid.cell[axis] < shape[axis] <= count * grid.cell[axis]
    ends = itertools.product(*({0, n - 1} for n in grid.counts))
    for index in ends:  # the corners, where an index past 32 bits would come out wrong
        offset = tuple(i * c for i, c in zip(index, grid.cell, strict=True))
        stop = tuple(min(o + c, n) for o, c, n in zip(offset, grid.cell, shape, strict=True))
        box = Box(offset, tuple(s - o for s, o in zip(stop, offset, strict=True)))
        assert grid.object_bytes(box, itemsize) < 18 * MIB
        inner = list(grid.chunks_of(box))
        assert sum(b.volume for b in inner) == box.volume
        assert inner[0].offset == offset and inner[-1].stop == stop


@pytest.mark.parametrize("kind", ["70000 x 70000 fp32", "2^31 + 7 bytes", "2^32 + 5 bf16", "strides past 2^32"])
def test_plans_cover_every_byte_once_and_move_right_boxes(kind: str) -> None:
    """Three ranks with uneven cuts save; five load. Only the boxes are looked at: no memory is needed."""
    shape, itemsize, stack = HUGE[kind]
    axis = max(range(len(shape)), key=lambda i: shape[i])
    catalogue = Catalogue.of([TensorSpec("huge", shape, "uint8", itemsize, stack)])

    def held(world: int) -> Holdings:
        cuts = [0, *(shape[axis] * r // world + 1 for r in range(1, world)), shape[axis]]
        boxes = []
        for rank, (a, b) in enumerate(itertools.pairwise(cuts)):
            offset = tuple(a if i == axis else 0 for i in range(len(shape)))
            boxes.append((rank, Box(offset, tuple(b - a if i == axis else n for i, n in enumerate(shape)))))
        holdings = Holdings.of(boxes)
        holdings.check_cover("huge", shape)
        return holdings

    write = write_plan(catalogue, [held(3)], 3, 64 * MIB)
    read = read_plan(catalogue, {0: held(5)}, 5, 64 * MIB)
    for plan, holdings in ((write, held(3)), (read, held(5))):
        units = list(plan.units)
        assert sum(u.box.volume for u in units) == math.prod(shape)
        assert sum(k.box.volume for u in units for k in u.links) == math.prod(shape)
        assert sum(plan.owned) == math.prod(shape) * itemsize
        assert max(u.nbytes for u in units) <= 17 * MIB
        assert max(u.box.stop for u in units) == shape
        by_rank = {ranks[0]: box for box, ranks in zip(holdings.boxes, holdings.ranks, strict=True)}
        assert all(by_rank[r].contains(k.box) for u in units[::97] for k in u.links for r in k.ranks)


@pytest.mark.parametrize("border", [2**31, 2**32, 2**33, 2**40])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.int64])
def test_fingerprints_add_up_and_differ_across_the_borders_of_32_bits(border: int, dtype: torch.dtype) -> None:
    """A part that straddles the border is the sum of its halves; the same bits elsewhere have another digest."""
    size = 2 * border + 11
    part = torch.arange(4096, dtype=torch.int32).to(dtype)

    def at(offset: int, view: torch.Tensor) -> tuple[int, int]:
        return box_digest(view, Box((offset,), tuple(view.shape)), (size,))

    start = border - 1001
    assert at(start, part) == add(at(start, part[:1001]), at(border, part[1001:]))
    assert len({at(start % 2**31, part), at(start % 2**32, part), at(start, part), at(start + 4, part)}) == len(
        {start % 2**31, start % 2**32, start, start + 4}
    )
    column = part[:, None]
    whole = box_digest(column, Box((start, 0), tuple(column.shape)), (size, 1))
    halves = [
        box_digest(column[:1001], Box((start, 0), (1001, 1)), (size, 1)),
        box_digest(column[1001:], Box((border, 0), (3095, 1)), (size, 1)),
    ]
    assert whole == add(*halves)


@pytest.mark.slow
def test_a_tensor_of_more_than_2_gib_keeps_its_ends_and_its_middle(tmp_path: Path) -> None:
    """Real bytes at both ends and on both sides of element 2^31, in a sparse file that is mapped into memory."""
    size = 2**31 + 16
    label = np.frombuffer(np.random.default_rng(5).bytes(64), np.uint8)
    places = [0, 2**30 - 8, 2**31 - 200, size - 64]
    source = np.memmap(tmp_path / "source", np.uint8, "w+", shape=(size,))
    for i, place in enumerate(places):
        source[place : place + 64] = label + i
    target = np.memmap(tmp_path / "target", np.uint8, "w+", shape=(size,))
    with ckpt.Checkpointer(tmp_path / "root") as ck:
        receipt = ck.save(1, {"huge": source, "small": torch.ones(3)})
        small = torch.zeros(3)
        restored = ck.load({"huge": target, "small": small})
    assert receipt.bytes == size + 12
    assert restored is not None and restored.verified
    assert raw(small) == raw(torch.ones(3))
    step = 64 * MIB
    for start in range(0, size, step):  # every byte, a piece at a time
        assert source[start : start + step].tobytes() == target[start : start + step].tobytes()
    for i, place in enumerate(places):
        assert target[place : place + 64].tobytes() == (label + i).tobytes()
    largest = max(f.stat().st_size for f in (tmp_path / "root").rglob("*") if f.is_file())
    assert largest < 18 * MIB
    for file in (tmp_path / "source", tmp_path / "target", *(tmp_path / "root").rglob("c/*")):
        if file.is_file():
            file.unlink()  # 6 GiB that nobody needs until the next run
