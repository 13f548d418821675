"""`ckpt ls`: what a load offers, and with --all what else there is."""

import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from tests.cli.commands import document, run, set_variables
from tests.support.raw import attempt_folder, log_records
from tests.support.roots import Root


def state(step: int) -> dict[str, Any]:
    return {"x": torch.full((200, 100), float(step))}


def test_what_a_load_offers(root: Root, monkeypatch: pytest.MonkeyPatch) -> None:
    set_variables(monkeypatch, root)
    with ckpt.Checkpointer(root.url, storage_options=root.storage_options, layout=ckpt.Layout()) as ck:
        receipts = [ck.save(step, state(step)) for step in (5, 10)]
    found = document("ls", root.url)
    assert found["url"] == ck.url
    assert [(e["step"], e["status"], e["seq"], e["bytes"], e["world"]) for e in found["entries"]] == [
        (5, "current", 2, 80_000, 1),
        (10, "current", 3, 80_000, 1),
    ]
    assert [e["state_id"] for e in found["entries"]] == [r.state_id for r in receipts]
    assert found["entries"][0]["layout"]["tp"] == 1
    assert found["entries"][0]["time"][:4] == time.strftime("%Y", time.gmtime())
    lines = run("ls", root.url).output.splitlines()
    assert lines[0].split() == ["step", "time", "age", "size", "layout", "state", "id", "seq", "notes"]
    assert [line.split()[0] for line in lines[1:]] == ["5", "10"]
    assert receipts[1].state_id[:12] in lines[2] and " 78.1 KiB  1 rank " in lines[2] and " ago " in lines[2]


def test_branches_retired_marked_and_dead(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with ckpt.Checkpointer(folder) as ck:
        for step in (1, 2):
            ck.save(step, state(step))
    with ckpt.Checkpointer(folder) as ck:
        ck.load(state(0), step=1)
        ck.save(3, state(3))  # leaves 2 on a branch
        ck.save(3, state(4))
        ck.save(4, state(4))
    first = folder / "attempts" / log_records(folder)[1]["claim"]
    shutil.copytree(attempt_folder(folder), first / ("d" * 32))  # of an older claim, with no commit
    shutil.copytree(attempt_folder(folder), attempt_folder(folder).with_name("f" * 32))
    assert run("keep", folder, "1").exit_code == 0
    assert [(e["step"], e["status"]) for e in document("ls", folder)["entries"]] == [
        (1, "current"),
        (3, "current"),
        (4, "current"),
    ]
    everything = document("ls", folder, "--all")["entries"]
    assert [(e["step"], e["status"], e["seq"]) for e in everything[:5]] == [
        (1, "current", 2),
        (2, "branch", 3),
        (3, "shadowed", 5),
        (3, "current", 6),
        (4, "current", 7),
    ]
    assert everything[0]["notes"][0].startswith("marked by ")
    attempts = {e["attempt"].split("/")[2][0]: e for e in everything[5:]}
    assert attempts["d"]["status"] == "dead" and attempts["d"]["step"] == 4 and attempts["d"]["bytes"] > 80_000
    assert attempts["f"]["status"] == "unfinished" and attempts["f"]["seq"] is None
    text = run("ls", folder, "--all").output
    assert all(word in text for word in ("branch", "shadowed", "marked by", "dead", "unfinished", "d" * 32))
    # and once a collector has been there
    done = run("gc", folder, "--keep-last", "1", "--branches", "--take-over", "--grace", "0")
    assert done.exit_code == 0, done.output
    left = document("ls", folder, "--all")["entries"]
    assert [(e["step"], e["status"]) for e in left if e["status"] != "current"] == [
        (2, "retired"),
        (3, "retired"),
        (3, "retired"),
    ]
    assert {note for e in left if e["status"] == "retired" for note in e["notes"]} == {"data deleted"}


def test_damage_is_a_note(tmp_path: Path) -> None:
    with ckpt.Checkpointer(tmp_path / "run") as ck:
        ck.save(1, state(1))
    (attempt_folder(tmp_path / "run") / "run.json").write_bytes(b"{}")
    (entry,) = document("ls", tmp_path / "run")["entries"]
    assert entry["time"] is None and "run.json: not the bytes" in entry["notes"][0]
    assert "run.json: not the bytes" in run("ls", tmp_path / "run").output


def test_nothing_there(tmp_path: Path) -> None:
    done = run("ls", tmp_path / "nothing", "--json")
    assert done.exit_code == 4 and json.loads(done.stdout)["error"]["kind"] == "NothingCommitted"
    assert list(tmp_path.iterdir()) == []
    with ckpt.Checkpointer(tmp_path / "empty") as ck:
        with pytest.raises(ckpt.CkptError):
            ck.save(1, {"x": object()})
    if (tmp_path / "empty" / "log").exists():
        assert "nothing is committed" in run("ls", tmp_path / "empty").output
