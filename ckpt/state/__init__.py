"""What a checkpoint holds: logical tensors and shards, canonical values, names, dtypes, and the state id.

May import geometry, fingerprint and random. Nothing here uses pickle. Start reading at `captured.Captured`, the
one form in which every adapter hands a state to the engine.
"""

from ckpt.state.captured import Captured, LocalTensor, Shard
from ckpt.state.kinds import (
    PerRank,
    Replicated,
    RngState,
    ShardedTensor,
    State,
    TrainState,
    Vocabulary,
    per_rank,
    replicated,
)

__all__ = [
    "Captured",
    "LocalTensor",
    "PerRank",
    "Replicated",
    "RngState",
    "Shard",
    "ShardedTensor",
    "State",
    "TrainState",
    "Vocabulary",
    "per_rank",
    "replicated",
]
