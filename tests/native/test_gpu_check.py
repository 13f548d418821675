"""tools/gpu_check, as far as it runs without a GPU: it passes right kernels, and no wrong ones."""

import ctypes
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt.native.descriptors import CopyDescriptor
from ckpt.native.library import FILE, Library
from tests.support.emulated import Emulated
from tests.support.native_build import SOURCE, build
from tools import gpu_check
from tools.gpu_check_cases import KERNELS, check_bits, check_kernel
from tools.gpu_check_sides import NativeSide, Recorder, ReferenceSide, Row
from tools.gpu_check_speed import Sizes, measure, table

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")
UNINSTALLED = ["tensorstore", "zarr", "fsspec", "s3fs", "botocore", "click", "google_crc32c", "megatron"]


def run(*arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """The tool in a Python that cannot import what the machine with the GPU may lack."""
    script = f"""
import runpy, sys
sys.modules.update(dict.fromkeys({UNINSTALLED!r}))
sys.argv = ["gpu_check.py", *sys.argv[1:]]
runpy.run_path("tools/gpu_check.py", run_name="__main__")
"""
    command = [sys.executable, "-c", script, *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=280, cwd=ROOT, env={**os.environ, **(env or {})}
    )


@pytest.mark.slow
def test_right_host_kernels_pass(library: Library, tmp_path: Path) -> None:
    out = tmp_path / "table.md"
    done = run("--host", "--quick", "--library", str(library.path), "--out", str(out))
    assert done.returncode == gpu_check.EQUAL, done.stderr
    for kernel in [*KERNELS, "ckpt", "staging", "torch copy_"]:
        assert f"\n| {kernel} |" in done.stdout
    assert "DIFFERENT" not in done.stdout + done.stderr
    assert out.read_text().endswith(f"\n\n{done.stdout}")


@pytest.mark.slow
def test_a_library_with_one_wrong_constant_does_not_pass(library: Library, tmp_path: Path) -> None:
    """One bit of a multiplier of Philox."""
    source = Path(shutil.copytree(SOURCE, tmp_path / "source"))
    header = source / "include" / "ckpt" / "philox.h"
    right = header.read_text()
    wrong = right.replace("0xD2511F53", "0xD2511F51")
    assert wrong != right
    header.write_text(wrong)
    path = build(tmp_path / "build", source=source)
    done = run("--host", "--quick", "--library", str(path))
    assert done.returncode == gpu_check.DIFFERENT, done.stderr
    assert "DIFFERENT BITS: philox" in done.stderr
    assert "| **DIFFERENT** |" in done.stdout


class EmulatedRecorder(Recorder, Emulated):
    """The device code, as the tool wants it."""


class OneBitWrong(Library):
    """Each kernel changes one bit of the first number that it makes."""

    def _call(
        self, name: str, device: torch.device, arguments: list[Any], results: list[Any], threads: int | None = None
    ) -> None:
        super()._call(name, device, arguments, results, threads)
        if name == "fingerprint":
            results[0][1] ^= 1
        elif name == "box_copy":
            first = CopyDescriptor.from_address(arguments[0].value)
            _flip(first.dst, math.prod(first.extent[: first.ndim]))
        elif name == "tree_sum":
            _flip(results[0].value, arguments[3].value)
        else:
            _flip(arguments[0].value, arguments[1].value)


class Idle(Library):
    """Copies nothing."""

    def _call(
        self, name: str, device: torch.device, arguments: list[Any], results: list[Any], threads: int | None = None
    ) -> None:
        if name != "box_copy":
            super()._call(name, device, arguments, results, threads)


class IdleRecorder(Recorder, Idle):
    """That, as the tool wants it."""


class WrongRecorder(Recorder, OneBitWrong):
    """That, as the tool wants it."""


def _flip(address: int, count: int) -> None:
    if count:
        ctypes.c_uint8.from_address(address).value ^= 1


def native(path: Path) -> NativeSide:
    return NativeSide(Recorder(path), CPU)


@pytest.mark.parametrize("kernel", KERNELS)
def test_one_wrong_bit_is_found(library: Library, kernel: str) -> None:
    wrong = NativeSide(WrongRecorder(library.path), CPU)
    rows = check_kernel(kernel, wrong, native(library.path), quick=True)
    assert len(rows) > 30 and not any(row.equal for row in rows)


def test_timed_results_are_compared_too(library: Library) -> None:
    rows = measure(NativeSide(WrongRecorder(library.path), CPU), native(library.path), Sizes(1 << 20, 1), str)
    assert {row.kernel for row in rows if not row.equal} == set(KERNELS)
    assert all(row.equal == (row.kernel == "torch copy_") for row in rows)


def test_a_timed_copy_that_copies_nothing_is_found(library: Library) -> None:
    rows = measure(NativeSide(IdleRecorder(library.path), CPU), native(library.path), Sizes(1 << 20, 1), str)
    assert all(row.equal == (row.kernel != "box_copy") for row in rows)


@pytest.mark.slow
def test_all_cases_on_the_device_code(tmp_path: Path) -> None:
    """The very cases that will run on a GPU, on the emulated device."""
    if shutil.which("cmake") is None or shutil.which("c++") is None:
        pytest.skip("no CMake or no C++ compiler")
    path = build(tmp_path, "-DCKPT_EMULATE_DEVICE=ON")
    tested = NativeSide(EmulatedRecorder(path), CPU)
    rows = check_bits(tested, native(path), quick=False, say=str)
    rows += measure(tested, native(path), Sizes(4 << 20, 1), str)
    assert [row for row in rows if not row.equal] == []


def test_right_kernels_agree_with_the_reference(library: Library) -> None:
    rows = check_kernel("tree_sum", native(library.path), ReferenceSide(), quick=True)
    assert [row.equal for row in rows] == [True]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so() -> None:
    done = run()
    assert done.returncode == gpu_check.NO_GPU
    assert "sees no CUDA device" in done.stderr and done.stdout == ""


def test_what_is_no_library_is_refused(tmp_path: Path) -> None:
    other, missing, empty = tmp_path / "other.so", tmp_path / FILE, tmp_path / "empty" / FILE
    empty.parent.mkdir()
    empty.touch()
    for path, says in ((other, "is not named"), (missing, "cannot open"), (empty, "too short")):
        done = run("--host", "--library", str(path))
        assert done.returncode == gpu_check.NO_LIBRARY and says in done.stderr, done.stderr


def test_table() -> None:
    rows = [Row("a", "two cases", False), Row("b", "copy", True, traffic=3 << 30, seconds=2.0, floor=float(2 << 30))]
    assert table(rows).splitlines()[2:] == [
        "| a | two cases |  |  |  | **DIFFERENT** |",
        "| b | copy | 1.5 | 2.0 | 0.75 | equal |",
    ]
