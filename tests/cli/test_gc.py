"""`ckpt gc` and `ckpt keep`: what they do and say, and when they refuse."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

import ckpt
from ckpt.agent import registry
from ckpt.cli.main import main
from ckpt.store.log import Log
from ckpt.store.objects import open_store
from tests.support.raw import log_records, tree
from tests.support.roots import Root


def state(step: int) -> dict[str, Any]:
    return {"x": torch.full((200, 100), float(step)), "loss": 1.0 / (1 + step)}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A root with steps 1 to 4, whose job has ended: its claim names a process that is gone."""
    folder = tmp_path / "run"
    with ckpt.Checkpointer(folder) as ck:
        for step in (1, 2, 3, 4):
            ck.save(step, state(step))
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    rewrite_claim(folder, pid=ended.pid)
    return folder


def rewrite_claim(folder: Path, **fields: Any) -> None:
    file = folder / "log" / "000000000001.json"
    document = {**json.loads(file.read_bytes()), **fields}
    file.write_bytes(json.dumps(document, sort_keys=True, separators=(",", ":")).encode())


def gc(folder: Path | str, *options: str) -> Result:
    return CliRunner().invoke(main, ["gc", str(folder), *options])


def steps(folder: Path) -> list[int]:
    with ckpt.Checkpointer(folder, read_only=True) as ck:
        return ck.steps()


def test_a_dry_run_says_what_a_run_then_does(run: Path) -> None:
    before = tree(run)
    dry = gc(run, "--keep-last", "1", "--keep-every", "3", "--grace", "0", "--dry-run")
    assert dry.exit_code == 0, dry.output
    assert tree(run) == before
    assert dry.output.splitlines() == [
        "step          1  would be retired",
        "step          2  would be retired",
        "step          3  kept: every 3",
        "step          4  kept: the newest, last 1",
    ]
    done = gc(run, "--keep-last", "1", "--keep-every", "3", "--grace", "0")
    assert done.exit_code == 0, done.output
    assert done.output.splitlines()[:4] == [line.replace("would be ", "") for line in dry.output.splitlines()]
    assert done.output.count("deleted: attempts/") == 2 and steps(run) == [3, 4]
    commits = [r for r in log_records(run).values() if r["kind"] == "commit" and r["step"] > 2]
    kept = {f"attempts/{r['claim']}/{r['attempt']}/" for r in commits}
    left = {k: v for k, v in tree(run).items() if k.startswith("attempts/")}
    assert left == {k: v for k, v in before.items() if any(k.startswith(p) for p in kept)}


def test_one_document_for_machines(run: Path) -> None:
    first = json.loads(gc(run, "--keep-last", "2", "--json").output)
    assert first["dry_run"] is False and first["alive"] is None and first["removed"] == []
    assert [(c["step"], c["retired"], c["reasons"]) for c in first["commits"]] == [
        (1, True, []),
        (2, True, []),
        (3, False, ["last 2"]),
        (4, False, ["the newest", "last 2"]),
    ]
    assert [(w["step"], w["why"][:11]) for w in first["waiting"]] == [(1, "grace until"), (2, "grace until")]
    later = json.loads(gc(run, "--grace", "0", "--json").output)  # a collector's own claim stands in nobody's way
    assert sorted(one["why"] for one in later["removed"]) == ["retired", "retired"]
    assert all(one["bytes"] > 80_000 and one["objects"] > 5 for one in later["removed"])


def test_without_rules_nothing_is_retired(run: Path) -> None:
    assert gc(run, "--grace", "0").exit_code == 0
    assert steps(run) == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"pid": os.getpid()}, "process {pid} of this machine"),
        ({"pid": 1}, "process 1 of this machine"),
        ({"host": "elsewhere"}, "on host elsewhere"),
        ({"pid": None}, "cannot be seen from here"),
    ],
)
def test_a_job_that_may_be_running_is_not_fenced_off_unasked(run: Path, fields: dict[str, Any], why: str) -> None:
    rewrite_claim(run, **fields)
    before = tree(run)
    refused = gc(run, "--keep-last", "1")
    assert refused.exit_code == 6 and why.format(pid=os.getpid()) in refused.output
    assert "--take-over" in refused.output and tree(run) == before
    assert "needs --take-over" in gc(run, "--keep-last", "1", "--dry-run").output
    assert gc(run, "--keep-last", "1", "--take-over").exit_code == 0
    assert steps(run) == [4]


def test_a_job_whose_agent_is_there_may_be_running(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = open_store(str(run)).url
    monkeypatch.setattr(registry, "running", lambda: iter([registry.Entry(77, url, "x")]))
    refused = gc(run, "--keep-last", "1")
    assert refused.exit_code == 6 and "an agent of this machine, process 77" in refused.output


def test_a_job_that_was_taken_over_gets_fenced(run: Path) -> None:
    with ckpt.Checkpointer(run) as ck:
        ck.save(5, state(5))
        assert gc(run, "--keep-last", "1").exit_code == 6
        assert gc(run, "--keep-last", "1", "--take-over").exit_code == 0
        with pytest.raises(ckpt.Fenced, match=socket.gethostname()):
            ck.save(6, state(6))
    assert steps(run) == [5]


def test_marked_steps_stay(run: Path) -> None:
    assert CliRunner().invoke(main, ["keep", str(run), "1", "2"]).exit_code == 0
    assert CliRunner().invoke(main, ["keep", str(run), "2", "--undo"]).exit_code == 0
    done = gc(run, "--keep-last", "1", "--grace", "0")
    assert f"step          1  kept: marked by {socket.gethostname()}" in done.output and steps(run) == [1, 4]
    missing = CliRunner().invoke(main, ["keep", str(run), "2"])
    assert missing.exit_code == 4 and "no committed step 2; there are [1, 4]" in missing.output


@pytest.mark.parametrize(
    ("options", "code", "why"),
    [
        (["--keep-last", "0"], 2, "x>=1"),
        (["--grace", "-1"], 2, "x>=0"),
        (["--keep-best", "1"], 2, "best and metric go together"),
        (["--keep-best", "1", "--metric", "x"], 0, "has no x"),  # a tensor, not a value
        (["--keep-best", "1", "--metric", "loss"], 0, "best 1 of loss"),
    ],
)
def test_rules(run: Path, options: list[str], code: int, why: str) -> None:
    done = gc(run, *options)
    assert done.exit_code == code and why in done.output


def test_a_root_without_a_log_is_left_alone(tmp_path: Path) -> None:
    done = gc(tmp_path / "nothing", "--keep-last", "1")
    assert done.exit_code == 4 and "nothing was ever saved here" in done.output
    assert list(tmp_path.iterdir()) == []


@pytest.mark.s3
def test_on_s3_by_the_usual_variables(root: Root, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (root.storage_options or {}).items():
        names = {"endpoint": "AWS_ENDPOINT_URL", "region": "AWS_REGION", "access_key": "AWS_ACCESS_KEY_ID"}
        monkeypatch.setenv(names.get(name, "AWS_SECRET_ACCESS_KEY"), value)
    with ckpt.Checkpointer(root.url, storage_options=root.storage_options) as ck:
        for step in (1, 2):
            ck.save(step, state(step))
    assert "1  retired" in gc(root.url, "--keep-last", "1", "--take-over").output
    history = Log(open_store(root.url, root.storage_options)).read()
    assert [r.step for r in history.lineage()] == [2]
