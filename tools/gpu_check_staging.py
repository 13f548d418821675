"""Staging, as tools/gpu_check checks it: a state on the device comes into host memory bit for bit, with its digests,
and at the speed of the link between them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ckpt.engine.staging import SharedMemory, Staging, map_memory, unstage
from ckpt.fingerprint import box_digest
from ckpt.geometry import Box, TensorSpec
from ckpt.state.captured import Captured, Shard
from tools.gpu_check_sides import Row, noise, raw
from tools.gpu_check_speed import Sizes


def staging_rows(device: torch.device, sizes: Sizes) -> list[Row]:
    """Bits of small states and a large one in one memory, that grows and is used again; then times."""
    with shared_memory() as memory:
        cases = [(1, 1 << 16, False), (2, sizes.total, True), (3, 1 << 20, True), (4, sizes.total, False)]
        wrong = [case for case in cases if not _is_right(device, memory, *case)]
        rows = [Row("staging", f"{len(cases)} states, one after another in one memory", not wrong)]
        rows += [
            Row("staging", f"{nbytes} bytes, {'overlapped' if later else 'at once'}", False)
            for _, nbytes, later in wrong
        ]
    return [*rows, *_times(device, sizes)]


@contextmanager
def shared_memory() -> Iterator[SharedMemory]:
    memory = SharedMemory()
    try:
        yield memory
    finally:
        memory.close()


def _state(seed: int, nbytes: int, device: torch.device) -> tuple[Captured, dict[str, torch.Tensor]]:
    """A matrix, a transposed one and a part of one, of about that many bytes in all; and their bits on the host."""
    bits = noise(seed, nbytes)
    matrix, other = bits.view(torch.int32).view(2, -1, 64)
    host = {"matrix": matrix, "transposed": other[: len(other) // 2].t(), "part": other[len(other) // 2 :, 3:61]}
    moved = bits.to(device, copy=True).view(torch.int32).view(2, -1, 64)
    there = {
        "matrix": moved[0],
        "transposed": moved[1][: len(other) // 2].t(),
        "part": moved[1][len(other) // 2 :, 3:61],
    }
    captured = Captured()
    for name, view in there.items():
        shape = tuple(view.shape)
        captured.add_tensor(TensorSpec(name, shape, "int32", 4), [Shard(Box((0, 0), shape), view)])
    return captured, host


def _is_right(device: torch.device, memory: SharedMemory, seed: int, nbytes: int, later: bool) -> bool:
    captured, host = _state(seed, nbytes, device)
    staging = Staging(captured, memory, lambda shard: later)
    staged = staging.finish()
    for tensor in captured.tensors.values():  # from here on the state may change
        tensor.shards[0].view.zero_()
    found, held = unstage(staged, map_memory(memory.fd, memory.size))
    return all(
        raw(found.tensors[name].shards[0].view) == raw(view)
        and held[name]
        == [(Box((0, 0), tuple(view.shape)), box_digest(view, Box((0, 0), tuple(view.shape)), tuple(view.shape)))]
        for name, view in host.items()
    )


def _times(device: torch.device, sizes: Sizes) -> list[Row]:
    """Staging with its digests, against one plain copy into memory that torch pins (on the host: into plain memory)."""
    captured, _ = _state(5, sizes.total, device)
    source = torch.empty(sizes.total, dtype=torch.uint8, device=device)
    plain = torch.empty(sizes.total, dtype=torch.uint8, pin_memory=device.type == "cuda")
    with shared_memory() as memory:
        taken: list[list[float]] = [[], []]
        for _ in range(sizes.repeats + 1):  # the first is not counted: it finds or pins its memory
            for kind, run in enumerate(
                (lambda: plain.copy_(source), lambda: Staging(captured, memory, _never).finish())
            ):
                begin = time.perf_counter()
                run()
                taken[kind].append(time.perf_counter() - begin)
    floor, staged = (statistics.median(found[1:] or found) for found in taken)
    case = f"{sizes.total >> 20} MiB from the device, with digests; the floor is one copy into pinned memory"
    return [Row("staging", case, True, sizes.total, staged, sizes.total / floor)]


def _never(shard: Shard) -> bool:
    return False
