"""The norm of all gradients, exact and so free of any order, and clipping by it.

The square of an fp32 number is an integer below 2^48 times a power of two. Integers are added up by exponent, over
elements and ranks in any order, and the sum of all is one fraction of Python's: its square root is rounded once. No cut
of the parameters, not even an uneven one of flat buffers, can change it. (The idea of binned sums: Demmel and Nguyen,
"Parallel Reproducible Summation", IEEE Trans. Computers 64, 2015; here every bin is wide enough to lose nothing.)
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from fractions import Fraction

import torch
import torch.distributed as dist

from ckpt.errors import CkptError

_BINS = 256  # of the exponent field
_CHUNK = 1 << 24
_HALF = 1 << 24


class SquaredNorm:
    """Sums squares of fp32 elements, exactly. Each element of the whole must be counted by one rank.

    It holds three int64 sums for each exponent, so it is small whatever was added.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._sums = torch.zeros(2, _BINS, dtype=torch.int64, device=device)
        self._odd = torch.zeros(2, dtype=torch.int64, device=device)  # infinities, NaNs

    def add(self, tensors: Iterable[torch.Tensor]) -> None:
        """Counts all elements of fp32 tensors. Raises CkptError for another dtype."""
        for tensor in tensors:
            if tensor.dtype != torch.float32:
                raise CkptError(f"the exact norm is of fp32 gradients, not of {tensor.dtype}")
            for chunk in tensor.detach().reshape(-1).split(_CHUNK):
                self._add(chunk)

    def _add(self, chunk: torch.Tensor) -> None:
        self._odd[0] += chunk.isinf().sum()
        self._odd[1] += chunk.isnan().sum()
        bits = chunk.contiguous().view(torch.int32)
        exponent = (bits >> 23) & 0xFF
        whole = bits & 0x7FFFFF
        whole.add_((exponent != 0).to(torch.int32), alpha=1 << 23)
        square = whole.to(torch.int64).square_()
        # Doubles hold these sums exactly: 2^24 elements below 2^24 each. What is not finite makes the value odd anyway.
        for row, part in enumerate((square & (_HALF - 1), square >> 24)):
            self._sums[row] += torch.bincount(exponent, weights=part.double(), minlength=_BINS).to(torch.int64)

    def all_reduce(self, group: dist.ProcessGroup | None = None) -> None:
        """Collective over `group`: adds what all its ranks have counted. Sums of integers, in any order."""
        dist.all_reduce(self._sums, group=group)
        dist.all_reduce(self._odd, group=group)

    def value(self) -> float:
        """The root of the sum, rounded to nearest; inf or nan where an element is."""
        infinities, nans = self._odd.tolist()
        if nans or infinities:
            return math.nan if nans else math.inf
        low, high = self._sums.tolist()
        # An element of exponent field e > 0 is m 2^(e - 150); of field 0, m 2^-149.
        total = sum(((lo + (hi << 24)) << (2 * max(e, 1))) for e, (lo, hi) in enumerate(zip(low, high, strict=True)))
        return _root(Fraction(total, 1 << 300))


def clip_coefficient(norm: float, limit: float) -> float:
    """What gradients are multiplied by so that their norm is at most `limit` (above 0); 1 where it is already.

    Raises CkptError for a norm that is inf or nan: a step with it has no meaning.
    """
    if not math.isfinite(norm):
        raise CkptError(f"the gradients' norm is {norm}; skip this step, or look for the loss that is not finite")
    return min(1.0, limit / (norm + 1e-6))


def _root(x: Fraction) -> float:
    """The square root of x >= 0, rounded to nearest: from an integer root with 64 bits more than a double has."""
    if not x:
        return 0.0
    shift = 256 + max(0, x.denominator.bit_length() - x.numerator.bit_length())
    shift += shift % 2
    whole = math.isqrt((x.numerator << shift) // x.denominator)
    return float(Fraction(whole, 1 << (shift // 2)))
