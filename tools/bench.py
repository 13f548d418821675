"""Benchmarks against a peer in the same run: save, load and reshard-load of a sharded state.

    tools/bench [--gib 2] [--ranks 4] [--repeat 6] [--cold] [--dir /dev/shm] [--dir DIR ...]

Each measurement alternates ckpt and torch.distributed.checkpoint (DCP) on the same tensors, in the same processes, and
prints medians and the ratio of medians (above 1: ckpt is faster), and where ckpt spends its time. What verification
costs is the difference to loads without it, one after each load. Peak memory is the
growth of private anonymous memory summed over the ranks above the figure just before the call, sampled every 5 ms.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import platform
import shutil
import statistics
import tempfile
import threading
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import ckpt
from tests.support.ranks import run_ranks

GIB = 1 << 30


def shapes(total: int) -> list[tuple[str, tuple[int, int]]]:
    """Weights of a decoder of hidden size 2048, as many layers as `total` bytes of fp32 hold."""
    found: list[tuple[str, tuple[int, int]]] = [("embedding", (32000, 2048))]
    block = [("qkv", (6144, 2048)), ("proj", (2048, 2048)), ("up", (11264, 2048)), ("down", (2048, 5632))]
    layer = 0
    while sum(4 * a * b for _, (a, b) in found) + sum(4 * a * b for _, (a, b) in block) <= total:
        found += [(f"layers.{layer}.{name}", shape) for name, shape in block]
        layer += 1
    return found


def build(names: list[tuple[str, tuple[int, int]]], axis: int, fill: bool) -> dict[str, DTensor]:
    """The state cut along `axis` over all ranks: random bits, or zeros."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state = {}
    for number, (name, shape) in enumerate(names):
        local = list(shape)
        local[axis] //= dist.get_world_size()
        part = torch.zeros(local)
        if fill:
            generator = torch.Generator().manual_seed(1000 * dist.get_rank() + number)
            part.view(torch.int32).random_(generator=generator)
        state[name] = DTensor.from_local(part, mesh, [Shard(axis)], shape=torch.Size(shape), stride=(shape[1], 1))
    return state


class PeakMemory:
    """Growth of this process's anonymous memory while it is entered, in bytes."""

    def __enter__(self) -> PeakMemory:
        self._done = threading.Event()
        self._before = self._peak = _anonymous()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._done.wait(0.005):
            self._peak = max(self._peak, _anonymous())

    def __exit__(self, *_: object) -> None:
        self._peak = max(self._peak, _anonymous())
        self._done.set()
        self._thread.join()

    @property
    def growth(self) -> int:
        return self._peak - self._before


def _anonymous() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("no RssAnon in /proc/self/status")


OPERATIONS = ("save", "load", "reshard-load")
UNVERIFIED = "load, unverified"


@dataclass
class Series:
    """Seconds (the slowest rank), memory growth (all ranks) and ckpt's phases (rank 0) of one operation."""

    seconds: list[float] = field(default_factory=list)
    growth: list[int] = field(default_factory=list)
    phases: list[Mapping[str, float]] = field(default_factory=list)


def measure(series: Series, call: Callable[[], Any], cold: bool) -> None:
    if cold and dist.get_rank() == 0:
        os.sync()
        Path("/proc/sys/vm/drop_caches").write_text("3")
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)  # memory that an earlier call left with the allocator counts as growth
    dist.barrier()
    with PeakMemory() as memory:
        begin = time.perf_counter()
        done = call()
        seconds = time.perf_counter() - begin
    slowest = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    total = torch.tensor([memory.growth])
    dist.all_reduce(total)
    series.seconds.append(float(slowest))
    series.growth.append(int(total))
    if isinstance(done, ckpt.Receipt | ckpt.Restored):
        series.phases.append(done.phases)


def compare(rank: int, world: int, folder: str, total: int, repeat: int, cold: bool) -> dict[str, dict[str, Series]]:
    """All measurements on one directory, on every rank of one job."""
    warnings.filterwarnings("ignore")
    names = shapes(total)
    saved, rows, columns = build(names, 0, True), build(names, 0, False), build(names, 1, False)
    found = _no_figures()
    with ckpt.Checkpointer(f"{folder}/ckpt") as ck:
        for turn in range(repeat + 1):  # the first turn warms up and is not counted
            counted = found if turn else _no_figures()
            peer = f"{folder}/dcp-{turn}"
            operations: list[tuple[str, str, Callable[[], Any]]] = [
                ("save", "ckpt", partial(ck.save, turn, saved)),
                ("save", "dcp", partial(dcp.save, dict(saved), checkpoint_id=peer)),
                ("load", "ckpt", partial(ck.load, rows)),
                ("load", "dcp", partial(dcp.load, dict(rows), checkpoint_id=peer)),
                ("reshard-load", "ckpt", partial(ck.load, columns)),
                ("reshard-load", "dcp", partial(dcp.load, dict(columns), checkpoint_id=peer)),
                (UNVERIFIED, "ckpt", partial(ck.load, rows, verify=False)),
                (UNVERIFIED, "verified", partial(ck.load, rows)),
            ]
            for start in range(0, len(operations), 2):
                pair = operations[start : start + 2]
                for op, library, call in pair if turn % 2 else reversed(pair):
                    measure(counted[op][library], call, cold)
            dist.barrier()
            if rank == 0:
                shutil.rmtree(peer)
                _drop_attempts(Path(folder, "ckpt"))
            dist.barrier()
    return found


def _no_figures() -> dict[str, dict[str, Series]]:
    return {op: defaultdict(Series) for op in (*OPERATIONS, UNVERIFIED)}


def _drop_attempts(root: Path) -> None:
    """Frees the space of the steps measured so far; the root is thrown away at the end."""
    for attempt in root.glob("attempts/*/*"):
        shutil.rmtree(attempt)


def report(folder: str, found: dict[str, dict[str, Series]], total: int) -> None:
    print(f"\n{folder}")
    print(f"{'':14}{'ckpt s':>9}{'DCP s':>9}{'ratio':>8}{'ckpt GiB/s':>12}{'ckpt peak':>11}{'DCP peak':>10}")
    for op in OPERATIONS:
        both = found[op]
        ours, theirs = (statistics.median(both[k].seconds) for k in ("ckpt", "dcp"))
        peaks = [100 * max(both[k].growth) / total for k in ("ckpt", "dcp")]
        print(
            f"{op:14}{ours:9.2f}{theirs:9.2f}{theirs / ours:8.2f}{total / GIB / ours:12.2f}"
            f"{peaks[0]:10.0f}%{peaks[1]:9.0f}%"
        )
    for op in OPERATIONS:
        print(f"{op} of ckpt: {_shares(found[op]['ckpt'].phases)}")
    pairs = zip(found[UNVERIFIED]["verified"].seconds, found[UNVERIFIED]["ckpt"].seconds, strict=True)
    cost = [100 * (1 - without / verified) for verified, without in pairs]
    spread = f"{min(cost):.0f} to {max(cost):.0f} %"
    print(f"verification takes {statistics.median(cost):.0f} % of a load (median of pairs; {spread})")


def _shares(phases: Sequence[Mapping[str, float]]) -> str:
    """Median share of each phase in the time of all phases."""
    shares = [{name: s / sum(one.values()) for name, s in one.items()} for one in phases]
    return ", ".join(f"{name} {100 * statistics.median(s[name] for s in shares):.0f} %" for name in shares[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=2.0, help="size of the whole state")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--repeat", type=int, default=6, help="an even number lets each go first equally often")
    parser.add_argument("--cold", action="store_true", help="drop the page cache before each call (needs root)")
    parser.add_argument("--dir", action="append", help="where to save; may be given several times")
    args = parser.parse_args()
    total = sum(4 * a * b for _, (a, b) in shapes(int(args.gib * GIB)))
    print(
        f"{platform.processor() or platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}"
    )
    print(f"{total / GIB:.2f} GiB of fp32 over {args.ranks} gloo ranks, median of {args.repeat} alternating runs")
    for base in args.dir or ["/dev/shm"]:
        folder = tempfile.mkdtemp(prefix="ckpt-bench-", dir=base)
        try:
            results = run_ranks(args.ranks, compare, folder, total, args.repeat, args.cold, timeout=1800)
            report(base, results[0], total)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
