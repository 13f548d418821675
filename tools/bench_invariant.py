"""What the same bits on every layout cost: a training step of Megatron Core's GPT with the invariant layers, beside one
of the same model with Megatron's own layers and reductions on the same layout, in the same processes.

    tools/bench invariant [--rounds 7] [--hidden 512] [--layers 4] [--seq 256]

Steps of all models of a layout alternate, round by round, after one that is not counted; medians of rank 0 are printed.
One thread for each rank, no dropout (ordinary dropout draws other numbers on every layout). V is the number of virtual
shards. The last line is the most that gradients hold in fp32 at a time; the bound is log2 of the microbatches, plus 1.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))  # for tests.support, which is not installed

from tests.support.gpt_oracle import GptSize  # noqa: E402
from tests.support.ports import free_ports  # noqa: E402
from tests.support.ranks import Crew  # noqa: E402
from tests.support.tiny_gpt import parallel  # noqa: E402

LAYOUTS = [{}, {"tp": 2}, {"dp": 2}, {"pp": 2}]
SHARDS = (1, 2, 4, 8)
MICRO, MICROBATCHES = 2, 4  # samples in one, and how many a global batch has


def measure(rank: int, world: int, port: int, layout: dict[str, int], size: GptSize, rounds: int) -> dict[str, float]:
    """Median seconds of a step, by model: "ordinary", or the number of virtual shards."""
    from ckpt.invariant import Contract
    from tests.support import invariant_megatron as invariant
    from tests.support import megatron_trainer as ordinary
    from tests.support.megatron_cpu import megatron_on_cpu

    torch.set_num_threads(1)
    ranks = layout.get("tp", 1) * layout.get("dp", 1) * layout.get("pp", 1)
    if rank >= ranks:
        return {}
    where = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=ranks)
    batch = MICRO * MICROBATCHES
    with parallel(layout.get("tp", 1), layout.get("pp", 1), layout.get("dp", 1)), megatron_on_cpu():
        plain = ordinary.make_trainer(size, "whole", seed=1)
        steps: dict[str, Any] = {"ordinary": lambda: ordinary.train_step(plain, batch, MICRO)}
        for shards in SHARDS:
            if shards >= layout.get("tp", 1):
                contract = Contract(shards, batch, MICRO, dtype=size.dtype, optimizer="torch.optim.AdamW")
                trainer = invariant.make_trainer(size, contract)
                steps[str(shards)] = lambda trainer=trainer: invariant.train_step(trainer)
        seconds: dict[str, list[float]] = {name: [] for name in steps}
        for number in range(rounds + 1):
            for name, step in steps.items():
                dist.barrier()
                began = time.perf_counter()
                step()
                dist.barrier()
                if number:
                    seconds[name].append(time.perf_counter() - began)
    dist.destroy_process_group()
    return {name: statistics.median(found) for name, found in seconds.items()}


def held(microbatches: int = 16) -> float:
    """The most copies of a parameter that its gradients take while so many microbatches come."""
    from ckpt.invariant import Accumulator

    leaves, most = Accumulator(0, microbatches), 0
    for _ in range(microbatches):
        leaves.add(torch.zeros(8))
        most = max(most, len(leaves.nodes))
    return most


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--seq", type=int, default=256)
    args = parser.parse_args()
    size = GptSize(layers=args.layers, hidden=args.hidden, heads=8, vocab=8192, seq=args.seq)
    head = "".join(f"{f'V={shards}':>9}" for shards in SHARDS)
    print(f"{'layout':<10}{'dtype':<10}{'ordinary':>10}{head}   step, as a multiple of the ordinary one")
    with Crew(2, init=False) as crew:
        for dtype in (torch.float32, torch.bfloat16):
            for layout in LAYOUTS:
                asked = free_ports(1)[0], layout, replace(size, dtype=dtype), args.rounds
                found = crew.run(measure, *asked, timeout=1200)[0]
                name = " ".join(f"{k.upper()}{v}" for k, v in layout.items()) or "one rank"
                ratios = "".join(
                    f"{found[str(v)] / found['ordinary']:>9.2f}" if str(v) in found else f"{'-':>9}" for v in SHARDS
                )
                kind = str(dtype).removeprefix("torch.")
                print(f"{name:<10}{kind:<10}{found['ordinary']:>8.2f} s{ratios}", flush=True)
    print(f"gradients of 16 microbatches on a rank hold at most {held():.0f} copies of the parameters in fp32")


if __name__ == "__main__":
    main()
