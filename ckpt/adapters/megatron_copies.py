"""16-bit working copies of parameters against their fp32 masters: a copy must be its master, rounded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from ckpt.adapters.flat import flat_piece
from ckpt.adapters.placement import Placement
from ckpt.errors import StateMismatch

_AT_ONCE = 1 << 24  # elements; a comparison takes about five bytes for each


@dataclass(frozen=True)
class Copy:
    """A 16-bit `working` copy and its fp32 `master`, tensors of one shape: all of a local parameter of this `name`, or
    its elements from `start` on, flat. whole: where the parameter lies in the logical tensor."""

    name: str
    whole: Placement
    parameter: torch.Tensor
    start: int
    working: torch.Tensor
    master: torch.Tensor


def check_copies(copies: Sequence[Copy]) -> None:
    """Checks that every working copy has the bits of its master rounded to nearest, ties to even (what torch's cast
    does, and Megatron after each step). NaN equals NaN: its payload depends on the device that casts.

    Raises StateMismatch naming the parameter and the first element that differs.
    """
    for copy in copies:
        for first, working, master in _pieces(copy):
            rounded = master.detach().to(working.dtype)
            equal = (rounded.view(torch.int16) == working.view(torch.int16)) | (rounded.isnan() & working.isnan())
            if not equal.all():
                at = int(equal.reshape(-1).logical_not().nonzero()[0])
                _refuse(copy, first + at, working.reshape(-1)[at], master.reshape(-1)[at])


def _pieces(copy: Copy) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """(number of the first element in the local parameter, part of the copy, part of the master)."""
    working, master = copy.working.detach(), copy.master.detach()
    if working.dim() == 0 or working.numel() == 0:
        working, master = working.reshape(-1), master.reshape(-1)
    row = max(1, working[:1].numel())
    step = max(1, _AT_ONCE // row)
    for begin in range(0, working.shape[0], step):
        yield copy.start + begin * row, working[begin : begin + step], master[begin : begin + step]


def _refuse(copy: Copy, number: int, working: torch.Tensor, master: torch.Tensor) -> None:
    element = flat_piece(copy.whole, copy.parameter.shape, number, number + 1).parts[0][0].offset
    raise StateMismatch(
        f"{copy.name}: element {list(element)} is {working.item()!r} in {copy.working.dtype}, but its fp32 master is "
        f"{master.item()!r}; one was changed without the other: call the optimizer's reload_model_params() to take the "
        "parameter, or load a step where the two agree"
    )
