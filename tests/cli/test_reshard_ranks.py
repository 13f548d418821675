"""`ckpt-reshard --format ranks`, its plan, memory and jobs; and the command under torchrun."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import ckpt
from tests.cli.test_reshard import document, run
from tests.support.raw import attempt_folder, log_records, random_bits, raw, tree

FC1, FC2 = "model/decoder.layers.mlp.linear_fc1.weight", "model/decoder.layers.mlp.linear_fc2.weight"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """140 MiB, saved by one rank: several pieces for our format, several bands for the other."""
    tmp = tmp_path_factory.mktemp("root")
    tensors = {
        "decoder.layers.mlp.linear_fc1.weight": random_bits((4, 4096, 2048), torch.bfloat16, 1),
        "decoder.layers.mlp.linear_fc2.weight": random_bits((4, 2048, 2048), torch.bfloat16, 2),
        "embedding.word_embeddings.weight": random_bits((5000, 2048), torch.float32, 3),
        "odd": random_bits((7,), torch.float32, 4),
    }
    with ckpt.Checkpointer(tmp / "src") as ck:
        ck.save(1, {"model": tensors, "epoch": 3})
    return tmp / "src"


def state_id(root: Path) -> str:
    return str([r for r in log_records(root).values() if r["kind"] == "commit"][-1]["state_id"])


def test_there_and_back(root: Path, tmp_path: Path) -> None:
    there = document(root, tmp_path / "r", "--format", "ranks", "--to", "tp=2,pp=2,dp=2", "--jobs", 2, "--verify")
    assert there["destination"]["state_id"] == there["destination"]["read_again"] == state_id(root)
    assert there["in_sidecar"].keys() == {"epoch"} and there["not_carried"] == {}
    held = load_file(tmp_path / "r" / "rank_00005.safetensors")
    whole = random_bits((4, 4096, 2048), torch.bfloat16, 1)
    found = held["model.decoder.layers.mlp.linear_fc1.weight"]
    assert raw(found) == raw(torch.cat([whole[2:, 1024:2048], whole[2:, 3072:]], 1))
    back = document(tmp_path / "r", tmp_path / "b", "--step", 1, "--jobs", 2)
    assert back["source"]["format"] == "ranks" and state_id(tmp_path / "b") == state_id(root)
    assert tree(attempt_folder(tmp_path / "b") / "state") == tree(attempt_folder(root) / "state")


def test_all_threads_read_one_commit_though_a_job_commits_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def save(step: int) -> None:
        with ckpt.Checkpointer(tmp_path / "src") as ck:
            ck.save(step, {"model": {"w": random_bits((300, 200), torch.float32, step)}})

    module = importlib.import_module("ckpt.cli.reshard")
    plan, write = module.plan_files, module.write_ranks
    read: list[str] = []

    def plan_files(*arguments: Any) -> Any:
        save(2)
        return plan(*arguments)

    def write_ranks(sources: Any, *arguments: Any, **options: Any) -> str:
        read.extend(source.content.identity for source in sources)
        return str(write(sources, *arguments, **options))

    save(1)
    expected = state_id(tmp_path / "src")
    monkeypatch.setattr(module, "plan_files", plan_files)
    monkeypatch.setattr(module, "write_ranks", write_ranks)
    document(tmp_path / "src", tmp_path / "r", "--format", "ranks", "--to", "tp=1", "--jobs", 3)
    assert len(read) == 3 and len(set(read)) == 1 and expected in read[0] and state_id(tmp_path / "src") != expected


def test_the_plan_says_who_holds_what_and_writes_nothing(root: Path, tmp_path: Path) -> None:
    plan = document(root, tmp_path / "r", "--format", "ranks", "--to", "tp=2,pp=2,dp=2", "--plan", "--memory", "256MiB")
    layout = plan["layout"]
    assert not (tmp_path / "r").exists() and layout["no_rule"] == ["model/odd"]
    assert {r["what"]: r["cuts"] for r in layout["rules"]} == {
        "gate/up": [[0, "pp", 2], [1, "tp", 2]],
        "row-parallel": [[0, "pp", 2], [2, "tp", 2]],
        "vocabulary": [[0, "tp", 2]],
        "no rule": [],
    }
    assert layout["source_ranks"] == ["[0:4, 0:4096, 0:2048]"] and layout["example"]["name"] == FC1
    assert [r["is"] for r in layout["ranks"][4:6]] == [
        "[2:4, 0:1024, 0:2048] [2:4, 2048:3072, 0:2048]",
        "[2:4, 1024:2048, 0:2048] [2:4, 3072:4096, 0:2048]",
    ]
    assert [r["same_as"] for r in layout["ranks"]] == [None, None, 0, 1, None, None, 4, 5]
    moved = [r["moved"] for r in layout["ranks"]]
    part = (4 * 4096 * 2048 + 4 * 2048 * 2048) * 2 // 4 + 7 * 4
    assert moved == [0] + [part + 5000 * 2048 * 4 // 2] * 7  # tied embeddings: the last stage has them too
    document(root, tmp_path / "r", "--format", "ranks", "--to", "tp=2,pp=2,dp=2")
    sizes = {f.name: f.stat().st_size for f in (tmp_path / "r").glob("rank_*")}
    assert {r["file"]: r["bytes"] for r in layout["ranks"]} == sizes
    assert plan["plan"]["output"] == {"files": 8, "bytes": sum(sizes.values()) // 2}  # ranks of DP share files
    assert plan["plan"]["processes"] == [{"process": 0, "read": plan["bytes"], "moved": 0}]
    assert plan["plan"]["memory"] <= 256 << 20


def test_the_plan_for_people_draws_few_ranks_whole_and_many_in_short(root: Path, tmp_path: Path) -> None:
    few = run(root, tmp_path / "r", "--format", "ranks", "--to", "tp=4,pp=4", "--plan").output.splitlines()
    assert sum(line.split(" ")[0].isdigit() for line in few) == 16
    assert any(
        line.startswith("15 ") and line.rstrip().endswith("[3:4, 1536:2048, 0:2048] [3:4, 3584:4096, 0:2048]")
        for line in few
    )
    many = run(root, tmp_path / "r", "--to", "tp=4,dp=100", "--plan").output
    assert "392 more" in many and "399" in many and len(many.splitlines()) < 40
    assert "none needed: any layout loads this format" in many


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--format", "ranks"], 2, "--to"),
        (["--format", "hf", "--to", "tp=2"], 2, "--plan"),
        (["--to", "tp=2"], 2, "no effect"),
        (["--shard", "x=0:tp"], 2, "--to"),
        (["--format", "ranks", "--to", "tp=two"], 2, "not a size"),
        (["--format", "ranks", "--to", "tp=2,tp=2"], 2, "once each"),
        (["--format", "ranks", "--to", "tp=2,etp=3"], 2, "etp"),
        (["--format", "ranks", "--to", "tp=2", "--shard", "nobody=0:tp"], 6, "nobody"),
        (["--format", "ranks", "--to", "tp=3"], 6, "linear_fc1.weight"),
        (["--memory", "2Gib"], 2, "not a number of bytes"),
        (["--memory", "64MiB"], 6, "takes 192 MiB"),
        (["--jobs", "0"], 2, "jobs"),
        (["--format", "hf", "--jobs", "2"], 2, "one thread"),
    ],
)
def test_what_does_not_go_together_is_refused(
    root: Path, tmp_path: Path, arguments: list[str], code: int, words: str
) -> None:
    done = run(root, tmp_path / "b", *arguments)
    assert done.exit_code == code and words in done.stderr and done.stdout == "", done.output
    assert not (tmp_path / "b").exists()


TORCHRUN = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


@pytest.mark.ranks
@pytest.mark.parametrize("form", ["ckpt", "ranks", "dcp"])
def test_two_processes_of_torchrun_write_what_one_writes(root: Path, tmp_path: Path, form: str) -> None:
    options = ["--format", form, *(["--to", "tp=2,pp=2"] if form == "ranks" else [])]
    document(root, tmp_path / "one", *options)
    program = tmp_path / "program.py"
    program.write_text("from ckpt.cli.reshard import reshard\nreshard()\n")
    command = [*TORCHRUN, str(program), str(root), "two", *options, "--json"]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.getcwd()}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=150, env=env)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["destination"]["state_id"] == state_id(root)  # one process prints
    one, two = tmp_path / "one", tmp_path / "two"
    if form != "ckpt":
        assert tree(one) == tree(two)
        return
    for part in ("state", "ranks"):
        assert tree(attempt_folder(one) / part) == tree(attempt_folder(two) / part)
    assert (attempt_folder(one) / "manifest.json").read_bytes() == (attempt_folder(two) / "manifest.json").read_bytes()
