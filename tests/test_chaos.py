"""A short run of tools/chaos; the long ones are run by hand."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
RUNS = {
    "": ([], []),
    "keep": (["--keep"], ["steps retired"]),
    "tiers": (
        ["--tiers", "--loss", "0.5"],
        ["steps copied on", "kills before the newest step was copied on", "nodes lost"],
    ),
}


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("how", "happened"), RUNS.values(), ids=list(RUNS))
def test_some_random_kills_lose_nothing(how: list[str], happened: list[str]) -> None:
    """However many kills it takes until all has happened: a slow machine gets to less between two of them."""
    command = [sys.executable, "tools/chaos.py", "--kills", "5", "--minutes", "6", "--seed", "11", *how]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=540)
    assert done.returncode == 0, done.stdout + done.stderr
    committed = re.search(r"(\d+) steps were committed; none is lost", done.stdout)
    assert committed is not None and int(committed[1]) > 0
    counts = {what: int(count) for what, count in re.findall(r"^  (.+): (\d+)$", done.stdout, flags=re.M)}
    assert counts["kills"] >= 5 and counts["loads here"] > 0
    assert [what for what in happened if not counts.get(what)] == [], done.stdout
    assert how or "steps retired" not in counts
