"""The code of the CUDA kernels, run on the host (CKPT_EMULATE_DEVICE in cuda_ext/CMakeLists.txt)."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from ckpt.native.library import Library, _check


class Emulated(Library):
    """A library built that way, whose calls with tensors on the CPU go to the device code.

    Work is done when `wait` is called, or as late as a device might do it; with `lazy` only then, otherwise after every
    call.
    """

    lazy = False

    def wait(self) -> None:
        self._lib.ckpt_emulated_wait()

    def fail(self, allocation: int) -> None:
        """Makes an allocation of memory fail: the next one for 1."""
        self._lib.ckpt_emulated_fail(ctypes.c_int(allocation))

    def _call(
        self, name: str, device: torch.device, arguments: list[Any], results: list[Any], threads: int | None = None
    ) -> None:
        stream = ctypes.c_void_p(0)
        _check(getattr(self._lib, f"ckpt_cuda_{name}")(*arguments, *results, stream))
        if not self.lazy:
            self.wait()
