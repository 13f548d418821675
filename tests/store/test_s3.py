"""The store on S3: settings, refusals, and what is tried again."""

import os
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from ckpt.errors import StoreError
from ckpt.store import remote
from ckpt.store.objects import NotFound, ObjectStore, kvstore_spec, open_store
from ckpt.store.remote import s3_settings
from tests.support.ports import free_ports
from tests.support.s3 import S3Server


def verbs_of(store: ObjectStore) -> list[Callable[[], object]]:
    return [
        lambda: store.get("k"),
        lambda: store.put("k", b"x"),
        lambda: store.create("k", b"x"),
        lambda: store.list(),
        lambda: store.delete(["k"]),
    ]


@pytest.mark.s3
@pytest.mark.parametrize("changed", [{"secret_key": "wrong"}, {"access_key": "nobody"}, {"anonymous": True}])
def test_denied_is_said_at_once(s3: S3Server, changed: dict[str, Any]) -> None:
    options: dict[str, Any] = {**s3.storage_options, **changed}
    if "anonymous" in changed:
        del options["access_key"], options["secret_key"]
    store = open_store(s3.url("denied"), options)
    began = time.monotonic()
    for verb in verbs_of(store):
        with pytest.raises(StoreError, match=r"s3://.*/denied/.*HTTP 403.*check the keys") as caught:
            verb()
        assert not isinstance(caught.value, NotFound)
    assert time.monotonic() - began < 10


@pytest.mark.s3
def test_a_wrong_bucket_is_not_an_empty_one(s3: S3Server) -> None:
    store = open_store("s3://no-such-bucket/x", s3.storage_options)
    for verb in (lambda: store.get("k"), lambda: store.list(), lambda: store.delete(["k"])):
        with pytest.raises(StoreError, match="create the bucket no-such-bucket") as caught:
            verb()
        assert not isinstance(caught.value, NotFound)


def test_nobody_there_is_said_within_seconds() -> None:
    options = {"endpoint": f"http://127.0.0.1:{free_ports(1)[0]}", "access_key": "a", "secret_key": "b"}
    store = open_store("s3://bucket/x", options)
    began = time.monotonic()
    for verb in verbs_of(store)[2:4]:
        with pytest.raises(StoreError, match=r"check that http://127\.0\.0\.1:.* is the right endpoint"):
            verb()
    assert time.monotonic() - began < 15


@pytest.mark.s3
def test_the_environment_is_enough(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in s3.env.items():
        monkeypatch.setenv(name, value)
    store = open_store(s3.url("environment"))
    assert store.create("k", b"v")
    spec = kvstore_spec(s3.url("environment"))
    assert spec["aws_credentials"] == {"type": "environment"}
    assert (spec["endpoint"], spec["path"]) == (s3.endpoint, "environment/")
    same = kvstore_spec(s3.url("environment"), s3.storage_options)
    assert same == spec
    monkeypatch.setenv("AWS_SESSION_TOKEN", "another")
    other = kvstore_spec(s3.url("environment"), s3.storage_options)["aws_credentials"]
    assert other["type"] == "profile"
    assert s3.secret_key not in str(other)


@pytest.mark.s3
def test_a_forked_child_is_refused(s3: S3Server) -> None:
    store = open_store(s3.url("fork"), s3.storage_options)
    store.list()
    store._pid += 1  # type: ignore[attr-defined]
    with pytest.raises(StoreError, match="before a fork"):
        store.list()


@pytest.mark.parametrize(
    "options",
    [
        {"acess_key": "x"},
        {"access_key": "x"},
        {"session_token": "x"},
        {"anonymous": "false"},
        {"access_key": "x", "secret_key": "y", "profile": "z"},
        {"profile": "z", "anonymous": True},
        {"endpoint": "127.0.0.1:9000"},
        {"profile": "no-such-profile"},
    ],
)
def test_contradictory_settings_are_refused(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    with pytest.raises(StoreError):
        s3_settings(options)


def test_a_profile_brings_its_endpoint_and_region(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    config, credentials = tmp_path / "config", tmp_path / "credentials"
    config.write_text("[profile lab]\nregion = here-1\nendpoint_url = https://s3.lab.example/\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(credentials))
    settings = s3_settings({"profile": "lab"})
    assert (settings["endpoint"], settings["region"]) == ("https://s3.lab.example", "here-1")
    with pytest.raises(StoreError, match="profile lab gives no keys"):
        kvstore_spec("s3://bucket", {"profile": "lab"})
    credentials.write_text("[lab]\naws_access_key_id = a\naws_secret_access_key = b\n")
    spec = kvstore_spec("s3://bucket", {"profile": "lab"})
    files = {"credentials_file": str(credentials), "config_file": str(config)}
    assert spec["aws_credentials"] == {"type": "profile", "profile": "lab", **files}
    assert kvstore_spec("s3://bucket", {"region": "x"})["aws_credentials"] == {"type": "default"}
    monkeypatch.setenv("AWS_PROFILE", "lab")
    config.unlink()
    files["config_file"] = os.devnull
    assert kvstore_spec("s3://bucket")["aws_credentials"] == {"type": "profile", "profile": "lab", **files}
    config.write_text("[profile lab]\nregion = here-1\nendpoint_url = https://s3.lab.example/\n")
    monkeypatch.delenv("AWS_PROFILE")
    assert (spec["endpoint"], spec["aws_region"], spec["path"]) == ("https://s3.lab.example", "here-1", "")
    assert s3_settings({"profile": "lab", "endpoint": "http://x", "region": "y"})["endpoint"] == "http://x"
    with pytest.raises(StoreError, match="path-style only"):
        kvstore_spec("s3://bucket", {"profile": "lab", "path_style": False})


class Scripted:
    """An S3 endpoint that gives the next of its answers to each request: a status, or "drop" for none."""

    def __init__(self, *answers: int | str) -> None:
        self.asked: list[str | None] = []
        todo, asked = list(answers), self.asked

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_any(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length", 0)))
                asked.append(self.headers.get("If-None-Match"))
                answer = todo.pop(0)
                self.close_connection = True
                if isinstance(answer, int):
                    self.send_response(answer)
                    body = b"body" if self.command == "GET" else b""
                    self.send_header("Content-Length", str(len(body)))
                    self.end_headers()
                    self.wfile.write(body)

            do_GET = do_PUT = handle_any

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        endpoint = f"http://127.0.0.1:{self.server.server_port}"
        options = {"endpoint": endpoint, "access_key": "a", "secret_key": "b"}
        self.store = open_store("s3://bucket/x", options)

    def __enter__(self) -> "Scripted":
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.05,))
        self.thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


@pytest.mark.parametrize(("answers", "created"), [([200], True), ([409, 409, 200], True), ([429, 200], True)])
def test_create_by_status(answers: list[int], created: bool) -> None:
    with Scripted(*answers) as wire:
        assert wire.store.create("k", b"v") is created
    assert wire.asked == ["*"] * len(answers)


@pytest.mark.parametrize("answer", [412, 500, 503, "drop"])
def test_create_reads_back_what_may_be_its_own(answer: int | str) -> None:
    for data in (b"body", b"another"):
        with Scripted(answer, 200) as wire:
            assert wire.store.create("k", data) is (data == b"body")
        assert wire.asked == ["*", None]


@pytest.mark.parametrize(("answer", "times"), [(501, 1), (400, 4), (404, 4)])
def test_a_refused_create_is_an_error(answer: int, times: int) -> None:
    """A 400 or 404 without S3's document is not S3's own, and is tried again."""
    with Scripted(*[answer] * times, 200) as wire, pytest.raises(StoreError, match="cannot create"):
        wire.store.create("k", b"v")
    assert wire.asked == ["*"] * times


def test_what_may_pass_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with Scripted(503, "drop", 200, 500, 200) as wire:
        assert wire.store.get("k") == b"body"
        wire.store.put("k", b"v")
    assert wire.asked == [None] * 5
    with Scripted(*["drop"] * 9) as wire, pytest.raises(StoreError, match="is the right endpoint and up"):
        wire.store.get("k")
    assert len(wire.asked) == 4
    with Scripted(*[404] * 4) as wire, pytest.raises(StoreError, match="cannot read") as caught:
        wire.store.get("k")  # a 404 that is not S3's own says nothing about the key
    assert not isinstance(caught.value, NotFound)
    monkeypatch.setattr(remote, "FIRST_WAIT", 0.01)
    with Scripted(*[503, 429] * 3, 200) as wire:
        assert wire.store.get("k") == b"body"  # a busy server has not failed
    monkeypatch.setattr(remote, "PATIENCE", 0.1)
    with Scripted(*[503] * 99) as wire, pytest.raises(StoreError, match=r"HTTP 503.*too busy"):
        wire.store.get("k")
