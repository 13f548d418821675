"""Raw bytes, for tests: of tensors, of checkpoints at rest, and how to forge the latter. Nothing of ckpt is used."""

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


def raw(tensor: torch.Tensor) -> bytes:
    """The bits of a tensor's elements in row-major order, whatever its strides."""
    return tensor.detach().view(_INTEGER[tensor.element_size()]).contiguous().numpy().tobytes()


def random_bits(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """A contiguous tensor of random bytes: any NaN payload, denormals, bools that are neither 0 nor 1."""
    data = np.random.default_rng([seed, dtype.itemsize]).bytes(math.prod(shape) * dtype.itemsize)
    return from_bits(data, shape, dtype)


def from_bits(data: bytes, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A contiguous tensor of these bytes."""
    flat = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    return flat.view(dtype).reshape(shape)


def labelled(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor whose elements say where they belong: their row-major number."""
    return torch.arange(math.prod(shape), dtype=torch.float64).to(dtype).reshape(shape)


def tree(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, by its path."""
    return {str(f.relative_to(folder)): f.read_bytes() for f in sorted(folder.rglob("*")) if f.is_file()}


def flip_bit(file: Path, at: int) -> None:
    """Flips a bit of the byte at an offset, which counts from the end if negative; the same again undoes it."""
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


def log_records(root: Path) -> dict[int, dict[str, Any]]:
    """The records of a root's log, by number."""
    return {int(f.stem): json.loads(f.read_bytes()) for f in sorted((root / "log").glob("*.json"))}


def attempt_folder(root: Path) -> Path:
    """The folder of the newest commit."""
    commit = [r for _, r in sorted(log_records(root).items()) if r["kind"] == "commit"][-1]
    return root / "attempts" / commit["claim"] / commit["attempt"]


def objects_of(root: Path, tensor_folder: str) -> list[Path]:
    """The stored objects of one array of the newest commit, in the order of their grid index."""
    base = attempt_folder(root) / "state" / tensor_folder / "c"
    found = [f for f in base.rglob("*") if f.is_file()] if base.is_dir() else [base]
    return sorted(found, key=lambda f: [int(x) for x in f.relative_to(base).parts])


def canonical(document: Any) -> bytes:
    """The canonical form of a JSON document."""
    return json.dumps(document, sort_keys=True, separators=(",", ":")).encode()


def forge_commit(root: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Changes the record of the newest commit in place."""
    number = max(n for n, r in log_records(root).items() if r["kind"] == "commit")
    file = root / "log" / f"{number:012d}.json"
    document = json.loads(file.read_bytes())
    change(document)
    file.write_bytes(canonical(document))


def forge_pinned(root: Path, name: str, change: Callable[[dict[str, Any]], None]) -> None:
    """Changes manifest.json, ranks/manifest.json or run.json of the newest commit, and makes the commit pin the new one
    (its state id too): the forgery that no checksum can tell."""
    file = attempt_folder(root) / name
    document = json.loads(file.read_bytes())
    change(document)
    file.write_bytes(canonical(document))
    pin = {"manifest.json": "manifest", "ranks/manifest.json": "ranks", "run.json": "run"}[name]
    pinned: Mapping[str, str] = {pin: hashlib.sha256(canonical(document)).hexdigest()}
    forge_commit(root, lambda d: d.update(pinned))
