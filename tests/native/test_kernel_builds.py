"""Other builds of the kernels: with sanitizers, without x86 instructions, with CUDA."""

import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ckpt.fingerprint.reference import box_digest
from ckpt.geometry import Box
from ckpt.native.library import Library
from tests.support.native_build import build, sanitizer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("cmake") is None or shutil.which("c++") is None, reason="no C++ compiler"),
]
HERE = Path(__file__).resolve().parent


@pytest.mark.timeout(900)
def test_sanitizers_find_nothing(tmp_path: Path) -> None:
    """The tests of the kernels once more, on a build that stops at a wrong access or undefined behaviour."""
    runtime = sanitizer()
    if runtime is None:
        pytest.skip("the compiler has no AddressSanitizer")
    env = {
        **os.environ,
        "CKPT_TEST_LIBRARY": str(build(tmp_path, "-DCKPT_SANITIZE=ON")),
        "LD_PRELOAD": runtime,
        "ASAN_OPTIONS": "detect_leaks=0",  # Python and torch keep memory to the end
    }
    tests = [str(HERE / name) for name in ("test_kernels.py", "test_kernel_shapes.py", "test_kernel_copies.py")]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--capture=sys", "-p", "no:cacheprovider", *tests]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=800, cwd=HERE.parents[1])
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


def test_build_without_x86_instructions_gives_the_same_bytes(tmp_path: Path) -> None:
    portable = Library(build(tmp_path, "-DCMAKE_CXX_FLAGS=-DCKPT_PORTABLE"))
    assert portable.level() == 0
    for dtype in (torch.uint8, torch.bfloat16, torch.float32, torch.float64):
        whole = torch.arange(90_000 * 3, dtype=torch.int32).view(90_000, 3).to(dtype)
        for view in (whole, whole.t()):
            box = Box((1, 1), tuple(view.shape))
            shape = tuple(n + 2 for n in view.shape)
            assert portable.fingerprint([(view, box.offset, shape)]) == [box_digest(view, box, shape)]
            target = torch.empty(view.shape, dtype=dtype)
            portable.box_copy([(target, view)])
            assert target.view(torch.uint8).tolist() == view.contiguous().view(torch.uint8).tolist()


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc")
def test_cuda_code_compiles_with_warnings_as_errors(tmp_path: Path) -> None:
    """Compiled for one architecture; running it needs a GPU."""
    found = ctypes.CDLL(str(build(tmp_path, "-DCKPT_CUDA=ON", "-DCMAKE_CUDA_ARCHITECTURES=90")))
    assert found.ckpt_cuda_box_copy and found.ckpt_cuda_fingerprint and found.ckpt_cuda_tree_sum
