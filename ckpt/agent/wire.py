"""Messages on a stream socket: JSON with file descriptors beside it, and raw bytes; and a handshake over TCP.

A message is the length of its JSON and of its raw bytes as two little-endian 64-bit numbers, then both. Over TCP each
side first proves that it knows the job's secret: HMAC-SHA256 of a nonce that the other side chose (RFC 2104).
"""

from __future__ import annotations

import hmac
import os
import select
import socket
import struct
from collections.abc import Sequence
from typing import Any

from ckpt.errors import RankFailed
from ckpt.state.values import Json, canonical_json, parse_json

_LENGTHS = struct.Struct("<QQ")
_NUMBER = struct.Struct("<Q")
_MOST_JSON = 1 << 32
_NONCE = 32


class Closed(RankFailed):
    """The other side is gone."""


def send(sock: socket.socket, document: Json, raw: Any = b"", fds: Sequence[int] = ()) -> None:
    """raw: bytes or a memoryview of them. fds go with the first bytes of a message (Unix sockets). Raises Closed."""
    body = canonical_json(document)
    head = _LENGTHS.pack(len(body), len(raw)) + body
    try:
        if fds:
            sent = socket.send_fds(sock, [head], list(fds))
            head = head[sent:]
        sock.sendall(head)
        if len(raw):
            sock.sendall(raw)
    except OSError as error:
        raise Closed(f"a connection broke: {error}") from error


def offer(sock: socket.socket, document: Json) -> bool:
    """Sends a small message if that need not wait for the other side to read, and says whether it did. Raises Closed.

    Linux calls a Unix stream socket writable while three quarters of its buffer are free, so the message fits."""
    poll = select.poll()
    poll.register(sock, select.POLLOUT)
    if not any(events & select.POLLOUT for _, events in poll.poll(0)):
        return False
    send(sock, document)
    return True


def receive(sock: socket.socket, most_fds: int = 0) -> tuple[Json, bytearray, list[int]]:
    """A message: its document, raw bytes and file descriptors. Raises Closed at the end of the stream."""
    fds: list[int] = []
    head = b""
    try:
        if most_fds:
            head, fds, _, _ = socket.recv_fds(sock, _LENGTHS.size, most_fds)
        head = bytes(head) + bytes(_exactly(sock, _LENGTHS.size - len(head), begun=bool(head)))
        json_length, raw_length = _LENGTHS.unpack(head)
        if json_length > _MOST_JSON:
            raise Closed("a connection gave what is no message")
        document = parse_json(bytes(_exactly(sock, json_length)), "message")
        return document, _exactly(sock, raw_length), fds
    except BaseException as error:
        for fd in fds:
            os.close(fd)
        if isinstance(error, OSError):
            raise Closed(f"a connection broke: {error}") from error
        raise


def _exactly(sock: socket.socket, count: int, begun: bool = True) -> bytearray:
    found = bytearray(count)
    view, have = memoryview(found), 0
    while have < count:
        got = sock.recv_into(view[have:])
        if not got:
            raise Closed("the other side ended in the middle of a message" if have or begun else "the other side ended")
        have += got
    return found


def send_number(sock: socket.socket, number: int) -> None:
    """Says who connects, before it is proved."""
    sock.sendall(_NUMBER.pack(number))


def receive_number(sock: socket.socket) -> int:
    """Who says it is that connects. Raises Closed."""
    try:
        return int(_NUMBER.unpack(_exactly(sock, _NUMBER.size))[0])
    except OSError as error:
        raise Closed(f"a connection broke: {error}") from error


def prove(sock: socket.socket, secret: bytes, me: str, other: str) -> None:
    """Both sides call it, with their roles turned round. Raises Closed where the other side lacks the secret."""
    mine = os.urandom(_NONCE)
    try:
        sock.sendall(mine)
        theirs = bytes(_exactly(sock, _NONCE))
        sock.sendall(_answer(secret, me, theirs))
        if not hmac.compare_digest(bytes(_exactly(sock, _NONCE)), _answer(secret, other, mine)):
            raise Closed("a connection from somebody who does not know the job's secret")
    except OSError as error:
        raise Closed(f"a connection broke: {error}") from error


def _answer(secret: bytes, role: str, nonce: bytes) -> bytes:
    return hmac.digest(secret, role.encode() + b"\0" + nonce, "sha256")
