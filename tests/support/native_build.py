"""Builds of the compiled kernels, for tests."""

from __future__ import annotations

import subprocess
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[2] / "cuda_ext"


def build(folder: Path, *options: str, source: Path = SOURCE) -> Path:
    """Compiles cuda_ext/, or a changed copy of it, in `folder` with these CMake options; the path of the library. Fails
    with the compiler's words."""
    for command in (
        ["cmake", "-S", str(source), "-B", str(folder), *options],
        ["cmake", "--build", str(folder), "-j2"],
    ):
        done = subprocess.run(command, capture_output=True, text=True, timeout=280)
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return folder / "libckpt_native.so"


def sanitizer() -> str | None:
    """The AddressSanitizer runtime of the compiler, which must be loaded before Python."""
    found = subprocess.run(["c++", "-print-file-name=libasan.so"], capture_output=True, text=True).stdout.strip()
    return found if Path(found).is_absolute() else None
