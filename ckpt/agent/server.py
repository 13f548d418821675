"""The agent itself: accepts the trainers of its node, writes what they stage, and ends when they have ended.

Started with the descriptors of two listening sockets, one for trainers (Unix) and one for other agents (TCP, or -1).
Signals that end a job are ignored: what is staged is written, and nothing keeps the agent alive after that.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import struct
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ckpt import errors
from ckpt.agent import wire
from ckpt.agent.client import ENDING
from ckpt.agent.metrics import Metrics
from ckpt.agent.peers import Peers, Switch, connect
from ckpt.engine import save as saving
from ckpt.engine.digests import Held, digests_of
from ckpt.engine.session import Session
from ckpt.engine.staging import Staged, map_memory, unstage
from ckpt.errors import CkptError, CorruptCheckpoint, RankFailed
from ckpt.state.captured import Captured
from ckpt.store import arrays
from ckpt.store.log import Log
from ckpt.store.objects import kvstore_spec, open_store

_NICENESS = 10
_CREDENTIALS = struct.Struct("3i")  # struct ucred: process, user, group
_HUNG_UP = select.POLLRDHUP | select.POLLHUP
_TELL_EVERY = 0.1  # seconds between two words on how far a save is
_ACCEPTED = 10.0  # seconds in which a connection that was made is accepted
_ALL_HERE = 120.0  # seconds in which all trainers of the node must have said hello


class Agent:
    """One agent, for one Checkpointer on each rank of its node."""

    def __init__(self, trainers: socket.socket, others: socket.socket | None, starter: int) -> None:
        """trainers, others: listen for those; starter: the process that started this one, a trainer of this node."""
        self._trainers, self._others, self._starter = trainers, others, starter
        self._hellos: dict[int, tuple[socket.socket, Mapping[str, Any]]] = {}
        self._busy = 0
        self._started = False
        self._heard = 0.0
        self._changed = threading.Condition()

    def run(self) -> None:
        """Serves until every trainer has ended and nothing is left to write."""
        threading.Thread(target=self._accept, name="accept", daemon=True).start()
        self._await_trainers()
        first = next(iter(self._hellos.values()))[1]
        torch.set_num_threads(first["threads"])
        switch = Switch(first["agent"], first["agents"])
        self._metrics = Metrics(first["url"], min(switch.local))
        if first["metrics"]:
            self._metrics.serve(*first["metrics"])
        try:
            links = self._links(first)
        except RankFailed as error:
            switch.fail(str(error))
            links = {}
        for agent, sock in links.items():
            switch.link(agent, sock)
        ranks = [
            threading.Thread(target=self._serve, args=(rank, switch), name=f"rank {rank}") for rank in self._hellos
        ]
        for thread in ranks:
            thread.start()
        self._started = True
        for thread in ranks:
            thread.join()
        switch.close()

    def _await_trainers(self) -> None:
        """Waits for all of this node. Nothing can have been staged on all ranks before each has connected."""
        begun = time.monotonic()
        deadline = begun + _ALL_HERE
        with self._changed:
            while not self._complete():
                ended = [f"the trainer of rank {r}" for r, (sock, _) in self._hellos.items() if _look(sock) & _HUNG_UP]
                if os.getppid() != self._starter:
                    ended.append("the trainer that started this agent")
                # Trainers may all have staged and died before this process began; then all wait to be accepted.
                if ended and time.monotonic() > max(begun, self._heard) + _ACCEPTED:
                    raise RankFailed(f"{ended[0]} ended before all had connected")
                if time.monotonic() > deadline:
                    raise RankFailed(f"not all trainers of this node have connected within {_ALL_HERE:.0f} s")
                self._changed.wait(0.2)

    def _links(self, hello: Mapping[str, Any]) -> Mapping[int, socket.socket]:
        if self._others is None:
            return {}
        addresses = [(host, port) for host, port in hello["addresses"]]
        # Trainers that are told of a missing agent at once wait as long as `timeout` for those that are told by this.
        limit = min(_ALL_HERE, hello["timeout"] / 2)
        return connect(hello["agent"], addresses, self._others, bytes.fromhex(hello["secret"]), limit)

    def _complete(self) -> bool:
        hellos = [hello for _, hello in self._hellos.values()]
        return bool(hellos) and set(self._hellos) == set(hellos[0]["agents"][hellos[0]["agent"]])

    def _accept(self) -> None:
        while True:
            sock, _ = self._trainers.accept()
            process, user = _peer(sock)
            if user != os.getuid():  # the names of abstract sockets are no secret
                sock.close()
                continue
            threading.Thread(target=self._greet, args=(sock, process), name="hello", daemon=True).start()

    def _greet(self, sock: socket.socket, process: int) -> None:
        """A trainer of this job, or somebody who wants to know when nothing is being written; process: that has opened
        the other end."""
        with contextlib.suppress(wire.Closed):
            hello, _, _ = wire.receive(sock)
            if hello["kind"] == "wait":
                with self._changed:
                    while not self._idle():
                        self._changed.wait(0.05)
                wire.send(sock, "idle")
                sock.close()
                return
            with self._changed:
                self._hellos[hello["rank"]] = (sock, hello)
                self._heard = time.monotonic()
                self._changed.notify_all()
            _end_with(sock, process)

    def _idle(self) -> bool:
        """Whether nothing is being written, and no trainer has handed over what no thread has seen yet."""
        return self._started and not self._busy and not any(_look(sock) for sock, _ in self._hellos.values())

    def _serve(self, rank: int, switch: Switch) -> None:
        sock, hello = self._hellos[rank]
        peers = Peers(switch, rank, hello["world"], hello["timeout"])
        worker = Worker(hello, peers, sock, self._metrics)
        try:
            while True:
                _look(sock, forever=True)
                with self._at_work():
                    message, _, fds = wire.receive(sock, most_fds=1)
                    answer = worker.save(message, fds)
                    with contextlib.suppress(wire.Closed):  # the trainer may have died: what it staged is written
                        wire.send(sock, answer)
        except wire.Closed:
            pass
        finally:  # also where this fails: the trainer must not wait for an answer
            peers.close()
            switch.end(rank, f"the trainer of rank {rank} has ended")
            with self._changed:
                del self._hellos[rank]
                self._changed.notify_all()
            sock.close()

    @contextlib.contextmanager
    def _at_work(self) -> Iterator[None]:
        with self._changed:
            self._busy += 1
        try:
            yield
        finally:
            with self._changed:
                self._busy -= 1
                self._changed.notify_all()


def _peer(sock: socket.socket) -> tuple[int, int]:
    """The process that opened the other end of a Unix socket, and its user."""
    process, user, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return process, user


def _end_with(sock: socket.socket, process: int) -> None:
    """Waits for the end of the process that opened the other end of a socket; nothing comes from there after what it
    has sent. Without this, a child that it had forked (a loader of data) would hold its copy of the socket open."""
    try:
        handle = os.pidfd_open(process)
    except ProcessLookupError:  # it has ended already
        pass
    except OSError:  # an old kernel, or a process of another container
        return
    else:
        poll = select.poll()
        poll.register(handle, select.POLLIN)
        poll.poll()
        os.close(handle)
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RD)


def _look(sock: socket.socket, forever: bool = False) -> int:
    """What a socket has: something to read, or an end behind that. Waits for either if `forever`."""
    poll = select.poll()
    poll.register(sock, select.POLLIN | _HUNG_UP)
    found = poll.poll(None if forever else 0)
    return found[0][1] if found else 0


class Worker:
    """Writes what one rank stages, one save at a time, and tells the trainer at `sock` how far it is."""

    def __init__(self, hello: Mapping[str, Any], peers: Peers, sock: socket.socket, metrics: Metrics) -> None:
        self._hello, self._peers, self._sock, self._metrics = hello, peers, sock, metrics
        self._written, self._told = 0, 0.0
        self._session: Session | None = None
        self._cache = saving.PlanCache()
        self._memory = torch.empty(0, dtype=torch.uint8)

    def save(self, message: Mapping[str, Any], fds: list[int]) -> dict[str, Any]:
        """The outcome, as the trainer gets it: `record` and so on, or `error`, as (kind, message)."""
        self._written = 0
        with self._metrics.saving(self._peers.rank, sum(message["staged"])) as answer:
            answer |= self._save(message, fds)
        return answer

    def _save(self, message: Mapping[str, Any], fds: list[int]) -> dict[str, Any]:
        try:
            with self._peers.operation("save"):
                with self._peers.phase("save: take over"):
                    if "void" in message:
                        kind, said = message["void"]
                        raise getattr(errors, kind)(said)
                    session = self._opened()
                    captured, held = self._take(message, fds)
                parent = saving.parent_of(session, message["claim"], message["base"], message["seen"])
                done = saving.save(
                    session,
                    self._cache,
                    captured,
                    claim=message["claim"],
                    parent=parent,
                    step=message["step"],
                    layout=message["layout"],
                    numerics=message["numerics"],
                    held=held,
                )
        except Exception as error:
            if not isinstance(error, CkptError):
                traceback.print_exc()
            return {"error": [_kind(error), str(error)]}
        return {
            "record": [done.record.number, done.record.document],
            "bytes": done.bytes,
            "seconds": done.seconds,
            "phases": done.phases,
            "plan": done.plan,
            "contents": done.contents.lines(),
        }

    def _opened(self) -> Session:
        if self._session is None:
            url, options = self._hello["url"], self._hello["storage_options"]
            store = open_store(url, options)
            context = arrays.context(threads=self._hello["threads"])
            kvstore = kvstore_spec(url, options)
            self._session = Session(store, kvstore, Log(store), self._peers, context, progress=self._progress)
        return self._session

    def _progress(self, written: int, total: int) -> None:
        self._metrics.wrote(written - self._written)
        self._written = written
        if total and time.monotonic() - self._told >= _TELL_EVERY:
            self._told = time.monotonic()
            with contextlib.suppress(wire.Closed):  # the trainer may have died: what it staged is written
                wire.offer(self._sock, {"progress": written / total})

    def _take(self, message: Mapping[str, Any], fds: list[int]) -> tuple[Captured, Held]:
        for fd in fds:
            self._memory = map_memory(fd, os.fstat(fd).st_size)
            os.close(fd)
        captured, held = unstage(Staged(*message["staged"]), self._memory)
        return captured, _sound(captured, held)


def _sound(captured: Captured, held: Held) -> Held:
    """The digests without those of tensors that the save may take apart into slices, which have others: their copies
    are compared with them here."""
    apart = {n: t for n, t in captured.tensors.items() if n.rpartition("/")[0] in captured.stateless and t.spec.stack}
    for name, found in digests_of(Captured(dict(apart))).items():
        if found != held[name]:
            raise CorruptCheckpoint(f"{name}: the staged copy is not what was captured; save again")
    return {name: boxes for name, boxes in held.items() if name not in apart}


def _kind(error: Exception) -> str:
    kinds = (c.__name__ for c in type(error).__mro__ if c.__module__ == errors.__name__)
    return next(kinds, CkptError.__name__)


def main(trainers: int, others: int, starter: int) -> None:
    """Runs an agent on two inherited descriptors of listening sockets, for the process that started it."""
    for number in ENDING:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)  # see `client`
    with contextlib.suppress(OSError):
        os.nice(_NICENESS)
    agent = Agent(socket.socket(fileno=trainers), socket.socket(fileno=others) if others >= 0 else None, starter)
    code = 0
    try:
        agent.run()
    except RankFailed as error:
        print(f"ckpt agent: {error}", file=sys.stderr, flush=True)
        code = 1
    os._exit(code)  # threads that still wait for a connection have nothing to lose
