"""The ranks of a training job as a group of their own over gloo, which torch.distributed does not list: the training
group is never used. Every wait is bounded and watches for the failure of another rank, so that a rank that raises or
dies hangs nobody.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from ckpt.engine.group import Group
from ckpt.errors import RankFailed
from ckpt.state.values import canonical_json, parse_json

_GRACE = 3.0  # seconds in which every living rank is expected to notice a failure


@dataclass(frozen=True)
class Ticket:
    """Flags on their way to and from all ranks."""

    told: torch.Tensor
    work: dist.Work | None


class Comm(Group):
    """A job's ranks, found through torch.distributed."""

    def __init__(self, process_group: dist.ProcessGroup | None = None, timeout: float = 600.0) -> None:
        """Collective over `process_group` (the default group if None); a job of one rank where torch.distributed is
        not initialised. timeout: seconds that any one wait may take."""
        super().__init__(0, 1, timeout)
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

    def close(self) -> None:
        """Not collective; may be called twice. Frees the group; a wait that cannot end is left to the process's end."""
        self._let_go()
        self._closed = True

    def _abandon(self, said: str) -> None:
        with contextlib.suppress(Exception):
            self._tell(said)
        self._let_go()

    def all_gather(self, data: bytes, what: str) -> list[bytes]:
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
        if self._group is None:
            self._check()
            return
        self._wait(lambda: self._group.alltoall_base(receive, send, list(received), list(sent)), what)

    def start_any(self, flags: Sequence[bool]) -> Ticket:
        """Tells all ranks of some flags without waiting for them. Collective, as is `finish_any` after it."""
        told = torch.tensor(flags, dtype=torch.uint8)
        if self._group is None:
            self._check()
            return Ticket(told, None)
        self._check_wait("tell")
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
        return Ticket(told, self._group.allreduce([told], options))

    def finish_any(self, ticket: Ticket, what: str) -> list[bool]:
        """Which of the flags any rank had told."""
        work = ticket.work
        if work is not None:
            self._wait(lambda: work, what)
        return [bool(flag) for flag in ticket.told]

    def _wait(self, begin: Callable[[], dist.Work], what: str) -> None:
        self._check_wait(what)
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
