"""The trainer's end: starts one agent on each node, hands staged states over, and waits for outcomes."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckpt.agent import registry, wire
from ckpt.engine.group import Group
from ckpt.engine.staging import SharedMemory, Staged
from ckpt.errors import CkptError, RankFailed
from ckpt.state.values import Json, canonical_json, parse_json

_BACKLOG = 1024
NODE = "CKPT_NODE"
"""Environment variable that names the node, where the host's name and boot id do not."""
ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that a scheduler or a person may send to all processes of a job when it is to end."""


@dataclass(frozen=True)
class _Door:
    """Where an agent can be reached: by the trainers of its node, and by other agents."""

    trainers: str
    address: tuple[str, int] | None


class AgentLink:
    """One rank's connection to the agent of its node. Not thread-safe."""

    def __init__(
        self,
        comm: Group,
        url: str,
        storage_options: Mapping[str, Any] | None,
        *,
        timeout: float,
        threads: int,
        metrics: tuple[str, int] | None = None,
    ) -> None:
        """Collective. Starts agents and connects to this node's. metrics: host and port at which each serves metrics.
        Raises RankFailed where one cannot be started."""
        nodes = [d.decode() for d in comm.all_gather(node().encode(), "agent: nodes")]
        names = sorted(set(nodes), key=nodes.index)
        agents = [[rank for rank, name in enumerate(nodes) if name == one] for one in names]
        mine = names.index(nodes[comm.rank])
        door: _Door | None = None
        with comm.phase("agent: start"):
            if comm.rank == agents[mine][0]:
                door = _start(url, alone=len(agents) == 1)
        told = comm.all_gather(canonical_json([door.trainers, door.address] if door else None), "agent: doors")
        doors = [parse_json(told[ranks[0]], "agent: door") for ranks in agents]
        secret = comm.broadcast(secrets.token_hex(32).encode(), "agent: secret").decode()
        self._memory_sent = -1
        hello: dict[str, Json] = {
            "kind": "trainer",
            "rank": comm.rank,
            "world": comm.world,
            "agent": mine,
            "agents": agents,
            "addresses": [address for _, address in doors] if len(agents) > 1 else [],
            "secret": secret,
            "url": url,
            "storage_options": dict(storage_options or {}),
            "timeout": timeout,
            "threads": threads,
            "metrics": metrics and list(metrics),
        }
        with contextlib.ExitStack() as connecting:  # where one cannot connect, no agent waits for it
            with comm.phase("agent: connect"):
                self._sock = _connect(doors[mine][0])
                connecting.callback(self._sock.close)
                wire.send(self._sock, hello)
            connecting.pop_all()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ckpt agent")

    def submit(
        self,
        message: Mapping[str, Json],
        staged: Staged | CkptError,
        memory: SharedMemory,
        progress: Callable[[float], None] = lambda fraction: None,
    ) -> Future[Json]:
        """Hands a staged state over, or an error for which the agents void the save: on return the agent has it,
        whatever happens here. The future has the agent's answer, or raises RankFailed if the agent is gone. The memory
        must be left alone until then. progress: called from another thread with the fraction of this rank's bytes that
        is written."""
        fds = [memory.fd] if memory.size != self._memory_sent else []
        self._memory_sent = memory.size
        if isinstance(staged, CkptError):
            whole: dict[str, Json] = {**message, "staged": [0, 0], "void": [type(staged).__name__, str(staged)]}
        else:
            whole = {**message, "staged": [staged.elements, staged.header]}
        try:
            wire.send(self._sock, whole, fds=fds)
        except wire.Closed as error:
            failed: Future[Json] = Future()
            failed.set_exception(self._gone(message, error))
            return failed
        return self._thread.submit(self._answer, message, progress)

    def _answer(self, message: Mapping[str, Json], progress: Callable[[float], None]) -> Json:
        while True:
            try:
                answer, _, _ = wire.receive(self._sock)
            except wire.Closed as error:
                raise self._gone(message, error) from error
            if "progress" not in answer:
                return answer
            progress(answer["progress"])

    @staticmethod
    def _gone(message: Mapping[str, Json], error: Exception) -> RankFailed:
        return RankFailed(
            f"the agent that was to write step {message['step']} is gone ({error}): it was killed, or there was no "
            "memory left; save again"
        )

    def close(self) -> None:
        """Lets the agent go; it ends when it has written what it has."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()
        self._thread.shutdown(wait=False)


def node() -> str:
    """Which node this is: ranks with one answer share an agent."""
    named = os.environ.get(NODE)
    if named:
        return named
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()} {boot.read_text().strip() if boot.exists() else ''}"


def _start(url: str, alone: bool) -> _Door:
    """Starts an agent in a session of its own, so that what ends the trainers' does not end it."""
    trainers = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    name = f"ckpt-agent-{secrets.token_hex(16)}"
    trainers.bind(f"\0{name}")
    trainers.listen(_BACKLOG)
    others = None if alone else socket.create_server(("", 0), backlog=_BACKLOG)
    fds = [s.fileno() for s in (trainers, others) if s is not None]
    # The agent inherits this: it takes seconds until it ignores them.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "ckpt.agent", str(fds[0]), str(fds[1] if len(fds) > 1 else -1), str(os.getpid())],
            pass_fds=fds,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    threading.Thread(target=process.wait, name="ckpt agent's end", daemon=True).start()  # leaves no zombie
    registry.add(registry.Entry(process.pid, url, name))
    address = None if others is None else (_own_address(), others.getsockname()[1])
    for sock in (trainers, others):
        if sock is not None:
            sock.close()
    return _Door(name, address)


def _own_address() -> str:
    """The address of this node in the network that the job's ranks meet in."""
    master = os.environ.get("MASTER_ADDR", "127.0.0.1")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((socket.gethostbyname(master), 9))
        return str(probe.getsockname()[0])


def _connect(name: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.connect(f"\0{name}")
    except OSError as error:
        sock.close()
        raise RankFailed(f"the agent of this node cannot be reached: {error}; see what it printed") from error
    return sock
