"""The code that the CUDA kernels run on the device, run on the host: the same bytes as the reference twins.

Threads of a block take turns in an order that no device has, memory that nobody has written holds garbage, and work on
a stream is done as late as it may be. What this cannot show: that threads wait for each other where they must, and how
the CUDA compiler treats the code. tools/gpu_check shows that on a GPU.
"""

import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckpt.fingerprint.reference import box_digest
from ckpt.geometry import Box
from ckpt.native.descriptors import BoxDescriptor
from ckpt.native.library import Library
from tests.support.emulated import Emulated
from tests.support.native_build import build, sanitizer
from tools.gpu_check_cases import DTYPES, FLOATS, View, layout
from tools.gpu_check_sides import noise, raw

some = settings(deadline=None, max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """CKPT_TEST_EMULATED names a library that is built already: the last test runs this file on its own build so."""
    if given := os.environ.get("CKPT_TEST_EMULATED"):
        return Path(given)
    if shutil.which("cmake") is None or shutil.which("c++") is None:
        pytest.skip("no CMake or no C++ compiler")
    return build(tmp_path_factory.mktemp("emulated"), "-DCKPT_EMULATE_DEVICE=ON")


@pytest.fixture
def device(path: Path) -> Iterator[Emulated]:
    library = Emulated(path)
    yield library
    library.wait()


@pytest.fixture(scope="module")
def host(path: Path) -> Library:
    return Library(path)


@st.composite
def view(draw: st.DrawFn, sizes: st.SearchStrategy[tuple[int, ...]]) -> View:
    """Random bits with any order of axes in memory, gaps and steps."""
    size = draw(sizes)
    order = draw(st.permutations(range(len(size))))
    strides = layout(size, order, draw(st.integers(0, 3)), draw(st.sampled_from([1, 1, 2])))
    return View(draw(st.integers(0, 2**32 - 1)), draw(st.sampled_from(DTYPES)), size, strides, draw(st.integers(0, 9)))


def shapes(limit: int) -> st.SearchStrategy[tuple[int, ...]]:
    lengths = st.one_of(st.integers(1, 9), st.sampled_from([16, 31, 64, 65, 128, 130, 257]))
    return st.lists(lengths, max_size=5).map(tuple).filter(lambda size: np.prod(size) <= limit)


long_axes = st.builds(
    lambda length, other, first: (length, other) if first else (other, length),
    st.sampled_from([65_536, 65_537, 70_001, 131_072, 140_003]),
    st.integers(1, 5),
    st.booleans(),
)
beside = st.tuples(st.one_of(st.integers(0, 5), st.sampled_from([65_535, 65_536, 131_000])), st.integers(0, 2))


@some
@given(view=view(st.one_of(shapes(40_000), long_axes)), places=st.lists(beside, min_size=5, max_size=5))
def test_fingerprint(device: Emulated, view: View, places: list[tuple[int, int]]) -> None:
    tensor = view.on(CPU)
    offset = tuple(before for before, _ in places[: tensor.dim()])
    shape = tuple(o + n + after for o, n, (_, after) in zip(offset, tensor.shape, places, strict=False))
    assert device.fingerprint([(tensor, offset, shape)]) == [box_digest(tensor, Box(offset, view.size), shape)]


@pytest.mark.parametrize("size", [(20_000, 2), (3, 40_000), (700, 700), (1, 70_000), (300, 1, 3, 1, 90)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fingerprint_of_many_tiles(device: Emulated, host: Library, dtype: torch.dtype, size: tuple[int, ...]) -> None:
    for order in ([*range(len(size))], [*reversed(range(len(size)))]):
        tensor = View(1, dtype, size, layout(size, order, 0, 1), 0).on(CPU)
        box = [(tensor, (1,) * len(size), tuple(n + 1 for n in size))]
        assert device.fingerprint(box) == host.fingerprint(box)


def test_fingerprint_of_many_boxes_in_one_call(device: Emulated) -> None:
    whole = torch.arange(30 * 1000, dtype=torch.int32).reshape(30, 1000)
    boxes = [Box((r, 10 * r), (2, 500)) for r in range(28)] + [Box((3, 3), (0, 5)), Box((29, 0), (1, 1))]
    found = device.fingerprint([(whole[b.slices], b.offset, (30, 1000)) for b in boxes])
    assert found == [box_digest(whole[b.slices], b, (30, 1000)) for b in boxes]


@some
@given(
    size=shapes(40_000),
    dtype=st.sampled_from(DTYPES),
    data=st.data(),
    count=st.integers(1, 3),
)
def test_box_copy(device: Emulated, size: tuple[int, ...], dtype: torch.dtype, data: st.DataObject, count: int) -> None:
    """Whole memory of the outputs: what lies between their elements stays."""
    pairs, wholes = [], []
    for _ in range(count):
        to, source = (data.draw(view(st.just(size))) for _ in range(2))
        to, source = (View(v.seed, dtype, v.size, v.stride, v.start) for v in (to, source))
        whole: list[torch.Tensor] = []
        pairs.append((to.on(CPU, whole), source.on(CPU)))
        to.on(CPU, whole).copy_(pairs[-1][1])
        wholes.append(whole)
    device.box_copy(pairs)
    for found, wanted in wholes:
        assert raw(found) == raw(wanted)


@pytest.mark.parametrize("run", [16, 63, 64, 65, 79, 80, 200, 4099, 100_003])
@pytest.mark.parametrize(("to", "source"), [(0, 1), (1, 0), (3, 3), (5, 10), (0, 4), (8, 0)])
def test_runs_that_lie_differently_on_both_sides(device: Emulated, run: int, to: int, source: int) -> None:
    for gap in (0, 1, 4):
        given = noise(1, 5 * (run + gap) + source)[source:].view(5, run + gap)[:, :run]
        whole, wanted = noise(2, 5 * (run + gap) + to), noise(2, 5 * (run + gap) + to)
        wanted[to:].view(5, run + gap)[:, :run] = given
        device.box_copy([(whole[to:].view(5, run + gap)[:, :run], given)])
        assert raw(whole) == raw(wanted)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [(64, 64), (130, 67), (16, 200), (3, 40, 70), (2, 65, 3, 129)], ids=str)
def test_transposed(device: Emulated, dtype: torch.dtype, size: tuple[int, ...]) -> None:
    """Input and output densest along different axes, with other axes around them and with gaps."""
    axes = list(range(len(size)))
    swapped = [*axes[:-2], axes[-1], axes[-2]]
    for source, to, gap in (
        (axes[::-1], axes, 0),
        (axes, axes[::-1], 3),
        ([*axes[1:], 0], axes, 2),
        (swapped, axes, 1),
    ):
        given = View(1, dtype, size, layout(size, source, 3 - gap, 1), gap).on(CPU)
        whole: list[torch.Tensor] = []
        target, wanted = (View(2, dtype, size, layout(size, to, gap, 1), 1).on(CPU, whole) for _ in range(2))
        wanted.copy_(given)
        device.box_copy([(target, given)])
        assert raw(whole[0]) == raw(whole[1])


def test_calls_under_way_keep_their_descriptions(device: Emulated) -> None:
    """Calls do not wait for the work of those before, but where there are more of them than pieces in the pool."""
    device.lazy = True
    whole = noise(3, 100 * 64).view(100, 64)
    target = torch.zeros_like(whole)
    for row in range(100):
        device.box_copy([(target[row, : row % 64 + 1], whole[row, : row % 64 + 1])])
        assert row > 20 or not target.any()
    assert not target[99].any()
    device.wait()
    for row in range(100):
        assert raw(target[row, : row % 64 + 1]) == raw(whole[row, : row % 64 + 1])
        assert not target[row, row % 64 + 1 :].any()


def test_memory_that_is_refused(device: Emulated) -> None:
    """On the host and on the device: the error reaches the caller, nothing is written, and the next call works."""
    for allocation in (1, 2):
        source = noise(4, 1 << (17 + allocation)).view(-1, 64)  # so many copies need a larger piece than before
        target = torch.zeros_like(source)
        pairs = list(zip(target.split(1), source.split(1), strict=True))
        device.fail(allocation)
        with pytest.raises(RuntimeError, match="CUDA error 2"):
            device.box_copy(pairs)
        assert not target.any()
        device.box_copy(pairs)
        assert raw(target) == raw(source)


@some
@given(
    leaves=st.one_of(st.integers(1, 70), st.sampled_from([119, 120, 121, 128, 200, 777])),
    n=st.sampled_from([1, 5, 255, 256, 1023, 1025, 2050]),
    dtype=st.sampled_from(FLOATS),
    seed=st.integers(0, 2**32 - 1),
)
def test_tree_sum(device: Emulated, host: Library, leaves: int, n: int, dtype: torch.dtype, seed: int) -> None:
    given = noise(seed, leaves * n * torch.empty(0, dtype=dtype).element_size()).view(dtype).view(leaves, n)
    assert raw(device.tree_sum(given)) == raw(host.tree_sum(given))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_tree_sum_of_every_rest_of_leaves(device: Emulated, host: Library, dtype: torch.dtype) -> None:
    for leaves in [*range(1, 26), *range(57, 66), *range(112, 138)]:
        given = noise(leaves, leaves * 300 * torch.empty(0, dtype=dtype).element_size()).view(dtype).view(leaves, 300)
        assert raw(device.tree_sum(given)) == raw(host.tree_sum(given))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_tree_sum_of_every_16_bit_number(device: Emulated, host: Library, dtype: torch.dtype) -> None:
    every = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(1, -1).view(dtype)
    assert raw(device.tree_sum(every)) == raw(host.tree_sum(every))


@pytest.mark.parametrize("first", [0, 1, 6, 2**34 - 130, 2**34 + 3, 2**63, 2**64 - 5001])
@pytest.mark.parametrize("count", [0, 1, 3, 4, 777, 5000])
def test_philox(device: Emulated, host: Library, first: int, count: int) -> None:
    numbers = (count, first, 0x0370734413198A2E, 0x299F31D0A4093822)
    assert raw(device.philox(*numbers)) == raw(host.philox(*numbers))
    assert raw(device.philox_uniform(*numbers)) == raw(host.philox_uniform(*numbers))
    for threshold in (0, 2**31, 2**32):
        assert raw(device.philox_mask(*numbers, threshold)) == raw(host.philox_mask(*numbers, threshold))


def test_hostile_arguments_are_refused_and_nothing_is_written(device: Emulated) -> None:
    x = torch.zeros(4, 4)
    with pytest.raises(ValueError, match="leaves its tensor"):
        device.fingerprint([(x, (0, 0), (4, 4)), (x, (1, 0), (4, 4))])
    with pytest.raises(ValueError, match="overlaps"):
        device.box_copy([(x, torch.ones(4, 4)), (x[1:], x[:-1])])
    with pytest.raises(ValueError, match="dtype"):
        device.tree_sum(torch.zeros(2, 3, dtype=torch.int32))
    assert not x.any()
    odd = ctypes.c_void_p(x.data_ptr() + 1)
    numbers = [ctypes.c_int64(1), ctypes.c_uint64(0), ctypes.c_uint64(0), ctypes.c_uint64(0), ctypes.c_void_p(0)]
    assert device._lib.ckpt_cuda_philox(odd, *numbers) == 4  # CKPT_BAD_POINTER: a device would fail for good
    sizes = [ctypes.c_int64(n) for n in (2, 1, 3)]
    arguments = [ctypes.c_void_p(x.data_ptr()), 1, *sizes, ctypes.c_void_p(x.data_ptr() + 32), ctypes.c_void_p(0)]
    assert device._lib.ckpt_cuda_tree_sum(*arguments) == 4
    one = BoxDescriptor(data=x.data_ptr(), itemsize=4, ndim=17)
    out = (ctypes.c_uint64 * 2)(7, 7)
    assert device._lib.ckpt_cuda_fingerprint(ctypes.byref(one), ctypes.c_int64(1), out, ctypes.c_void_p(0)) == 1
    assert list(out) == [7, 7]


@pytest.mark.slow
@pytest.mark.skipif("CKPT_TEST_EMULATED" in os.environ, reason="runs already")
def test_sanitizers_find_nothing(tmp_path: Path) -> None:
    """This file once more, on a build that stops at a wrong or misaligned access, or at undefined behaviour."""
    if (runtime := sanitizer()) is None:
        pytest.skip("the compiler has no AddressSanitizer")
    options = ["-DCKPT_EMULATE_DEVICE=ON", "-DCKPT_SANITIZE=ON", "-DCMAKE_CXX_FLAGS_RELEASE=-O1"]
    env = {
        **os.environ,
        "CKPT_TEST_EMULATED": str(build(tmp_path, *options)),
        "LD_PRELOAD": runtime,
        "ASAN_OPTIONS": "detect_leaks=0",  # Python and torch keep memory to the end
    }
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(Path(__file__).resolve())]
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=280, cwd=root)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
