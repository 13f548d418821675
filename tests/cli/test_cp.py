"""`ckpt cp`: what it copies, what it says, and when it refuses."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

import ckpt
from ckpt.cli.main import main
from ckpt.store.log import Log
from ckpt.store.objects import open_store
from tests.support.raw import log_records, objects_of, tree
from tests.support.s3 import S3Server


def state(step: int) -> dict[str, Any]:
    return {"x": torch.full((200, 100), float(step)), "small": torch.arange(5) + step}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A root with steps 1 to 3."""
    with ckpt.Checkpointer(tmp_path / "run") as ck:
        for step in (1, 2, 3):
            ck.save(step, state(step))
    return tmp_path / "run"


def cp(*words: Any, env: dict[str, str] | None = None) -> Result:
    return CliRunner().invoke(main, ["cp", *map(str, words)], env=env)


def steps(folder: Path) -> list[int]:
    with ckpt.Checkpointer(folder, read_only=True) as ck:
        return ck.steps()


def test_one_step_and_then_the_rest(run: Path, tmp_path: Path) -> None:
    there = tmp_path / "there"
    first = cp(f"{run}@1", there)
    assert first.exit_code == 0, first.output
    ids = {r["step"]: r["state_id"] for r in log_records(run).values() if r["kind"] == "commit"}
    assert first.output == f"step          1  copied: 7 objects, 79.5 KiB, state id {ids[1]}\n"
    again = cp(f"{run}@1", there)
    assert again.exit_code == 0 and again.output == "step          1  is there already\n"
    assert cp(run, there).output.startswith("step          3  copied")
    assert steps(there) == [1, 3]
    before = tree(there)
    rest = cp(run, there, "--all")
    assert rest.exit_code == 0
    assert rest.output == f"step          2  left out: {there.as_uri()} has a later step of this run\n"
    assert tree(there) == before


def test_all_of_it_to_s3_and_back(run: Path, tmp_path: Path, s3: S3Server) -> None:
    url = s3.url(f"cp-{tmp_path.name}")
    out = json.loads(cp(run, url, "--all", "--json", env=s3.env).output)
    assert [(c["step"], c["copied"], c["found"]) for c in out["checkpoints"]] == [
        (1, True, 0),
        (2, True, 0),
        (3, True, 0),
    ]
    assert out["target"] == url and out["left_out"] == [] and all(c["bytes"] > 80_000 for c in out["checkpoints"])
    back = tmp_path / "back"
    done = cp(f"{url}@latest", back, env=s3.env)
    assert done.exit_code == 0, done.output
    live = state(0)
    with ckpt.Checkpointer(back, read_only=True) as ck:
        assert ck.load(live) is not None
    assert live["x"].numpy().tobytes() == state(3)["x"].numpy().tobytes()
    assert cp(run, url, "--all", env=s3.env).output == f"nothing to do: {url} has all steps\n"


def test_damage_has_its_exit_code_and_commits_nothing(run: Path, tmp_path: Path) -> None:
    file = objects_of(run, "tensors/x")[0]
    file.write_bytes(file.read_bytes()[:-9] + b"123456789")
    done = cp(run, tmp_path / "there")
    assert done.exit_code == 1 and "a stored object is damaged" in done.output
    assert "Traceback" not in done.output and steps(tmp_path / "there") == []
    partly = cp(run, tmp_path / "there", "--all", "--json")
    assert partly.exit_code == 1 and json.loads(partly.output)["error"]["kind"] == "CorruptCheckpoint"
    assert steps(tmp_path / "there") == [1, 2]


def test_what_it_refuses(run: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    with ckpt.Checkpointer(other) as ck:
        ck.save(9, state(9))
    before = tree(other)
    done = cp(run, other, "--take-over")
    assert done.exit_code == 6 and "its newest step is 9, from which step 3 does not descend" in done.output
    assert tree(other) == before, "nothing is claimed for it"
    with ckpt.Checkpointer(tmp_path / "empty") as ck:
        ck.load(state(0))
    alive = cp(run, tmp_path / "empty")
    assert alive.exit_code == 6 and f"process {os.getpid()} of this machine" in alive.output
    assert cp(run, tmp_path / "empty", "--take-over").exit_code == 0 and steps(tmp_path / "empty") == [3]


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["{run}@7", "{new}"], 4, "no committed step 7; there are 1, 2, 3"),
        (["{new}", "{run}"], 4, "nothing is committed here"),
        (["{run}@1", "{new}", "--all"], 2, "either --all or @STEP"),
        (["{run}", "{new}@2"], 2, "DST is a root"),
        (["{run}", "{run}"], 2, "the same root"),
        (["{run}"], 2, "Missing argument 'DST'"),
        (["{run}", "s3://no-such-bucket/x"], 3, "create the bucket"),
        (["gopher://x", "{new}"], 3, "gopher"),
        (["{run}", "memory://x"], 3, "no known conditional create"),
    ],
)
def test_exit_codes(run: Path, tmp_path: Path, s3: S3Server, words: list[str], code: int, said: str) -> None:
    before = tree(run)
    done = cp(*(word.format(run=run, new=tmp_path / "new") for word in words), env=s3.env)
    assert done.exit_code == code, done.output
    assert said in done.output
    assert tree(run) == before and not Log(open_store(str(tmp_path / "new"))).read().records
