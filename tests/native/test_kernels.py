"""The compiled kernels give the same bytes as their reference twins, at every instruction set this machine has."""

import ctypes

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckpt.fingerprint.reference import box_digest
from ckpt.geometry import Box
from ckpt.native import philox
from ckpt.native.library import Library

DTYPES = [torch.uint8, torch.bfloat16, torch.float32, torch.float64, torch.complex128]
quick = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])


@st.composite
def views(draw: st.DrawFn) -> tuple[torch.Tensor, Box, tuple[int, ...]]:
    """A box of a random logical tensor, as a view with random strides of random bits."""
    sizes = st.sampled_from([1, 2, 3, 7, 33, 70])
    shape = tuple(draw(st.lists(sizes, max_size=4)))
    if shape and draw(st.booleans()):
        axis = draw(st.integers(0, len(shape) - 1))
        shape = (*(1 if i != axis else draw(st.sampled_from([65536, 70001, 140000])) for i in range(len(shape))),)
    offset = tuple(draw(st.integers(0, n - 1)) for n in shape)
    extent = tuple(draw(st.integers(1, n - o)) for n, o in zip(shape, offset, strict=True))
    dtype = draw(st.sampled_from(DTYPES))
    box = Box(offset, extent)
    seed = draw(st.integers(0, 2**32 - 1))
    raw = np.random.default_rng(seed).bytes(box.volume * torch.empty(0, dtype=dtype).element_size())
    tensor = torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(dtype).reshape(extent)
    order = draw(st.permutations(range(len(extent))))
    back = [order.index(i) for i in range(len(extent))]
    return tensor.permute(order).contiguous().permute(back), box, shape


@quick
@given(case=views(), threads=st.integers(1, 3))
def test_fingerprint(kernels: Library, case: tuple[torch.Tensor, Box, tuple[int, ...]], threads: int) -> None:
    view, box, shape = case
    assert kernels.fingerprint([(view, box.offset, shape)], threads) == [box_digest(view, box, shape)]


def test_fingerprint_of_many_boxes_in_one_call(kernels: Library) -> None:
    whole = torch.arange(30 * 1000, dtype=torch.int32).reshape(30, 1000)
    boxes = [Box((r, 10 * r), (2, 500)) for r in range(28)]
    found = kernels.fingerprint([(whole[b.slices], b.offset, (30, 1000)) for b in boxes], 2)
    assert found == [box_digest(whole[b.slices], b, (30, 1000)) for b in boxes]


@quick
@given(case=views(), more=views(), threads=st.integers(1, 3))
def test_box_copy(library: Library, case: tuple, more: tuple, threads: int) -> None:
    pairs = []
    for view, _, _ in (case, more):
        backwards = tuple(reversed(range(view.dim())))
        pairs.append(
            (torch.zeros(view.shape, dtype=view.dtype).permute(backwards).contiguous().permute(backwards), view)
        )
    library.box_copy(pairs, threads)
    for target, view in pairs:
        assert _raw(target) == _raw(view)


def _raw(tensor: torch.Tensor) -> bytes:
    flat = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)
    return flat.reshape(-1).view(torch.uint8).numpy().tobytes()


def _tree(leaves: torch.Tensor) -> torch.Tensor:
    """The definition: the largest power of two below the number of leaves, and the rest, each summed alike."""
    if len(leaves) == 1:
        return leaves[0]
    half = 1 << (len(leaves) - 1).bit_length() - 1
    return _tree(leaves[:half]) + _tree(leaves[half:])


@quick
@given(
    leaves=st.integers(1, 70),
    n=st.sampled_from([1, 5, 16, 511, 513, 1024, 1500]),
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]),
    seed=st.integers(0, 2**32 - 1),
    threads=st.integers(1, 3),
)
def test_tree_sum(library: Library, leaves: int, n: int, dtype: torch.dtype, seed: int, threads: int) -> None:
    size = torch.empty(0, dtype=dtype).element_size()
    raw = np.random.default_rng(seed).bytes(leaves * n * size)  # NaN, infinities and denormals among them
    given_ = torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(dtype).reshape(leaves, n)
    _check_tree_sum(library, given_, threads)


def _check_tree_sum(library: Library, leaves: torch.Tensor, threads: int) -> None:
    wide = torch.float64 if leaves.dtype == torch.float64 else torch.float32
    wanted = _tree(leaves.to(wide)).clone()
    wanted[wanted.isnan()] = torch.nan
    assert _raw(library.tree_sum(leaves, threads)) == _raw(wanted)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_tree_sum_of_every_16_bit_number(library: Library, dtype: torch.dtype) -> None:
    _check_tree_sum(library, torch.arange(-(2**15), 2**15, dtype=torch.int16).view(1, -1).view(dtype), 1)


@pytest.mark.parametrize(("leaves", "n"), [(8, 2**20 + 5), (19, 2**19 + 1)])
def test_tree_sum_larger_than_caches(library: Library, leaves: int, n: int) -> None:
    given_ = torch.arange(leaves * n, dtype=torch.int32).mul_(0x9E3779B1 - 2**32).view(torch.float32).view(leaves, n)
    _check_tree_sum(library, given_, 2)


def test_tree_sum_keeps_denormals_whatever_the_thread_has_set(library: Library) -> None:
    tiny = torch.tensor([[1], [2], [4]], dtype=torch.int32).view(torch.float32)
    assert torch.set_flush_denormal(True) in (True, False)
    try:
        found = library.tree_sum(tiny)
    finally:
        torch.set_flush_denormal(False)
    assert found.view(torch.int32).tolist() == [7]


@pytest.mark.parametrize("first", [0, 1, 6, 2**34 - 130, 2**34 + 3, 2**63])
def test_philox_is_the_same_stream_from_any_offset(kernels: Library, first: int) -> None:
    key, stream, count = 0x299F31D0A4093822, 0x0370734413198A2E, 777
    elements = [first + i for i in range(count)]
    counter = np.array(
        [[(e // 4) & 0xFFFFFFFF, e // 4 >> 32, stream & 0xFFFFFFFF, stream >> 32] for e in elements], dtype=np.uint64
    ).T
    words = philox.philox4x32(counter, (key & 0xFFFFFFFF, key >> 32))
    wanted = [int(words[e % 4, i]) for i, e in enumerate(elements)]
    assert kernels.philox(count, first, stream, key).tolist() == wanted
    assert kernels.philox_uniform(count, first, stream, key).tolist() == [(w >> 8) / 2**24 for w in wanted]
    for threshold in (0, 2**31, 2**32):
        assert kernels.philox_mask(count, first, stream, key, threshold).tolist() == [w < threshold for w in wanted]


def test_hostile_arguments_are_refused(library: Library) -> None:
    x = torch.zeros(4, 4)
    with pytest.raises(ValueError, match="leaves its tensor"):
        library.fingerprint([(x, (1, 0), (4, 4))])
    with pytest.raises(ValueError, match="more axes"):
        library.fingerprint([(torch.zeros((1,) * 17), (0,) * 17, (1,) * 17)])
    with pytest.raises(ValueError, match="overflow"):
        library.fingerprint([(torch.zeros(1, 1).expand(2**31, 2**31), (0, 0), (2**31, 2**31))])
    with pytest.raises(ValueError, match="overlaps"):
        library.box_copy([(torch.zeros(1).expand(4), torch.zeros(4))])
    with pytest.raises(ValueError, match="overlaps"):
        library.box_copy([(x[1:], x[:-1])])
    with pytest.raises(ValueError, match="cannot copy"):
        library.box_copy([(torch.zeros(3), torch.zeros(4))])
    with pytest.raises(ValueError, match="dtype"):
        library.tree_sum(torch.zeros(2, 3, dtype=torch.int32))
    with pytest.raises(ValueError, match="negative"):
        library.tree_sum(torch.zeros(0, 3))
    with pytest.raises(ValueError, match="overflow"):
        library.philox_mask(4, 0, 0, 0, 2**33)
    assert library._lib.ckpt_box_copy(None, ctypes.c_int64(0), 1) == 0
