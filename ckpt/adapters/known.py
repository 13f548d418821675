"""What a checkpoint, or another live state, holds: as a capture that is to be filled from it sees it."""

from __future__ import annotations

from ckpt.adapters.capture import Known
from ckpt.geometry import TensorSpec
from ckpt.state import Vocabulary
from ckpt.store.opened import Opened


def known_from(opened: Opened, vocabulary: Vocabulary | None = None) -> Known:
    """Tensors by each of their names, tied ones too, and the encoded values. vocabulary: whose padding may be left
    behind."""
    tensors = {t.name: t for t in opened.manifest.catalogue.tensors}
    for name, kept in opened.manifest.aliases.items():
        t = tensors[kept]
        tensors[name] = TensorSpec(name, t.shape, t.dtype, t.itemsize, t.stack)
    return Known(tensors, opened.manifest.values, vocabulary)
