"""`Checkpointer(url, fast=...)`: where steps are, which of two roots wins, and what neither a kill, a lost node,
damage, nor another run's leftovers may do."""

import logging
import shutil
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest

import ckpt
from ckpt.store.collect import take_over
from ckpt.store.log import Log
from ckpt.store.objects import open_store
from ckpt.trainer import draining
from ckpt.trainer.events import read_events
from tests.support.raw import attempt_folder, objects_of, tree
from tests.support.roots import Root
from tests.trainer.tiered import loaded, state, steps, tiered


@pytest.fixture
def durable(tmp_path: Path) -> Path:
    return tmp_path / "durable"


@pytest.fixture
def fast(tmp_path: Path) -> Path:
    return tmp_path / "fast"


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """Copies wait for the second event, and say by the first that they wait."""
    waiting, go = threading.Event(), threading.Event()
    real = draining.copy_commit

    def gated(*args: Any, **more: Any) -> Any:
        waiting.set()
        assert go.wait(60)
        return real(*args, **more)

    monkeypatch.setattr(draining, "copy_commit", gated)
    return waiting, go


def test_steps_go_on_to_the_durable_root(fast: Path, root: Root) -> None:
    options = {"storage_options": root.storage_options}
    with tiered(root.url, fast, **options) as ck:
        assert loaded(ck) is None
        for step in (1, 2, 3):
            ck.save(step, state(step))
            ck._tiers._draining.wait()  # type: ignore[union-attr]
        assert ck.steps() == [1, 2, 3] and ck.latest() == 3 and loaded(ck, 1) == 1
    assert steps(root.url, **options) == [1, 2, 3] and steps(fast) == [2, 3]
    shutil.rmtree(fast)  # another node
    with tiered(root.url, fast, **options) as ck:
        assert ck.steps() == [1, 2, 3] and loaded(ck) == 3
        ck.save(4, state(4))
    assert steps(root.url, **options) == [1, 2, 3, 4] and steps(fast) == [4]


def test_the_newest_is_copied_first_and_older_ones_not_at_all(durable: Path, fast: Path, gate: Any) -> None:
    waiting, go = gate
    with tiered(durable, fast) as ck:
        for step in (1, 2, 3, 4):
            ck.save(step, state(step))
            assert waiting.wait(60)
        assert steps(durable) == [] and loaded(ck) == 4
        go.set()
    copied = steps(durable)
    assert copied in ([1, 4], [4]), "1 may have been retired while it waited"
    assert steps(fast) == [3, 4]


def lost(durable: Path, fast: Path, gate: Any, step: int) -> None:
    """A job that goes on to a step, and is killed before that is copied."""
    waiting, go = gate
    go.clear()
    waiting.clear()
    ck = tiered(durable, fast)
    loaded(ck)
    ck.save(step, state(step))
    assert waiting.wait(60)
    assert ck._tiers is not None
    ck._tiers._draining.stop()
    go.set()
    ck._tiers._draining.wait()
    assert step not in steps(durable)


def test_a_step_that_is_only_in_the_fast_root_is_loaded_and_copied(durable: Path, fast: Path, gate: Any) -> None:
    go = gate[1]
    go.set()
    with tiered(durable, fast) as ck:
        ck.save(1, state(1))
    lost(durable, fast, gate, 2)
    with tiered(durable, fast) as ck:
        assert ck.steps() == [1, 2] and loaded(ck) == 2
    assert steps(durable) == [1, 2], "whoever has loaded it, copies it"
    with tiered(durable, fast) as ck:
        assert loaded(ck, 1) == 1
        assert ck._tiers is not None and ck._tiers._draining._asked is None


def test_what_a_lost_node_had_does_not_win_when_it_comes_back(durable: Path, tmp_path: Path, gate: Any) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    gate[1].set()
    with tiered(durable, first) as ck:
        ck.save(1, state(1))
    lost(durable, first, gate, 5)
    with tiered(durable, second) as ck:
        assert loaded(ck) == 1
        ck.save(2, state(2))
    with tiered(durable, first) as ck:
        assert ck.steps() == [1, 2] and loaded(ck) == 2
        ck.save(3, state(3))
        assert ck.steps() == [1, 2, 3]
    assert steps(durable) == [1, 2, 3]


def test_an_older_step_is_gone_on_from(durable: Path, fast: Path, gate: Any) -> None:
    gate[1].set()
    with tiered(durable, fast, keep_fast=None) as ck:
        for step in (1, 2, 3):
            ck.save(step, state(step))
            ck._tiers._draining.wait()  # type: ignore[union-attr]
        assert loaded(ck, 1) == 1
        ck.save(9, state(9))
        assert ck.steps() == [1, 9], "before it is copied, and after"
    assert steps(durable) == steps(fast) == [1, 9]
    shutil.rmtree(fast)
    with tiered(durable, fast) as ck:
        assert loaded(ck, 1) == 1
        ck.save(4, state(4))
        ck.save(5, state(5))
        assert ck.steps() == [1, 4, 5]
    assert steps(durable) in ([1, 4, 5], [1, 5]) and steps(fast) == [4, 5]


def test_a_fast_root_of_another_run_is_refused(durable: Path, fast: Path, tmp_path: Path) -> None:
    with tiered(tmp_path / "other", fast) as ck:
        ck.save(7, state(7))
    before = tree(fast) | {f"durable/{k}": v for k, v in tree(durable).items()}
    for act in (lambda ck: ck.load(state(0)), lambda ck: ck.save(1, state(1))):
        with tiered(durable, fast) as ck:
            assert ck.steps() == []
            with pytest.raises(ckpt.CkptError, match="it holds step 7 of another run"):
                act(ck)
    assert tree(fast) | {f"durable/{k}": v for k, v in tree(durable).items()} == before


def test_damage_in_the_fast_root_is_got_round(durable: Path, fast: Path, caplog: pytest.LogCaptureFixture) -> None:
    with tiered(durable, fast) as ck:
        ck.save(1, state(1))
    for damage in ("missing", "flipped"):
        file = objects_of(fast, "tensors/x")[0]
        data = bytearray(file.read_bytes())
        data[50] ^= 1
        file.unlink() if damage == "missing" else file.write_bytes(bytes(data))
        with caplog.at_level(logging.WARNING, "ckpt"), tiered(durable, fast) as ck:
            assert loaded(ck) == 1
        assert "loading step 1 from the durable root" in caplog.text
        caplog.clear()
        data[50] ^= 1
        file.write_bytes(bytes(data))
    shutil.rmtree(attempt_folder(durable))
    objects_of(fast, "tensors/x")[0].write_bytes(b"")
    with tiered(durable, fast) as ck, pytest.raises(ckpt.CorruptCheckpoint):
        ck.load(state(0))


def test_an_error_of_the_copy_is_raised_after_the_next_commit(durable: Path, fast: Path) -> None:
    with tiered(durable, fast) as ck:
        ck.save(1, state(1))
        ck._tiers._draining.wait()  # type: ignore[union-attr]
        shutil.move(durable / "attempts", durable / "away")
        (durable / "attempts").write_bytes(b"a file where a folder is needed")
        ck.save(2, state(2))
        ck._tiers._draining.wait()  # type: ignore[union-attr]
        with pytest.raises(ckpt.StoreError, match="a file stands where a folder is needed"):
            ck.save(3, state(3))
        assert ck.latest() == 3
        ck._tiers._draining.wait()  # type: ignore[union-attr]
        (durable / "attempts").unlink()
        shutil.move(durable / "away", durable / "attempts")
        with pytest.raises(ckpt.StoreError):  # of the copy of 3
            ck.save(4, state(4))
    assert steps(durable) == [1, 4]


def test_copies_are_events(durable: Path, fast: Path, tmp_path: Path) -> None:
    log = tmp_path / "events.jsonl"
    with tiered(durable, fast, events=log) as ck:
        first = ck.save(1, state(1))
        ck._tiers._draining.wait()  # type: ignore[union-attr]
        store = open_store(str(durable))
        take_over(store, Log(store))
        ck.save(2, state(2))
        with pytest.raises(ckpt.Fenced):
            ck.close()
    told = [e for e in read_events(log) if e["event"].startswith("copy.")]
    assert [(e["event"], e["step"]) for e in told] == [("copy.finished", 1), ("copy.failed", None)]
    assert told[0]["state_id"] == first.state_id and told[0]["bytes"] == first.bytes < told[0]["written"]
    assert told[1]["error"]["kind"] == "Fenced"


def test_a_full_durable_disk_is_told_and_the_next_copy_makes_up_for_it(fast: Path, tmp_path: Path) -> None:
    durable = tmp_path / "small"
    durable.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=100k", "none", str(durable)], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"no mounts here: {mounted.stderr.strip()}")
    try:
        with tiered(durable, fast) as ck:
            ck.save(1, state(1))
            with pytest.raises(ckpt.StoreError, match="No space left on device; free some space there"):
                ck._tiers._draining.wait()  # type: ignore[union-attr]
                ck.save(2, state(2))
            assert ck.steps() == [1, 2] and loaded(ck) == 2
            subprocess.run(["mount", "-o", "remount,size=8m", str(durable)], check=True)
            ck._tiers._draining.wait()  # type: ignore[union-attr]
            ck._tiers._draining.error()  # type: ignore[union-attr]
            ck.save(3, state(3))
        assert steps(durable)[-1] == 3
        with ckpt.Checkpointer(durable, read_only=True) as reader:
            assert loaded(reader) == 3
    finally:
        subprocess.run(["umount", str(durable)], check=True)


def test_closing_raises_what_became_of_the_last_copy(durable: Path, fast: Path) -> None:
    ck = tiered(durable, fast)
    ck.save(1, state(1))
    ck._tiers._draining.wait()  # type: ignore[union-attr]
    store = open_store(str(durable))
    take_over(store, Log(store))
    ck.save(2, state(2))
    with pytest.raises(ckpt.Fenced):
        ck.close()
    ck.close()
    assert steps(durable) == [1] and steps(fast) == [1, 2]


def test_a_wait_is_no_longer_than_it_may_be_and_says_what_is_still_under_way(durable: Path, fast: Path) -> None:
    own = draining.Draining(fast.as_uri(), durable.as_uri(), None, lambda outcome, seconds: None)
    go = threading.Event()

    def nothing_is_committed() -> None:
        go.wait(60)

    own.follow(nothing_is_committed, "claim")
    assert not own.wait(0.01)
    go.set()
    assert own.wait(60)


def test_each_root_has_its_own_rules(durable: Path, fast: Path) -> None:
    keep = ckpt.Keep(last=1, every=2, grace=0)
    with tiered(durable, fast, keep=keep, keep_fast=ckpt.Keep(last=1, grace=0)) as ck:
        for step in (1, 2, 3, 4, 5):
            ck.save(step, state(step))
            ck._tiers._draining.wait()  # type: ignore[union-attr]
        assert loaded(ck, 2) == 2, "from the durable root"
    assert steps(durable) == [2, 4, 5] and steps(fast) == [5]
    assert len(list(durable.glob("attempts/*/*"))) == 3 and len(list(fast.glob("attempts/*/*"))) == 1


@pytest.mark.parametrize(
    ("url", "more", "error", "said"),
    [
        ("durable", {"fast": "durable"}, ckpt.CkptError, "the durable root itself"),
        ("durable", {"fast": "s3://bucket/x"}, ckpt.Unsupported, "must be a directory"),
        ("durable", {"fast": "fast", "read_only": True}, ckpt.CkptError, "a reader has one root"),
    ],
)
def test_what_cannot_be_a_fast_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str, more: Any, error: type[Exception], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=said):
        ckpt.Checkpointer(url, **more)
    assert tree(tmp_path) == {}
