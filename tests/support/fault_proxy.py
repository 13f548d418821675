"""A faulty network and a faulty server, in front of the real S3 server of `tests.support.s3`.

    with FaultProxy(s3.endpoint) as proxy:
        options = {**s3.storage_options, "endpoint": proxy.endpoint}
        proxy.on(puts("receipts/"), answer(503), times=3)

Each request goes to the first rule that fits and has turns left, and without one through to the server. Bytes and the
Host header pass unchanged, so that signatures stay valid. Faults are functions of an `Exchange`; they run in the thread
of its connection.
"""

import contextlib
import re
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

_SOCKET_SECONDS = 60.0  # no test waits so long for the server
_REASONS = {200: "OK", 400: "Bad Request", 403: "Forbidden", 404: "Not Found", 409: "Conflict"}
_CODES = {
    403: "AccessDenied",
    409: "ConditionalRequestConflict",
    412: "PreconditionFailed",
    500: "InternalError",
    503: "SlowDown",
}


@dataclass(frozen=True)
class Request:
    """A request's first line and headers, names in lower case; `text` is both as they came."""

    method: str
    path: str
    headers: dict[str, str]
    text: bytes

    @property
    def length(self) -> int:
        return int(self.headers.get("content-length", 0))

    @property
    def access_key(self) -> str:
        """As whom it was signed; empty for nobody."""
        found = re.search(r"Credential=([^/]+)/", self.headers.get("authorization", ""))
        return found[1] if found else ""


class Exchange:
    """One request on its way, and what a fault may do with it. Bodies are read when asked for."""

    def __init__(self, proxy: "FaultProxy", client: socket.socket, request: Request) -> None:
        self.request = request
        self._proxy, self._client = proxy, client
        self._body = b""

    def body(self, share: float = 1.0) -> bytes:
        """The request's body, or as much of its beginning."""
        if self._body == b"" and self.request.headers.get("expect") == "100-continue":
            self._client.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        wanted = int(self.request.length * share)
        while len(self._body) < wanted:
            piece = self._client.recv(min(1 << 16, wanted - len(self._body)))
            if not piece:
                raise ConnectionError("the client left in the middle of a body")
            self._body += piece
        return self._body

    def ask(self) -> bytes:
        """What the server answers to the request, once more at every call."""
        with socket.create_connection(self._proxy.server, _SOCKET_SECONDS) as server:
            server.sendall(self._head() + self.body())
            pieces = []
            while piece := server.recv(1 << 16):
                pieces.append(piece)
        return b"".join(pieces)

    def cut_to_server(self, share: float) -> None:
        """Sends the server the beginning of the request's body, and closes in good order."""
        with socket.create_connection(self._proxy.server, _SOCKET_SECONDS) as server:
            server.sendall(self._head() + self.body(share))
            server.shutdown(socket.SHUT_WR)
            server.settimeout(2)
            with contextlib.suppress(OSError):
                while server.recv(1 << 16):
                    continue

    def _head(self) -> bytes:
        head = re.sub(rb"(?im)^(expect|connection):.*\r\n", b"", self.request.text)
        return head.removesuffix(b"\r\n") + b"Connection: close\r\n\r\n"

    def reply(self, data: bytes) -> None:
        self.body()  # or closing would reset the connection before the reply is read
        self._client.sendall(data)

    def reset(self) -> None:
        """Ends the connection with a TCP reset."""
        self._client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._client.close()

    def wait(self, seconds: float) -> None:
        """Does nothing, until the client or the proxy gives up."""
        end = time.monotonic() + seconds
        self._client.settimeout(0.1)
        while time.monotonic() < end and not self._proxy.stopping.is_set():
            try:
                if not self._client.recv(1 << 16):
                    return
            except TimeoutError:
                continue


Fault = Callable[[Exchange], None]
Match = Callable[[Request], bool]


def answer(status: int, code: str = "", message: str = "made by a test") -> Fault:
    """S3's error document, instead of the server's answer; nothing is done."""
    code = code or _CODES.get(status, "Unknown")
    body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{message}</Message></Error>".encode()
    head = f"HTTP/1.1 {status} {_REASONS.get(status, 'Fault')}\r\nContent-Type: application/xml\r\n"
    head += f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"

    def fault(exchange: Exchange) -> None:
        # A HEAD has no body: the rest would be taken for the next answer.
        exchange.reply(head.encode() + (b"" if exchange.request.method == "HEAD" else body))

    return fault


def reset_request(exchange: Exchange) -> None:
    """A reset after half of the request's body; nothing is done."""
    exchange.body(0.5)
    exchange.reset()


def reset_reply(exchange: Exchange) -> None:
    """All is done; a reset after half of the reply's body."""
    exchange.reply(_half(exchange.ask()))
    time.sleep(0.05)  # a reset throws away what has not arrived
    exchange.reset()


def short_reply(exchange: Exchange) -> None:
    """All is done; the reply ends in good order after half of its body."""
    exchange.reply(_half(exchange.ask()))


def lost_reply(exchange: Exchange) -> None:
    """All is done; a reset instead of the reply."""
    exchange.ask()
    exchange.reset()


def twice(exchange: Exchange) -> None:
    """The request arrives twice, and the second answer comes back."""
    exchange.ask()
    exchange.reply(exchange.ask())


def hang(seconds: float = 3600.0) -> Fault:
    """No answer; nothing is done."""
    return lambda exchange: exchange.wait(seconds)


def hang_after(seconds: float = 3600.0) -> Fault:
    """All is done; no answer."""

    def fault(exchange: Exchange) -> None:
        exchange.ask()
        exchange.wait(seconds)

    return fault


def _half(reply: bytes) -> bytes:
    head, _, body = reply.partition(b"\r\n\r\n")
    return head + b"\r\n\r\n" + body[: len(body) // 2]


def every(request: Request) -> bool:
    return True


def puts(pattern: str = "") -> Match:
    return lambda request: request.method == "PUT" and re.search(pattern, request.path) is not None


def gets(pattern: str = "") -> Match:
    return lambda request: request.method == "GET" and re.search(pattern, request.path) is not None


@dataclass
class _Rule:
    match: Match
    fault: Fault
    after: int
    left: int | None
    hits: int = 0


class FaultProxy:
    """A context manager; rules may be added and dropped at any time, from any thread."""

    def __init__(self, endpoint: str) -> None:
        """endpoint: http://host:port of the server behind."""
        host, port = endpoint.removeprefix("http://").split(":")
        self.server = (host, int(port))
        self.stopping = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self._lock = threading.Lock()
        self._rules: list[_Rule] = []
        self._seen: list[Request] = []
        self._threads: list[threading.Thread] = []

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def on(self, match: Match, fault: Fault, *, times: int | None = None, after: int = 0) -> None:
        """From now on `fault` for requests that match: not for the first `after`, then for `times` (None: always)."""
        with self._lock:
            self._rules.append(_Rule(match, fault, after, times))

    def heal(self) -> int:
        """Drops all rules, and says how many faults there were since the last time."""
        with self._lock:
            rules, self._rules = self._rules, []
            self._seen = []
            return sum(rule.hits for rule in rules)

    def seen(self, match: Match = every) -> list[Request]:
        """The requests since the last `heal` that match."""
        with self._lock:
            return [request for request in self._seen if match(request)]

    def __enter__(self) -> Self:
        self._listener.settimeout(0.1)
        self._start(self._accept)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stopping.set()
        for thread in self._threads:
            thread.join(10)
        self._listener.close()

    def _start(self, run: Callable[[], None]) -> None:
        thread = threading.Thread(target=run, daemon=True)
        self._threads = [t for t in self._threads if t.is_alive()] + [thread]
        thread.start()

    def _accept(self) -> None:
        while not self.stopping.is_set():
            try:
                client, _ = self._listener.accept()
            except TimeoutError:
                continue
            self._start(lambda client=client: self._serve(client))  # type: ignore[misc]

    def _serve(self, client: socket.socket) -> None:
        """One request of a connection; the client makes a new one for the next."""
        with client:
            client.settimeout(_SOCKET_SECONDS)
            try:
                request = _read_head(client)
                if request is None:
                    return
                exchange = Exchange(self, client, request)
                fault = self._fault_for(request)
                if fault is None:
                    exchange.reply(exchange.ask())
                else:
                    fault(exchange)
            except OSError:
                return  # the client has given up, which is its right here

    def _fault_for(self, request: Request) -> Fault | None:
        with self._lock:
            self._seen.append(request)
            for rule in self._rules:
                if rule.left == 0 or not rule.match(request):
                    continue
                if rule.after > 0:
                    rule.after -= 1
                    continue
                rule.left = None if rule.left is None else rule.left - 1
                rule.hits += 1
                return rule.fault
        return None


def _read_head(client: socket.socket) -> Request | None:
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        piece = client.recv(1)
        if not piece:
            return None
        head += piece
    first, *lines = head.decode("latin-1").strip().split("\r\n")
    method, path, _ = first.split(" ", 2)
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return Request(method, path, headers, head)
