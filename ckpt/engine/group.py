"""How the ranks of one job talk about a checkpoint, and how they fail together.

Two kinds of failure. An error inside a `phase` is agreed on by all ranks, which stay in step: all raise, and the next
operation may succeed. Anything else (a death, a time-out, an interrupt in a wait, an error between phases) breaks the
group for good: whoever notices tells the others and lets its connections go.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import torch

from ckpt import errors
from ckpt.errors import CkptError, RankFailed
from ckpt.state.values import canonical_json, parse_json


class Group(ABC):
    """One rank's end. All methods but `close` are collective; none may be called from two threads at once.

    Once the group is broken every later call raises RankFailed.
    """

    def __init__(self, rank: int, world: int, timeout: float) -> None:
        """timeout: seconds that any one wait may take."""
        self.rank, self.world, self.timeout = rank, world, timeout
        self._broken: str | None = None
        self._agreed: list[BaseException] = []
        self._in_phase = self._closed = False

    @property
    def broken(self) -> bool:
        """Whether the group has failed and can no longer be used."""
        return self._broken is not None

    @abstractmethod
    def close(self) -> None:
        """Not collective; may be called twice. Frees the group."""

    @abstractmethod
    def all_gather(self, data: bytes, what: str) -> list[bytes]:
        """Everybody's bytes, by rank."""

    @abstractmethod
    def broadcast(self, data: bytes | None, what: str) -> bytes:
        """Rank 0's bytes; the others give None."""

    @abstractmethod
    def exchange(
        self, send: torch.Tensor, sent: Sequence[int], receive: torch.Tensor, received: Sequence[int], what: str
    ) -> None:
        """All to all: `sent[r]` bytes of `send` (uint8, in rank order) go to rank r, `received[r]` bytes come back."""

    @abstractmethod
    def _abandon(self, said: str) -> None:
        """Tells the others, as far as can be, that this rank goes out of step, and lets its connections go."""

    @contextlib.contextmanager
    def operation(self, what: str) -> Iterator[None]:
        """Around a whole collective operation. An error that was not agreed on in a phase leaves this rank out of step
        with the others: they are told of it, fail at once, and the group is broken."""
        self._agreed = []
        try:
            yield
        except BaseException as error:
            if self._broken is None and not self.agreed(error):
                self._broken = f"{what}: this rank failed alone: {type(error).__name__}: {error}; restart the job"
                self._abandon(f"failed during {what}: {type(error).__name__}: {error}")
            raise

    def agreed(self, error: BaseException) -> bool:
        """Not collective. Whether an error of the operation under way, or one that it was made from, was agreed on in a
        phase: then every rank has one, and they are in step."""
        stem: BaseException | None = error
        while stem is not None and not any(stem is one for one in self._agreed):
            stem = stem.__cause__ or stem.__context__
        return self.world == 1 or stem is not None

    @contextlib.contextmanager
    def phase(self, what: str) -> Iterator[None]:
        """Runs its body on every rank and then agrees: if it raised on any rank, all ranks raise. The body is local
        work: it holds no collectives, so that a rank that leaves it early stays in step. The rank that failed raises
        its own error, the others one of the same kind that names the rank."""
        self._check()
        self._in_phase = True
        try:
            yield
        except BaseException as error:
            self._in_phase = False
            with contextlib.suppress(RankFailed):  # where the group breaks meanwhile, this rank's error says more
                self._agree(what, error)
            raise
        finally:
            self._in_phase = False
        self._agree(what, None)

    def _agree(self, what: str, error: BaseException | None) -> None:
        mine = b"" if error is None else canonical_json([_kind(error), type(error).__name__, str(error)])
        failures = {r: parse_json(d, f"rank {r}") for r, d in enumerate(self.all_gather(mine, what)) if d}
        if error is not None:
            self._agreed.append(error)
        if not failures or error is not None:
            return
        rank = min(failures)
        kind, name, message = failures[rank]
        shown = message if kind == name else f"{name}: {message}"
        told: BaseException = getattr(errors, kind)(f"rank {rank} failed during {what}: {shown}")
        self._agreed.append(told)
        raise told

    def _check(self) -> None:
        if self._broken is not None:
            raise RankFailed(f"an earlier operation failed and the ranks are out of step: {self._broken}")
        if self._closed:
            raise CkptError("this Checkpointer is closed; make a new one")

    def _check_wait(self, what: str) -> None:
        """Before each collective."""
        self._check()
        if self._in_phase:
            raise AssertionError(f"{what}: a collective inside the body of a phase")


def _kind(error: BaseException) -> str:
    """The kind of ckpt's errors that an error is; RankFailed for any other, since that is what it is to the others."""
    kinds = (c.__name__ for c in type(error).__mro__ if c.__module__ == errors.__name__)
    return next(kinds, RankFailed.__name__)
