"""Installing ckpt: with a compiler it has its kernels, without one it still works, with the same bits."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
needs_cmake = pytest.mark.skipif(shutil.which("cmake") is None, reason="no cmake")

# Run with -S: neither the installation under test in this environment nor its import hooks are seen.
PROBE = """
import json, sys
sys.path[:0] = sys.argv[1:]
import torch
import ckpt
from ckpt.fingerprint import tensor_digest, to_hex
from ckpt.inspect.pages.show import show_page
from ckpt.native import library
page = {"step": 1, "url": "u", "run": {}, "tensors": [], "values": {}, "ranks": [{}]}
assert "<svg" not in show_page(page, [], [], "") and "Layout map" in show_page(page, [], [], "")
print(json.dumps([ckpt.__file__, library.describe(), to_hex(tensor_digest(torch.arange(1000).reshape(20, 50)))]))
"""


def install(target: Path, env: dict[str, str]) -> tuple[str, dict[str, str], str]:
    """Installs a copy of the sources and returns where ckpt lies, its kernels, and a digest it computes."""
    source = target / "source"
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(".*", "build", "__pycache__"))
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command = [*pip, "--no-build-isolation", "--target", str(target / "site"), str(source)]
    done = subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    paths = [str(target / "site"), sysconfig.get_path("purelib")]
    probe = subprocess.run(
        [sys.executable, "-S", "-c", PROBE, *paths], cwd=target, capture_output=True, text=True, timeout=100
    )
    assert probe.returncode == 0, probe.stderr[-4000:]
    where, kernels, digest = json.loads(probe.stdout)
    assert where.startswith(str(target / "site"))
    return where, kernels, digest


@pytest.mark.slow
@needs_cmake
def test_without_a_compiler_the_reference_twins_are_used(tmp_path: Path) -> None:
    """CMake is there (pip fetches it where it is not), and no compiler on the PATH. CMake would still look into the
    system's folders, so CXX names one that does not exist."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("cmake", "ninja", "make"):
        if found := shutil.which(name):
            (tools / name).symlink_to(found)
    _, kernels, digest = install(tmp_path, {"PATH": str(tools), "CXX": str(tools / "none"), "CUDACXX": ""})
    assert kernels["kernels"] == "reference"
    assert digest == _digest_here()


@pytest.mark.slow
@needs_cmake
@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")
def test_with_a_compiler_and_no_nvcc_the_host_kernels_are_built(tmp_path: Path) -> None:
    _, kernels, digest = install(tmp_path, {"SKBUILD_CMAKE_DEFINE": "CKPT_CUDA=OFF"})
    assert kernels["kernels"] == "native" and kernels["cuda"] == "not built"
    assert digest == _digest_here()


def _digest_here() -> str:
    import torch

    from ckpt.fingerprint import to_hex
    from ckpt.fingerprint.reference import box_digest
    from ckpt.geometry import Box

    return to_hex(box_digest(torch.arange(1000).reshape(20, 50), Box((0, 0), (20, 50)), (20, 50)))
