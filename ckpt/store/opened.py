"""A commit with the documents that it pins, parsed and checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckpt.errors import CorruptCheckpoint
from ckpt.state.values import Json, parse_json
from ckpt.store.log import Record, check_format
from ckpt.store.records import Manifest, attempt_prefix
from ckpt.store.remedies import OLDER


@dataclass(frozen=True)
class Opened:
    """record: the commit; manifest: the state; ranks: plain values of each saving rank; run: provenance."""

    record: Record
    manifest: Manifest
    ranks: list[Mapping[str, Json]]
    run: Mapping[str, Any]

    @property
    def prefix(self) -> str:
        return attempt_prefix(self.record.claim, self.record.attempt)


def parse_opened(record: Record, documents: Sequence[bytes], url: str) -> Opened:
    """documents: what the commit pins, in the order of `PINNED`. Raises CorruptCheckpoint naming the file."""
    where = f"{url}/{attempt_prefix(record.claim, record.attempt)}"
    manifest = Manifest.parse(documents[0], where + "manifest.json")
    if manifest.state_id != record.document["state_id"]:
        raise CorruptCheckpoint(f"{where}manifest.json: its state id is not the committed one; {OLDER}")
    ranks = _object(documents[1], where + "ranks/manifest.json")
    own = ranks.get("ranks")
    if not isinstance(own, list) or not all(isinstance(r, dict) for r in own) or ranks.get("world") != len(own):
        raise CorruptCheckpoint(f"{where}ranks/manifest.json: malformed; {OLDER}")
    return Opened(record, manifest, list(own), _object(documents[2], where + "run.json"))


def _object(data: bytes, where: str) -> dict[str, Any]:
    document = parse_json(data, where)
    if not isinstance(document, dict):
        raise CorruptCheckpoint(f"{where}: not an object; {OLDER}")
    check_format(document, where)
    return document
