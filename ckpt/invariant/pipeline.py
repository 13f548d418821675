"""One forward, one backward: the schedule of pipeline stages, whose order no bit depends on.

After Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", SC 2021. Only
whole activations and their gradients travel; every stage runs backward passes in the order of microbatches, as
`Gradients` wants them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

Forward = Callable[[int, torch.Tensor | None], torch.Tensor]


@dataclass(frozen=True)
class Stage:
    """A place in a pipeline. before, after: the neighbours' ranks in the job; None at the ends.

    index, count: which of how many stages it is. shape, dtype, device: of the activations that travel.
    """

    index: int
    count: int
    before: int | None
    after: int | None
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str = "cpu"


def one_forward_one_backward(stage: Stage, microbatches: range, forward: Forward) -> list[torch.Tensor]:
    """Runs this stage on its microbatches, forward and backward. Collective over the pipeline.

    forward: takes a microbatch's number and the activations of the stage before (None on the first) and gives those for
    the stage after, or, on the last, the loss: a scalar, which the backward pass starts from.
    Returns the losses, detached, on the last stage, and nothing on the others.
    """
    return _Run(stage, forward).all(list(microbatches))


class _Run:
    def __init__(self, stage: Stage, forward: Forward) -> None:
        self._stage, self._forward = stage, forward
        self._open: deque[tuple[torch.Tensor | None, torch.Tensor]] = deque()
        self._sending: deque[tuple[dist.Work, torch.Tensor]] = deque()
        self._losses: list[torch.Tensor] = []

    def all(self, microbatches: list[int]) -> list[torch.Tensor]:
        ahead = min(self._stage.count - self._stage.index - 1, len(microbatches))
        for number in microbatches[:ahead]:
            self._ahead(number)
        for number in microbatches[ahead:]:
            self._ahead(number)
            self._back()
        for _ in range(ahead):
            self._back()
        while self._sending:
            self._sending.popleft()[0].wait()
        return self._losses

    def _ahead(self, number: int) -> None:
        given = self._received(self._stage.before)
        if given is not None:
            given.requires_grad_()
        made = self._forward(number, given)
        if self._stage.after is None:
            self._losses.append(made.detach())
        else:
            self._send(made, self._stage.after)
        self._open.append((given, made))

    def _back(self) -> None:
        given, made = self._open.popleft()
        slope = self._received(self._stage.after)
        made.backward(slope)  # type: ignore[no-untyped-call]
        if given is not None and self._stage.before is not None:
            assert given.grad is not None
            self._send(given.grad, self._stage.before)

    def _received(self, rank: int | None) -> torch.Tensor | None:
        if rank is None:
            return None
        found = torch.empty(self._stage.shape, dtype=self._stage.dtype, device=self._stage.device)
        dist.recv(found, rank)
        return found

    def _send(self, tensor: torch.Tensor, rank: int) -> None:
        """Without waiting, since the other may be sending too; what travels is held until it has arrived."""
        travelling = tensor.detach().contiguous()
        work = dist.isend(travelling, rank)
        assert work is not None
        self._sending.append((work, travelling))
        while self._sending and self._sending[0][0].is_completed():
            self._sending.popleft()
