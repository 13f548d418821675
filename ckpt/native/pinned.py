"""Host memory pinned for CUDA: what is copied there from a device goes by DMA, without a pageable detour."""

from __future__ import annotations

import warnings

import torch

_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device's context, not just the current one's


class Pinned:
    """Memory of a tensor on the CPU, registered with CUDA (`cudaHostRegister`) until `release`.

    Where CUDA refuses it, mostly for a limit on locked memory, copies are slower and their bytes the same: so it is
    told by a RuntimeWarning, and `active` is False.
    """

    def __init__(self, memory: torch.Tensor) -> None:
        """memory: contiguous, on the CPU, mapped in pages of its own. Needs a CUDA device."""
        self._address, self._nbytes = memory.data_ptr(), memory.numel() * memory.element_size()
        error = torch.cuda.cudart().cudaHostRegister(self._address, self._nbytes, _PORTABLE)
        self.active = int(error) == 0
        if not self.active:
            warnings.warn(
                f"CUDA does not pin {self._nbytes} bytes of host memory for staging (cudaHostRegister: error "
                f"{int(error)}): saves of CUDA tensors stall longer. Raise the limit on locked memory (ulimit -l)",
                RuntimeWarning,
                stacklevel=2,
            )

    def release(self) -> None:
        """Undoes it; needed before the memory is unmapped. Safe to call twice. Raises RuntimeError where CUDA fails."""
        if not self.active:
            return
        self.active = False
        error = int(torch.cuda.cudart().cudaHostUnregister(self._address))
        if error:
            raise RuntimeError(f"cudaHostUnregister of {self._nbytes} bytes: error {error}")
