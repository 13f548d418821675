"""The door to the compiled kernels of cuda_ext/, through their plain C interface (cuda_ext/include/ckpt/abi.h).

The library links to neither torch nor Python: one build serves any version of both. ctypes releases the GIL for the
time of a call. Where there is no library, callers use the reference twins, which give the same bytes.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

import ckpt.native
from ckpt.native.descriptors import describe_boxes, describe_copies

ABI = 1
LEVELS = ("scalar", "AVX2", "AVX-512 IFMA")
FILE = {"darwin": "libckpt_native.dylib", "win32": "ckpt_native.dll"}.get(sys.platform, "libckpt_native.so")

_MOST_THREADS = 8
_OVERLAP = 6
_CUDA_ERROR = 1000
_FAULTS = {
    1: "more axes than the kernels take",
    2: "an item size other than 1, 2, 4, 8 or 16",
    3: "a negative size, or a box that leaves its tensor",
    4: "a null pointer",
    5: "sizes that overflow",
    6: "an output that overlaps itself or its input",
    7: "a dtype that the kernel does not take",
}
_DTYPES = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2, torch.float64: 3}


class Overlap(ValueError):
    """An output may overlap itself or its input, as far as strides tell."""


class Library:
    """An opened library. Methods may be called from any thread.

    All tensors of a call lie on the CPU, or all on one CUDA device: then the call is one launch on that device's
    current stream, which nothing but `fingerprint` waits for. Tensors keep their strides. Every method raises
    ValueError for arguments that a kernel refuses, with nothing written, and RuntimeError where CUDA reports an error.
    """

    def __init__(self, path: Path) -> None:
        """Raises OSError where `path` is no library, RuntimeError where its interface has another version."""
        self.path = path
        self._lib = ctypes.CDLL(str(path))
        found = self._lib.ckpt_abi()
        if found != ABI:
            raise RuntimeError(f"{path}: interface version {found}, this ckpt needs {ABI}; install ckpt again")
        self.has_cuda = hasattr(self._lib, "ckpt_cuda_box_copy")

    def level(self, limit: int = -1) -> int:
        """Index into LEVELS of the instruction set in use; a limit of 0 or more allows no higher one from now on."""
        return int(self._lib.ckpt_host_level(ctypes.c_int(limit)))

    def takes(self, device: torch.device) -> bool:
        """Whether the kernels run on this device."""
        return device.type == "cpu" or (device.type == "cuda" and self.has_cuda and torch.version.cuda is not None)

    def fingerprint(
        self, boxes: Sequence[tuple[torch.Tensor, Sequence[int], Sequence[int]]], threads: int = 1
    ) -> list[tuple[int, int]]:
        """Digests of (view, offset in the logical tensor, shape of the logical tensor), in one call."""
        device = _one_device([view for view, _, _ in boxes])
        described = describe_boxes(boxes)
        out = (ctypes.c_uint64 * (2 * len(boxes)))()
        self._call("fingerprint", device, _array(described), [out], threads)
        return [(out[2 * i], out[2 * i + 1]) for i in range(len(boxes))]

    def box_copy(self, copies: Sequence[tuple[torch.Tensor, torch.Tensor]], threads: int = 1) -> None:
        """Copies the elements of each (destination, source) of equal shape and item size. Destinations of different
        pairs must not overlap."""
        device = _one_device([tensor for pair in copies for tensor in pair])
        self._call("box_copy", device, _array(describe_copies(copies)), [], threads)

    def tree_sum(self, leaves: torch.Tensor, threads: int = 1) -> torch.Tensor:
        """Sum over the first axis of a contiguous tensor of fp16, bf16, fp32 or fp64, over the fixed binary tree."""
        if not leaves.is_contiguous() or leaves.dim() == 0:
            raise ValueError("tree_sum takes a contiguous tensor with a leading axis of leaves")
        wide = torch.float64 if leaves.dtype == torch.float64 else torch.float32
        out = torch.empty(leaves.shape[1:], dtype=wide, device=leaves.device)
        count = out.numel()
        sizes = [leaves.shape[0], count, count * leaves.element_size()]
        arguments = [ctypes.c_void_p(leaves.data_ptr()), ctypes.c_int(_DTYPES.get(leaves.dtype, -1))]
        arguments += [ctypes.c_int64(n) for n in sizes]
        self._call("tree_sum", leaves.device, arguments, [ctypes.c_void_p(out.data_ptr())], threads)
        return out

    def philox(self, count: int, first: int, stream: int, key: int, device: str = "cpu") -> torch.Tensor:
        """Words of elements first..first+count of a stream: int64 with values below 2^32."""
        out = torch.empty(count, dtype=torch.int32, device=device)
        self._call("philox", out.device, _stream(out, count, first, stream, key), [])
        return out.long() & 0xFFFFFFFF

    def philox_uniform(self, count: int, first: int, stream: int, key: int, device: str = "cpu") -> torch.Tensor:
        """The same words as fp32 in [0, 1): the top 24 bits times 2^-24."""
        out = torch.empty(count, dtype=torch.float32, device=device)
        self._call("philox_uniform", out.device, _stream(out, count, first, stream, key), [])
        return out

    def philox_mask(
        self, count: int, first: int, stream: int, key: int, threshold: int, device: str = "cpu"
    ) -> torch.Tensor:
        """uint8: 1 where the word is below `threshold` (0 to 2^32)."""
        out = torch.empty(count, dtype=torch.uint8, device=device)
        arguments = [*_stream(out, count, first, stream, key), ctypes.c_uint64(threshold)]
        self._call("philox_mask", out.device, arguments, [])
        return out

    def _call(
        self, name: str, device: torch.device, arguments: list[Any], results: list[Any], threads: int | None = None
    ) -> None:
        """The host form of a kernel takes its threads before its results, the CUDA form a stream after them."""
        if device.type == "cpu":
            bound = [] if threads is None else [ctypes.c_int(threads)]
            _check(getattr(self._lib, f"ckpt_{name}")(*arguments, *bound, *results))
        elif self.takes(device):
            with torch.cuda.device(device):
                on = ctypes.c_void_p(torch.cuda.current_stream(device).cuda_stream)
                _check(getattr(self._lib, f"ckpt_cuda_{name}")(*arguments, *results, on))
        else:
            raise ValueError(f"a tensor on {device}, for which {self.path} has no kernels")


@cache
def find() -> Library | None:
    """The library that was installed with ckpt, or None where it was installed without a compiler.

    Raises RuntimeError for a library of another interface version: a stale build must not pass unseen."""
    for folder in ckpt.native.__path__:
        path = Path(folder) / FILE
        if path.exists():
            return Library(path)
    return None


def thread_count() -> int:
    """Threads that a host kernel may use: torch's own number, but no more than memory bandwidth is worth."""
    return min(torch.get_num_threads(), _MOST_THREADS)


def describe() -> dict[str, Any]:
    """What is active, as plain data: `kernels` is "native" or "reference"."""
    library = find()
    if library is None:
        return {"kernels": "reference", "library": None, "host": None, "cuda": "not built"}
    usable = library.has_cuda and torch.version.cuda is not None and torch.cuda.is_available()
    return {
        "kernels": "native",
        "library": str(library.path),
        "host": LEVELS[library.level()],
        "cuda": "active" if usable else "built, no device" if library.has_cuda else "not built",
    }


def _one_device(tensors: Sequence[torch.Tensor]) -> torch.device:
    devices = {t.device for t in tensors}
    if len(devices) > 1:
        raise ValueError(f"tensors on different devices in one call: {', '.join(sorted(map(str, devices)))}")
    return devices.pop() if devices else torch.device("cpu")


def _stream(out: torch.Tensor, count: int, first: int, stream: int, key: int) -> list[Any]:
    numbers = (ctypes.c_uint64(first), ctypes.c_uint64(stream), ctypes.c_uint64(key))
    return [ctypes.c_void_p(out.data_ptr()), ctypes.c_int64(count), *numbers]


def _array(described: np.ndarray) -> list[Any]:
    """Descriptors as the kernels take them: a pointer, which keeps them alive, and their number."""
    return [described.ctypes.data_as(ctypes.c_void_p), ctypes.c_int64(len(described))]


def _check(code: int) -> None:
    if code > _CUDA_ERROR:
        raise RuntimeError(f"a kernel failed with CUDA error {code - _CUDA_ERROR} (cudaError_t)")
    if code:
        raise (Overlap if code == _OVERLAP else ValueError)(
            f"the kernel refused its arguments: {_FAULTS.get(code, f'error {code}')}"
        )
