"""The reference trainer from its command line: stopped on one layout, it goes on with the same bits on another."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.ports import free_ports

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [pytest.mark.ranks]


def train(run: Path, ranks: int, *options: str) -> str:
    launch = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks), f"--master-port={free_ports(1)[0]}"]
    small = ["--shards", "4", "--batch", "4"]
    done = subprocess.run(
        [sys.executable, *launch, "tools/reference_trainer.py", str(run), *small, *options],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_it_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    wanted = train(tmp_path / "one", 1, "--until", "4")
    first = train(tmp_path / "two", 2, "--tp", "2", "--until", "2", "--sequence-parallel")
    second = train(tmp_path / "two", 2, "--dp", "2", "--until", "4", "--zero")
    steps = re.findall(r"step \d+: loss .*", wanted)
    assert len(steps) == 4
    assert re.findall(r"step \d+: loss .*", first + second) == steps
    assert second.splitlines()[-1] == wanted.splitlines()[-1]
    assert wanted.splitlines()[-1].startswith("saved step 4: state ")
