"""Golden values: they pin the fingerprint for every later release and for readers in other languages.

Each tensor is made of the bytes 0, 1, 2, ..., 250, 0, ... (index modulo 251), little-endian, unless it says otherwise.
The values were computed with tests/fingerprint/reference.py alone.
"""

import itertools
import math

import pytest
import torch

from ckpt.fingerprint import add, box_digest, tensor_digest, to_hex
from ckpt.geometry import Box
from tests.fingerprint import reference

Index = tuple[int, ...]

GOLDEN: list[tuple[torch.dtype, Index, str]] = [
    (torch.uint8, (), "00000000000000010000000000000001"),
    (torch.bfloat16, (), "00000000000001010000000000000101"),
    (torch.float32, (), "00000000030201010000000003020101"),
    (torch.float64, (), "129ea6891b55d724008b522f6bdbf4c5"),
    (torch.complex128, (), "1295ac79e19c29570a215eb1d366dfa0"),
    (torch.bool, (5,), "0e2dad58c063ec8a1b9316b8e3999dc3"),
    (torch.int8, (3, 7), "0184ad0e6c1569a403b36f6e2ecac3c5"),
    (torch.bfloat16, (4, 5), "1ef7f3b0e872dc561f582cfe8072dd0a"),
    (torch.float16, (2, 3, 3), "0831f0e055f8e35413519f2cd266747a"),
    (torch.float32, (2, 3), "05db9b241e9b2994042a5819ddbf488b"),
    (torch.int32, (1, 1, 1, 1), "0b2b3620cc29315913edcb85f9bb0808"),
    (torch.float64, (3, 2), "04d3689ae1a29b9a14a22b8c8292ef57"),
    (torch.int64, (5,), "159ef2274d442bea0a639378b3cd9ee3"),
    (torch.complex64, (2, 2), "1615d04c736f6f340b04e23b8c237287"),
    (torch.complex128, (2, 3), "0c6a6036db0facdc11b6b8b6ed28f531"),
    (torch.float8_e4m3fn, (9,), "1d5425d4d4ef380516504b3f099f1f9b"),
    (torch.float32, (0, 4), "00000000000000000000000000000000"),
    (torch.float32, (65606,), "191a488a44c11c730a605b6e76b01921"),
]
ODD = "1f4daf99f4eddd9916f8e7f510763548"
SPECIAL = "10f03340a38e208818f32251ff9e2f55"


def counting(shape: Index, dtype: torch.dtype) -> torch.Tensor:
    size = math.prod(shape) * dtype.itemsize
    return (torch.arange(size) % 251).to(torch.uint8).view(dtype).reshape(shape)


@pytest.mark.parametrize(("dtype", "shape", "golden"), GOLDEN, ids=lambda x: str(x))
def test_golden_digests(dtype: torch.dtype, shape: Index, golden: str) -> None:
    assert to_hex(tensor_digest(counting(shape, dtype))) == golden


@pytest.mark.parametrize(
    ("dtype", "shape", "golden"), [g for g in GOLDEN if math.prod(g[1]) < 1000], ids=lambda x: str(x)
)
def test_golden_digests_by_the_reference(dtype: torch.dtype, shape: Index, golden: str) -> None:
    size = dtype.itemsize
    raw = bytes(i % 251 for i in range(math.prod(shape) * size))

    def element(at: Index) -> bytes:
        flat = 0
        for i, n in zip(at, shape, strict=True):
            flat = flat * n + i
        return raw[flat * size : (flat + 1) * size]

    assert to_hex(reference.digest(element, (0,) * len(shape), shape, shape)) == golden


def test_a_bfloat16_box_at_an_odd_offset() -> None:
    """Elements 3..8 of a row of 9: the box starts and ends in the middle of a word."""
    box = Box((1, 3), (2, 5))
    assert to_hex(box_digest(counting((2, 5), torch.bfloat16), box, (3, 9))) == ODD


def test_special_floats() -> None:
    """-0.0, a NaN with a payload, the smallest denormal, infinity."""
    bits = torch.tensor([-0x80000000, 0x7FC12345, 1, 0x7F800000], dtype=torch.int32)
    assert to_hex(tensor_digest(bits.view(torch.float32))) == SPECIAL


def test_parts_of_the_long_golden_tensor_add_up_to_it() -> None:
    (dtype, shape, golden) = next(g for g in GOLDEN if math.prod(g[1]) > 65536)
    whole = counting(shape, dtype)
    cuts = [0, 1, 65535, 65537, 65600, *shape]
    parts = [box_digest(whole[a:b], Box((a,), (b - a,)), shape) for a, b in itertools.pairwise(cuts)]
    assert to_hex(add(*parts)) == golden
