"""TLS before the real S3 server of `tests.support.s3`, with a certificate of a private authority made for the test.

    with TlsProxy(s3.endpoint, tmp_path) as proxy:
        options = {**s3.storage_options, "endpoint": proxy.endpoint, "ca_bundle": str(proxy.authority)}

Bytes and the Host header pass unchanged, so that signatures stay valid.
"""

import contextlib
import socket
import ssl
import subprocess
import threading
from pathlib import Path
from types import TracebackType
from typing import Self

_SECONDS = 30.0


def make_authority(folder: Path) -> tuple[Path, Path]:
    """A new authority's certificate, and one file with the key and certificate that it gave to 127.0.0.1."""
    authority, key, both = folder / "authority.pem", folder / "authority.key", folder / "server.pem"
    new = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
        "-days",
        "2",
    ]
    _run(*new, "-subj", "/CN=ckpt test authority", "-keyout", str(key), "-out", str(authority))
    server_key, server = folder / "server.key", folder / "server.crt"
    by = ["-CA", str(authority), "-CAkey", str(key), "-addext", "subjectAltName=IP:127.0.0.1"]
    by += ["-addext", "basicConstraints=critical,CA:FALSE"]
    _run(*new, *by, "-subj", "/CN=127.0.0.1", "-keyout", str(server_key), "-out", str(server))
    both.write_bytes(server_key.read_bytes() + server.read_bytes())
    return authority, both


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=30)


class TlsProxy:
    """Listens on 127.0.0.1 while it is open. authority: a PEM file that clients must trust."""

    def __init__(self, endpoint: str, folder: Path) -> None:
        """endpoint: of the server behind it, http://host:port; folder: for the certificates."""
        host, port = endpoint.removeprefix("http://").split(":")
        self._server = (host, int(port))
        self.authority, both = make_authority(folder)
        self._tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._tls.load_cert_chain(both)
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self._stopping = threading.Event()

    @property
    def endpoint(self) -> str:
        return f"https://127.0.0.1:{self._listener.getsockname()[1]}"

    def __enter__(self) -> Self:
        self._listener.settimeout(0.1)
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopping.set()
        self._thread.join(10)
        self._listener.close()

    def _accept(self) -> None:
        while not self._stopping.is_set():
            try:
                client, _ = self._listener.accept()
            except TimeoutError:
                continue
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client:
            client.settimeout(_SECONDS)
            try:
                with self._tls.wrap_socket(client, server_side=True) as inside:
                    with socket.create_connection(self._server, _SECONDS) as server:
                        onward = threading.Thread(target=_copy, args=(inside, server), daemon=True)
                        onward.start()
                        _copy(server, inside)
                        onward.join(_SECONDS)
            except OSError:
                return  # the client does not trust the certificate, or has left


def _copy(source: socket.socket, target: socket.socket) -> None:
    try:
        while piece := source.recv(1 << 16):
            target.sendall(piece)
    except OSError:
        pass
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_RDWR)
