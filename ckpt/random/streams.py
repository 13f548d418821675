"""Streams of random numbers keyed by what they are for, and the two numbers that are their whole state."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, TypeAlias

import torch

from ckpt.errors import CkptError, StateMismatch
from ckpt.native import logical
from ckpt.random import gaussian
from ckpt.random.regions import At, Region, region

Device: TypeAlias = torch.device | str

_DOMAIN = b"ckpt.random 1"
_STOP = 1 << 64


class LogicalRng:
    """The source of every random number of a run. Its whole state is a seed and a step.

    A number is a function of (seed, step, purpose, indices, element) and of nothing else: no rank, no call count, no
    batch shape. Every rank holds an equal copy; put it into the state of a `ckpt.Checkpointer` as it is, and it loads
    on any layout.
    """

    def __init__(self, seed: int, step: int = 0) -> None:
        """seed, step: 0 to 2^64 - 1. Raises CkptError for anything else."""
        self._seed = _number(seed, "seed")
        self._step = _number(step, "step")

    @property
    def seed(self) -> int:
        return self._seed

    @property
    def step(self) -> int:
        return self._step

    def advance(self, steps: int = 1) -> None:
        """Goes on to the next step, whose streams are all new. Streams made before stay what they are."""
        self._step = _number(self._step + _number(steps, "steps"), "step")

    def stream(self, purpose: str, *indices: int | str) -> Stream:
        """The stream of this step for `purpose`, told apart by `indices`: a layer's global number, a name.

        indices: integers from 0 to 2^64 - 1 or text; their order counts, and 1 is not "1". Raises CkptError for others.
        """
        return derive(self._seed, self._step, purpose, indices)

    def fixed(self, purpose: str, *indices: int | str) -> Stream:
        """The same at every step, and different from every stream of a step: for initial weights."""
        return derive(self._seed, None, purpose, indices)

    def state_dict(self) -> dict[str, int]:
        """{"seed": ..., "step": ...}, plain integers, equal on every rank."""
        return {"seed": self._seed, "step": self._step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over a state. Raises StateMismatch, with nothing changed, where it is not exactly a seed and a step."""
        if set(state) != {"seed", "step"}:
            raise StateMismatch(
                f"the state of a LogicalRng holds a seed and a step, not {sorted(map(str, state))}; it was written by "
                "something else, or by a newer ckpt"
            )
        try:
            found = LogicalRng(state["seed"], state["step"])
        except CkptError as error:
            raise StateMismatch(f"the state of a LogicalRng is damaged: {error}") from None
        self._seed, self._step = found._seed, found._step

    def __repr__(self) -> str:
        return f"LogicalRng(seed={self._seed}, step={self._step})"


@dataclass(frozen=True, slots=True)
class Stream:
    """A sequence of 2^64 random words, of which any element can be had at once; see `ckpt.native.logical`.

    key, number: 0 to 2^64 - 1. Every method draws the elements of a logical tensor of `shape` that lie `at` a box or at
    given places along each axis (see `regions.region`; the whole tensor by default), and returns them as a contiguous
    tensor of that extent. Elements are numbered row-major in `shape`, so any cut of a tensor has the numbers of the
    whole. A stream serves one tensor and one kind of draw: all kinds read the same words.
    """

    key: int
    number: int

    def bits(self, shape: Sequence[int], at: At | None = None, device: Device = "cpu") -> torch.Tensor:
        """int64, uniform in 0 to 2^32 - 1: the word of each element."""
        part = region(shape, at)
        return logical.words(self.key, self.number, part.runs(), torch.device(device)).view(part.extent)

    def keep_mask(self, p: float, shape: Sequence[int], at: At | None = None, device: Device = "cpu") -> torch.Tensor:
        """bool: True with probability 1 - p, where the element's word is below `keep_threshold(p)`."""
        part, threshold = region(shape, at), keep_threshold(p)
        return logical.mask(self.key, self.number, part.runs(), torch.device(device), threshold).view(part.extent)

    def uniform(
        self,
        shape: Sequence[int],
        at: At | None = None,
        dtype: torch.dtype = torch.float32,
        device: Device = "cpu",
    ) -> torch.Tensor:
        """Uniform in [0, 1). float32: the top 24 bits of element e's word, times 2^-24. float64: the top 53 bits of the
        64 in words 2 e and 2 e + 1 (the upper), times 2^-53. Raises CkptError for other dtypes: rounding could give 1.
        """
        part, where = region(shape, at), torch.device(device)
        if dtype == torch.float32:
            return logical.uniforms(self.key, self.number, part.runs(), where).view(part.extent)
        if dtype != torch.float64:
            raise CkptError(f"uniform numbers of dtype {dtype} could round up to 1; draw float32 or float64")
        return self._filled(part, dtype, where, unit)

    def normal(
        self,
        shape: Sequence[int],
        at: At | None = None,
        dtype: torch.dtype = torch.float32,
        device: Device = "cpu",
    ) -> torch.Tensor:
        """Standard normal numbers: words 2 e and 2 e + 1 through `gaussian.normals` in float64, rounded to a floating
        `dtype` (below 32 bits by way of float32). Raises CkptError for another dtype."""
        if not dtype.is_floating_point:
            raise CkptError(f"normal numbers of dtype {dtype}; it must be a floating one")
        return self._filled(region(shape, at), dtype, torch.device(device), gaussian.normals)

    def fill(self, out: torch.Tensor, part: Region, make: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Writes `make` of 64 random bits (int64 [n] to float64 [n], element by element) of each element into `out`.

        out: a floating tensor of the region's extent, any strides.
        """
        with torch.no_grad():
            dense = out if out.is_contiguous() else torch.empty(out.shape, dtype=out.dtype, device=out.device)
            flat, done = dense.view(-1), 0
            for chunk in part.runs(words=2).chunks(logical.chunk_limit(out.device)):
                count = chunk.count // 2
                flat[done : done + count] = narrow(make(self._wide(chunk, out.device)), out.dtype)
                done += count
            if dense is not out:
                out.copy_(dense)

    def _filled(
        self, part: Region, dtype: torch.dtype, device: torch.device, make: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        out = torch.empty(part.extent, dtype=dtype, device=device)
        self.fill(out, part, make)
        return out

    def _wide(self, runs: logical.Runs, device: torch.device) -> torch.Tensor:
        """int64 [n]: each two words as 64 bits, the first one below."""
        pairs = logical.words(self.key, self.number, runs, device).view(-1, 2)
        return pairs[:, 0] | (pairs[:, 1] << 32)


def derive(seed: int, step: int | None, purpose: str, indices: Sequence[int | str]) -> Stream:
    """The stream of a seed, a step (or None), a purpose and indices.

    SHA-256 of: the 13 bytes "ckpt.random 1"; the seed in 8 bytes; a byte 0, or a byte 1 and the step in 8 bytes; the
    purpose as text; every index. Text is the byte "s", the length of its UTF-8 in 8 bytes, its UTF-8; an integer is the
    byte "i" and 8 bytes. All numbers are little-endian. No two inputs have the same encoding. The first 8 bytes of the
    digest are the key, the next 8 the number: n streams hold two equal ones with a probability of about n^2 / 2^129.
    """
    if type(purpose) is not str or not purpose:
        raise CkptError(f"the purpose of a stream is {purpose!r}; it must be a text that says what it is for")
    step_code = b"\0" if step is None else b"\1" + _eight(step)
    fields = b"".join(_field(x, i) for i, x in enumerate((purpose, *indices)))
    digest = hashlib.sha256(_DOMAIN + _eight(seed) + step_code + fields, usedforsecurity=False).digest()
    return Stream(int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:16], "little"))


def keep_threshold(p: float) -> int:
    """(1 - p) 2^32, exactly, rounded to the nearest integer (ties to even): how many of the 2^32 words are kept.

    Raises CkptError unless p is a number from 0 to 1.
    """
    if not 0 <= p <= 1:
        raise CkptError(f"dropout probability {p!r} must be from 0 to 1")
    return round((1 - Fraction(p)) * (1 << 32))


def unit(words: torch.Tensor) -> torch.Tensor:
    """float64 in [0, 1): the top 53 of 64 bits, times 2^-53."""
    return ((words >> 11) & ((1 << 53) - 1)).to(torch.float64).mul_(2.0**-53)


def narrow(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """float64 rounded to a dtype; to one below 32 bits by way of float32, as torch does, but on every device."""
    return x.to(dtype) if dtype in (torch.float64, torch.float32) else x.to(torch.float32).to(dtype)


def _field(value: int | str, place: int) -> bytes:
    if isinstance(value, str):
        try:
            text = value.encode()
        except UnicodeEncodeError:
            raise CkptError(f"index {place} of a stream is {value!r}, which is not valid Unicode") from None
        return b"s" + _eight(len(text)) + text
    return b"i" + _eight(_number(value, f"index {place} of a stream"))


def _number(value: Any, what: str) -> int:
    """An integer from 0 to 2^64 - 1, of Python's or NumPy's types."""
    try:
        found = None if isinstance(value, bool | torch.Tensor) else operator.index(value)
    except TypeError:
        found = None
    if found is None or not 0 <= found < _STOP:
        raise CkptError(f"{what} is {value!r}; it must be an integer from 0 to 2^64 - 1")
    return found


def _eight(number: int) -> bytes:
    return number.to_bytes(8, "little")
