"""`ckpt verify`: what is whole is found whole, and every damaged thing is told, in every kind of file."""

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ckpt
from ckpt.inspect import verify as verifying
from ckpt.store.leases import read_leases
from ckpt.store.log import Log
from ckpt.store.objects import open_store
from tests.cli.commands import document, run, set_variables
from tests.engine.states import FOLDERS, sample_state, swap_chunks
from tests.support.raw import attempt_folder, forge_commit, forge_pinned, log_records, objects_of, random_bits, tree
from tests.support.roots import Root

GOLDEN = Path(__file__).parents[1] / "golden" / "format-1"


def large_state() -> dict[str, Any]:
    """`big` is in four objects of two chunks."""
    return sample_state(10, big=random_bits((2600, 1000), torch.float32, 1))


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    with ckpt.Checkpointer(folder) as ck:
        ck.save(1, sample_state(10, rank=ckpt.per_rank(4)))
    return folder


def test_a_whole_checkpoint(root: Root, monkeypatch: pytest.MonkeyPatch) -> None:
    set_variables(monkeypatch, root)
    with ckpt.Checkpointer(root.url, storage_options=root.storage_options) as ck:
        receipts = [ck.save(step, sample_state(step)) for step in (1, 2)]
    store = open_store(root.url)
    before = store.list()
    found = document("verify", root.url, "--jobs", 2)
    assert found["url"] == ck.url and found["leased"] is True
    (only,) = found["checkpoints"]
    assert (only["step"], only["ok"], only["damage"], only["tensors"]) == (2, True, [], 4)
    assert only["state_id"] == receipts[1].state_id and only["bytes"] > receipts[1].bytes
    both = document("verify", root.url, "--all")["checkpoints"]
    assert [(c["step"], c["state_id"]) for c in both] == [(r.step, r.state_id) for r in receipts]
    assert document("verify", f"{root.url}@1")["checkpoints"] == both[:1]
    assert store.list() == before and read_leases(store) == []
    text = run("verify", root.url)
    assert text.exit_code == 0 and re.match(rf"step 2  ok .*{receipts[1].state_id}\n$", text.output)


def test_a_checkpoint_of_an_old_release(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN, tmp_path / "old")
    (only,) = document("verify", tmp_path / "old")["checkpoints"]
    assert only["ok"] and only["state_id"].startswith("e0d1c36064ba5b5e")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_store_that_cannot_be_written(saved: Path) -> None:
    folders = [saved, *(f for f in saved.rglob("*") if f.is_dir())]
    for folder in folders:
        folder.chmod(0o555)
    try:
        done = run("verify", saved)
    finally:
        for folder in folders:
            folder.chmod(0o755)
    assert done.exit_code == 0 and done.stderr.startswith("no lease: the store cannot be written")


def test_a_lease_is_held_meanwhile(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, seen = open_store(str(saved)), []
    check = verifying.check_documents

    def look(*given: Any) -> Any:
        seen.extend(read_leases(store))
        return check(*given)

    monkeypatch.setattr(verifying, "check_documents", look)
    assert run("verify", saved).exit_code == 0
    assert [(lease.commit, lease.purpose) for lease in seen] == [(2, "verify")]


def _flips(data: bytes, seed: int, most: int) -> list[tuple[int, int]]:
    """Positions and bits: the ends, and a random sample."""
    rng = np.random.default_rng([seed, len(data)])
    at = {0, len(data) - 1, *rng.integers(0, len(data), most).tolist()}
    return [(position, int(rng.integers(0, 8))) for position in sorted(at)]


def _unpinned(data: bytes) -> set[int]:
    """Positions of what is in a claim for people only: times, hosts, process numbers and the world."""
    found = re.finditer(rb'"(?:host|time)":"[^"]*"|"(?:pid|world)":[0-9]+', data)
    return {i for m in found for i in range(*m.span())}


def test_every_flipped_bit_is_found_in_every_file(saved: Path) -> None:
    """A sample of positions of each file: log, intent, receipt, manifests, provenance, zarr.json, packed and others."""
    files = tree(saved)
    names = {"intent.json", "run.json", "manifest.json", "zarr.json", "000000.json"}
    assert {k.rpartition("/")[2] for k in files} >= names
    missed = []
    for number, (key, data) in enumerate(files.items()):
        claim = key == "log/000000000001.json"
        for position, bit in _flips(data, number, 200 if claim else 25):
            if claim and position in _unpinned(data):
                continue
            changed = bytearray(data)
            changed[position] ^= 1 << bit
            (saved / key).write_bytes(changed)
            if not _finds(saved, key):
                missed.append((key, position, bit))
        (saved / key).write_bytes(data)
    assert missed == []
    assert run("verify", saved).exit_code == 0


def _finds(root: Path, key: str) -> bool:
    """Whether a damaged file is reported by its name; a damaged log may be one that cannot be read at all."""
    store = open_store(str(root))
    try:
        history = Log(store).read()
        commit = history.lineage()[0]
    except (ckpt.CkptError, IndexError):
        return key.startswith("log/")
    done = verifying.verify(store, history, commit, jobs=1)
    named = {d.file for d in done.damage}
    if key.startswith("log/"):
        return bool(named)
    return key in named or any(key.startswith(folder) for folder in named if folder.endswith("/"))


@pytest.mark.s3
def test_flipped_bits_on_s3(root: Root, monkeypatch: pytest.MonkeyPatch) -> None:
    if not root.on_s3:
        pytest.skip("directories have a test of their own")
    set_variables(monkeypatch, root)
    with ckpt.Checkpointer(root.url, storage_options=root.storage_options) as ck:
        ck.save(1, large_state())
    store = open_store(root.url)
    names = ("big/c/0/1", "float32/c/0", "own/zarr.json", "run.json", "receipts/000000.json")
    keys = [next(k for k in store.list() if k.endswith(name)) for name in names]
    for key in keys:
        data = bytearray(store.get(key))
        data[len(data) // 2] ^= 1
        store.put(key, bytes(data))
    store.delete([missing := next(k for k in store.list() if k.endswith("big/c/1/0"))])
    (only,) = document("verify", root.url, code=1)["checkpoints"]
    # run.json is pinned, so nothing that depends on it can be trusted: it comes alone
    assert [d["file"] for d in only["damage"] if d["file"].endswith("run.json")]
    fixed = bytearray(store.get(keys[3]))
    fixed[len(fixed) // 2] ^= 1
    store.put(keys[3], bytes(fixed))
    (only,) = document("verify", root.url, code=1)["checkpoints"]
    assert {d["file"] for d in only["damage"]} >= {*keys[:3], missing}


def test_all_damage_is_told_with_its_tensor_chunk_and_file(tmp_path: Path) -> None:
    saved = tmp_path / "run"
    with ckpt.Checkpointer(saved) as ck:
        ck.save(1, large_state())
    big = objects_of(saved, FOLDERS["big"])
    data = bytearray(big[0].read_bytes())
    data[10] ^= 1
    big[0].write_bytes(data)
    big[1].unlink()
    big[2].write_bytes(big[2].read_bytes()[:-1])
    index = bytearray(big[3].read_bytes())
    index[-5] ^= 1
    big[3].write_bytes(index)
    own = objects_of(saved, FOLDERS["own"])[0]
    (own.parents[2] / "zarr.json").unlink()
    (only,) = document("verify", saved, code=1)["checkpoints"]
    prefix = attempt_folder(saved).relative_to(saved).as_posix()
    found = {(d["kind"], d["file"].removeprefix(prefix + "/state/tensors/")) for d in only["damage"]}
    assert found == {
        ("chunk", "big/c/0/0"),
        ("missing", "big/c/0/1"),
        ("size", "big/c/1/0"),
        ("object", "big/c/1/1"),
        ("missing", "own/zarr.json"),
    }
    assert not only["ok"] and only["state_id"] is None and only["tensors"] == 3
    (chunk,) = [d for d in only["damage"] if d["kind"] == "chunk"]
    assert chunk["tensors"] == ["big"] and chunk["chunk"] == [0, 0]
    assert chunk["box"] == {"offset": [0, 0], "extent": [650, 500]}
    text = run("verify", saved)
    assert text.exit_code == 1 and "DAMAGED  5 faults; sound: 3 tensors" in text.output
    assert all(word in text.output for word in ("big/c/0/0: digest mismatch", "[0:650, 0:500]", prefix))


def test_a_damaged_packed_chunk_names_the_tensors_in_it(saved: Path) -> None:
    (packed,) = objects_of(saved, "packed/float32")
    data = bytearray(packed.read_bytes())
    data[0] ^= 128
    packed.write_bytes(data)
    (only,) = document("verify", saved, code=1)["checkpoints"]
    (damage,) = only["damage"]
    assert damage["kind"] == "chunk" and damage["tensors"] == ["small"] and damage["box"]["extent"] == [15]


def test_swapped_chunks_are_told_by_the_fingerprint(saved: Path) -> None:
    swap_chunks(saved)
    (only,) = document("verify", saved, code=1)["checkpoints"]
    assert [(d["kind"], d["tensors"]) for d in only["damage"]] == [("fingerprint", ["big"]), ("state id", [])]


def _other(field: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda d: d.update({field: value})


@pytest.mark.parametrize("field, value", [("step", 7), ("bytes", 1), ("state_id", "0" * 64), ("note", "more")])
def test_a_forged_commit(saved: Path, field: str, value: Any) -> None:
    forge_commit(saved, _other(field, value))
    (only,) = document("verify", saved, code=1)["checkpoints"]
    assert any(field in d["problem"].replace("state id", "state_id") for d in only["damage"])


def test_forged_provenance_is_told_by_the_receipts(saved: Path) -> None:
    forge_pinned(saved, "run.json", _other("host", "elsewhere"))
    assert document("verify", saved)["checkpoints"][0]["ok"]  # host is for people; the forger pinned it
    forge_pinned(saved, "ranks/manifest.json", _other("ranks", [{}]))
    (only,) = document("verify", saved, code=1)["checkpoints"]
    assert [d["problem"] for d in only["damage"]] == ["ranks: not what intent and receipts give"]


@pytest.mark.parametrize("name", ["intent.json", "receipts/000000.json", "manifest.json", "run.json"])
def test_a_missing_document(saved: Path, name: str) -> None:
    (attempt_folder(saved) / name).unlink()
    (only,) = document("verify", saved, code=1)["checkpoints"]
    assert [(d["kind"], d["file"].endswith(name)) for d in only["damage"]] == [("missing", True)]


def test_all_looks_at_every_commit_and_goes_on_after_damage(saved: Path) -> None:
    with ckpt.Checkpointer(saved) as ck:
        ck.load(sample_state(0, rank=ckpt.per_rank(0)))
        ck.save(2, sample_state(20))
        ck.load(sample_state(0, rank=ckpt.per_rank(0)), step=1)
        ck.save(3, sample_state(30))  # beside 2
    commits = [r for r in log_records(saved).values() if r["kind"] == "commit"]
    first = saved / "attempts" / commits[0]["claim"] / commits[0]["attempt"] / "run.json"
    first.write_bytes(b"{}")
    found = document("verify", saved, "--all", code=1)["checkpoints"]
    assert [(c["step"], c["ok"]) for c in found] == [(1, False), (2, True), (3, True)]
    assert run("verify", f"{saved}@1", "--all").exit_code == 2


def test_memory_is_bounded_by_the_jobs(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No more objects are begun than the window allows, whatever their number."""
    began, ended, most = 0, 0, 0
    read = verifying._Check._read

    def counted(self: Any, item: Any) -> Any:
        nonlocal began, ended, most
        began += 1
        most = max(most, began - ended)
        try:
            return read(self, item)
        finally:
            ended += 1

    monkeypatch.setattr(verifying._Check, "_read", counted)
    done = run("verify", saved, "-j", 2)
    assert done.exit_code == 0 and began == 5 and most <= 2


def test_one_error_document_for_a_log_that_cannot_be_read(saved: Path) -> None:
    (saved / "log" / "000000000002.json").write_bytes(b"{")
    done = run("verify", saved, "--json")
    error = json.loads(done.stdout)["error"]
    assert done.exit_code == error["exit_code"] == 1 and error["kind"] == "CorruptCheckpoint"
