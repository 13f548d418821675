"""Messages and the handshake between agents, on real sockets."""

import os
import socket
import threading
import time
from typing import Any

import pytest
import torch

from ckpt.agent import server, wire
from ckpt.agent.peers import Peers, Switch, connect
from ckpt.errors import CkptError, RankFailed, StateMismatch


def test_messages_carry_documents_bytes_and_descriptors() -> None:
    one, other = socket.socketpair()
    reader, writer = os.pipe()
    wire.send(one, {"a": [1, "ä"]}, b"x" * 100_000, fds=[writer])
    os.close(writer)
    document, raw, fds = wire.receive(other, most_fds=1)
    assert document == {"a": [1, "ä"]} and bytes(raw) == b"x" * 100_000
    os.write(fds[0], b"through")
    assert os.read(reader, 10) == b"through"
    for fd in (reader, *fds):
        os.close(fd)
    one.close()
    with pytest.raises(wire.Closed, match="ended"):
        wire.receive(other, most_fds=1)
    with pytest.raises(wire.Closed):
        wire.send(other, 1)
    other.close()


@pytest.mark.parametrize("head", [b"\xff" * 16, b"\x05" + b"\0" * 15 + b"nojso", b"\x05\0"])
def test_what_is_no_message_is_refused(head: bytes) -> None:
    one, other = socket.socketpair()
    with one, other:
        one.sendall(head)
        one.shutdown(socket.SHUT_WR)
        with pytest.raises(CkptError, match=r"message|ended"):
            wire.receive(other)


def _both(mine: bytes, theirs: bytes) -> list[str]:
    one, other = socket.socketpair()
    said = ["", ""]

    def side(number: int, sock: socket.socket, secret: bytes) -> None:
        try:
            wire.prove(sock, secret, str(number), str(1 - number))
        except wire.Closed as error:
            said[number] = str(error)
        finally:
            sock.close()

    threads = [threading.Thread(target=side, args=(n, s, k)) for n, s, k in ((0, one, mine), (1, other, theirs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    return said


def test_only_who_knows_the_secret_may_connect() -> None:
    assert _both(b"secret", b"secret") == ["", ""]
    assert all("secret" in one for one in _both(b"secret", b"other"))


def test_an_answer_that_is_sent_back_proves_nothing() -> None:
    """Who knows no secret may try to have its own nonce answered, and return that."""
    one, other = socket.socketpair()

    def reflect() -> None:
        other.sendall(other.recv(32))
        other.sendall(other.recv(32))

    with one, other:
        thread = threading.Thread(target=reflect)
        thread.start()
        with pytest.raises(wire.Closed, match="secret"):
            wire.prove(one, b"secret", "0", "1")
        thread.join(10)


def _mesh(count: int) -> list[Switch]:
    """Agents of one rank each, connected over TCP; a stranger knocks first."""
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    addresses = [s.getsockname() for s in listeners]
    stranger = socket.create_connection(addresses[0])
    wire.send_number(stranger, 1)
    stranger.sendall(b"?" * 64)
    switches = [Switch(agent, [[rank] for rank in range(count)]) for agent in range(count)]

    def join(agent: int) -> None:
        for other, sock in connect(agent, addresses, listeners[agent], b"k", 20).items():
            switches[agent].link(other, sock)

    threads = [threading.Thread(target=join, args=(agent,)) for agent in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    for sock in (stranger, *listeners):
        sock.close()
    return switches


def _on_all(switches: list[Switch], work: Any) -> list[Any]:
    found: list[Any] = [None] * len(switches)

    def one(rank: int) -> None:
        try:
            found[rank] = work(Peers(switches[rank], rank, len(switches), 20), rank)
        except Exception as error:
            found[rank] = error

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(len(switches))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return found


def test_collectives_over_tcp() -> None:
    switches = _mesh(3)

    def work(peers: Peers, rank: int) -> Any:
        gathered = peers.all_gather(bytes([rank]) * (rank * 100_000), "gather")
        told = peers.broadcast(b"from 0" if rank == 0 else None, "tell")
        send = torch.full((30,), rank, dtype=torch.uint8)
        receive = torch.zeros(10 * sum(r != rank for r in range(3)), dtype=torch.uint8)
        sent = [0 if r == rank else 10 for r in range(3)]
        peers.exchange(send[:20], sent, receive, sent, "exchange")
        return [len(g) for g in gathered], told, receive.tolist()

    for rank, found in enumerate(_on_all(switches, work)):
        assert found == ([0, 100_000, 200_000], b"from 0", [r for r in range(3) if r != rank for _ in range(10)])

    def fail_in_phase(peers: Peers, rank: int) -> None:
        with peers.phase("work"):
            if rank == 1:
                raise StateMismatch("rank 1 it is")

    assert all(isinstance(e, StateMismatch) and "rank 1" in str(e) for e in _on_all(switches, fail_in_phase))

    def die(peers: Peers, rank: int) -> None:
        if rank == 2:
            switches[2].close()
            return
        peers.all_gather(b"", "wait")
        peers.all_gather(b"", "wait")

    found = _on_all(switches, die)
    assert all(isinstance(e, RankFailed) for e in found[:2])
    for switch in switches:
        switch.close()


def test_a_rank_that_ends_well_takes_no_message_of_others_along(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trainer closes when it has its answer, and its agent ends, before the answer is at another node."""
    switches = _mesh(3)
    send = switches[0]._send
    switches[0]._links = dict(sorted(switches[0]._links.items()))

    def slow(agent: int, head: Any, data: Any) -> None:
        deadline = time.monotonic() + 20
        while agent == 2 and bytes(data) == b"committed" and 1 not in switches[2]._ended:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        send(agent, head, data)

    monkeypatch.setattr(switches[0], "_send", slow)

    def work(peers: Peers, rank: int) -> Any:
        told = peers.broadcast(b"committed" if rank == 0 else None, "outcome")
        if rank == 1:
            switches[1].end(1, "the trainer of rank 1 has ended")
            switches[1].close()
        else:
            with pytest.raises(RankFailed, match=r"rank 1|a connection broke"):
                peers.all_gather(b"", "after")
        return told

    assert _on_all(switches, work) == [b"committed"] * 3
    for switch in switches:
        switch.close()


def test_an_agent_that_is_gone_is_not_waited_for() -> None:
    """The one that waits for it to connect would do so for minutes."""
    here, other, dead = (socket.create_server(("127.0.0.1", 0)) for _ in range(3))
    addresses = [s.getsockname() for s in (here, other, dead)]
    dead.close()
    with here, other, pytest.raises(RankFailed, match=r"agents \[2\] have ended before they connected"):
        connect(0, addresses, here, b"k", 90)


@pytest.mark.parametrize("said_hello", [False, True])
def test_an_agent_whose_trainers_have_ended_before_they_connected_ends(
    monkeypatch: pytest.MonkeyPatch, said_hello: bool
) -> None:
    """It would keep the next job waiting. The process that started it is another one than this one's parent."""
    monkeypatch.setattr(server, "_ACCEPTED", 0.3)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(f"\0ckpt-test-{os.getpid()}-{said_hello}")
    listener.listen(5)
    agent = server.Agent(listener, None, os.getppid() if said_hello else os.getpid())
    ours, theirs = socket.socketpair()
    if said_hello:
        agent._hellos[0] = (ours, {"agents": [[0, 1]], "agent": 0})
    theirs.close()
    with listener, ours, pytest.raises(RankFailed, match="rank 0 ended before" if said_hello else "started this agent"):
        agent._await_trainers()
