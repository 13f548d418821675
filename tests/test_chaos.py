"""A short run of tools/chaos; the long ones are run by hand."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize(("how", "kills"), [([], 5), (["--keep"], 5), (["--tiers"], 3)], ids=["", "keep", "tiers"])
def test_some_random_kills_lose_nothing(how: list[str], kills: int) -> None:
    command = [sys.executable, "tools/chaos.py", "--kills", str(kills), "--minutes", "2", "--seed", "11", *how]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    committed = re.search(r"(\d+) steps were committed; none is lost", done.stdout)
    assert committed is not None and int(committed[1]) > 0
    assert re.search(rf"kills: {kills}\n", done.stdout)
    retired = re.search(r"steps retired: (\d+)", done.stdout)
    if how == ["--keep"]:
        assert retired is not None and int(retired[1]) > 0
    if not how:
        assert retired is None or int(retired[1]) == 0
