"""The numerics contract: everything besides the data that the bits of a trajectory depend on.

A run keeps its bits on any physical layout as long as its contract stays the same. It has two parts. The logical part
is chosen once, when the run starts: how the work is cut into granules, and how they are summed. The environment is
found: a kernel's bits are those of one library, one instruction set and one number of threads. A checkpoint holds both
(`ckpt.Checkpointer(contract=)`), and a load says whether the run that goes on is `trajectory-exact` or `state-exact`.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Any

import torch

from ckpt.errors import CkptError

TREE = "halves-at-power-of-two/1"
RNG = "ckpt.random/1"
DTYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True)
class Contract:
    """How a run is cut into granules, whatever the layout.

    shards: virtual tensor shards V, of which each tensor-parallel rank has a run. Attention heads, their key and value
        groups, the feed-forward width, the vocabulary and the sequence length are multiples of it.
    batch, microbatch: samples in a global batch, and in a microbatch, which is what runs through a layer at once.
    leaf: microbatches whose gradients are summed one after the other, before the tree over leaves.
    seed: of all logical random numbers (`ckpt.random`).
    dtype: of parameters as the model uses them. Gradients are summed, and masters kept, in fp32.
    optimizer: what updates the parameters, with all that changes its bits.
    """

    shards: int
    batch: int
    microbatch: int = 1
    leaf: int = 1
    seed: int = 0
    dtype: torch.dtype = torch.float32
    optimizer: str = "ckpt.invariant.AdamW/1"

    def __post_init__(self) -> None:
        """Raises CkptError where the numbers do not fit each other."""
        for name in ("shards", "batch", "microbatch", "leaf"):
            if type(value := getattr(self, name)) is not int or value < 1:
                raise CkptError(f"{name} of a numerics contract is {value!r}; it must be an integer above 0")
        if self.batch % (self.microbatch * self.leaf):
            raise CkptError(
                f"a global batch of {self.batch} samples is not a number of leaves of {self.leaf} microbatches of "
                f"{self.microbatch} samples"
            )
        if self.dtype not in DTYPES:
            raise CkptError(f"parameters of {self.dtype} have no contract; use {' or '.join(map(str, DTYPES))}")

    @property
    def microbatches(self) -> int:
        return self.batch // self.microbatch

    @property
    def leaves(self) -> int:
        return self.microbatches // self.leaf

    def document(self) -> dict[str, Any]:
        """Both parts as plain values, as they are stored with a checkpoint."""
        logical = asdict(self) | {"dtype": str(self.dtype), "tree": TREE, "rng": RNG}
        return {"logical": logical, "environment": environment()}

    def differences(self, document: Mapping[str, Any] | None) -> list[str]:
        """What of a checkpoint's contract is not as here and now, a line each; nothing means `trajectory-exact`."""
        if document is None:
            return ["numerics contract: none was saved with the checkpoint"]
        here, lines = self.document(), []
        for part in ("logical", "environment"):
            ours, theirs = here[part], document.get(part, {})
            for name in sorted(ours.keys() | theirs.keys()):
                if ours.get(name) != theirs.get(name):
                    lines.append(f"{part} {name}: {theirs.get(name)!r} in the checkpoint, {ours.get(name)!r} here")
        return lines


def environment() -> dict[str, Any]:
    """What the bits of a kernel depend on besides its arguments. Plain values, equal where the bits may be."""
    found: dict[str, Any] = {
        "torch": torch.__version__,
        "device": "cpu",
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
        "isa": torch.backends.cpu.get_cpu_capability(),
        "mkl": torch.backends.mkl.is_available(),
        "onednn": torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled,
        "settings": {name: os.environ[name] for name in _SETTINGS if name in os.environ},
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }
    with suppress(metadata.PackageNotFoundError):
        found["megatron"] = metadata.version("megatron-core")
    if torch.cuda.is_available():
        found |= {
            "device": torch.cuda.get_device_name(),
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "tf32": torch.backends.cuda.matmul.allow_tf32,
            "reduced": [
                torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction,
                torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
            ],
        }
    return found


_SETTINGS = ("ATEN_CPU_CAPABILITY", "MKL_CBWR", "ONEDNN_MAX_CPU_ISA", "CUBLAS_WORKSPACE_CONFIG", "NVIDIA_TF32_OVERRIDE")
