"""The timings of tools/gpu_check: each kernel against the time in which the memory moves as many bytes.

The floor is the speed of a plain copy (torch's `copy_`) measured in the same run, in bytes read plus bytes written a
second; a kernel that reads much and writes little may be slightly faster than that.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from tools.gpu_check_cases import Say
from tools.gpu_check_sides import Boxes, Draw, NativeSide, Row, Side, item, noise, raw

GIB = 1 << 30
CALLS = 4  # between two events


@dataclass(frozen=True)
class Sizes:
    """total: bytes of the tensor of a timed case, a power of two; repeats: of which the median counts."""

    total: int
    repeats: int

    @staticmethod
    def of(device: torch.device, quick: bool) -> Sizes:
        """1 GiB on a GPU, less where that is more than a tenth of its free memory, or on a CPU."""
        if quick:
            return Sizes(4 << 20, 1)
        if device.type != "cuda":
            return Sizes(256 << 20, 3)
        free = torch.cuda.mem_get_info(device)[0]
        return Sizes(min(GIB, 1 << (free // 10).bit_length() - 1), 15)


@dataclass(frozen=True)
class Timed:
    """A case: a call of one kernel, the bytes that it reads and writes, and whether what it left is right."""

    kernel: str
    case: str
    traffic: int
    run: Callable[[], object]
    is_right: Callable[[], bool]


def seconds(device: torch.device, repeats: int, run: Callable[[], object]) -> float:
    """The median time of a call, after three to warm up. On a GPU from event to event on the stream, around several
    calls, so that the next one is launched while one runs."""
    for _ in range(3):
        run()
    found = []
    for _ in range(repeats):
        if device.type == "cuda":
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(CALLS):
                run()
            stop.record()
            stop.synchronize()
            found.append(start.elapsed_time(stop) / 1000 / CALLS)
        else:
            begin = time.perf_counter()
            run()
            found.append(time.perf_counter() - begin)
    return statistics.median(found)


def measure(tested: NativeSide, twin: Side, sizes: Sizes, say: Say) -> list[Row]:
    """The plain copy, then every kernel. Bits are compared too, at full size."""
    device, total = tested.device, sizes.total
    say(f"timing, {total >> 20} MiB, {sizes.repeats} repeats")
    bits = noise(1, total)
    data = bits.to(device)
    other = torch.empty_like(data)
    plain = seconds(device, sizes.repeats, lambda: other.copy_(data))
    floor = 2 * total / plain
    rows = [Row("torch copy_", f"{total >> 20} MiB, the floor", True, 2 * total, plain, floor)]
    cases = [
        *copy_times(tested, data, other),
        *fingerprint_times(tested, twin, bits, data),
        *tree_sum_times(tested, twin, bits, data),
        *philox_times(tested, twin, total // 4),
    ]
    for case in cases:
        say(f"timing {case.kernel}: {case.case}")
        case.run()
        taken = seconds(device, sizes.repeats, tested.library.again)
        rows.append(Row(case.kernel, case.case, case.is_right(), case.traffic, taken, floor))
    return rows


def copy_times(tested: Side, data: torch.Tensor, other: torch.Tensor) -> Iterator[Timed]:
    """Outputs in `other` are compared with what torch copies."""
    side = 1 << (data.numel() // 4).bit_length() // 2  # of a square of words, or a rectangle of 1 to 2
    words, room = data.view(torch.int32).view(-1, side), other.view(torch.int32).view(-1, side)
    halves = data.view(torch.int16).view(-1, 2 * side)
    narrow = other.view(torch.int16)[: len(halves) * (side - 1)].view(len(halves), side - 1)

    def one(case: str, to: torch.Tensor, source: torch.Tensor, boxes: int = 1) -> Timed:
        pairs = list(zip(to.tensor_split(boxes), source.tensor_split(boxes), strict=True))

        def run() -> None:
            to.zero_()
            tested.copy(pairs)

        def is_right() -> bool:
            return bool(torch.equal(to, source))

        return Timed("box_copy", case, 2 * to.numel() * to.element_size(), run, is_right)

    yield one("contiguous", room, words)
    yield one(
        "half of the columns", other.view(torch.int32)[: words.numel() // 2].view(-1, side // 2), words[:, : side // 2]
    )
    yield one("columns from an odd 2-byte element on", narrow, halves[:, 1:side])
    yield one("1,024 boxes of rows", room[:, : side // 2], words[:, side // 2 :], min(1024, len(words)))
    yield one("transposed, 4 bytes", room.view(side, -1), words.t())
    yield one("transposed, 2 bytes", other.view(torch.int16).view(2 * side, -1), halves.t())
    runs = data.view(torch.int64).view(-1, 8)
    yield one("runs of 32 bytes", other.view(torch.int64)[: len(runs) * 4].view(-1, 4), runs[:, 2:6])


def fingerprint_times(tested: Side, twin: Side, bits: torch.Tensor, data: torch.Tensor) -> Iterator[Timed]:
    def one(case: str, view: Callable[[torch.Tensor], torch.Tensor], start: int = 0, boxes: int = 1) -> Timed:
        def described(whole: torch.Tensor) -> Boxes:
            found, first = [], 0
            shape = tuple(n + start for n in view(whole).shape)
            for part in view(whole).tensor_split(boxes):
                found.append((part, (first + start, *(start for _ in shape[1:])), shape))
                first += len(part)
            return found

        on_device = described(data)
        found: list[tuple[int, int]] = []

        def run() -> None:
            found[:] = tested.digests(on_device)

        traffic = view(data).numel() * view(data).element_size()
        return Timed("fingerprint", case, traffic, run, lambda: found == twin.digests(described(bits)))

    side = 1 << (bits.numel() // 4).bit_length() // 2
    yield one("matrix, fp32", lambda x: x.view(torch.float32).view(-1, side))
    yield one("matrix, bf16", lambda x: x.view(torch.bfloat16).view(-1, 2 * side))
    yield one("matrix, fp64", lambda x: x.view(torch.float64).view(-1, side // 2))
    yield one("vector, fp32", lambda x: x.view(torch.float32))
    yield one(
        "box at odd offsets of a larger tensor, bf16", lambda x: x.view(torch.bfloat16).view(-1, 2 * side)[:, 3:], 5
    )
    yield one("transposed, bf16", lambda x: x.view(torch.bfloat16).view(-1, 2 * side).t())
    yield one("stack of matrices, 1,024 boxes of fp32", lambda x: x.view(torch.float32).view(1024, -1, 64), 0, 1024)


def tree_sum_times(tested: Side, twin: Side, bits: torch.Tensor, data: torch.Tensor) -> Iterator[Timed]:
    def one(leaves: int, dtype: torch.dtype) -> Timed:
        size = item(dtype)
        count = bits.numel() // size // leaves

        def given(whole: torch.Tensor) -> torch.Tensor:
            return whole.view(dtype)[: leaves * count].view(leaves, count)

        found: list[torch.Tensor] = []

        def run() -> None:
            found[:] = [tested.tree_sum(given(data))]

        def is_right() -> bool:
            return raw(found[0]) == raw(twin.tree_sum(given(bits)))

        name = f"{leaves} leaves, {str(dtype).removeprefix('torch.')}"
        return Timed("tree_sum", name, count * (leaves * size + max(4, size)), run, is_right)

    for leaves in (2, 8, 64):
        yield one(leaves, torch.bfloat16)
    yield one(8, torch.float16)
    for leaves in (8, 64, 200):
        yield one(leaves, torch.float32)
    yield one(17, torch.float64)


def philox_times(tested: Side, twin: Side, count: int) -> Iterator[Timed]:
    """From an element in the middle of a block. Masks make a byte of what costs as much as a word of four."""
    numbers = (count, 3, 5, 7, 1 << 31)
    for kind, size in ((Draw.WORDS, 4), (Draw.UNIFORMS, 4), (Draw.MASKS, 1)):
        yield _draw(tested, twin, kind, size * count, numbers)


def _draw(tested: Side, twin: Side, kind: Draw, traffic: int, numbers: tuple[int, int, int, int, int]) -> Timed:
    found: list[torch.Tensor] = []

    def run() -> None:
        found[:] = [tested.draw(kind, *numbers)]

    def is_right() -> bool:
        return raw(found[0]) == raw(twin.draw(kind, *numbers))

    return Timed("philox", kind.value, traffic, run, is_right)


def table(rows: list[Row]) -> str:
    """The rows as a Markdown table."""
    lines = ["| kernel | case | GiB/s | floor GiB/s | ratio | bits |", "|---|---|---|---|---|---|"]
    for row in rows:
        speed = ["", "", ""]
        if row.seconds:
            rate = row.traffic / row.seconds
            speed = [f"{rate / GIB:.1f}", f"{row.floor / GIB:.1f}", f"{rate / row.floor:.2f}"]
        lines.append(f"| {' | '.join([row.kernel, row.case, *speed, 'equal' if row.equal else '**DIFFERENT**'])} |")
    return "\n".join(lines)
