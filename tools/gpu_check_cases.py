"""The cases of tools/gpu_check: every kernel on random bits, on the tested side and on its twin."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ckpt.fingerprint import digest
from ckpt.geometry.box import Box
from ckpt.native import copies
from tools.gpu_check_sides import Draw, Index, Row, Side, item, noise, raw

DTYPES = [torch.uint8, torch.bfloat16, torch.float32, torch.float64, torch.complex128]  # of each item size
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
Cases = Iterator[tuple[str, Callable[[Side], Any]]]  # names, and what to do on both sides for equal results
Say = Callable[[str], None]


@dataclass(frozen=True)
class View:
    """A strided view of random bits, to be laid out on several devices alike. Sizes and strides in elements."""

    seed: int
    dtype: torch.dtype
    size: Index
    stride: Index
    start: int

    def on(self, device: torch.device, whole: list[torch.Tensor] | None = None) -> torch.Tensor:
        """The view in memory of its own, which is also appended to `whole`."""
        held = self.start + 1 + sum((n - 1) * s for n, s in zip(self.size, self.stride, strict=True) if n > 1)
        memory = noise(self.seed, held * item(self.dtype)).to(device)
        if whole is not None:
            whole.append(memory)
        return memory.view(self.dtype).as_strided(self.size, self.stride, self.start)


def layout(extent: Index, order: Sequence[int], gap: int, step: int) -> Index:
    """Strides of axes that lie in this order in memory, outermost first: `gap` elements after each row of an axis,
    every `step`-th element of the innermost one."""
    strides, reach = [0] * len(extent), step
    for axis in reversed(order):
        strides[axis] = reach
        reach = reach * max(1, extent[axis]) + gap
    return tuple(strides)


def views(quick: bool) -> Iterator[View]:
    """Every dtype on every shape, in several orders in memory, with gaps, from starts that no vector load fits."""
    shapes: list[Index] = [
        (),
        (0,),
        (3, 0, 2),
        (1,),
        (7,),
        (1, 1, 1),
        (129,),
        (33, 70),
        (64, 64),
        (130, 67),
        (5, 3, 257),
    ]
    shapes += [(2, 3, 4, 5, 6), (3, 40, 70), (17, 1, 40, 3), (1000, 4), (300, 1), (1, 2049), (70_001,), (3, 65_537)]
    seeds = itertools.count()
    for shape, dtype in itertools.product(shapes[::2] if quick else shapes, DTYPES):
        orders = {tuple(range(len(shape))), tuple(reversed(range(len(shape))))}
        orders.add(tuple(range(len(shape))[1:]) + tuple(range(len(shape))[:1]))
        for order, (gap, step, start) in itertools.product(sorted(orders), [(0, 1, 0), (3, 1, 1), (1, 2, 3)]):
            yield View(next(seeds), dtype, shape, layout(shape, order, gap, step), start)


def fingerprint_cases(quick: bool) -> Cases:
    def one(view: View, offset: Index, shape: Index) -> Callable[[Side], Any]:
        return lambda side: side.digests([(view.on(side.device), offset, shape)])

    for number, view in enumerate(views(quick)):
        offset = tuple((number + 7 * axis) % 11 for axis in range(len(view.size)))
        shape = tuple(o + n + number % 3 for o, n in zip(offset, view.size, strict=True))
        yield f"{view}", one(view, offset, shape)
    for dtype, (first, rest) in itertools.product(DTYPES, [(0, 0), (65_530, 1), (131_071, 70_000)]):
        for size in ((9, 140_001), (140_001, 3)):  # axes of two digits, from inside of one to inside of another
            view = View(first, dtype, size, layout(size, (0, 1), 0, 1), 0)
            yield f"two digits {view}", one(view, (first, first), (first + size[0] + rest, first + size[1] + rest))
    some = [view for view in views(True) if view.size]
    yield (
        "many boxes in one call",
        lambda side: side.digests(
            [(v.on(side.device), (1,) * len(v.size), tuple(n + 1 for n in v.size)) for v in some]
        ),
    )


def copy_cases(quick: bool) -> Cases:
    def some(pairs: list[tuple[View, View]], calls: int = 1) -> Callable[[Side], Any]:
        """The whole memory of all outputs: what lies between their elements must stay."""

        def run(side: Side) -> list[bytes]:
            whole: list[torch.Tensor] = []
            laid = [(to.on(side.device, whole), source.on(side.device)) for to, source in pairs]
            for first in range(calls):
                side.copy(laid[first::calls])
            return [raw(memory) for memory in whole]

        return run

    targets = itertools.cycle([(False, 0, 1), (True, 5, 1), (True, 0, 1), (False, 0, 3), (False, 5, 1)])
    every: list[tuple[View, View]] = []
    for view in views(quick):
        for turned, gap, step in itertools.islice(targets, 2):
            order = sorted(range(len(view.size)), reverse=turned)
            strides = layout(view.size, order, gap, step)
            target = View(view.seed + 1, view.dtype, view.size, strides, view.start % 2 + 1)
            if np.prod(view.size) < 40_000:
                every.append((target, view))
            yield f"{view} to {strides}", some([(target, view)])
    yield "all of them in one call", some(every)
    yield "64 calls without waiting", some(every, 64)


def tree_sum_cases(quick: bool) -> Cases:
    def one(leaves: torch.Tensor) -> Callable[[Side], Any]:
        return lambda side: raw(side.tree_sum(leaves.to(side.device)))

    counts = [*range(1, 18), 24, 31, 64, 65, 120, 121, 200]
    for leaves, dtype in itertools.product(counts[::3] if quick else counts, FLOATS):
        for n in (0, 1, 5, 1025, 4099):
            yield f"{leaves} leaves of {n} {dtype}", one(noise(n, leaves * n * item(dtype)).view(dtype).view(leaves, n))
    for dtype in (torch.float16, torch.bfloat16):
        every = torch.arange(-(2**15), 2**15, dtype=torch.int16)
        yield f"every {dtype}", one(every.view(1, -1).view(dtype))
        yield f"pairs of {dtype}", one(torch.stack([every, every * 31 + 5]).view(dtype))
    for dtype, bits in ((torch.float32, torch.int32), (torch.float64, torch.int64)):
        special = special_numbers(dtype, bits)
        pairs = torch.stack([special.repeat(len(special)), special.repeat_interleave(len(special))])
        yield f"special numbers of {dtype}", one(pairs.view(dtype))


def special_numbers(dtype: torch.dtype, bits: torch.dtype) -> torch.Tensor:
    """Bits of zeros, the ends of the denormal and normal numbers, infinities and NaN with payloads, of both signs."""
    info = torch.finfo(dtype)
    ends = torch.tensor([0.0, info.tiny, info.max, torch.inf, 1.0, 1.5], dtype=dtype).view(bits)
    inf = ends[3]
    positive = torch.cat([ends, torch.stack([ends[0] + 1, ends[1] - 1, ends[1] + 1, inf + 1, inf + 12345, inf - 1])])
    quiet = torch.tensor([torch.nan], dtype=dtype).view(bits)
    positive = torch.cat([positive, quiet, quiet + 99])
    return torch.cat([positive, positive ^ torch.tensor(torch.iinfo(bits).min, dtype=bits)])


def philox_cases(quick: bool) -> Cases:
    key, stream = 0x299F31D0A4093822, 0x0370734413198A2E
    firsts = [0, 1, 6, 2**34 - 130, 2**34 + 3, 2**63, 2**64 - 300_000]

    def one(kind: Draw, count: int, first: int, threshold: int = 0) -> tuple[str, Callable[[Side], Any]]:
        name = f"{count} {kind.value} from {first}, threshold {threshold}"
        return name, lambda side: raw(side.draw(kind, count, first, stream, key, threshold))

    for first, count in itertools.product(firsts[::3] if quick else firsts, (0, 1, 3, 4, 777, 70_001)):
        yield one(Draw.WORDS, count, first)
        yield one(Draw.UNIFORMS, count, first)
        for threshold in (0, 1, 2**31, 2**32):
            yield one(Draw.MASKS, count, first, threshold)


def check_package(tested: Side, twin: Side, quick: bool) -> Row:
    """ckpt's own entry points on a stream that is not the default one and is still busy making the data."""
    data = noise(5, 1 << 20 if quick else 64 << 20).view(torch.bfloat16).view(1024, -1)
    width = data.shape[1]
    source, held = data.to(tested.device), torch.zeros_like(data, device=tested.device)
    stream = torch.cuda.Stream(tested.device) if tested.device.type == "cuda" else None

    def make() -> None:
        """Brings the data into `held`, long after it has returned."""
        for _ in range(50 if stream else 0):
            held.copy_(source.flip(0))
        held.copy_(source)

    parts = [slice(r, r + 128) for r in range(0, 1024, 128)]
    boxes = [Box((part.start, 9), (128, width)) for part in parts]
    shape = (2048, width + 9)
    targets = [torch.zeros(width, 128, dtype=data.dtype, device=tested.device).t() for _ in parts]
    if stream:
        torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        make()
        found = digest.box_digests([(held[part], box, shape) for part, box in zip(parts, boxes, strict=True)])
        found.append(digest.box_digest(held[0, 0], Box((), ()), ()))
        held.zero_()
        make()
        copies.copy_boxes([(to, held[part]) for to, part in zip(targets, parts, strict=True)])
        held.zero_()
        copied = [raw(to) for to in targets]
    wanted = twin.digests([(data[part], box.offset, shape) for part, box in zip(parts, boxes, strict=True)])
    wanted += twin.digests([(data[0, 0], (), ())])
    equal = found == wanted and copied == [raw(data[part]) for part in parts]
    return Row("ckpt", "box_digests and copy_boxes, on a busy stream", equal)


KERNELS = {
    "fingerprint": fingerprint_cases,
    "box_copy": copy_cases,
    "tree_sum": tree_sum_cases,
    "philox": philox_cases,
}


def check_kernel(kernel: str, tested: Side, twin: Side, quick: bool) -> list[Row]:
    """One row, or one for each case whose bits differ."""
    count, wrong = 0, []
    for name, run in KERNELS[kernel](quick):
        count += 1
        if run(tested) != run(twin):
            wrong.append(Row(kernel, name, False))
    return wrong or [Row(kernel, f"{count} cases", True)]


def check_bits(tested: Side, twin: Side, quick: bool, say: Say) -> list[Row]:
    """All kernels, and the package on top of them."""
    rows = []
    for kernel in KERNELS:
        say(f"checking {kernel}")
        rows += check_kernel(kernel, tested, twin, quick)
    return [*rows, check_package(tested, twin, quick)]
