"""The layout-free fingerprint: a digest that any rank can compute from any box it holds, and that adds up.

May import geometry and native. Start reading at `reference`, whose docstring holds the mathematics; docs/format.md
states it for readers in other languages, with golden values.
"""

from ckpt.fingerprint.digest import ZERO, Digest, add, box_digest, box_digests, from_hex, tensor_digest, to_hex

__all__ = ["ZERO", "Digest", "add", "box_digest", "box_digests", "from_hex", "tensor_digest", "to_hex"]
