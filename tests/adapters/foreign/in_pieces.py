"""A small state, the writers of other libraries' files with small pieces, and what tests of both need."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt.adapters.foreign.formats import OUTPUTS
from ckpt.adapters.foreign.pieces import write_pieces
from ckpt.adapters.foreign.work_folder import WORK
from ckpt.engine.faults import FaultPoint, no_faults
from ckpt.engine.group import Group
from ckpt.engine.rest import CommittedState
from ckpt.engine.stream import Source
from ckpt.errors import StoreError
from ckpt.geometry import Box
from tests.support.at_rest import committed
from tests.support.raw import random_bits, tree

PIECE = 1 << 20


def write(
    form: str,
    source: Source,
    folder: Path,
    group: Group | None = None,
    *,
    faults: FaultPoint = no_faults,
    **options: Any,
) -> str:
    """Writes a format, in the way that its options say."""
    return write_pieces(OUTPUTS[form](source.content, **options), source, folder, group, faults=faults)


WRITE: dict[str, Callable[..., str]] = {
    "hf": partial(write, "hf", piece_bytes=PIECE),
    "hf, several": partial(write, "hf", piece_bytes=PIECE, file_bytes=3 * PIECE, beside={"config.json": b"{}"}),
    "dcp": partial(write, "dcp", file_bytes=PIECE),
    "megatron": partial(write, "megatron", file_bytes=PIECE),
}
LAST = {"hf": "model.safetensors", "hf, several": "model.safetensors.index.json"}  # .metadata elsewhere


def state() -> dict[str, Any]:
    tensors = {f"w{n}": random_bits((600, 700 + n), torch.float32, n) for n in range(5)}
    tensors |= {f"t{n}": random_bits((9, n), torch.bfloat16, n) for n in range(5)}
    tensors["decoder.layers.mlp.linear_fc1.weight"] = random_bits((2, 300, 400), torch.bfloat16, 7)
    return {**tensors, "tied": tensors["w1"], "epoch": 3, "lr": {"now": 0.5}, "rank": ckpt.per_rank({"a": 1})}


def saved(folder: Path) -> Path:
    """A root with the state: about ten pieces, with ties and values."""
    with ckpt.Checkpointer(folder / "root") as ck:
        ck.save(4, state())
    return folder / "root"


def undisturbed(root: Path, folder: Path) -> dict[str, dict[str, bytes]]:
    """What one process writes, by format."""
    for form, writer in WRITE.items():
        assert writer(committed(root), folder / form) == committed(root).content.state_id
    return {form: tree(folder / form) for form in WRITE}


class Counting:
    """A source that counts the bytes that are read of it, and may do something at each box."""

    def __init__(self, true: CommittedState, at_read: Callable[[str], None] = lambda point: None) -> None:
        self.url, self.content, self._true, self._at_read = true.url, true.content, true, at_read
        self.nbytes = 0

    def read(self, name: str, box: Box) -> torch.Tensor:
        self._at_read("read")
        found = self._true.read(name, box)
        self.nbytes += found.nbytes
        return found


class Countdown:
    """Does something when a point is reached for the n-th time."""

    def __init__(self, point: str, left: int, then: Callable[[], Any]) -> None:
        self._point, self._left, self._then = point, left, then

    def __call__(self, reached: str) -> None:
        self._left -= reached == self._point
        if self._left < 0:
            self._then()


def stop() -> None:
    raise StoreError("stop")


def stopped(form: str, root: Path, folder: Path, left: int = 3) -> None:
    with pytest.raises(StoreError, match="stop"):
        WRITE[form](committed(root), folder, faults=Countdown("files.piece", left, stop))


def records(folder: Path) -> dict[int, dict[str, Any]]:
    """Of the finished pieces: what they say, and when."""
    found = {}
    for path in (folder / WORK / "pieces").glob("*.json"):
        found[int(path.stem)] = {**json.loads(json.loads(path.read_bytes())[1]), "at": path.stat().st_mtime_ns}
    return found


def bytes_read(record: dict[str, Any]) -> int:
    """Bytes of the state in a piece, by the boxes that its record names."""
    two = ("t0", "t1", "t2", "t3", "t4", "decoder.layers.mlp.linear_fc1.weight")
    return sum((2 if name in two else 4) * torch.Size(extent).numel() for name, _, extent, _ in record["seen"])


def to_read(root: Path) -> int:
    """Bytes that are read for all pieces: a tied tensor twice."""
    tensors = committed(root).content.tensors
    return sum(t.nbytes for t in tensors) + next(t.nbytes for t in tensors if t.name == "tied")


def go_on(form: str, root: Path, folder: Path) -> int:
    """Bytes that were read to make the rest."""
    source = Counting(committed(root))
    assert WRITE[form](source, folder) == source.content.state_id
    return source.nbytes
