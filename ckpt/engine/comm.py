"""How the ranks of one job talk about a checkpoint, and how they fail together.

A gloo group of its own, which torch.distributed does not list: the training group is never used. Every wait is bounded
and watches for the failure of another rank, so that a rank that raises or dies hangs nobody.

Two kinds of failure. An error inside a `phase` is agreed on by all ranks, which stay in step: all raise, and the next
operation may succeed. Anything else (a death, a time-out, an interrupt in a wait, an error between phases) breaks the
group for good: whoever notices tells the others through the rendezvous store and closes its connections.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from ckpt import errors
from ckpt.errors import CkptError, RankFailed
from ckpt.state.values import canonical_json, parse_json

_GRACE = 3.0  # seconds in which every living rank is expected to notice a failure


class Comm:
    """One rank's end. All methods but `close` are collective; none may be called from two threads at once.

    Once the group is broken every later call raises RankFailed.
    """

    def __init__(self, process_group: dist.ProcessGroup | None = None, timeout: float = 600.0) -> None:
        """Collective over `process_group` (the default group if None); a job of one rank where torch.distributed is
        not initialised. timeout: seconds that any one wait may take."""
        self.rank, self.world, self.timeout = 0, 1, timeout
        self._broken: str | None = None
        self._agreed = self._in_phase = self._closed = False
        self._group: Any = None  # a ProcessGroupGloo that nothing else keeps: letting it go closes its connections
        self._work: dist.Work | None = None
        if not (dist.is_available() and dist.is_initialized()):
            return
        ranks = dist.get_process_group_ranks(process_group or dist.group.WORLD)
        self.rank, self.world = ranks.index(dist.get_rank()), len(ranks)
        if self.world == 1:
            return
        # Not dist.new_group: it needs every rank of the world, or else names the group by how many groups each rank
        # happens to have, and again the same once one is destroyed. Here: the n-th group of these ranks.
        store = dist.distributed_c10d._get_default_store()
        name = "ckpt/" + "-".join(map(str, ranks))
        number = store.add(f"{name}/made by {self.rank}", 1)
        self._store = dist.PrefixStore(f"{name}/{number}", store)
        rendezvous = dist.PrefixStore("gloo", self._store)
        self._group = dist.ProcessGroupGloo(rendezvous, self.rank, self.world, timedelta(seconds=timeout))

    @property
    def broken(self) -> bool:
        """Whether the group has failed and can no longer be used."""
        return self._broken is not None

    def close(self) -> None:
        """Not collective; may be called twice. Frees the group; a wait that cannot end is left to the process's end."""
        self._let_go()
        self._closed = True

    @contextlib.contextmanager
    def operation(self, what: str) -> Iterator[None]:
        """Around a whole collective operation. An error that was not agreed on in a phase leaves this rank out of step
        with the others: they are told of it, fail at once, and the group is broken."""
        self._agreed = False
        try:
            yield
        except BaseException as error:
            if self._group is not None and not self._agreed and self._broken is None:
                with contextlib.suppress(Exception):
                    self._tell(f"failed during {what}: {type(error).__name__}: {error}")
                self._broken = f"{what}: this rank failed alone: {type(error).__name__}: {error}; restart the job"
                self._let_go()
            raise

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
        self._agreed = bool(failures)
        if not failures or error is not None:
            return
        rank = min(failures)
        kind, name, message = failures[rank]
        shown = message if kind == name else f"{name}: {message}"
        raise getattr(errors, kind)(f"rank {rank} failed during {what}: {shown}")

    def all_gather(self, data: bytes, what: str) -> list[bytes]:
        """Everybody's bytes, by rank."""
        if self._group is None:
            self._check()
            return [data]
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world)]
        self._wait(lambda: self._group.allgather([sizes], [torch.tensor([len(data)])]), what)
        longest = max(int(s) for s in sizes)
        if longest == 0:
            return [b""] * self.world
        padded = torch.zeros(longest, dtype=torch.uint8)
        if data:
            padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        found = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.world)]
        self._wait(lambda: self._group.allgather([found], [padded]), what)
        return [f[: int(n)].numpy().tobytes() for f, n in zip(found, sizes, strict=True)]

    def broadcast(self, data: bytes | None, what: str) -> bytes:
        """Rank 0's bytes; the others give None."""
        if self._group is None:
            self._check()
            return data or b""
        size = torch.tensor([len(data or b"")])
        self._wait(lambda: self._group.broadcast(size, 0), what)
        buffer = torch.zeros(int(size), dtype=torch.uint8)
        if data:
            buffer.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        if int(size):
            self._wait(lambda: self._group.broadcast(buffer, 0), what)
        return buffer.numpy().tobytes()

    def exchange(
        self,
        send: torch.Tensor,
        sent: Sequence[int],
        receive: torch.Tensor,
        received: Sequence[int],
        what: str,
    ) -> None:
        """All to all: `sent[r]` bytes of `send` (uint8, in rank order) go to rank r, `received[r]` bytes come back."""
        if self._group is None:
            self._check()
            return
        self._wait(lambda: self._group.alltoall_base(receive, send, list(received), list(sent)), what)

    def _wait(self, begin: Callable[[], dist.Work], what: str) -> None:
        self._check()
        if self._in_phase:
            raise AssertionError(f"{what}: a collective inside the body of a phase")
        deadline = time.monotonic() + self.timeout
        pause, next_look = 0.0, time.monotonic() + 0.1
        try:
            self._work = work = begin()
            while not work.is_completed():
                time.sleep(pause)
                pause = min(0.002, pause + 0.00005)
                now = time.monotonic()
                if now > next_look:
                    next_look = now + 0.1
                    if self._store.check(["failed"]):
                        raise RuntimeError("another rank reported a failure")
                if now > deadline:
                    raise RuntimeError(f"no answer within {self.timeout:.0f} s")
            work.wait()
        except RuntimeError as error:
            self._fail(what, error)

    def _tell(self, said: str) -> tuple[int, str]:
        """Reports a failure to all ranks, once for the job: the rank that did so first and what it said, which is empty
        where it only saw that something broke."""
        mine = canonical_json([self.rank, said]).decode()
        rank, first = parse_json(self._store.compare_set("failed", "", mine), "failed")
        return rank, first

    def _fail(self, what: str, cause: Exception) -> NoReturn:
        """Tells the others, finds out who does not answer, and raises RankFailed."""
        silent: list[int] | None = None
        said = ""
        with contextlib.suppress(Exception):
            self._store.set(f"alive/{self.rank}", "1")
            teller, said = self._tell("")
            deadline = time.monotonic() + _GRACE
            silent = [] if said else list(range(self.world))
            while silent and time.monotonic() < deadline:
                silent = [r for r in silent if not self._store.check([f"alive/{r}"])]
                time.sleep(0.05)
        if silent is None:
            who = "the rank that hosts the rendezvous store (usually rank 0) is gone"
        elif said:
            who = f"rank {teller} {said}"
        elif silent:
            who = f"rank {', '.join(map(str, silent))} stopped answering (killed, crashed or stuck)"
        else:
            who = "the connection between ranks broke"
        seen = "" if said else f"; first seen as: {str(cause).splitlines()[0]}"
        self._broken = f"{what}: {who}{seen}; restart the job"
        self._let_go()
        raise RankFailed(self._broken) from cause

    def _let_go(self) -> None:
        """Closes this rank's connections, which ends what other ranks still wait for. Not while a wait of its own is
        under way, which closing would sit out."""
        if self._group is not None and (self._work is None or self._work.is_completed()):
            self._group = self._work = None

    def _check(self) -> None:
        if self._broken is not None:
            raise RankFailed(f"an earlier operation failed and the ranks are out of step: {self._broken}")
        if self._closed:
            raise CkptError("this Checkpointer is closed; make a new one")


def _kind(error: BaseException) -> str:
    """The kind of ckpt's errors that an error is; RankFailed for any other, since that is what it is to the others."""
    kinds = (c.__name__ for c in type(error).__mro__ if c.__module__ == errors.__name__)
    return next(kinds, RankFailed.__name__)
