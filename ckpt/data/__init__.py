"""Data cursors: where a run is in its data, so that a resumed one goes on with exactly the next global batch.

What lives here: one global order of samples that no layout enters, cursors in it, a loader for one data-parallel rank,
token packing, and adapters for the loaders of other libraries. May import state, geometry, native and random. Start
reading at `cursor.Cursor`, then `samples.GlobalCursor` and `loader.GlobalLoader`.
"""

from ckpt.data.cursor import Cursor
from ckpt.data.fingerprint import dataset_fingerprint
from ckpt.data.foreign import HuggingFaceCursor, TorchdataCursor
from ckpt.data.loader import GlobalLoader, GlobalSampler
from ckpt.data.megatron import MegatronCursor
from ckpt.data.packing import PackedCursor, PackedSequences, Piece
from ckpt.data.permutation import Permutation
from ckpt.data.samples import GlobalCursor

__all__ = [
    "Cursor",
    "GlobalCursor",
    "GlobalLoader",
    "GlobalSampler",
    "HuggingFaceCursor",
    "MegatronCursor",
    "PackedCursor",
    "PackedSequences",
    "Permutation",
    "Piece",
    "TorchdataCursor",
    "dataset_fingerprint",
]
