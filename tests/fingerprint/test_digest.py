"""The fingerprint against the slow reference: random shapes, dtypes, boxes and strides, long axes, and what it tells
apart."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt.fingerprint import ZERO, Digest, add, box_digest, from_hex, tensor_digest, to_hex
from ckpt.geometry import Box
from tests.fingerprint import reference
from tests.geometry.partitions import partitions

Index = tuple[int, ...]

DTYPES = [
    torch.bool,
    torch.int8,
    torch.float8_e4m3fn,
    torch.bfloat16,
    torch.float16,
    torch.int16,
    torch.float32,
    torch.int32,
    torch.complex32,
    torch.float64,
    torch.int64,
    torch.complex64,
    torch.complex128,
]
dtypes = st.sampled_from(DTYPES)
# Around the borders of words, of the 2^16 indices of a digit, of both, and beyond 2^32.
EDGES = [0, 65535, 65536, 65537, 2 * 65536, 4 * 65536, 5 * 65536 + 3, 8 * 65536, 2**31 + 7, 2**33 + 5, 2**35 + 1]


def tensor_of(seed: int, shape: Index, dtype: torch.dtype) -> torch.Tensor:
    """Random bits as a tensor (a bool gets bytes beyond 0 and 1 too)."""
    size = math.prod(shape) * dtype.itemsize
    made = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return made.view(dtype).reshape(shape)


def slow(tensor: torch.Tensor, box: Box, shape: Index) -> Digest:
    """The reference, on bytes taken one element at a time."""
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
    plain = tensor.view(bits[tensor.element_size()])

    def element(at: Index) -> bytes:
        return plain[at].reshape(1).contiguous().numpy().tobytes()

    return reference.digest(element, box.offset, box.extent, shape)


@st.composite
def cases(draw: st.DrawFn) -> tuple[torch.Tensor, Box, Index]:
    """A box of at most some hundred elements, anywhere in a tensor of any size."""
    ndim = draw(st.integers(0, 4))
    offset, extent, shape = [], [], []
    for _ in range(ndim):
        held = draw(st.integers(0, 12 if ndim < 3 else 4))
        before = draw(st.one_of(st.integers(0, 9), st.sampled_from(EDGES)))
        offset.append(max(0, before - draw(st.integers(0, held))))
        extent.append(held)
        shape.append(offset[-1] + held + draw(st.one_of(st.integers(0, 9), st.sampled_from(EDGES))))
    tensor = tensor_of(draw(st.integers(0, 2**31)), tuple(extent), draw(dtypes))
    return tensor, Box(tuple(offset), tuple(extent)), tuple(shape)


@settings(max_examples=250)
@given(cases())
def test_any_box_of_any_tensor_has_the_digest_of_the_docstring(case: tuple[torch.Tensor, Box, Index]) -> None:
    tensor, box, shape = case
    assert box_digest(tensor, box, shape) == slow(tensor, box, shape)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (7,), (70, 3), (3, 5, 64), (2, 3, 4, 5), (1, 1, 1), (130, 66)], ids=str)
def test_whole_tensors_have_the_digest_of_the_docstring(shape: Index, dtype: torch.dtype) -> None:
    tensor = tensor_of(len(shape), shape, dtype)
    assert tensor_digest(tensor) == slow(tensor, Box.whole(shape), shape)


@st.composite
def cut_tensors(draw: st.DrawFn) -> tuple[torch.Tensor, list[Box]]:
    shape = tuple(draw(st.lists(st.integers(0, 9), max_size=4)))
    return tensor_of(draw(st.integers(0, 2**31)), shape, draw(dtypes)), draw(partitions(shape))


@settings(max_examples=100)
@given(cut_tensors())
def test_digests_of_any_partition_add_up(case: tuple[torch.Tensor, list[Box]]) -> None:
    tensor, boxes = case
    shape = tuple(tensor.shape)
    parts = [box_digest(tensor[box.slices] if shape else tensor, box, shape) for box in boxes]
    assert add(*parts) == tensor_digest(tensor)
    assert add(*reversed(parts)) == tensor_digest(tensor)


LONG = [
    ((4 * 3 * 65536 + 9,), torch.int8),
    ((2 * 2 * 65536 + 5,), torch.bfloat16),
    ((2 * 65536 + 3,), torch.float32),
    ((65536 + 11,), torch.complex128),
    ((65536 + 3, 3), torch.int16),
    ((2, 65536 + 5, 2), torch.float32),
    ((3, 4 * 65536 + 6), torch.uint8),
    ((65536 * 4,), torch.int8),
    ((65536 * 4 + 1,), torch.int8),
]


@pytest.fixture(scope="module")
def long_tensors() -> list[tuple[torch.Tensor, Digest]]:
    made = [tensor_of(n, shape, dtype) for n, (shape, dtype) in enumerate(LONG)]
    return [(tensor, tensor_digest(tensor)) for tensor in made]


@settings(max_examples=40)
@given(st.integers(0, len(LONG) - 1), st.data())
def test_digests_of_parts_of_long_axes_add_up(
    long_tensors: list[tuple[torch.Tensor, Digest]], number: int, data: st.DataObject
) -> None:
    """Cuts anywhere on every axis: within a word, on and beside the borders of the two digits."""
    tensor, whole = long_tensors[number]
    shape = tuple(tensor.shape)
    cuts = []
    for n in shape:
        border = st.sampled_from([b for b in EDGES if b <= n]).flatmap(lambda b: st.integers(max(0, b - 3), b + 3))
        inner = data.draw(st.lists(st.one_of(st.integers(0, n), border), max_size=3))
        cuts.append(list(itertools.pairwise([0, *sorted(min(c, n) for c in inner), n])))
    boxes = [Box(tuple(a for a, _ in c), tuple(b - a for a, b in c)) for c in itertools.product(*cuts)]
    assert add(*(box_digest(tensor[box.slices], box, shape) for box in boxes)) == whole


@settings(max_examples=60)
@given(st.integers(0, len(LONG) - 1), st.data())
def test_short_boxes_of_long_axes_have_the_digest_of_the_docstring(number: int, data: st.DataObject) -> None:
    shape, dtype = LONG[number]
    offset = tuple(data.draw(st.integers(0, n - 1)) for n in shape)
    extent = tuple(data.draw(st.integers(0, min(9, n - o))) for n, o in zip(shape, offset, strict=True))
    tensor, box = tensor_of(number, extent, dtype), Box(offset, extent)
    assert box_digest(tensor, box, shape) == slow(tensor, box, shape)


def views(shape: Index, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The same elements in memory of every kind that a training loop makes."""
    dense = tensor_of(5, shape, dtype)
    n = dense.numel()
    reverse = tuple(range(len(shape)))[::-1]
    rooms = torch.zeros([s + 2 for s in shape], dtype=dtype)[tuple(slice(1, s + 1) for s in shape)]
    rooms.copy_(dense)
    transposed = torch.zeros([shape[i] for i in reverse], dtype=dtype).permute(*reverse)
    transposed.copy_(dense)
    offset = torch.zeros(n + 3, dtype=dtype)[3:].reshape(shape)
    offset.copy_(dense)
    stepped = torch.zeros(2 * n, dtype=dtype).as_strided(shape, [2 * s for s in dense.stride()])
    stepped.copy_(dense)
    return {"inside a larger one": rooms, "transposed": transposed, "offset": offset, "every other": stepped}


@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16, torch.float32, torch.float64, torch.complex128], ids=str)
@pytest.mark.parametrize("shape", [(7,), (5, 6), (3, 4, 5), (2, 3, 2, 9), (600, 1100), (9, 300, 270)], ids=str)
def test_views_with_strides_have_the_digest_of_the_contiguous_tensor(shape: Index, dtype: torch.dtype) -> None:
    dense = tensor_of(5, shape, dtype)
    expected = tensor_digest(dense)
    for kind, view in views(shape, dtype).items():
        assert tensor_digest(view) == expected, kind
    box = Box(tuple(s // 3 for s in shape), tuple(s - s // 3 for s in shape))
    part = box_digest(dense[box.slices].contiguous(), box, shape)
    for kind, view in views(shape, dtype).items():
        assert box_digest(view[box.slices], box, shape) == part, kind


@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16, torch.float32, torch.int64, torch.complex128], ids=str)
def test_axes_of_size_one_with_odd_strides(dtype: torch.dtype) -> None:
    """They count as contiguous, yet cannot be reinterpreted as they are."""
    base = tensor_of(8, (40,), dtype)
    for shape, stride in [
        ((1,), (8,)),
        ((4, 1), (1, 7)),
        ((1, 4), (9, 1)),
        ((1, 1, 1), (5, 3, 2)),
        ((2, 1, 3), (3, 50, 1)),
    ]:
        odd = base.as_strided(shape, stride)
        dense = torch.empty(shape, dtype=dtype).copy_(odd)
        assert tensor_digest(odd) == tensor_digest(dense) == slow(dense, Box.whole(shape), shape)


def test_channels_last_and_a_row_of_a_transposed_matrix() -> None:
    image = tensor_of(1, (2, 3, 4, 5), torch.float32)
    assert tensor_digest(image.to(memory_format=torch.channels_last)) == tensor_digest(image)
    matrix = tensor_of(2, (65, 70), torch.float64)
    row = matrix.t()[3]
    assert tensor_digest(row) == slow(row, Box.whole((65,)), (65,))
    scalar = matrix[2, 5]
    assert tensor_digest(scalar) == slow(scalar, Box((), ()), ())


def test_empty_boxes_have_the_zero_digest() -> None:
    assert tensor_digest(torch.empty(3, 0, 2)) == ZERO
    assert box_digest(torch.empty(0, 5), Box((2, 1), (0, 5)), (4, 9)) == ZERO
    assert add() == ZERO


def changed(tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """One fault each."""
    flat = tensor.reshape(-1)
    n = len(flat)
    found: dict[str, torch.Tensor] = {}

    def fault(name: str, change: Any) -> None:
        copy = flat.clone()
        change(copy)
        found[name] = copy.reshape(tensor.shape)

    def swap(copy: torch.Tensor, a: int, b: int) -> None:
        copy[a], copy[b] = flat[b], flat[a]

    fault("swapped neighbours", lambda c: swap(c, 0, 1))
    fault("swapped ends", lambda c: swap(c, 0, n - 1))
    fault("zeroed", lambda c: c[n // 2].zero_())
    fault("doubled", lambda c: c[3].copy_(c[4]))
    fault("all zero", lambda c: c.zero_())
    fault("moved by one", lambda c: c.copy_(torch.roll(flat, 1)))
    for bit in range(8 * tensor.element_size()):
        fault(f"bit {bit}", lambda c, b=bit: c[5:6].view(torch.uint8)[b // 8].bitwise_xor_(1 << b % 8))
    if tensor.dim() == 2:
        found["swapped rows"] = tensor[[1, 0, *range(2, len(tensor))]]
        found["swapped columns"] = tensor[:, [1, 0, *range(2, tensor.shape[1])]]
    return found


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.int64, torch.complex128], ids=str)
@pytest.mark.parametrize("shape", [(97,), (9, 13), (131, 70), (5, 4, 6)], ids=str)
def test_every_fault_changes_both_halves_of_the_digest(shape: Index, dtype: torch.dtype) -> None:
    tensor = tensor_of(3, shape, dtype)
    whole = tensor_digest(tensor)
    for kind, other in changed(tensor).items():
        assert other.numpy().tobytes() != tensor.numpy().tobytes(), kind
        found = tensor_digest(other)
        assert found[0] != whole[0], kind
        assert found[1] != whole[1], kind


@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_a_lost_and_a_doubled_zero_count(dtype: torch.dtype) -> None:
    zeros = torch.zeros(6, 10, dtype=dtype)
    whole = tensor_digest(zeros)
    row = box_digest(zeros[2:3], Box((2, 0), (1, 10)), (6, 10))
    lost = add(
        box_digest(zeros[:2], Box((0, 0), (2, 10)), (6, 10)), box_digest(zeros[3:], Box((3, 0), (3, 10)), (6, 10))
    )
    assert whole == add(lost, row)
    assert len({whole, lost, add(whole, row), ZERO}) == 4


def test_shape_offset_and_bits_enter_but_not_the_dtype() -> None:
    """Equal bits at another place or in another shape differ; dtypes of one width have one digest."""
    data = tensor_of(4, (24,), torch.int32)
    digests = {
        tensor_digest(data),
        tensor_digest(data.reshape(4, 6)),
        tensor_digest(data.reshape(6, 4)),
        tensor_digest(data.view(torch.int16)),
        tensor_digest(data.view(torch.int64)),
        tensor_digest(torch.cat([data, data[:1] * 0])),
        box_digest(data, Box((1,), (24,)), (25,)),
        box_digest(data[None], Box((1, 0), (1, 24)), (2, 24)),
    }
    assert len(digests) == 8
    assert tensor_digest(data) == tensor_digest(data.view(torch.float32))
    nans = torch.tensor([0x7FC00001, 0x7FC00002, -0x80000000, 0], dtype=torch.int32).view(torch.float32)
    assert len({tensor_digest(nans[i : i + 1]) for i in range(4)}) == 4, "payloads of NaN and the sign of zero count"


def test_a_view_of_another_shape_than_its_box_is_refused() -> None:
    with pytest.raises(ValueError, match=r"view of shape \(2, 3\) given for box \[0:3, 0:2\]"):
        box_digest(torch.zeros(2, 3), Box.whole((3, 2)), (3, 2))


@given(st.tuples(st.integers(0, reference.P - 1), st.integers(0, reference.P - 1)))
def test_hex_keeps_the_digest(digest: Digest) -> None:
    text = to_hex(digest)
    assert len(text) == 32
    assert from_hex(text) == digest
    assert add(digest, (reference.P - digest[0], reference.P - digest[1])) == ZERO


@pytest.mark.parametrize(
    "text",
    ["", "0" * 31, "0" * 33, "1fffffffffffffff" + "0" * 16, "0" * 16 + "f" * 16, "A" * 32, "0x" + "0" * 30, "+" * 32],
)
def test_text_that_is_no_digest_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"is no fingerprint|invalid literal"):
        from_hex(text)
