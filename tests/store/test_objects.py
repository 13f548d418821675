"""One suite over every store that can be committed to; the raw store is read past the code under test."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ckpt.errors import StoreError
from ckpt.store import posix
from ckpt.store.objects import NotFound, ObjectStore, kvstore_spec, open_store, probe
from tests.support.roots import Root
from tests.support.s3 import BUCKET

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
