"""What verification finds: one record for each damaged thing, so that all can be told, not only the first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ckpt.geometry import Box
from ckpt.geometry.box import Index

Kind = Literal["record", "missing", "document", "size", "object", "chunk", "fingerprint", "state id"]
"""record: of the log. missing: a file. document: a JSON file that is not what another one pins, or contradicts itself.
size: of a stored object. object: an object's index of chunks. chunk: its CRC32C. fingerprint: of a tensor whose chunks
are sound. state id: the one of the recomputed fingerprints."""


@dataclass(frozen=True)
class Damage:
    """file: key below the root. tensors: names of those that are hit. chunk: its index within the object. box: the
    elements of the array that are lost (of the tensor, unless the array is packed)."""

    kind: Kind
    file: str
    problem: str
    tensors: tuple[str, ...] = ()
    chunk: Index | None = None
    box: Box | None = None
