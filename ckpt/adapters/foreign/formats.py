"""Which library wrote a folder, and the reader and the output for each."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from ckpt.adapters.foreign.dcp_read import DcpCheckpoint
from ckpt.adapters.foreign.dcp_write import DcpOutput
from ckpt.adapters.foreign.megatron_read import MegatronCheckpoint
from ckpt.adapters.foreign.megatron_write import megatron_output
from ckpt.adapters.foreign.mp_rank_read import MpRankCheckpoint
from ckpt.adapters.foreign.pieces import Output
from ckpt.adapters.foreign.ranks_read import RanksCheckpoint
from ckpt.adapters.foreign.safetensors_read import INDEX, SafetensorsCheckpoint
from ckpt.adapters.foreign.safetensors_write import SafetensorsOutput
from ckpt.adapters.foreign.work_folder import unfinished
from ckpt.engine.stream import Source
from ckpt.errors import CkptError, CorruptCheckpoint, StoreError

READERS: dict[str, Callable[..., Source]] = {
    "dcp": DcpCheckpoint,
    "megatron": MegatronCheckpoint,
    "hf": SafetensorsCheckpoint,
    "ranks": RanksCheckpoint,
    "mp_rank": MpRankCheckpoint,
}
OUTPUTS: dict[str, Callable[..., Output]] = {  # of a content, for `write_pieces`
    "dcp": DcpOutput,
    "megatron": megatron_output,
    "hf": SafetensorsOutput,
}


def detect(path: Path) -> str:
    """The format of a folder or file: "ckpt" or a key of READERS. Raises CkptError that says what was looked for."""
    if not path.exists():
        raise StoreError(f"{path}: there is nothing; check the path")
    if path.is_file():
        if path.suffix == ".safetensors":
            return "hf"
        raise CkptError(f"{path}: a file of no known kind; give a folder, or a .safetensors file")
    found = []
    if (path / "log").is_dir():
        found.append("ckpt")
    if (path / ".metadata").is_file():
        found.append("megatron" if _is_megatron(path) else "dcp")
    if any(path.glob(f"rank_{'[0-9]' * 5}*.safetensors")):  # that of rank 0 may be missing: it is no hf then
        found.append("ranks")
    elif (path / INDEX).is_file() or any(path.glob("*.safetensors")):
        found.append("hf")
    if any(path.glob("mp_rank_*")):
        found.append("mp_rank")
    if len(found) == 1:
        return found[0]
    if found:
        raise CkptError(f"{path}: may be {' or '.join(found)}; say which with --from")
    if unfinished(path):
        raise CkptError(f"{path}: a conversion into it is not finished; call it again as it was")
    if any(path.glob("iter_*")) or any(path.glob("checkpoint-*")):
        raise CkptError(f"{path}: holds a folder for each step; name one of them")
    raise CkptError(f"{path}: no checkpoint of a known kind: no log/, no .metadata, no *.safetensors")


def _is_megatron(path: Path) -> bool:
    try:
        return "sharded_backend" in json.loads((path / "metadata.json").read_text())
    except FileNotFoundError:
        return False
    except (ValueError, TypeError, OSError) as error:
        raise CorruptCheckpoint(f"{path}/metadata.json: not readable: {error}") from None
