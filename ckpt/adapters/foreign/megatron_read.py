"""Checkpoints of Megatron Core's `torch_dist`: those of torch.distributed.checkpoint, and a `common.pt`.

Tensors have Megatron's global names and shapes (layers stacked, as its `sharded_state_dict` has them). What is common
to all ranks lies in `common.pt`, a pickle; of that, only plain values and small tensors are read. Its iteration is the
step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ckpt.adapters.foreign.dcp_read import DcpCheckpoint
from ckpt.adapters.foreign.megatron_write import COMMON, common_of
from ckpt.adapters.foreign.restricted import load_plain
from ckpt.adapters.foreign.sidecar import NAME
from ckpt.errors import CorruptCheckpoint, StoreError, Unsupported
from ckpt.state.names import join
from ckpt.state.values import Json, encode

_ABSENT = object()
_LARGEST = 256 << 20  # bytes of it


class MegatronCheckpoint(DcpCheckpoint):
    """A `torch_dist` checkpoint of one iteration."""

    def __init__(self, folder: Path, document: Mapping[str, Json] | None = None) -> None:
        """Raises what `DcpCheckpoint` raises. What of `common.pt` is not plain is in `content.left_out`."""
        super().__init__(folder, document)
        path = folder / COMMON
        if not path.is_file():
            raise CorruptCheckpoint(f"{path}: missing, so this is no whole checkpoint of Megatron Core")
        values, left_out = dict(self.content.values), dict(self.content.left_out)
        common = _common(path)
        if self.content.state_id is not None:  # values are those of the sidecar
            _check_same(common, common_of(self.content), path)
            return
        for key, value in common.items():
            try:
                name = join([COMMON, key])
                values[name] = encode(value, str(key))
            except Unsupported as error:
                left_out[f"{COMMON}: {key}"] = str(error)
        step = common.get("iteration", self.content.step)
        self.content = replace(
            self.content, values=values, left_out=left_out, step=step if type(step) is int and step >= 0 else None
        )


def _check_same(common: dict[Any, Any], expected: dict[Any, Any], path: Path) -> None:
    """Raises CorruptCheckpoint where what Megatron would load is not what the sidecar has."""
    for key in {**expected, **common}:
        try:
            same = encode(common.get(key, _ABSENT), str(key)) == encode(expected.get(key, _ABSENT), str(key))
        except Unsupported:
            same = False
        if not same:
            raise CorruptCheckpoint(f"{path}: {key} is not what {NAME} has; delete that to read the file as it is")


def _common(path: Path) -> dict[Any, Any]:
    try:
        if path.stat().st_size > _LARGEST:
            raise Unsupported(f"{path}: {path.stat().st_size} bytes are more than plain values take")
        common = load_plain(path.read_bytes(), str(path))
    except OSError as error:
        raise StoreError(f"{path}: cannot be read: {error.strerror}") from error
    if not isinstance(common, dict):
        raise CorruptCheckpoint(f"{path}: holds a {type(common).__name__}, where Megatron Core writes a dict")
    return common
