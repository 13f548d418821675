"""Exact inner products of byte rows with coefficients modulo p = 2^61 - 1.

A coefficient is written in nine balanced base-128 digits, so that a product of bytes and coefficients becomes one
int8 matrix product with exact int32 sums. Digits stay within -64..63 because x86 int8 kernels without VNNI add
pairs of products in saturating int16, which such digits cannot saturate.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import numpy.typing as npt
import torch

from ckpt.native import field

U64 = npt.NDArray[np.uint64]

DIGITS = 9
MAX_BYTES = 1 << 17  # 2^17 products of magnitude up to 2^13 stay within int32


def digit_table(coefficients: U64) -> torch.Tensor:
    """The int8 [n, 18] digits of two rows of n coefficients (uint64 [2, n], below p)."""
    n = coefficients.shape[1]
    table = np.empty((n, 2, DIGITS), dtype=np.int8)
    rest = coefficients.astype(np.int64).T.copy()
    for d in range(DIGITS):
        digit = ((rest + 64) & 127) - 64
        table[:, :, d] = digit
        rest = (rest - digit) >> 7
    return torch.from_numpy(table.reshape(n, 2 * DIGITS))


def byte_dot(rows: torch.Tensor, table: torch.Tensor, scratch: torch.Tensor | None = None) -> U64:
    """For each row, sum over its bytes of (byte - 128) times the byte's coefficient, modulo p.

    rows: uint8 [r, n] on the CPU, n at most 2^17; table: int8 [n, 18] of `digit_table`; scratch: uint8 memory of at
    least r * n bytes to work in, so that a caller of many products pays for it once. Returns uint64 [2, r].
    The caller adds 128 times the sum of the coefficients, which depends on geometry alone.
    """
    if scratch is None:
        scratch = torch.empty(rows.numel(), dtype=torch.uint8)
    signed = torch.bitwise_xor(rows, 0x80, out=scratch[: rows.numel()].view(rows.shape)).view(torch.int8)
    if _int8_product_is_exact():
        sums = torch._int_mm(signed, table).long().numpy()
    else:
        sums = np.matmul(signed.numpy().astype(np.int64), table.numpy().astype(np.int64))
    return _from_digits(sums.reshape(-1, 2, DIGITS))


def _from_digits(sums: npt.NDArray[np.int64]) -> U64:
    """Digit sums [r, 2, 9], each below 2^31 in magnitude, as numbers modulo p, [2, r].

    Thirds of three digits stay below 2^46. Times 2^21 and 2^42 they are split where 2^61 = 1 wraps around.
    """
    weights = np.array([1, 1 << 7, 1 << 14], dtype=np.int64)
    low, middle, high = np.moveaxis(sums.reshape(-1, 2, 3, 3) @ weights, (1, 2), (1, 0))
    value = low + (middle >> 40) + (high >> 19)
    value += (middle & ((1 << 40) - 1)) << 21  # below 2^61
    value += (high & ((1 << 19) - 1)) << 42
    value[value < 0] += field.P
    return field.reduce(value.astype(np.uint64))


@cache
def _int8_product_is_exact() -> bool:
    """Tries the int8 matrix product on the extremes that a saturating kernel gets wrong."""
    if not hasattr(torch, "_int_mm"):
        return False
    values = torch.tensor([-128, 127, -1, 0], dtype=torch.int8)
    rows = values[torch.arange(33 * 512) % 3].reshape(33, 512)
    table = torch.tensor([-64, 63], dtype=torch.int8)[torch.arange(512 * 18) % 2].reshape(512, 18)
    try:
        found = torch._int_mm(rows, table)
    except RuntimeError:
        return False
    return torch.equal(found.long(), rows.long() @ table.long())
