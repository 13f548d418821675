"""Attempts that no commit names are invisible, and no name in a record leads out of the root."""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import ckpt
from tests.engine.states import refused_load, sample_state, state_bits
from tests.support.raw import attempt_folder, canonical, forge_commit, log_records, tree


class _Killed(BaseException):
    """Stands for the death of the process, together with `_forget_the_void`."""


def _forget_the_void(root: Path) -> None:
    """Removes what a process that lives on appends to the log after a failed save, and a dead one does not."""
    number, record = max(log_records(root).items())
    if record["kind"] == "void":
        (root / "log" / f"{number:012d}.json").unlink()


@pytest.mark.parametrize("point", ["save.begin", "save.intent", "save.object", "save.written"])
@pytest.mark.parametrize("older", [False, True], ids=["first save", "after a commit"])
def test_an_attempt_without_its_commit_is_invisible(point: str, older: bool, tmp_path: Path) -> None:
    def die(at: str) -> None:
        if armed and at == point:
            raise _Killed

    armed = False
    with ckpt.Checkpointer(tmp_path, faults=die) as ck:
        if older:
            ck.save(5, sample_state(10))
        armed = True
        with pytest.raises(_Killed):
            ck.save(6, sample_state(30))
    _forget_the_void(tmp_path)
    target = sample_state(20)
    with ckpt.Checkpointer(tmp_path) as ck:
        restored = ck.load(target)
        assert (ck.steps(), ck.latest()) == (([5], 5) if older else ([], None))
        assert (restored.step if restored else None) == (5 if older else None)
        assert state_bits(target) == state_bits(sample_state(10 if older else 20))
        with pytest.raises(ckpt.CkptError, match="no committed step 6; there are"):
            ck.load(target, step=6)
        ck.save(6, sample_state(30))  # the same step again
        ck.load(target)
    assert state_bits(target) == state_bits(sample_state(30))


def test_a_whole_attempt_that_nobody_committed_is_invisible(ck: ckpt.Checkpointer, tmp_path: Path) -> None:
    """A copy of a committed attempt, manifests and all, under another name: only the log makes a checkpoint."""
    root = tmp_path / "root"
    attempt = attempt_folder(root)
    shutil.copytree(attempt, attempt.parent / ("f" * 32))
    shutil.copytree(attempt.parent, root / "attempts" / ("e" * 32))
    with ckpt.Checkpointer(root) as fresh:
        assert fresh.steps() == [1]
        target = sample_state(20)
        assert fresh.load(target) is not None
    commits = [r for r in log_records(root).values() if r["kind"] == "commit"]
    assert [(r["step"], r["attempt"]) for r in commits] == [(1, attempt.name)]


ESCAPES = [
    {"claim": "../../outside", "attempt": "copy"},
    {"claim": "..", "attempt": "../outside/copy"},
    {"claim": "x", "attempt": "../../../outside/copy"},
    {"claim": "/", "attempt": "/outside/copy"},
    {"claim": ".", "attempt": "copy"},
    {"claim": "", "attempt": "copy"},
    {"claim": "a\0b", "attempt": "copy"},
    {"claim": "a", "attempt": ["copy"]},
]


@pytest.mark.parametrize("where", ESCAPES, ids=str)
@pytest.mark.parametrize("read_only", [True, False])
def test_a_log_record_cannot_lead_out_of_the_root(where: dict[str, Any], read_only: bool, tmp_path: Path) -> None:
    """A whole checkpoint lies outside, so that a path that escaped would load."""
    root, outside = tmp_path / "root", tmp_path / "outside"
    with ckpt.Checkpointer(root) as ck:
        ck.save(1, sample_state(10))
    outside.mkdir()
    attempt_folder(root).rename(outside / "copy")
    forge_commit(root, lambda d: d.update(where))
    before = tree(outside)
    with ckpt.Checkpointer(root, read_only=read_only) as ck:
        target = sample_state(20)
        with pytest.raises((ckpt.StoreError, ckpt.CorruptCheckpoint)) as caught:
            ck.load(target)
        assert ck.url in str(caught.value)
        assert state_bits(target) == state_bits(sample_state(20))
    assert tree(outside) == before


def test_a_commit_record_without_its_fields_is_refused(ck: ckpt.Checkpointer, tmp_path: Path) -> None:
    root = tmp_path / "root"
    kept = {f: f.read_bytes() for f in (root / "log").iterdir()}
    for field in ("attempt", "step", "manifest", "ranks", "run", "state_id"):
        forge_commit(root, lambda d, field=field: d.pop(field))  # type: ignore[misc]
        with ckpt.Checkpointer(root, read_only=True) as fresh:
            refused_load(fresh, sample_state(20), ckpt.CorruptCheckpoint, [fresh.url, "log/"])
        for file, data in kept.items():
            file.write_bytes(data)


@pytest.mark.parametrize("lies", [False, True])
def test_an_intent_that_names_another_attempt_is_never_completed(lies: bool, tmp_path: Path) -> None:
    """A dead job's attempt with all its receipts is completed by the next job, but not one whose intent lies."""

    def die(at: str) -> None:
        if at == "commit.manifest":
            raise _Killed

    root = tmp_path / "root"
    with ckpt.Checkpointer(root, faults=die) as ck, pytest.raises(_Killed):
        ck.save(1, sample_state(10))
    (attempt,) = (f.parent for f in (root / "attempts").rglob("intent.json"))
    _forget_the_void(root)
    assert [r["kind"] for r in log_records(root).values()] == ["claim"]
    if not lies:
        with ckpt.Checkpointer(root) as ck:
            restored = ck.load(sample_state(20))
            assert restored is not None and restored.step == 1
        return
    (attempt / "manifest.json").unlink()
    intent = json.loads((attempt / "intent.json").read_bytes()) | {"claim": "../../outside"}
    (attempt / "intent.json").write_bytes(canonical(intent))
    receipt = json.loads((attempt / "receipts" / "000000.json").read_bytes())
    receipt["intent"] = hashlib.sha256(canonical(intent)).hexdigest()
    (attempt / "receipts" / "000000.json").write_bytes(canonical(receipt))
    with ckpt.Checkpointer(root) as ck:
        assert ck.load(sample_state(20)) is None
        ck.save(2, sample_state(30))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["root"]
