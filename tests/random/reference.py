"""The definitions of docs/random.md in plain Python integers, written without the code under test."""

import hashlib
import struct
from collections.abc import Sequence

LOW = 0xFFFFFFFF


def key_and_number(seed: int, step: int | None, purpose: str, *indices: int | str) -> tuple[int, int]:
    message = b"ckpt.random 1" + struct.pack("<Q", seed)
    message += b"\x00" if step is None else b"\x01" + struct.pack("<Q", step)
    for field in (purpose, *indices):
        if isinstance(field, str):
            message += b"s" + struct.pack("<Q", len(field.encode())) + field.encode()
        else:
            message += b"i" + struct.pack("<Q", field)
    first, second = struct.unpack("<QQ", hashlib.sha256(message).digest()[:16])
    return first, second


def block(counter: Sequence[int], key: int) -> tuple[int, int, int, int]:
    """Philox 4x32-10, as in the paper: S-boxes of 32-bit products, and the key raised by the Weyl constants."""
    x0, x1, x2, x3 = counter
    k0, k1 = key & LOW, key >> 32
    for _ in range(10):
        high0, low0 = divmod(0xD2511F53 * x0, 1 << 32)
        high1, low1 = divmod(0xCD9E8D57 * x2, 1 << 32)
        x0, x1, x2, x3 = high1 ^ x1 ^ k0, low1, high0 ^ x3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) & LOW, (k1 + 0xBB67AE85) & LOW
    return x0, x1, x2, x3


def word(element: int, number: int, key: int) -> int:
    at = element // 4
    return block((at & LOW, at >> 32, number & LOW, number >> 32), key)[element % 4]


def wide(element: int, number: int, key: int) -> int:
    """The 64 bits of a float64 draw."""
    return word(2 * element, number, key) | word(2 * element + 1, number, key) << 32
