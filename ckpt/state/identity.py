"""The state id: equal ids mean equal bits, up to the fingerprint's bound."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

from ckpt.fingerprint import Digest, to_hex
from ckpt.geometry import TensorSpec
from ckpt.state.values import Json, canonical_json


def state_id(tensors: Iterable[tuple[TensorSpec, Digest]], values: Mapping[str, Json]) -> str:
    """SHA-256, as 64 hex digits, of the canonical JSON {"tensors": [[name, dtype, shape, fingerprint], ...] sorted by
    name, "values": {name: canonical value}}. Grid, packing, and versions do not enter it."""
    rows = sorted([t.name, t.dtype, list(t.shape), to_hex(d)] for t, d in tensors)
    return hashlib.sha256(canonical_json({"tensors": rows, "values": dict(values)})).hexdigest()
