"""Frameworks are imported only by the hook that is for them, and one that is missing is named with its extra."""

import subprocess
import sys

FRAMEWORKS = {
    "megatron": (["megatron"], "megatron"),
    "bridge": (["megatron"], "megatron"),
    "transformers": (["transformers", "accelerate"], "transformers"),
    "lightning": (["lightning"], "lightning"),
}

PROBE = f"""
import importlib, sys
import ckpt
from ckpt.trainer.hooks import loop, run, titan

frameworks = {FRAMEWORKS!r}
for names, _ in frameworks.values():
    loaded = [name for name in names + ["lightning_fabric", "pytorch_lightning", "torchtitan"] if name in sys.modules]
    assert not loaded, loaded

for hook, (names, extra) in frameworks.items():
    for name in names:
        sys.modules[name] = None  # as if it were not installed
        try:
            importlib.import_module("ckpt.trainer.hooks." + hook)
        except ckpt.CkptError as error:
            assert isinstance(error, ImportError) and name in str(error), error
            assert f"pip install 'bitexact-ckpt[{{extra}}]'" in str(error), error
        else:
            raise AssertionError(hook + " was imported without " + name)
        del sys.modules[name]
"""


def test_importing_ckpt_imports_no_framework_and_a_missing_one_names_its_extra() -> None:
    done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
