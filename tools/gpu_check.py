"""Checks the compiled kernels bit for bit against their twins, and times them against the memory's own bandwidth.

    ./tools/gpu_check --out gpu.md      on a machine with a CUDA GPU, where it takes less than four minutes
    ./tools/gpu_check --host --quick    a self-check of this tool: the host kernels against the reference twins

On a GPU every kernel of cuda_ext/ runs on the device and is compared with its host twin from the same library; then
states on the device are staged in host memory, as asynchronous saves do it. The library is built into build/gpu_check/
(with CMake, or else with nvcc alone), or given by --library. Only torch and NumPy are needed, and ckpt need not be
installed.

Exit codes: 0 all bits are equal, 1 some differ or a kernel fails, 2 usage, 3 no GPU or no torch, 4 no library could be
built or opened.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
import types
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from tools.gpu_check_sides import Recorder

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "cuda_ext"
EQUAL, DIFFERENT, NO_GPU, NO_LIBRARY = 0, 1, 3, 4


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", action="store_true", help="self-check on the CPU: host kernels, reference twins")
    parser.add_argument("--quick", action="store_true", help="fewer cases, and timings of small tensors")
    parser.add_argument("--library", type=Path, metavar="PATH", help="a library that is built already")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the table there, as Markdown")
    args = parser.parse_args(arguments)
    if not args.host and not torch.cuda.is_available():
        return _fail(NO_GPU, f"torch {torch.__version__} sees no CUDA device; --host checks the host kernels instead")
    use_checkout()
    try:
        library = open_library(args.library or build(cuda=not args.host))
    except (OSError, RuntimeError, AttributeError) as problem:
        return _fail(NO_LIBRARY, str(problem))
    if not args.host and not library.has_cuda:
        return _fail(NO_GPU, f"{library.path} was built without its CUDA kernels")

    from tools.gpu_check_cases import check_bits
    from tools.gpu_check_sides import NativeSide, ReferenceSide
    from tools.gpu_check_speed import Sizes, measure, table
    from tools.gpu_check_staging import staging_rows

    device = torch.device("cpu") if args.host else torch.device("cuda", torch.cuda.current_device())
    tested = NativeSide(library, device)
    twin = ReferenceSide() if args.host else NativeSide(library, torch.device("cpu"))
    rows = check_bits(tested, twin, args.quick, _say)
    sizes = Sizes.of(device, args.quick)
    rows += measure(tested, twin, sizes, _say)
    _say("staging")
    rows += staging_rows(device, sizes)
    text = table(rows)
    print(text)
    if args.out:
        args.out.write_text(f"{_machine(device)}\n\n{text}\n")
    wrong = [row for row in rows if not row.equal]
    for row in wrong:
        _say(f"DIFFERENT BITS: {row.kernel}, {row.case}")
    return DIFFERENT if wrong else EQUAL


def use_checkout() -> None:
    """Makes the modules of this checkout importable one by one.

    `import ckpt.native.library` would run ckpt/__init__.py first, which imports all of ckpt, and with it TensorStore
    and others that this machine may lack. A bare package of that name with the same path stands in for it.
    """
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    bare = types.ModuleType("ckpt")
    bare.__path__ = [str(ROOT / "ckpt")]
    sys.modules.setdefault("ckpt", bare)


def open_library(path: Path) -> Recorder:
    """Opens it, and has ckpt use it too. Raises OSError or RuntimeError where it is no library of this version."""
    import ckpt.native
    from ckpt.native.library import FILE
    from tools.gpu_check_sides import Recorder

    path = path.resolve()
    if path.name != FILE:
        raise OSError(f"{path} is not named {FILE}, as ckpt needs it")
    ckpt.native.__path__.insert(0, str(path.parent))
    return Recorder(path)


def build(cuda: bool) -> Path:
    """Builds the library for this machine; returns its path. Raises RuntimeError with the compiler's last words."""
    folder = ROOT / "build" / ("gpu_check" if cuda else "gpu_check_host")
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / "libckpt_native.so"
    nvcc = _nvcc() if cuda else None
    if cuda and nvcc is None:
        raise RuntimeError(
            "no nvcc on PATH, under CUDA_HOME or in /usr/local/cuda; give a built library with --library"
        )
    major, minor = torch.cuda.get_device_capability() if cuda else (0, 0)
    if shutil.which("cmake"):
        options = [f"-DCKPT_CUDA={'ON' if cuda else 'OFF'}"]
        if cuda:
            options += [f"-DCMAKE_CUDA_COMPILER={nvcc}", f"-DCMAKE_CUDA_ARCHITECTURES={major}{minor}"]
        commands = [
            ["cmake", "-S", str(SOURCE), "-B", str(folder), *options],
            ["cmake", "--build", str(folder), "--parallel", str(min(8, os.cpu_count() or 1))],
        ]
    elif nvcc is not None:
        sources = [*sorted(map(str, (SOURCE / "src").glob("*.cpp"))), str(SOURCE / "src" / "device.cu")]
        flags = ["-shared", "-std=c++17", "-O3", "--fmad=false", f"-arch=sm_{major}{minor}", "-cudart", "static"]
        host = "-Xcompiler=-fPIC,-pthread,-ffp-contract=off,-fvisibility=hidden"
        commands = [[nvcc, *flags, host, f"-I{SOURCE / 'include'}", "-o", str(target), *sources]]
    else:
        raise RuntimeError("no cmake to build the host kernels with; give a built library with --library")
    for command in commands:
        _say(" ".join(command))
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            raise RuntimeError(f"the build failed:\n{(done.stdout + done.stderr)[-4000:]}")
    return target


def _nvcc() -> str | None:
    homes = [os.environ.get("CUDA_HOME", ""), "/usr/local/cuda"]
    places = [Path(home) / "bin" / "nvcc" for home in homes if home]
    return shutil.which("nvcc") or next((str(place) for place in places if place.exists()), None)


def _machine(device: torch.device) -> str:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    version = f", CUDA {torch.version.cuda}" if device.type == "cuda" else ""
    return f"{name}; Python {platform.python_version()}, torch {torch.__version__}{version}"


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _fail(code: int, text: str) -> int:
    _say(f"gpu_check: {text}")
    return code


if __name__ == "__main__":
    sys.exit(main())
