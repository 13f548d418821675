"""Ranks whose work goes on in agents, as a group: threads of one process, and over TCP those of other nodes' agents."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from ckpt.agent import wire
from ckpt.engine.group import Group
from ckpt.errors import RankFailed

_LOOK = 1.0  # seconds between two looks at whether agents that have not connected are there

_Key = tuple[int, int, int | None]  # source, number of the collective, target (None: all)


class Switch:
    """Carries messages between the ranks of a job: to ranks of this agent by reference, to those of others by TCP."""

    def __init__(self, agent: int, agents: Sequence[Sequence[int]]) -> None:
        """agents: the ranks of each agent; agent: which of them this is."""
        self.agents = agents
        self.local = frozenset(agents[agent])
        self._where = {rank: number for number, ranks in enumerate(agents) for rank in ranks}
        self._links: dict[int, tuple[socket.socket, threading.Lock]] = {}
        self._arrived: dict[_Key, Any] = {}
        self._left: dict[_Key, int] = {}
        self._ended: dict[int, str] = {}  # ranks that will say no more, and why
        self._changed = threading.Condition()
        self._broken: str | None = None

    def link(self, agent: int, sock: socket.socket) -> None:
        """Adds the connection to another agent, which has proved itself."""
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._links[agent] = (sock, threading.Lock())
        threading.Thread(target=self._read, args=(agent, sock), name=f"agent {agent}", daemon=True).start()

    def close(self) -> None:
        for sock, _ in self._links.values():
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()

    def post(self, source: int, number: int, data: Any) -> None:
        """Gives bytes to every rank: `take` finds them once on each."""
        self._deliver((source, number, None), data, readers=len(self.local))
        for agent in self._links:
            self._send(agent, [source, number, None], data)

    def give(self, source: int, number: int, target: int, data: Any) -> None:
        """Gives bytes to one rank."""
        if target in self.local:
            self._deliver((source, number, target), data, readers=1)
        else:
            self._send(self._where[target], [source, number, target], data)

    def take(self, source: int, number: int, target: int | None, timeout: float, what: str) -> Any:
        """Waits for what `source` gave. Raises RankFailed when the group breaks, when that rank has ended without
        giving it, or when nothing comes in time."""
        key = (source, number, target)
        deadline = time.monotonic() + timeout
        with self._changed:
            while key not in self._arrived:
                why = self._broken or self._ended.get(source)
                if why is not None:
                    raise RankFailed(f"{what}: {why}")
                if not self._changed.wait(deadline - time.monotonic()):
                    raise RankFailed(f"{what}: nothing from the agent of rank {source} within {timeout:.0f} s")
            self._left[key] -= 1
            if self._left[key]:
                return self._arrived[key]
            del self._left[key]
            return self._arrived.pop(key)

    def fail(self, said: str) -> None:
        """Breaks the group for all ranks, here and elsewhere."""
        for agent in self._links:
            with contextlib.suppress(RankFailed):
                self._send(agent, said, b"")
        self._break(said)

    def end(self, rank: int, said: str) -> None:
        """A rank of this agent will say no more: who still waits for something from it fails, here and elsewhere. What
        it has said before counts, and so does all that others say to each other."""
        for agent in self._links:
            with contextlib.suppress(RankFailed):
                self._send(agent, {"ended": rank, "said": said}, b"")
        self._end([rank], said)

    def _end(self, ranks: Sequence[int], said: str) -> None:
        with self._changed:
            self._ended |= dict.fromkeys(ranks, said)
            self._changed.notify_all()

    def _break(self, said: str) -> None:
        with self._changed:
            self._broken = self._broken or said
            self._changed.notify_all()

    def _deliver(self, key: _Key, data: Any, readers: int) -> None:
        with self._changed:
            self._arrived[key], self._left[key] = data, readers
            self._changed.notify_all()

    def _send(self, agent: int, head: Any, data: Any) -> None:
        sock, lock = self._links[agent]
        with lock:
            wire.send(sock, head, data)

    def _read(self, agent: int, sock: socket.socket) -> None:
        while True:
            try:
                head, data, _ = wire.receive(sock)
            except RankFailed:
                ranks = ", ".join(map(str, self.agents[agent]))
                self._end(self.agents[agent], f"the agent of rank {ranks} is gone")
                return
            if isinstance(head, str):
                self._break(head)
            elif isinstance(head, dict):
                self._end([head["ended"]], head["said"])
            else:
                source, number, target = head
                self._deliver((source, number, target), data, readers=len(self.local) if target is None else 1)


class Peers(Group):
    """One rank's end of a switch, from one thread. Ranks number their collectives alike, so that messages meet."""

    def __init__(self, switch: Switch, rank: int, world: int, timeout: float) -> None:
        super().__init__(rank, world, timeout)
        self._switch = switch
        self._number = 0

    def close(self) -> None:
        self._closed = True

    def all_gather(self, data: bytes, what: str) -> list[bytes]:
        number = self._next(what)
        with self._breaking():
            self._switch.post(self.rank, number, data)
            return [bytes(self._take(source, number, None, what)) for source in range(self.world)]

    def broadcast(self, data: bytes | None, what: str) -> bytes:
        number = self._next(what)
        with self._breaking():
            if self.rank == 0:
                self._switch.post(0, number, data or b"")
            return bytes(self._take(0, number, None, what))

    def exchange(
        self, send: torch.Tensor, sent: Sequence[int], receive: torch.Tensor, received: Sequence[int], what: str
    ) -> None:
        number = self._next(what)
        with self._breaking():
            start = 0
            for target, count in enumerate(sent):
                if count:
                    piece = send[start : start + count]
                    # A rank of this process reads it when it gets to it, and the sender's buffer is used again.
                    data = piece.clone() if target in self._switch.local else memoryview(piece.numpy().data)
                    self._switch.give(self.rank, number, target, data)
                start += count
            start = 0
            for source, count in enumerate(received):
                if count:
                    receive[start : start + count] = _tensor(self._take(source, number, self.rank, what))
                start += count

    def _next(self, what: str) -> int:
        self._check_wait(what)
        self._number += 1
        return self._number

    def _take(self, source: int, number: int, target: int | None, what: str) -> Any:
        return self._switch.take(source, number, target, self.timeout, what)

    @contextlib.contextmanager
    def _breaking(self) -> Iterator[None]:
        """A wait that failed leaves this rank out of step for good."""
        try:
            yield
        except BaseException as error:
            self._broken = self._broken or f"{error}"
            self._abandon(str(error))
            raise

    def _abandon(self, said: str) -> None:
        self._switch.fail(f"rank {self.rank}: {said}")


def _tensor(data: Any) -> torch.Tensor:
    return data if isinstance(data, torch.Tensor) else torch.frombuffer(data, dtype=torch.uint8)


def connect(
    agent: int, addresses: Sequence[tuple[str, int]], listener: socket.socket, secret: bytes, timeout: float
) -> Mapping[int, socket.socket]:
    """Connections to all other agents: made to those before this one, awaited from those after it.

    Raises RankFailed naming the agent that cannot be reached in time, or is gone."""
    links: dict[int, socket.socket] = {}
    deadline = time.monotonic() + timeout
    for other, address in enumerate(addresses[:agent]):
        try:
            sock = socket.create_connection(address, timeout=max(0.1, deadline - time.monotonic()))
            wire.send_number(sock, agent)
            wire.prove(sock, secret, str(agent), str(other))
        except (OSError, wire.Closed) as error:
            raise RankFailed(f"the agent at {address[0]}:{address[1]} cannot be reached: {error}") from error
        links[other] = sock
    while len(links) < len(addresses) - 1:
        listener.settimeout(max(0.1, min(_LOOK, deadline - time.monotonic())))
        try:
            sock, _ = listener.accept()
        except TimeoutError:
            missing = sorted(set(range(len(addresses))) - {agent} - links.keys())
            gone = [other for other in missing if _refuses(addresses[other])]
            if gone:
                raise RankFailed(f"agents {gone} have ended before they connected") from None
            if time.monotonic() > deadline:
                raise RankFailed(f"agents {missing} have not connected within {timeout:.0f} s") from None
            continue
        try:
            sock.settimeout(10)
            links.setdefault(_accepted(sock, agent, secret, len(addresses)), sock)
        except wire.Closed:  # a stranger is let go
            pass
        if sock not in links.values():
            sock.close()
    for sock in links.values():
        sock.settimeout(None)
    return links


def _refuses(address: tuple[str, int]) -> bool:
    """Whether nobody listens there. Agents listen from before they begin until they end."""
    try:
        socket.create_connection(address, timeout=_LOOK).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return False


def _accepted(sock: socket.socket, agent: int, secret: bytes, count: int) -> int:
    """Which agent has connected. Raises Closed for anybody else."""
    claimed = wire.receive_number(sock)
    if not agent < claimed < count:
        raise wire.Closed("a connection from nobody of this job")
    wire.prove(sock, secret, str(agent), str(claimed))
    return claimed
