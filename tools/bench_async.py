"""What an asynchronous save costs the trainer, against a peer and a copy of memory in the same run.

    tools/bench async [--gib 2] [--ranks 4] [--repeat 8] [--dir /dev/shm]

Stall is the time of the call on the slowest rank; every save is waited for before the next begins. In turn: ckpt's
`save_async`, DCP's `async_save` with its default stager (new memory each time) and with one that is kept for all
saves, both on a gloo group of their own, ckpt with `overlap=True`, and a `memmove` of each rank's part into memory used
before, by all ranks at once. The first three of each are not counted: memory is new, agents start, plans are made.

Then steps of training (matrix products and an all-reduce) are timed alone, and over intervals of at least 20 times the
background write, each with one save at its begin.
"""

from __future__ import annotations

import argparse
import ctypes
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

import ckpt
from tests.support.ranks import run_ranks
from tools.bench import GIB, PeakMemory, build, shapes

WARM = 3
INTERVAL = 20  # of the background write time


def slowest(seconds: float) -> float:
    told = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(told, op=dist.ReduceOp.MAX)
    return float(told)


def timed(call: Callable[[], Any]) -> tuple[Any, float]:
    dist.barrier()
    begin = time.perf_counter()
    done = call()
    return done, slowest(time.perf_counter() - begin)


def stalls(rank: int, world: int, folder: str, total: int, repeat: int) -> dict[str, list[float]]:
    """Seconds by case: stalls, and until the end of each save."""
    warnings.filterwarnings("ignore")
    state: dict[str, Any] = dict(build(shapes(total), 0, True))
    group = dist.new_group(backend="gloo")
    stager = DefaultStager(StagingOptions(False, False, False, False))  # as the default, but for memory used again
    local = [t.to_local() for t in state.values()]
    kept = [t.clone() for t in local]
    found: dict[str, list[float]] = {}

    def note(name: str, seconds: float) -> None:
        found.setdefault(name, []).append(seconds)

    def memmove() -> None:
        for to, source in zip(kept, local, strict=True):
            ctypes.memmove(to.data_ptr(), source.data_ptr(), source.numel() * source.element_size())

    def peer(name: str, turn: int, **options: Any) -> None:
        where = f"{folder}/{name}-{turn}"
        future, stall = timed(partial(dcp.async_save, state, checkpoint_id=where, process_group=group, **options))
        note(name, stall)
        note(f"{name}, written", timed(future.result)[1])
        dist.barrier()
        if rank == 0:
            shutil.rmtree(where)

    owned = {**state, "optimizer": torch.optim.SGD(state.values())}  # has no state; its parameters are all there is
    beside = ckpt.Checkpointer(f"{folder}/overlap", overlap=True)
    with ckpt.Checkpointer(f"{folder}/ckpt") as ck, beside:
        for turn in range(repeat + WARM):
            with PeakMemory() as memory:
                pending, stall = timed(partial(ck.save_async, turn, state))
            note("ckpt", stall)
            note("ckpt, memory", memory.growth / sum(t.numel() * t.element_size() for t in local))
            note("ckpt, written", timed(pending.result)[1])
            pending, stall = timed(partial(beside.save_async, turn, owned))
            note("ckpt with overlap", stall)
            note("ckpt with overlap, copied", timed(pending.captured)[1])
            note("ckpt with overlap, written", timed(pending.result)[1])
            dist.barrier()
            if rank == 0:
                for attempt in Path(folder).glob("*/attempts/*/*"):
                    shutil.rmtree(attempt)
            peer("DCP, default stager", turn)
            peer("DCP, reused stager", turn, async_stager=stager)
            note("memmove", timed(memmove)[1])
    return {name: values[WARM:] for name, values in found.items()}


def training(rank: int, world: int, folder: str, total: int, repeat: int) -> tuple[float, float, float]:
    """Seconds of a step alone and beside saves, and of the background write."""
    state: dict[str, Any] = dict(build(shapes(total), 0, True))
    a, b = torch.randn(512, 512), torch.randn(512, 512)
    shared = torch.zeros(1 << 16)

    def step() -> None:
        torch.mm(a, b)
        dist.all_reduce(shared)

    def run(seconds: float) -> tuple[int, float]:
        begin, count = time.perf_counter(), 0
        while True:
            step()
            count += 1
            if count % 50 == 0 and slowest(time.perf_counter() - begin) > seconds:
                return count, time.perf_counter() - begin

    with ckpt.Checkpointer(f"{folder}/train") as ck:
        writes = []
        for turn in range(WARM):
            pending = ck.save_async(turn, state)
            writes.append(timed(pending.result)[1])
        length = INTERVAL * writes[-1]
        alone, beside = [], []
        for turn in range(WARM, WARM + repeat):
            count, seconds = run(length)
            alone.append(seconds / count)
            begin = time.perf_counter()
            pending = ck.save_async(turn, state)
            count, _ = run(length)
            beside.append((time.perf_counter() - begin) / count)
            pending.result()
    return statistics.median(alone), statistics.median(beside), writes[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=2.0, help="size of the whole state")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--repeat", type=int, default=8)
    parser.add_argument(
        "--intervals", type=int, default=3, help="of training, alone and beside a save; 0 leaves it out"
    )
    parser.add_argument("--dir", default="/dev/shm")
    args = parser.parse_args()
    total = sum(4 * a * b for _, (a, b) in shapes(int(args.gib * GIB)))
    folder = tempfile.mkdtemp(prefix="ckpt-bench-", dir=args.dir)
    try:
        found = run_ranks(args.ranks, stalls, folder, total, args.repeat, timeout=3000)[0]
        copy = statistics.median(found["memmove"])
        print(f"{total / GIB:.2f} GiB over {args.ranks} ranks to {args.dir}, medians of {args.repeat}")
        print(f"{'':32}{'seconds':>9}{'of a memmove':>14}")
        for name, values in found.items():
            if not name.endswith("memory"):
                print(f"{name:32}{statistics.median(values):9.3f}{statistics.median(values) / copy:14.2f}")
        extra = 100 * max(found["ckpt, memory"])
        print(f"private memory during ckpt's call, beside the one copy: {extra:.1f} % of a rank's part")
        if args.intervals:
            alone, beside, write = run_ranks(args.ranks, training, folder, total, args.intervals, timeout=3000)[0]
            print(
                f"a step takes {1e3 * alone:.2f} ms alone, and {1e3 * beside:.2f} ms over intervals of "
                f"{INTERVAL * write:.1f} s with a save each: {100 * (beside / alone - 1):+.1f} %"
            )
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
