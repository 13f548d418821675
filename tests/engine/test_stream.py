"""A state at rest written as a step: killed at any point it goes on, and any number of processes write the same."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import ckpt
from ckpt.adapters.foreign.into import open_session, save_from
from ckpt.engine import stream
from ckpt.engine.rest import CommittedState
from ckpt.errors import CkptError, CorruptCheckpoint, StoreError
from ckpt.geometry import Catalogue
from tests.support.at_rest import committed
from tests.support.ranks import run_ranks
from tests.support.raw import attempt_folder, random_bits, tree

MIB = 1 << 20


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with a state of several pieces, once `PIECE` is made small."""
    root = tmp_path_factory.mktemp("stream") / "source"
    state = {f"w{n}": random_bits((600, 700 + n), torch.float32, n) for n in range(5)}
    state |= {f"t{n}": random_bits((9, n), torch.bfloat16, n) for n in range(5)}
    with ckpt.Checkpointer(root) as ck:
        ck.save(4, {**state, "big": random_bits((2500, 1000), torch.float32), "rank": ckpt.per_rank({"a": 1})})
    return root


def result(root: Path) -> dict[str, bytes]:
    """What does not depend on when and by whom it was written."""
    files = tree(attempt_folder(root))
    return {name: data for name, data in files.items() if name.startswith(("state/", "manifest", "ranks/"))}


# Killed


CHILD = """
import os, signal, sys
from pathlib import Path
from ckpt.adapters.foreign.into import open_session, save_from
from ckpt.engine import stream
from ckpt.engine.rest import CommittedState
stream.PIECE = 2 << 20
source, root, point, left = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
def fault(reached):
    global left
    left -= reached == point
    if left < 0:
        os.kill(os.getpid(), signal.SIGKILL)
session = open_session(source)
state = CommittedState(session, session.log.read().newest())
read = state.read
def reading(name, box):
    fault("read")
    return read(name, box)
state.read = reading
save_from(open_session(root, faults=fault), state, 4)
"""


def killed(source: Path, root: Path, point: str, left: int) -> None:
    command = [sys.executable, "-W", "ignore", "-c", CHILD, str(source), str(root), point, str(left)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == -signal.SIGKILL, done.stderr


@pytest.mark.parametrize(
    ("point", "left"),
    [("stream.object", 6), ("stream.piece", 3), ("stream.receipts", 0), ("read", 9), ("commit.manifest", 0)],
)
def test_after_a_kill_only_what_is_not_finished_is_written(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str, left: int
) -> None:
    monkeypatch.setattr(stream, "PIECE", 2 * MIB)
    root = tmp_path / "root"
    killed(source, root, point, left)
    finished = {p.name: p.stat().st_mtime_ns for p in root.rglob("pieces/*.json")}
    objects = {p: p.stat().st_mtime_ns for p in root.rglob("state/**/c/**/*") if p.name.isdigit() and p.is_file()}
    records = [json.loads(p.read_bytes()) for p in root.rglob("pieces/*.json")]
    state = committed(source)
    pieces = list(stream.cut(Catalogue.of(state.content.tensors)))
    expected = sum(len(piece) for n, piece in enumerate(pieces) if f"{n:06d}.json" not in finished)
    assert len(pieces) > 5 and (len(finished) == len(pieces)) == (point in ("stream.receipts", "commit.manifest"))
    written: list[str] = []
    made = save_from(open_session(str(root), faults=written.append), state, 4)
    assert written.count("stream.object") == expected and made.fresh
    after = {p.name: p.stat().st_mtime_ns for p in root.rglob("pieces/*.json")}
    assert {name: after[name] for name in finished} == finished
    assert sum(len(r["objects"]) for r in records) <= len(objects)
    assert sum(p.stat().st_mtime_ns == before for p, before in objects.items()) >= sum(
        len(r["objects"]) for r in records
    )
    fresh = tmp_path / "fresh"
    save_from(open_session(str(fresh)), state, 4)
    assert result(root) == result(fresh)
    assert made.record.document["state_id"] == state.content.state_id
    again = save_from(open_session(str(root), faults=written.append), state, 4)
    assert not again.fresh and again.record.number == made.record.number


def test_other_pieces_do_not_change_what_is_written(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_from(open_session(str(tmp_path / "a")), committed(source), 4)
    monkeypatch.setattr(stream, "PIECE", 1 * MIB)
    save_from(open_session(str(tmp_path / "b")), committed(source), 4)
    assert result(tmp_path / "a") == result(tmp_path / "b") == {name: data for name, data in result(source).items()}


# Any number of processes


def _write(rank: int, world: int, source: str, root: str) -> int:
    """Gives how many objects this rank wrote."""
    stream.PIECE = 2 * MIB
    points: list[str] = []
    save_from(open_session(root, timeout=60, faults=points.append), committed(Path(source)), 4)
    return points.count("stream.object")


def test_one_two_and_three_processes_write_the_same(source: Path, tmp_path: Path) -> None:
    save_from(open_session(str(tmp_path / "1")), committed(source), 4)
    for world in (2, 3):
        root = tmp_path / str(world)
        assert all(run_ranks(world, _write, str(source), str(root), timeout=60))
        assert result(root) == result(tmp_path / "1") == result(source)


# Bad states


class Lying:
    """A source that says another state id than that of its bits."""

    def __init__(self, true: CommittedState) -> None:
        from dataclasses import replace

        self.url, self.read = true.url, true.read
        self.content = replace(true.content, state_id="0" * 64)


def test_another_state_than_the_source_says_is_not_committed(source: Path, tmp_path: Path) -> None:
    with pytest.raises(CorruptCheckpoint, match="nothing was committed"):
        save_from(open_session(str(tmp_path / "root")), Lying(committed(source)), 4)
    assert not list((tmp_path / "root").rglob("receipts/*"))
    with ckpt.Checkpointer(tmp_path / "root") as ck:  # a job that comes by commits what has all its receipts
        assert ck.load({}) is None


@pytest.mark.parametrize("name", ["pieces/000001.json", "intent.json", "run.json"])
def test_a_damaged_record_of_an_attempt_is_an_error(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(stream, "PIECE", 2 * MIB)
    root = tmp_path / "root"

    def stop(point: str) -> None:
        if point == "stream.piece" and len(list(root.rglob("pieces/*"))) == 3:
            raise StoreError("stop")

    with pytest.raises(StoreError, match="stop"):
        save_from(open_session(str(root), faults=stop), committed(source), 4)
    (attempt,) = root.glob("attempts/*/*")
    (attempt / "pieces" / "note.txt").write_text("not a record")
    (attempt / name).write_bytes(b"{}")
    with pytest.raises(CkptError, match=name):
        save_from(open_session(str(root)), committed(source), 4)
    assert open_session(str(root)).log.read().newest() is None
