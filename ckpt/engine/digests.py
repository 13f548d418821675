"""Digests of what a rank holds, from its live memory, and how ranks tell each other of them."""

from __future__ import annotations

from ckpt.fingerprint import Digest, box_digests
from ckpt.geometry import Box
from ckpt.state.captured import Captured
from ckpt.state.values import canonical_json, parse_json

Held = dict[str, list[tuple[Box, Digest]]]


def digests_of(captured: Captured) -> Held:
    """Digest of each box that this rank holds, from its live memory."""
    boxes = [(s.view, s.box, t.spec.shape) for t in captured.tensors.values() for s in t.shards]
    found = iter(box_digests(boxes))
    return {name: [(s.box, next(found)) for s in t.shards] for name, t in captured.tensors.items()}


def held_document(held: Held) -> bytes:
    """What a rank tells the others of its digests; `parse_held` reads it."""
    return canonical_json({n: [[list(b.offset), list(b.extent), list(d)] for b, d in x] for n, x in held.items()})


def parse_held(data: bytes, rank: int) -> Held:
    document = parse_json(data, f"digests of rank {rank}")
    return {n: [(Box(tuple(o), tuple(e)), (d[0], d[1])) for o, e, d in boxes] for n, boxes in document.items()}
