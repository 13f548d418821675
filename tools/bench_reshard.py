"""What `ckpt-reshard` takes, beside a plain copy of the same bytes in the same run.

    tools/bench reshard-cli [--gib 8] [--memory 1GiB] [--jobs 2] [--repeat 3] [--dir DIR] [--format ranks ...]

A synthetic checkpoint of Megatron's names is written into DIR. Then a copy of its files (each with fsync, as `cp -r`
and a sync of each) and the command for each format alternate; before each the source is dropped from the page cache,
and after each the result is deleted. Rates count the bytes of the state and the seconds of the command's work, without
the start of Python; ratios are to the copy (above 1: faster than it). Memory is the growth of the peak RSS meanwhile.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import torch

from ckpt.adapters.foreign.into import open_session, save_from
from ckpt.engine.stream import Content
from ckpt.geometry import Box, TensorSpec

MIB, GIB = 1 << 20, 1 << 30
HIDDEN, FFN, VOCAB = 4096, 11008, 32000

CHILD = """
import json, sys, time
from pathlib import Path
from ckpt.cli.reshard import reshard

def memory(what):
    lines = open("/proc/self/status").read().splitlines()
    return int(next(line for line in lines if line.startswith(what)).split()[1]) << 10

Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew from what is there
before, start = memory("VmRSS"), time.perf_counter()
reshard(sys.argv[1:], standalone_mode=False)
print(json.dumps([time.perf_counter() - start, memory("VmHWM") - before]), file=sys.stderr)
"""


class Synthetic:
    """A state at rest of about so many bytes, in bfloat16, that is nowhere: its elements are cut from one pattern."""

    def __init__(self, nbytes: int) -> None:
        self.url = "synthetic:"
        per_layer = {
            "self_attention.linear_qkv": (3 * HIDDEN, HIDDEN),
            "self_attention.linear_proj": (HIDDEN, HIDDEN),
            "mlp.linear_fc1": (2 * FFN, HIDDEN),
            "mlp.linear_fc2": (HIDDEN, FFN),
        }
        ends = {"embedding.word_embeddings": (VOCAB, HIDDEN), "output_layer": (VOCAB, HIDDEN)}
        one = sum(2 * math.prod(s) for s in per_layer.values())
        layers = 2 * max(1, round((nbytes - sum(2 * math.prod(s) for s in ends.values())) / one / 2))  # for pp=2
        shapes: dict[str, tuple[int, ...]] = {
            f"decoder.layers.{name}.weight": (layers, *shape) for name, shape in per_layer.items()
        }
        shapes |= {f"{name}.weight": shape for name, shape in ends.items()}
        specs = [TensorSpec(f"model/{n}", s, "bfloat16", 2, len(s) - 2) for n, s in shapes.items()]
        self.content = Content(tuple(sorted(specs)), {}, {}, ({},), {}, f"synthetic {nbytes}")
        self._pattern = torch.randint(-(1 << 15), 1 << 15, (32 * MIB,), dtype=torch.int16)

    def read(self, name: str, box: Box) -> torch.Tensor:
        start = hash((box.offset, len(name))) % (16 * MIB)
        return self._pattern[start : start + box.volume].reshape(box.extent)


def drop(folder: Path) -> None:
    """What was written goes to the device, and out of the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            opened = os.open(path, os.O_RDONLY)
            os.fsync(opened)
            os.posix_fadvise(opened, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(opened)


def copy(source: Path, target: Path) -> float:
    """Seconds of a copy of a tree, each file flushed to the device."""
    start = time.perf_counter()
    for path in sorted(source.rglob("*")):
        to = target / path.relative_to(source)
        if path.is_dir():
            to.mkdir(parents=True, exist_ok=True)
            continue
        to.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, to)
        opened = os.open(to, os.O_RDONLY)
        os.fsync(opened)
        os.close(opened)
    return time.perf_counter() - start


def convert(source: Path, target: Path, form: str, args: argparse.Namespace) -> tuple[float, int]:
    """Seconds, and bytes by which the process grew."""
    options = ["--format", form, "--memory", args.memory, "--jobs", str(args.jobs), "--json", "--step", "1"]
    options += ["--to", args.to] if form == "ranks" else []
    command = [sys.executable, "-W", "ignore", "-c", CHILD, str(source), str(target), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    seconds, grown = json.loads(done.stderr.splitlines()[-1])
    return seconds, grown


def main() -> None:
    parser = argparse.ArgumentParser(prog="tools/bench reshard-cli", description=__doc__.splitlines()[0])
    parser.add_argument("--gib", type=float, default=8)
    parser.add_argument("--memory", default="1GiB")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--to", default="tp=2,pp=2,dp=2")
    parser.add_argument("--dir", type=Path, default=None)
    parser.add_argument("--format", nargs="+", choices=["ranks", "ckpt"], default=["ranks", "ckpt"])
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ckpt-bench-", dir=args.dir) as name:
        measure(Path(name), args)


def measure(folder: Path, args: argparse.Namespace) -> None:
    state, source, target = Synthetic(int(args.gib * GIB)), folder / "source", folder / "target"
    save_from(open_session(str(source)), state, 1)
    nbytes = state.content.nbytes
    cores = os.cpu_count()
    print(f"{nbytes / GIB:.2f} GiB, --memory {args.memory} --jobs {args.jobs}, {cores} cores, Python ", end="")
    print(f"{platform.python_version()}, torch {torch.__version__}", flush=True)
    seconds: dict[str, list[float]] = defaultdict(list)
    grown: dict[str, list[int]] = defaultdict(list)
    for _ in range(args.repeat):
        for what in ["copy", *args.format]:
            drop(source)
            if what == "copy":
                seconds[what].append(copy(source, target))
            else:
                spent, growth = convert(source, target, what, args)
                seconds[what].append(spent)
                grown[what].append(growth)
            shutil.rmtree(target)
            print(f"  {what}: {seconds[what][-1]:.2f} s", file=sys.stderr, flush=True)
    base = statistics.median(seconds["copy"])
    for what, took in seconds.items():
        middle = statistics.median(took)
        memory = f", peak growth {max(grown[what]) / MIB:.0f} MiB" if what in grown else ""
        rates = f"{middle:.2f} s, {nbytes / GIB / middle:.2f} GiB/s, ratio {base / middle:.2f}"
        print(f"{what:6} {rates}{memory} (of {', '.join(f'{t:.2f}' for t in took)})", flush=True)


if __name__ == "__main__":
    main()
