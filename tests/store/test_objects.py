"""One suite over every store that can be committed to; the raw store is read past the code under test."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from ckpt.errors import StoreError
from ckpt.store import posix, remote
from ckpt.store.objects import NotFound, ObjectStore, kvstore_spec, open_store, probe
from ckpt.store.remote import s3_settings
from tests.support.ports import free_ports
from tests.support.roots import Root
from tests.support.s3 import BUCKET, S3Server

KEYS = [
    "a",
    "log/1.json",
    "d/ä ö/漢字",
    "d/per%20cent",
    "d/a+b&c=d?e#f",
    "d/x;y,'\"<>",
    "d/tail.",
    "d/" + "n" * 200,
]


@dataclass
class Raw:
    """The same root, through botocore or the file system."""

    root: Root
    client: Any = None

    def _key(self, key: str) -> dict[str, str]:
        return {"Bucket": BUCKET, "Key": f"{self.root.url.removeprefix(f's3://{BUCKET}/')}/{key}"}

    def put(self, key: str, data: bytes) -> None:
        if self.client:
            self.client.put_object(**self._key(key), Body=data)
        else:
            path = Path(self.root.url, key)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)

    def get(self, key: str) -> bytes | None:
        if self.client:
            try:
                return bytes(self.client.get_object(**self._key(key))["Body"].read())
            except self.client.exceptions.NoSuchKey:
                return None
        path = Path(self.root.url, key)
        return path.read_bytes() if path.exists() else None


@pytest.fixture
def raw(root: Root, request: pytest.FixtureRequest) -> Iterator[Raw]:
    client = request.getfixturevalue("s3").client() if root.on_s3 else None
    yield Raw(root, client)
    if client:
        client.close()


@pytest.fixture
def store(root: Root) -> ObjectStore:
    return open_store(root.url, root.storage_options)


def race(stores: list[ObjectStore], key: str, ways: int = 16) -> list[bytes]:
    """What the winners wrote, of `ways` threads that create the key at once."""
    ready = threading.Barrier(ways)

    def one(number: int) -> bytes | None:
        data = b"%d." % number * 1000
        ready.wait()
        return data if stores[number % len(stores)].create(key, data) else None

    with ThreadPoolExecutor(ways) as pool:
        return [data for data in pool.map(one, range(ways)) if data is not None]


@pytest.mark.parametrize("key", KEYS)
def test_put_get_list_delete(store: ObjectStore, raw: Raw, key: str) -> None:
    with pytest.raises(NotFound) as caught:
        store.get(key)
    assert str(caught.value).startswith(store.url + "/")
    for data in (b"first", b"", bytes(range(256)) * 300):
        store.put(key, data)
        assert raw.get(key) == data
        assert store.get(key) == data
        assert store.list() == {key: len(data)}
    assert store.create(key, b"late") is False
    assert raw.get(key) == data
    store.delete([key, key, "never/there"])
    assert raw.get(key) is None
    assert store.list() == {}
    assert store.create(key, b"again") is True
    assert raw.get(key) == b"again"


def test_the_url_opens_the_same_root(store: ObjectStore, root: Root) -> None:
    store.put("k", b"v")
    for url in (store.url, store.url + "/", root.url + "/"):
        again = open_store(url, root.storage_options)
        assert again.url == store.url
        assert again.get("k") == b"v"


def test_list_takes_any_string_as_prefix(store: ObjectStore, raw: Raw) -> None:
    for key in ("log/1.json", "log/10.json", "log/2.json", "logs/x", "b/c/d", "b/cc"):
        raw.put(key, b"12")
    assert list(store.list()) == ["b/c/d", "b/cc", "log/1.json", "log/10.json", "log/2.json", "logs/x"]
    assert list(store.list("log/")) == ["log/1.json", "log/10.json", "log/2.json"]
    assert list(store.list("log/1")) == ["log/1.json", "log/10.json"]
    assert list(store.list("log")) == ["log/1.json", "log/10.json", "log/2.json", "logs/x"]
    assert list(store.list("b/c")) == ["b/c/d", "b/cc"]
    assert store.list("b/c/d/e") == store.list("nothing/") == {}


def test_files_that_are_no_keys_are_not_listed(store: ObjectStore, raw: Raw) -> None:
    for key in ("log/.tmp-0123", ".hidden", "log/1.json", ".git/x"):
        raw.put(key, b"1")
    assert store.list() == {"log/1.json": 1}
    assert store.create("log/2.json", b"2")


@pytest.mark.parametrize("key", ["", "/a", "a/", "a//b", "..", "a/../b", ".", "./a", "a\0b", ".a", "a/.b", "\ud800"])
def test_bad_keys_are_refused_by_every_verb(store: ObjectStore, key: str) -> None:
    verbs: list[Callable[[], object]] = [
        lambda: store.get(key),
        lambda: store.put(key, b""),
        lambda: store.create(key, b""),
        lambda: store.delete([key]),
    ]
    if key not in ("", "a/"):
        verbs += [lambda: store.list(key), lambda: store.sync(key)]
    for verb in verbs:
        with pytest.raises(StoreError, match="bad key"):
            verb()


def test_the_store_is_never_stale(store: ObjectStore, root: Root) -> None:
    other = open_store(root.url, root.storage_options)
    assert store.list() == {}
    with pytest.raises(NotFound):
        store.get("log/1")
    other.put("log/1", b"one")
    assert store.list("log/") == {"log/1": 3}
    assert store.get("log/1") == b"one"
    other.put("log/1", b"three")
    assert store.list("log/") == {"log/1": 5}
    assert store.get("log/1") == b"three"
    other.delete(["log/1"])
    assert store.list("log/") == {}
    with pytest.raises(NotFound):
        store.get("log/1")


def test_sixteen_threads_one_winner(store: ObjectStore, root: Root, raw: Raw) -> None:
    stores = [store, open_store(root.url, root.storage_options)]
    rounds = 2 if root.on_s3 else 20  # the server lets the losers of a race wait, a second at a time
    for number in range(rounds):
        key = f"log/{number}.json"
        (winner,) = race(stores, key)
        assert raw.get(key) == winner
    assert len(store.list()) == rounds


def test_probe_passes_and_leaves_nothing(store: ObjectStore) -> None:
    probe(store)
    assert store.list() == {}


def test_many_objects_are_listed_and_deleted(store: ObjectStore, raw: Raw) -> None:
    keys = [f"many/{number:04}" for number in range(1005)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda key: raw.put(key, b"x"), keys))
    assert list(store.list("many/")) == keys
    store.delete(keys[1:])
    assert store.list() == {keys[0]: 1}


def test_sync_may_name_anything(store: ObjectStore) -> None:
    store.sync("")
    store.put("a/b/c", b"")
    for prefix in ("", "a", "a/", "a/b", "a/b/c", "not/there"):
        store.sync(prefix)


def test_the_array_driver_sees_the_same_root(store: ObjectStore, root: Root) -> None:
    import tensorstore as ts

    arrays = ts.KvStore.open(kvstore_spec(root.url, root.storage_options)).result()
    store.put("ä %/x", b"from objects")
    assert arrays.read("ä %/x").result().value == b"from objects"
    arrays.write("ä %/y", b"from arrays").result()
    assert store.get("ä %/y") == b"from arrays"


# The file system


def test_sixteen_ways_over_processes_one_winner(tmp_path: Path) -> None:
    code = """
import sys, threading, time
from ckpt.store.posix import PosixStore
store, me, start = PosixStore(sys.argv[1]), sys.argv[2], float(sys.argv[3])
def one(key, data, at):
    while time.time() < at: pass
    if store.create(key, data): sys.stdout.write(f"{key} {data.decode()}\\n")
for n in range(20):
    names = [f"{me}-{thread}".encode() for thread in range(4)]
    racers = [threading.Thread(target=one, args=(f"log/{n}", name, start + n / 20)) for name in names]
    for racer in racers: racer.start()
    for racer in racers: racer.join()
"""
    repository = str(Path(__file__).parents[2])
    start = str(time.time() + 2)
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path), str(me), start],
            env={**os.environ, "PYTHONPATH": repository},
            stdout=subprocess.PIPE,
            text=True,
        )
        for me in range(4)
    ]
    lines = [line for racer in racers for line in racer.communicate(timeout=60)[0].splitlines()]
    assert [racer.returncode for racer in racers] == [0] * 4
    assert sorted(line.split()[0] for line in lines) == sorted(f"log/{n}" for n in range(20))
    for key, data in (line.split() for line in lines):
        assert (tmp_path / key).read_text() == data
    assert sorted(path.name for path in (tmp_path / "log").iterdir()) == sorted(str(n) for n in range(20))


def test_put_and_create_are_durable_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, steps = tmp_path / "new" / "root", []
    fsync, link, replace = os.fsync, os.link, os.replace

    def traced_fsync(handle: int) -> None:
        steps.append("fsync " + os.path.relpath(os.readlink(f"/proc/self/fd/{handle}"), tmp_path))
        fsync(handle)

    monkeypatch.setattr(os, "fsync", traced_fsync)

    def traced(name: Callable[[str, str], None]) -> Callable[[str, str], None]:
        def step(old: str, new: str) -> None:
            steps.append("name")
            name(old, new)

        return step

    monkeypatch.setattr(os, "link", traced(link))
    monkeypatch.setattr(os, "replace", traced(replace))
    store = open_store(str(root))
    for verb in (store.put, store.create):
        steps.clear()
        verb(f"{verb.__name__}/d/k", b"x")
        named = steps.index("name")
        assert steps[named - 1].startswith(f"fsync new/root/{verb.__name__}/d/.tmp-")
        above = [f"new/root/{verb.__name__}/d", f"new/root/{verb.__name__}", "new/root", "new"]
        assert steps[named + 1 :] == [f"fsync {folder}" for folder in above]
        assert f"fsync new/root/{verb.__name__}" in steps[:named]
    steps.clear()
    store.sync("")
    assert steps.index("fsync new/root/put/d") < steps.index("fsync new/root/put") < len(steps) - 2
    assert steps[-2:] == ["fsync new/root", "fsync new"]


def test_a_failed_write_leaves_the_old_object(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(str(tmp_path))
    store.put("k", b"old")

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    for verb in (store.put, store.create):
        with pytest.raises(StoreError, match=r"k: cannot .*No space left.*free some space"):
            verb("k", b"new")
    assert (tmp_path / "k").read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["k"]


@pytest.mark.parametrize("code", sorted(posix.NO_LINK))
def test_without_hard_links_create_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def no_link(old: str, new: str) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "link", no_link)
    with pytest.raises(StoreError, match="no hard links here"):
        open_store(str(tmp_path)).create("log/1", b"x")
    assert os.listdir(tmp_path / "log") == []


def test_a_link_whose_answer_was_lost_is_a_win(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link = os.link

    def lossy(old: str, new: str) -> None:
        link(old, new)
        link(old, new)  # as NFS repeats it

    monkeypatch.setattr(os, "link", lossy)
    store = open_store(str(tmp_path))
    assert store.create("log/1", b"mine") is True
    assert store.create("log/1", b"late") is False
    assert store.get("log/1") == b"mine"


def test_links_that_lead_out_are_not_followed(tmp_path: Path) -> None:
    inside, outside = tmp_path / "in", tmp_path / "in-and-out"
    inside.mkdir()
    outside.mkdir()
    (outside / "secret").write_bytes(b"secret")
    (inside / "folder").symlink_to(outside)
    (inside / "file").symlink_to(outside / "secret")
    (inside / "own").write_bytes(b"own")
    (inside / "alias").symlink_to(inside / "own")
    store = open_store(str(inside))
    escapes: list[Callable[[], object]] = [
        lambda: store.get("file"),
        lambda: store.get("folder/secret"),
        lambda: store.put("folder/new", b""),
        lambda: store.create("folder/new", b""),
        lambda: store.delete(["folder/secret"]),
        lambda: store.list("folder/"),
        lambda: store.sync("folder"),
    ]
    for verb in escapes:
        with pytest.raises(StoreError, match="symbolic link leads out"):
            verb()
    assert store.get("alias") == b"own"
    assert store.list() == {"own": 3}
    assert sorted(os.listdir(outside)) == ["secret"]


def test_delete_takes_empty_folders_and_old_residue_along(tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "root"))
    store.put("a/b/c", b"")
    store.put("a/k", b"")
    old, new = tmp_path / "root/a/b/.tmp-old", tmp_path / "root/a/.tmp-new"
    old.write_bytes(b"")
    new.write_bytes(b"")
    os.utime(old, (0, 0))
    store.delete(["a/b/c", "a/k"])
    assert not (tmp_path / "root/a/b").exists()
    assert new.exists()
    new.unlink()
    store.put("a/k", b"")
    store.delete(["a/k"])
    assert os.listdir(tmp_path / "root") == []


def test_writers_and_deleters_of_one_folder_do_not_trip(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))

    def work(me: int) -> None:
        for _ in range(100):
            store.put(f"d/e/{me}", b"x")
            assert store.get(f"d/e/{me}") == b"x"
            store.delete([f"d/e/{me}"])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert os.listdir(tmp_path) == []


def test_folders_and_files_in_each_others_place(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    store.put("folder/file", b"")
    for key in ("folder", "folder/file/below"):
        with pytest.raises(NotFound):
            store.get(key)
        for verb in (store.put, store.create):
            with pytest.raises(StoreError, match="move it away"):
                verb(key, b"")
    store.delete(["folder/file/below"])
    assert store.list() == {"folder/file": 0}


def test_file_urls() -> None:
    assert open_store("file:///a%20b/c").url == open_store("/a b/c/").url == "file:///a%20b/c"
    assert open_store("file://localhost/x").url == "file:///x"
    assert kvstore_spec("/a b/c") == {"driver": "file", "path": "/a b/c/"}
    for url in (
        "file://host/x",
        "file://x",
        "",
        "s3://",
        "s3:///x",
        "s3://b/x?y",
        "s3://b/../c",
        "nosuch://x",
    ):
        with pytest.raises(StoreError):
            open_store(url)


# Other schemes


def test_other_schemes_read_but_do_not_create() -> None:
    import fsspec

    fsspec.filesystem("memory").pipe("/objects/log/1", b"one")
    store = open_store("memory://objects")
    assert store.list() == {"log/1": 3}
    assert store.get("log/1") == b"one"
    store.put("d/x", b"12")
    assert store.list("d/") == {"d/x": 2}
    with pytest.raises(NotFound, match="memory://objects/no"):
        store.get("no")
    for verb in (lambda: store.create("log/2", b""), lambda: probe(store)):
        with pytest.raises(StoreError, match="no known conditional create"):
            verb()
    store.delete(["d/x", "log/1", "log/1"])
    assert store.list() == {}
    with pytest.raises(StoreError, match="no array driver"):
        kvstore_spec("memory://objects")


def test_probe_finds_a_store_that_ignores_the_condition(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))

    def careless(key: str, data: bytes) -> bool:
        store.put(key, data)
        return True

    class Careless(posix.PosixStore):
        create = staticmethod(careless)  # type: ignore[assignment]

    with pytest.raises(StoreError, match="ignores create-if-absent"):
        probe(Careless(str(tmp_path)))
    assert store.list() == {}


# S3: refusals, settings, and what can happen on the wire


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
