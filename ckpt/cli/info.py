"""`ckpt info`: what is installed here, and which kernels are in use."""

from __future__ import annotations

import importlib.metadata
import platform
from typing import Any

import click

from ckpt.cli import output
from ckpt.native import library

_PACKAGES = ("torch", "numpy", "tensorstore", "zarr", "fsspec", "s3fs", "megatron-core")


def facts() -> dict[str, Any]:
    """Versions of ckpt and what it builds on (None where a package is absent), and the kernels in use."""
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    return {
        "ckpt": importlib.metadata.version("bitexact-ckpt"),
        "machine": platform.machine(),
        "versions": versions,
        "kernels": library.describe(),
    }


@click.command()
@output.json_option
def info(as_json: bool) -> None:
    """Show versions, and whether the compiled kernels are in use.

    Exit codes: 0 done, 2 usage.
    """
    found = facts()
    if as_json:
        output.write_json(found)
        return
    rows = [("ckpt", found["ckpt"]), ("machine", found["machine"])]
    rows += [(name, version or "not installed") for name, version in found["versions"].items()]
    kernels = found["kernels"]
    if kernels["kernels"] == "native":
        rows += [("kernels", f"native ({kernels['host']})"), ("CUDA", kernels["cuda"]), ("library", kernels["library"])]
    else:
        rows.append(("kernels", "reference (slower, same bits); install ckpt where a C++17 compiler is found"))
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        click.echo(f"{name:{width}}  {value}")
