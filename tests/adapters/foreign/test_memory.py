"""How much memory a conversion takes: far less than the state, whatever it reads and writes."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import ckpt

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

MIB = 1 << 20
BOUND = 180  # MiB by which a conversion may grow
PAIRS = [("ckpt", "ckpt"), ("dcp", "ckpt"), ("hf", "ckpt"), ("ckpt", "hf"), ("ckpt", "dcp")]
BOUNDS = {"ranks": "184MiB"}  # what --memory says, if anything

CHILD = """
import json, sys
from pathlib import Path
import torch
import ckpt
from ckpt.cli.reshard import reshard

BOUNDS = json.loads(sys.argv[2])

def memory(what):
    lines = open("/proc/self/status").read().splitlines()
    return int(next(line for line in lines if line.startswith(what)).split()[1]) >> 10

def convert(source, form, target):
    options = ["--to", "tp=2,pp=2"] if form == "ranks" else []
    bounded = ["--memory", BOUNDS[form]] if form in BOUNDS else []
    reshard([source, target, "--format", form, "--step", "1", "--json", *options, *bounded], standalone_mode=False)

with ckpt.Checkpointer("small") as ck:
    ck.save(1, {"w": torch.zeros(1000, 1000)})
grown = {}
for source, form in json.loads(sys.argv[1]):
    convert("small", form, f"{source}-{form}-small")  # so that what is imported and started once is there
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew from what is there
    before = memory("VmRSS")
    convert(source, form, f"{source}-{form}")
    grown[f"{source} to {form}"] = memory("VmHWM") - before
print(json.dumps(grown), file=sys.stderr)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One state of 400 MiB in three formats; in that of dcp its largest tensor is transposed."""
    tmp_path = tmp_path_factory.mktemp("memory")
    big = torch.arange(200 * MIB // 4, dtype=torch.int32).view(torch.float32)
    part = big[: 25 * MIB]
    state = {"big": big.view(5 * 1024, -1), "rows": part.view(-1, 64).clone(), "flat": part.clone()}
    with ckpt.Checkpointer(tmp_path / "ckpt") as ck:
        ck.save(1, state)
    dcp.save({**state, "big": state["big"].view(-1, 5 * 1024).T}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    (tmp_path / "hf").mkdir()
    save_file(state, tmp_path / "hf" / "model.safetensors")
    return tmp_path


@pytest.mark.parametrize(("pairs", "bound"), [(PAIRS, BOUND), ([("ckpt", "ranks")], 184)])
def test_a_conversion_takes_less_memory_than_the_state(folder: Path, pairs: list[tuple[str, str]], bound: int) -> None:
    """Each list in a process of its own, since memory that one conversion took is there for the next."""
    command = [sys.executable, "-W", "ignore", "-c", CHILD, json.dumps(pairs), json.dumps(BOUNDS)]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    shutil.rmtree(folder / "small", ignore_errors=True)
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=200, env=env)
    assert done.returncode == 0, done.stderr
    grown = json.loads(done.stderr.splitlines()[-1])
    assert grown.keys() == {f"{source} to {form}" for source, form in pairs}
    assert all(0 < mib < bound for mib in grown.values()), grown
