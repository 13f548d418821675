"""The store in a directory: durability, links, folders that come and go."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ckpt.errors import StoreError
from ckpt.store import posix
from ckpt.store.objects import NotFound, create_same, kvstore_spec, open_store


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


def test_a_create_that_fails_is_an_error_unless_the_object_is_there(tmp_path: Path) -> None:
    class Failing(posix.PosixStore):
        stored = False

        def create(self, key: str, data: bytes) -> bool:
            if self.stored:
                super().create(key, data)
            raise StoreError(f"{key}: out of luck")

    store = Failing(str(tmp_path))
    with pytest.raises(StoreError, match="a: out of luck"):
        create_same(store, "a", b"data")
    assert store.list("") == {}
    store.stored = True
    create_same(store, "a", b"data")
    assert store.get("a") == b"data"
