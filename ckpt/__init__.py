"""ckpt: bit-exact checkpoints of large-model training, on any parallel layout, on directories and object stores.

    import ckpt
    ck = ckpt.Checkpointer("s3://bucket/run", layout=ckpt.Layout(tp=2, pp=2, dp=2))
    receipt = ck.save(step, {"model": model, "optimizer": optimizer})
    restored = ck.load({"model": model, "optimizer": optimizer})

The rooms are described in docs/design.md; each has a docstring that says what lives there and where to start.
"""

from ckpt import data, random
from ckpt.errors import (
    CkptError,
    CorruptCheckpoint,
    Fenced,
    NothingCommitted,
    RankFailed,
    StateInvalid,
    StateMismatch,
    StoreError,
    Unsupported,
)
from ckpt.geometry import Layout
from ckpt.state import RngState, ShardedTensor, TrainState, Vocabulary, per_rank, replicated
from ckpt.store.retention import Keep
from ckpt.trainer import Checkpointer, PendingSave, Preempted, Receipt, Resharded, Restored, reshard_

__all__ = [
    "Checkpointer",
    "CkptError",
    "CorruptCheckpoint",
    "Fenced",
    "Keep",
    "Layout",
    "NothingCommitted",
    "PendingSave",
    "Preempted",
    "RankFailed",
    "Receipt",
    "Resharded",
    "Restored",
    "RngState",
    "ShardedTensor",
    "StateInvalid",
    "StateMismatch",
    "StoreError",
    "TrainState",
    "Unsupported",
    "Vocabulary",
    "data",
    "per_rank",
    "random",
    "replicated",
    "reshard_",
]
