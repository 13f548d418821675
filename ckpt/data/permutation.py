"""A shuffle that is a formula: position i of an epoch holds sample P(i), computed for i alone.

P is a Feistel network over the smallest power of two that holds the data set, with cycle walking for what lies beyond
its end (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002, sections 3 and 4). The halves are as
equal as the number of bits allows. The round function is Philox 4x32-10 (Salmon et al., SC 2011), keyed by seed, epoch
and size. Four rounds are the least that theory asks for (Luby and Rackoff, SIAM J. Comput. 17(2), 1988), tiny domains
want more (NIST SP 800-38G takes ten): with eight, the orders of five samples are visibly uneven, with twelve they are
not.

The values are fixed for ever: a run that resumes with a later release must see the same order. tests/data holds golden
values, and docs/data.md the definition.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ckpt.errors import CkptError
from ckpt.native.philox import U64, philox4x32

Indices = npt.NDArray[np.int64]

LARGEST_SIZE = 1 << 62
_ROUNDS = 12
_LOW = 0xFFFFFFFF
_PURPOSE = 0x0DA7A001  # keeps these numbers apart from every other use of the same seed


@dataclass(frozen=True, slots=True)
class Permutation:
    """A bijection of range(size), a pure function of (seed, epoch, size), in O(1) memory.

    seed: 0 to 2^64 - 1; epoch: 0 to 2^32 - 1; size: 1 to 2^62. Raises CkptError for anything else.
    """

    seed: int
    epoch: int
    size: int
    _words: tuple[int, int, int, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name, value, stop in (("seed", self.seed, 1 << 64), ("epoch", self.epoch, 1 << 32)):
            if not 0 <= value < stop:
                raise CkptError(f"permutation: {name}={value} must be at least 0 and below {stop}")
        if not 1 <= self.size <= LARGEST_SIZE:
            raise CkptError(f"permutation: size={self.size} must be at least 1 and at most 2^62")
        counter = _column(self.size & _LOW, self.size >> 32, self.epoch, _PURPOSE)
        words = philox4x32(counter, (self.seed & _LOW, self.seed >> 32))
        object.__setattr__(self, "_words", tuple(int(w) for w in words[:, 0]))

    def __call__(self, positions: npt.ArrayLike) -> Indices:
        """The samples at these positions of the epoch: int64, of the shape that was given.

        Raises CkptError when a position is outside range(size).
        """
        return self._walk(positions, range(_ROUNDS))

    def inverse(self, samples: npt.ArrayLike) -> Indices:
        """The positions at which these samples come: int64, of the shape that was given.

        Raises CkptError when a sample is outside range(size).
        """
        return self._walk(samples, range(_ROUNDS - 1, -1, -1))

    def _walk(self, numbers: npt.ArrayLike, rounds: range) -> Indices:
        given = np.asarray(numbers)
        if given.size and given.dtype.kind not in "iu":
            raise CkptError(f"permutation: numbers of dtype {given.dtype}; give integers")
        if given.size and not (given.min() >= 0 and given.max() < self.size):
            raise CkptError(f"permutation: numbers from {given.min()} to {given.max()} are not all below {self.size}")
        x = given.astype(np.uint64).reshape(-1)
        beyond = np.arange(x.size)
        while beyond.size:  # at most half of the domain lies beyond the end
            x[beyond] = self._feistel(x[beyond], rounds)
            beyond = beyond[x[beyond] >= self.size]
        return x.astype(np.int64).reshape(given.shape)

    def _feistel(self, x: U64, rounds: range) -> U64:
        """All rounds, in this order. A round is its own inverse: it changes one half by a function of the other."""
        bits = (self.size - 1).bit_length()
        low = np.uint64(bits // 2)
        masks = (np.uint64((1 << bits // 2) - 1), np.uint64((1 << bits - bits // 2) - 1))
        halves = [x & masks[0], x >> low]
        for number in rounds:
            changed, other = number % 2, 1 - number % 2
            halves[changed] = halves[changed] ^ (self._random(number, halves[other]) & masks[changed])
        return halves[1] << low | halves[0]

    def _random(self, number: int, half: U64) -> U64:
        """The round function: 32 random bits for each value of a half."""
        counter = np.empty((4, half.size), np.uint64)
        counter[0], counter[1], counter[2], counter[3] = half, number, self._words[2], self._words[3]
        word: U64 = philox4x32(counter, (self._words[0], self._words[1]))[0]
        return word


def _column(*words: int) -> U64:
    return np.array(words, np.uint64).reshape(4, 1)
