"""Copies of the shapes for which the host kernel has ways of its own: whole bytes of the output are compared."""

import ctypes
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckpt.native.descriptors import CopyDescriptor
from ckpt.native.library import Library

DTYPES = [torch.uint8, torch.int16, torch.int32, torch.int64, torch.complex128]
LARGE = 33 << 20  # bytes: copies of more than 32 MiB write past the caches
some = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])


def noise(count: int, seed: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, count, dtype=np.uint8))


def check(
    library: Library,
    whole: torch.Tensor,
    pick: Callable[[torch.Tensor], torch.Tensor],
    source: torch.Tensor,
    threads: int,
) -> None:
    """Copies `source` into the part `pick(whole)`: that changes as torch would, and nothing else does."""
    wanted = whole.clone()
    pick(wanted).copy_(source)
    library.box_copy([(pick(whole), source)], threads)
    assert np.array_equal(whole.view(-1).view(torch.uint8).numpy(), wanted.view(-1).view(torch.uint8).numpy())


@some
@given(
    dtype=st.sampled_from(DTYPES),
    extent=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    orders=st.tuples(st.randoms(use_true_random=False), st.randoms(use_true_random=False)),
    steps=st.lists(st.integers(1, 2), min_size=8, max_size=8),
    threads=st.integers(1, 3),
)
def test_permuted_views_with_gaps(
    library: Library, dtype: torch.dtype, extent: list[int], orders: tuple, steps: list[int], threads: int
) -> None:
    """Input and output each in an order of axes of its own, with gaps: lines, tiles and their edges."""
    count, places = len(extent), []
    for random, step in zip(orders, (steps[:4], steps[4:]), strict=True):
        order = list(range(count))
        random.shuffle(order)
        places.append((order, step))

    def part(whole: torch.Tensor, order: list[int], step: list[int]) -> torch.Tensor:
        gaps = tuple(slice(None, None, step[i]) for i in order)
        return whole[gaps].permute([order.index(i) for i in range(count)])

    def room(order: list[int], step: list[int], seed: int) -> torch.Tensor:
        size = [(extent[i] - 1) * step[i] + 1 for i in order]
        bytes_ = int(np.prod(size)) * torch.empty(0, dtype=dtype).element_size()
        return noise(bytes_, seed).view(dtype).view(size)

    source = part(room(*places[1], 1), *places[1])
    check(library, room(*places[0], 2), lambda whole: part(whole, *places[0]), source, threads)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [(64, 64), (130, 67), (1, 500), (500, 3)], ids=str)
def test_transposed(library: Library, dtype: torch.dtype, size: tuple[int, int]) -> None:
    rows, columns = size
    item = torch.empty(0, dtype=dtype).element_size()
    source = noise(rows * columns * item, 3).view(dtype).view(columns, rows).t()
    whole = noise(rows * (columns + 3) * item, 4).view(dtype).view(rows, columns + 3)
    check(library, whole, lambda w: w[:, 1 : columns + 1], source, 1)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("run", [16, 64, 100, 192, 700, 1024, 5000, 1_000_003])
@pytest.mark.parametrize("lead", [0, 1, 32], ids=lambda n: f"lead{n}")
def test_larger_than_caches(library: Library, run: int, lead: int, threads: int) -> None:
    """Rows of `run` bytes with gaps on both sides, the first `lead` bytes past a cache line."""
    rows = LARGE // run + 1
    gap = 64 if run % 64 == 0 else 5
    source = noise(rows * (run + gap), 5).view(rows, run + gap)[:, gap:]
    whole = noise(rows * (run + gap) + 128, 6)
    start = -whole.data_ptr() % 64 + lead
    check(library, whole, lambda w: w[start : start + rows * (run + gap)].view(rows, -1)[:, :run], source, threads)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_transposed_larger_than_caches(library: Library, dtype: torch.dtype) -> None:
    item = torch.empty(0, dtype=dtype).element_size()
    columns = 1000
    rows = LARGE // (item * columns) + 1
    source = noise(rows * columns * item, 7).view(dtype).view(columns, rows).t()
    check(library, noise(rows * columns * item, 8).view(dtype).view(rows, columns), lambda w: w, source, 2)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_one_strided_axis_is_shared_out(library: Library, threads: int) -> None:
    source = noise(16 << 20, 9)[::2]
    check(library, noise(3 * len(source), 10), lambda w: w[1::3], source, threads)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)], ids=str)
def test_planes_are_shared_out(library: Library, order: tuple[int, int, int]) -> None:
    """The parts of four threads start inside of a plane of short runs, and inside of a line."""
    source = noise(2 * 107 * 203 * 199, 13).view(torch.int16).view(107, 203, 199)[:, ::2].permute(order)
    size = source.shape
    whole = noise(2 * 2 * source.numel(), 14).view(torch.int16).view(size[0], size[1], 2 * size[2])
    check(library, whole, lambda w: w[:, :, ::2], source, 4)


@pytest.mark.parametrize("threads", [1, 3])
def test_many_boxes_of_short_rows(library: Library, threads: int) -> None:
    source = noise(4 << 20, 11).view(1024, 4096)
    target, wanted = torch.zeros_like(source), torch.zeros_like(source)
    boxes = [(slice(r, r + 16), slice(c, c + 64)) for r in range(0, 1024, 16) for c in range(0, 4096, 64)]
    for box in boxes:
        wanted[box] = source[box]
    library.box_copy([(target[box], source[box]) for box in boxes], threads)
    assert np.array_equal(target.numpy(), wanted.numpy())


def test_reversed_memory(library: Library) -> None:
    """Negative strides, which torch does not have but the interface takes."""
    source, target = noise(7 * 100, 12).view(7, 100), torch.zeros(7, 100, dtype=torch.uint8)
    one = CopyDescriptor(dst=target.data_ptr(), src=source.data_ptr() + 699, itemsize=1, ndim=2)
    for name, numbers in (("extent", (7, 100)), ("dst_stride", (100, 1)), ("src_stride", (-100, -1))):
        getattr(one, name)[:2] = numbers
    assert library._lib.ckpt_box_copy(ctypes.byref(one), ctypes.c_int64(1), 1) == 0
    assert np.array_equal(target.numpy(), source.flip(0, 1).numpy())


def test_more_bytes_than_can_be_counted_are_refused(library: Library) -> None:
    """Before any of the addresses, which are none, is touched."""
    many = (CopyDescriptor * 64)()
    for one in many:
        one.dst, one.src, one.itemsize, one.ndim = 1 << 60, 1, 1, 1
        one.extent[0], one.dst_stride[0], one.src_stride[0] = 1 << 57, 1, 1
    assert library._lib.ckpt_box_copy(many, ctypes.c_int64(64), 1) == 5  # CKPT_TOO_LARGE
