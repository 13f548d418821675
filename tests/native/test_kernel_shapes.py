"""Fingerprints of shapes for which the host kernel has ways of its own: long axes, short ones, gaps, wide elements."""

import ctypes

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckpt.fingerprint.reference import box_digest
from ckpt.geometry import Box
from ckpt.native.descriptors import BoxDescriptor
from ckpt.native.library import Library

DTYPES = [torch.uint8, torch.bfloat16, torch.float32, torch.float64, torch.complex128]
some = settings(deadline=None, max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])


def bits(seed: int, extent: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Random bits, contiguous, in memory of exactly that size."""
    count = int(np.prod(extent, dtype=np.int64)) * torch.empty(0, dtype=dtype).element_size()
    return torch.frombuffer(bytearray(np.random.default_rng(seed).bytes(count)), dtype=dtype).reshape(extent)


def check(kernels: Library, view: torch.Tensor, offset: tuple[int, ...], shape: tuple[int, ...], threads: int) -> None:
    wanted = box_digest(view, Box(offset, tuple(view.shape)), shape)
    assert kernels.fingerprint([(view, offset, shape)], threads) == [wanted]


near = st.tuples(st.integers(0, 3), st.integers(-9, 9))  # a number of whole digits of an axis, and units beside it


@some
@given(
    dtype=st.sampled_from(DTYPES),
    start=near,
    length=near,
    rest=st.integers(0, 100_000),
    threads=st.integers(1, 3),
    seed=st.integers(0, 2**32 - 1),
)
def test_long_vectors_from_odd_offsets(
    kernels: Library,
    dtype: torch.dtype,
    start: tuple[int, int],
    length: tuple[int, int],
    rest: int,
    threads: int,
    seed: int,
) -> None:
    """Axes of two digits: the first and the last part start or end inside of a digit, or inside of a word."""
    digit = 65536 * max(1, 4 // torch.empty(0, dtype=dtype).element_size())
    first, count = (max(least, n * digit + more) for least, (n, more) in zip((0, 1), (start, length), strict=True))
    check(kernels, bits(seed, (count,), dtype), (first,), (first + count + rest,), threads)


@some
@given(
    dtype=st.sampled_from(DTYPES),
    rows=st.one_of(st.integers(1, 20), st.integers(900, 1100), st.integers(65_530, 65_540), st.just(140_001)),
    columns=st.lists(st.integers(1, 5), min_size=1, max_size=3),
    before=st.integers(0, 70_000),
    start=st.integers(0, 2),
    threads=st.integers(1, 3),
    seed=st.integers(0, 2**32 - 1),
)
def test_short_trailing_axes(
    kernels: Library,
    dtype: torch.dtype,
    rows: int,
    columns: list[int],
    before: int,
    start: int,
    threads: int,
    seed: int,
) -> None:
    if len(columns) > 1:
        rows = min(rows, 2000)  # the reference takes these slowly
    shape = (before + rows, *columns[:-1], columns[-1] + start)
    offset = (before, *(0 for _ in columns[:-1]), start)
    check(kernels, bits(seed, (rows, *columns), dtype), offset, shape, threads)


@some
@given(
    dtype=st.sampled_from(DTYPES),
    rows=st.integers(1, 9),
    columns=st.one_of(
        st.integers(1, 40), st.integers(2040, 2056), st.integers(4090, 4102), st.integers(8185, 8200), st.just(30_000)
    ),
    gap=st.integers(0, 3),
    start=st.integers(0, 5),
    seed=st.integers(0, 2**32 - 1),
)
def test_rows_of_every_length_with_gaps(
    kernels: Library, dtype: torch.dtype, rows: int, columns: int, gap: int, start: int, seed: int
) -> None:
    """Numbers of rows and words that leave a rest in every loop of the kernel."""
    view = bits(seed, (rows, columns + gap), dtype)[:, :columns]
    check(kernels, view, (2, start), (20, start + columns + 1), 1)


@some
@given(
    dtype=st.sampled_from(DTYPES),
    extent=st.tuples(st.integers(1, 300), st.integers(1, 300)),
    depth=st.integers(1, 4),
    order=st.permutations(range(3)),
    step=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    start=st.integers(0, 3),
    threads=st.integers(1, 3),
    seed=st.integers(0, 2**32 - 1),
)
def test_permuted_views_with_steps(
    kernels: Library,
    dtype: torch.dtype,
    extent: tuple[int, int],
    depth: int,
    order: list[int],
    step: tuple[int, int],
    start: int,
    threads: int,
    seed: int,
) -> None:
    view = bits(seed, (*extent, depth), dtype)[:: step[0], :: step[1]].permute(order)
    check(kernels, view, (0, 0, start), (*view.shape[:2], view.shape[2] + start), threads)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_transposed_views_of_several_tiles(kernels: Library, dtype: torch.dtype) -> None:
    view = bits(1, (260, 9001), dtype).t()
    check(kernels, view, (3, 1), (9004, 262), 2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_repeated_and_reversed_memory(kernels: Library, dtype: torch.dtype) -> None:
    """Strides of zero (an expanded tensor), and negative ones, which torch does not have but the interface takes."""
    check(kernels, bits(2, (1, 70), dtype).expand(300, 70), (0, 1), (300, 72), 1)
    whole = bits(3, (5, 70), dtype)
    size = whole.element_size()
    box = BoxDescriptor(data=whole.data_ptr() + (whole.numel() - 1) * size, itemsize=size, ndim=2)
    for name, numbers in (("shape", (5, 71)), ("offset", (0, 1)), ("extent", (5, 70)), ("stride", (-70 * size, -size))):
        getattr(box, name)[:2] = numbers
    out = (ctypes.c_uint64 * 2)()
    assert kernels._lib.ckpt_fingerprint(ctypes.byref(box), ctypes.c_int64(1), 1, out) == 0
    assert tuple(out) == box_digest(whole.flip(0, 1), Box((0, 1), (5, 70)), (5, 71))


@pytest.mark.parametrize(
    ("dtype", "extent"),
    [
        (torch.float32, (600_000, 3)),
        (torch.float64, (600_000,)),
        (torch.complex128, (400_000,)),
        (torch.uint8, (9000, 28)),
    ],
    ids=str,
)
def test_columns_of_several_axes(kernels: Library, dtype: torch.dtype, extent: tuple[int, ...]) -> None:
    """So many that their coefficients are made in parts, whose bounds fall inside of the innermost axis."""
    check(kernels, bits(5, extent, dtype), (5,) * len(extent), tuple(n + 9 for n in extent), 1)


@pytest.mark.parametrize("shape", [(3, 100_000), (300_000,), (70_000, 4)], ids=str)
def test_largest_words(kernels: Library, shape: tuple[int, ...]) -> None:
    """Every sum in the kernel is at its largest."""
    check(kernels, torch.full(shape, -1, dtype=torch.int32), (0,) * len(shape), shape, 1)


def test_axes_of_more_than_two_to_the_32_words(kernels: Library) -> None:
    """Whose second digit has more indices than a table of coefficients."""
    view = bits(4, (100_000,), torch.float32)
    start = 2**32 + 2**17 - 7
    check(kernels, view, (start,), (2**33,), 1)
