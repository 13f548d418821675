"""Benchmarks of the compiled kernels on the CPU, on one thread, against what a plain copy of memory allows.

    tools/bench kernels [--mib 256] [--rounds 7] [--level scalar|avx2|ifma] [--library PATH]

All cases alternate, round by round, with a memcpy (ctypes.memmove of --mib between two buffers that have been touched
before); medians are printed. GiB/s counts the bytes of the input, for tree_sum also those of the output.

bound   a memcpy's bytes copied per second; for tree_sum bytes read and written per second, twice as many; or, where
        the case says so, what slicing by torch reaches
ratio   GiB/s over the bound
aim     the ratio that is aimed at
"""

from __future__ import annotations

import argparse
import ctypes
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ckpt.native.library import LEVELS, Library, find
from tests.support.native_build import build

GIB = 1 << 30
LEVEL_NAMES = ("scalar", "avx2", "ifma")
FINGERPRINT_AIMS = (None, 0.5, 0.6)  # by level
MANY = 1 << 16  # boxes


@dataclass(eq=False)
class Timed:
    """A call and how long it took, round by round."""

    call: Callable[[], Any]
    seconds: list[float] = field(default_factory=list)

    def run(self) -> None:
        begin = time.perf_counter()
        self.call()
        self.seconds.append(time.perf_counter() - begin)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


@dataclass
class Case:
    """`moved` are the bytes that count; the bound is `passes` times a memcpy's rate, or that of `peer` for the same
    bytes."""

    kernel: str
    name: str
    moved: int
    timed: Timed
    aim: float | None = None
    passes: int = 1
    peer: Timed | None = None


class Recorder(Library):
    """Keeps a call instead of making it, so that it can be repeated without the making of arguments and results."""

    recorded: Callable[[], Any]

    def _call(
        self, name: str, device: torch.device, arguments: list[Any], results: list[Any], threads: int | None = None
    ) -> None:
        bound = [] if threads is None else [ctypes.c_int(threads)]
        self.recorded = partial(getattr(self._lib, f"ckpt_{name}"), *arguments, *bound, *results)


def nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def side_of(memory: torch.Tensor) -> int:
    """Columns of an fp32 matrix that fills the memory and is as square as powers of two allow."""
    return 1 << (memory.numel() // 4).bit_length() // 2


def fingerprints(library: Library, memory: torch.Tensor) -> Iterator[Case]:
    """Whole tensors in `memory` (uint8) of several dtypes, shapes and strides."""
    size, side = memory.numel(), side_of(memory)
    fp32, bf16, fp64 = (memory.view(t) for t in (torch.float32, torch.bfloat16, torch.float64))
    views = {
        "fp32 matrix": fp32.view(-1, side),
        "bf16 matrix": bf16.view(-1, side),
        "fp32 vector": fp32,
        "bf16 vector": bf16,
        "fp32 rows of 64": fp32.view(-1, 64),
        "fp32 rows of 4": fp32.view(-1, 4),
        "fp32 left half of columns": fp32.view(-1, side)[:, : side // 2],
        "fp32 every other column": fp32.view(-1, side)[:, ::2],
        "fp32 transposed": fp32.view(-1, side).t(),
        "bf16 transposed": bf16.view(-1, side).t(),
        "bf16 from an odd column": bf16.view(-1, side)[:, 1:],
        "fp64 array": fp64.view(-1, side),
        "complex128 array": memory.view(torch.complex128).view(-1, side),
        "uint8 rows of 3": memory[: size // 3 * 3].view(-1, 3),
    }
    for name, view in views.items():
        aim = FINGERPRINT_AIMS[library.level()] if name.endswith(("matrix", "vector")) else None
        box = (view, (0,) * view.dim(), tuple(view.shape))
        yield Case("fingerprint", name, nbytes(view), Timed(partial(library.fingerprint, [box])), aim)


def box_copies(library: Library, source: torch.Tensor, target: torch.Tensor) -> Iterator[Case]:
    """Rows out of rows twice as wide (gathered) and into such (scattered), transpositions, and many small boxes."""
    size = source.numel()

    def case(name: str, to: torch.Tensor, given: torch.Tensor, aim: float | None) -> Case:
        return Case("box_copy", name, nbytes(to), Timed(partial(library.box_copy, [(to, given)])), aim)

    yield case("contiguous", target, source, 0.8)
    for row, name, aim in ((64, "64 B", None), (1 << 10, "1 KiB", 0.8), (1 << 16, "64 KiB", 0.8)):
        dense = target[: size // 2].view(-1, row)
        yield case(f"rows of {name} gathered", dense, source.view(-1, 2 * row)[:, :row], aim)
        dense = source[: size // 2].view(-1, row)
        yield case(f"rows of {name} scattered", target.view(-1, 2 * row)[:, :row], dense, aim)
    for dtype, name in ((torch.float32, "fp32"), (torch.bfloat16, "bf16")):
        columns = source.view(dtype).view(-1, side_of(source))
        yield case(f"{name} transposed", target.view(dtype).view(columns.t().shape), columns.t(), None)
    yield from many_boxes(library, source, target)


def many_boxes(library: Library, source: torch.Tensor, target: torch.Tensor) -> Iterator[Case]:
    """Boxes of 16 rows of 64 bytes out of rows of 4 KiB, against torch slicing: described once, and each time."""
    count = min(source.numel() // 1024, MANY)
    wide, dense = source.view(-1, 4096), target.view(-1, 16, 64)
    places = [(i, slice(i // 64 * 16, i // 64 * 16 + 16), slice(i % 64 * 64, i % 64 * 64 + 64)) for i in range(count)]

    def pairs() -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [(dense[i], wide[rows, columns]) for i, rows, columns in places]

    def slices() -> None:
        for i, rows, columns in places:
            dense[i] = wide[rows, columns]

    recorder, peer = Recorder(library.path), Timed(slices)
    recorder.box_copy(pairs())
    yield Case("box_copy", "many boxes (bound: torch)", 1024 * count, Timed(recorder.recorded), 5.0, peer=peer)
    described = Timed(lambda: library.box_copy(pairs()))
    yield Case("box_copy", "the same, described in Python", 1024 * count, described, peer=peer)


def tree_sums(library: Library, memory: torch.Tensor) -> Iterator[Case]:
    for dtype, name, aim in (
        (torch.float32, "fp32", 0.8),
        (torch.bfloat16, "bf16", None),
        (torch.float16, "fp16", None),
    ):
        recorder = Recorder(library.path)
        out = recorder.tree_sum(memory.view(dtype).view(8, -1))
        yield Case("tree_sum", f"8 leaves of {name}", nbytes(memory) + nbytes(out), timed(recorder, out), aim, passes=2)


def random_numbers(library: Library, words: int) -> Iterator[Case]:
    """Counts the 4 bytes of a word, also where a mask of one byte is made of it."""
    recorder = Recorder(library.path)
    out = recorder.philox_uniform(words, 0, 1, 2)
    yield Case("philox", "uniform fp32", 4 * words, timed(recorder, out))
    recorder = Recorder(library.path)
    out = recorder.philox_mask(words, 0, 1, 2, 1 << 31)
    yield Case("philox", "mask", 4 * words, timed(recorder, out))


def timed(recorder: Recorder, out: torch.Tensor) -> Timed:
    """The recorded call, which goes on writing to `out`."""

    def call(_keep: torch.Tensor = out) -> Any:
        return recorder.recorded()

    return Timed(call)


def measure(cases: list[Case], memcpy: Timed, rounds: int) -> None:
    """The first round warms up and is not counted."""
    everything = [memcpy, *dict.fromkeys(t for case in cases for t in (case.timed, case.peer) if t is not None)]
    for turn in range(rounds + 1):
        for one in everything:
            one.run()
            if turn == 0:
                one.seconds.clear()


def report(cases: list[Case], memcpy: Timed, size: int) -> None:
    print(f"{'kernel':<13}{'case':<31}{'GiB/s':>7}{'bound GiB/s':>13}{'ratio':>7}{'aim':>6}")
    for case in cases:
        rate = case.moved / case.timed.median / GIB
        bound = case.passes * size / memcpy.median / GIB
        if case.peer is not None:
            bound = case.moved / case.peer.median / GIB
        aim = "" if case.aim is None else f"{case.aim:.1f}"
        print(f"{case.kernel:<13}{case.name:<31}{rate:7.2f}{bound:13.2f}{rate / bound:7.2f}{aim:>6}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=256, help="size of the input: well beyond the caches")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--level", choices=LEVEL_NAMES, help="the instruction set; the best there is by default")
    parser.add_argument("--library", type=Path, help="default: the one installed, or else one built for this run")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with ExitStack() as stack:
        library = Library(args.library) if args.library else find()
        if library is None:
            library = Library(build(Path(stack.enter_context(tempfile.TemporaryDirectory()))))
        wanted = len(LEVELS) if args.level is None else LEVEL_NAMES.index(args.level)
        if library.level(wanted) < wanted and args.level is not None:
            parser.error(f"this machine has no {LEVELS[wanted]}, only {LEVELS[library.level()]}")
        size = args.mib << 20
        source = torch.randint(0, 256, (size,), dtype=torch.uint8)
        target = torch.zeros_like(source)
        memcpy = Timed(partial(ctypes.memmove, target.data_ptr(), source.data_ptr(), size))
        cases = [*fingerprints(library, source), *box_copies(library, source, target)]
        numbers = torch.randn(size // 4).view(torch.uint8)
        cases += [*tree_sums(library, numbers), *random_numbers(library, size // 16)]
        measure(cases, memcpy, args.rounds)
    name = platform.processor() or platform.machine()
    print(f"{name}, {LEVELS[library.level()]}, Python {platform.python_version()}, torch {torch.__version__}")
    print(f"{args.mib} MiB, one thread, median of {args.rounds} alternating rounds\n")
    report(cases, memcpy, size)


if __name__ == "__main__":
    main()
