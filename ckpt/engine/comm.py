"""How the ranks of one job talk about a checkpoint, and how they fail together.

A process group of its own (gloo): the training group is never used. Every wait is bounded and watches for the failure
of another rank, so that a rank that raises or dies hangs nobody.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from ckpt import errors
from ckpt.errors import CkptError, RankFailed
from ckpt.state.values import canonical_json, parse_json

_GRACE = 3.0  # seconds in which every living rank is expected to notice a failure


class Comm:
    """One rank's end. All methods but `phase`'s body are collective; none may be called from two threads at once.

    After a RankFailed the group is unusable: every later call raises RankFailed again.
    """

    def __init__(self, process_group: dist.ProcessGroup | None = None, timeout: float = 600.0) -> None:
        """Collective over `process_group` (the default group if None); a job of one rank where torch.distributed is
        not initialised. timeout: seconds that any one wait may take."""
        self.rank, self.world, self.timeout = 0, 1, timeout
        self._broken: str | None = None
        self._group: dist.ProcessGroup | None = None
        if not (dist.is_available() and dist.is_initialized()):
            return
        ranks = dist.get_process_group_ranks(process_group or dist.group.WORLD)
        self.rank, self.world = ranks.index(dist.get_rank()), len(ranks)
        if self.world == 1:
            return
        self._group = dist.new_group(
            ranks,
            backend="gloo",
            timeout=timedelta(seconds=timeout),
            use_local_synchronization=process_group is not None,
        )
        prefix = f"ckpt/{self._group.group_name}"
        self._store = dist.PrefixStore(prefix, dist.distributed_c10d._get_default_store())

    @property
    def broken(self) -> bool:
        """Whether the group has failed and can no longer be used."""
        return self._broken is not None

    def close(self) -> None:
        """Not collective. Frees the group unless it has failed (then it is left to the end of the process)."""
        if self._group is not None and self._broken is None:
            dist.destroy_process_group(self._group)
        self._group = None

    @contextlib.contextmanager
    def phase(self, what: str) -> Iterator[None]:
        """Runs its body on every rank and then agrees: if it raised on any rank, all ranks raise. The body may hold
        collectives of this object. The rank that failed raises its own error, the others one of the same kind that
        names the rank."""
        try:
            yield
        except RankFailed:
            if self._broken is not None:
                raise
            self._agree(what, RankFailed("another rank failed"))
            raise
        except BaseException as error:
            self._agree(what, error)
            raise
        else:
            self._agree(what, None)

    def _agree(self, what: str, error: BaseException | None) -> None:
        mine = b"" if error is None else canonical_json([type(error).__name__, str(error)])
        failures = {r: parse_json(d, f"rank {r}") for r, d in enumerate(self.all_gather(mine, what)) if d}
        if not failures or error is not None:
            return
        rank = min(failures, key=lambda r: (failures[r][0] == "RankFailed", r))
        kind, message = failures[rank]
        known = getattr(errors, kind, RankFailed)
        if not (isinstance(known, type) and issubclass(known, CkptError)):
            known = RankFailed
        name = "" if known is not RankFailed else f"{kind}: "
        raise known(f"rank {rank} failed during {what}: {name}{message}")

    def all_gather(self, data: bytes, what: str) -> list[bytes]:
        """Everybody's bytes, by rank."""
        if self._group is None:
            self._check()
            return [data]
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world)]
        self._wait(lambda: dist.all_gather(sizes, torch.tensor([len(data)]), group=self._group, async_op=True), what)
        longest = max(int(s) for s in sizes)
        if longest == 0:
            return [b""] * self.world
        padded = torch.zeros(longest, dtype=torch.uint8)
        if data:
            padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        found = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.world)]
        self._wait(lambda: dist.all_gather(found, padded, group=self._group, async_op=True), what)
        return [f[: int(n)].numpy().tobytes() for f, n in zip(found, sizes, strict=True)]

    def broadcast(self, data: bytes | None, what: str) -> bytes:
        """Rank 0's bytes; the others give None."""
        if self._group is None:
            self._check()
            return data or b""
        root = dist.get_global_rank(self._group, 0)
        size = torch.tensor([len(data or b"")])
        self._wait(lambda: dist.broadcast(size, root, group=self._group, async_op=True), what)
        buffer = torch.zeros(int(size), dtype=torch.uint8)
        if data:
            buffer.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        if int(size):
            self._wait(lambda: dist.broadcast(buffer, root, group=self._group, async_op=True), what)
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
        splits = {"output_split_sizes": list(received), "input_split_sizes": list(sent)}
        self._wait(lambda: dist.all_to_all_single(receive, send, **splits, group=self._group, async_op=True), what)

    def _wait(self, begin, what: str) -> None:  # type: ignore[no-untyped-def]
        self._check()
        deadline = time.monotonic() + self.timeout
        pause, next_look = 0.0, time.monotonic() + 0.1
        try:
            work = begin()
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

    def _fail(self, what: str, cause: Exception) -> None:
        """Tells the others, finds out who does not answer, and raises RankFailed."""
        silent: list[int] | None = None
        with contextlib.suppress(Exception):
            self._store.set("failed", str(self.rank))
            self._store.set(f"alive/{self.rank}", "1")
            deadline = time.monotonic() + _GRACE
            silent = list(range(self.world))
            while silent and time.monotonic() < deadline:
                silent = [r for r in silent if not self._store.check([f"alive/{r}"])]
                time.sleep(0.05)
        if silent is None:
            who = "the rank that hosts the rendezvous store (usually rank 0) is gone"
        elif silent:
            who = f"rank {', '.join(map(str, silent))} stopped answering (killed, crashed or stuck)"
        else:
            who = "the connection between ranks broke"
        self._broken = f"{what}: {who}; first seen as: {str(cause).splitlines()[0]}; restart the job"
        raise RankFailed(self._broken) from cause

    def _check(self) -> None:
        if self._broken is not None:
            raise RankFailed(f"an earlier operation failed and the ranks are out of step: {self._broken}")
