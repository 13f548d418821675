"""`ckpt-reshard` killed by SIGKILL and called again: alone, and under torchrun."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt.adapters.foreign.work_folder import WORK
from tests.adapters.foreign.in_pieces import write
from tests.cli.test_reshard import run
from tests.support.at_rest import committed
from tests.support.raw import random_bits, tree

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

# The command with small pieces, which dies once so many pieces are finished that the file `pieces` says.
PROGRAM = """
import os, signal, sys
from functools import partial
from pathlib import Path
from ckpt.adapters.foreign.formats import OUTPUTS
from ckpt.cli import reshard
limit = Path("limit")
def fault(point):
    there = len(list(Path("out/{work}/pieces").glob("*.json")))
    if point == "files.piece" and limit.exists() and there >= int(limit.read_text()):
        os.kill(os.getpid(), signal.SIGKILL)
for form in ("dcp", "megatron"):
    OUTPUTS[form] = partial(OUTPUTS[form], file_bytes=1 << 20)
OUTPUTS["hf"] = partial(OUTPUTS["hf"], piece_bytes=1 << 20)
reshard.write_pieces = partial(reshard.write_pieces, faults=fault)
reshard.write_ranks = partial(reshard.write_ranks, faults=fault)
reshard.band_for = lambda memory, jobs: 1 << 20
reshard.reshard()
"""
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About 20 MB."""
    path = tmp_path_factory.mktemp("killed") / "src"
    model = {f"w{n}": random_bits((1000, 1001), torch.float32, n) for n in range(5)}
    with ckpt.Checkpointer(path) as ck:
        ck.save(7, {"model": {**model, "tied": model["w3"]}, "epoch": 3})
    return path


def call(folder: Path, *arguments: object, torchrun: bool) -> subprocess.CompletedProcess[str]:
    (folder / "program.py").write_text(PROGRAM.replace("{work}", WORK))
    command = [sys.executable, "-W", "ignore", *(TORCHRUN if torchrun else []), "program.py", *map(str, arguments)]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.getcwd()}
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=100, env=env)


def finished(folder: Path) -> dict[str, tuple[int, int]]:
    """Inode and time of the record of each finished piece."""
    found = {p.name: p.stat() for p in (folder / "out" / WORK / "pieces").glob("*.json")}
    return {name: (stat.st_ino, stat.st_mtime_ns) for name, stat in found.items()}


@pytest.mark.ranks
def test_the_same_command_into_ranks_goes_on(root: Path, tmp_path: Path) -> None:
    arguments = [root, "out", "--format", "ranks", "--to", "tp=2", "--shard", "*=0:tp", "--json"]
    (tmp_path / "limit").write_text("6")
    killed = call(tmp_path, *arguments, torchrun=True)
    assert killed.returncode == 1, killed.stderr
    before = finished(tmp_path)
    assert len(before) >= 6 and not list((tmp_path / "out").glob("rank_*"))
    (tmp_path / "limit").unlink()
    done = call(tmp_path, *arguments, "--jobs", 2, "--verify", torchrun=False)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)["destination"]
    assert told["state_id"] == told["read_again"] == committed(root).content.state_id
    fresh = run(root, tmp_path / "fresh", "--format", "ranks", "--to", "tp=2", "--shard", "*=0:tp")
    assert fresh.exit_code == 0 and tree(tmp_path / "out") == tree(tmp_path / "fresh")


@pytest.mark.ranks
@pytest.mark.parametrize(("form", "torchrun"), [("hf", True), ("dcp", False), ("megatron", False)])
def test_the_same_command_goes_on(root: Path, tmp_path: Path, form: str, torchrun: bool) -> None:
    arguments = [root, "out", "--format", form, "--json"]
    (tmp_path / "limit").write_text("6")
    killed = call(tmp_path, *arguments, torchrun=torchrun)
    assert killed.returncode == (1 if torchrun else -signal.SIGKILL), killed.stderr
    before = finished(tmp_path)
    assert len(before) >= 6
    (tmp_path / "limit").unlink()
    other = run(root, tmp_path / "out", "--format", form, "--no-sidecar")
    assert other.exit_code == 6 and "unfinished conversion" in other.stderr and finished(tmp_path) == before
    names = [f"__{int(name[:6])}_0.distcp" for name in before] if form != "hf" else []
    made = {name: (tmp_path / "out" / WORK / "files" / f"{name}.part").stat() for name in names}
    done = call(tmp_path, *arguments, "--verify", torchrun=torchrun)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)["destination"]
    assert told["state_id"] == told["read_again"] == committed(root).content.state_id
    for name, stat in made.items():
        now = (tmp_path / "out" / name).stat()
        assert (now.st_ino, now.st_mtime_ns) == (stat.st_ino, stat.st_mtime_ns)
    cut: dict[str, Any] = {"piece_bytes": 1 << 20} if form == "hf" else {"file_bytes": 1 << 20}
    write(form, committed(root), tmp_path / "fresh", **cut)
    assert tree(tmp_path / "out") == tree(tmp_path / "fresh")
    assert run(root, tmp_path / "out", "--format", form).exit_code == 3  # it is finished
