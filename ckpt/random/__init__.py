"""Logical random numbers: keyed by what they are for and counted by where they lie, never by who draws them.

What lives here: `LogicalRng`, whose whole state is a seed and a step, its streams, dropout and initial weights. May
import geometry and native. Start reading at `streams`, then `regions` (which elements a rank draws). The orders of
samples are `ckpt.data.Permutation`. docs/random.md says how to key a stream and what is promised.
"""

from ckpt.random.dropout import dropout
from ckpt.random.init import normal_, trunc_normal_, uniform_
from ckpt.random.streams import LogicalRng, Stream, keep_threshold

__all__ = ["LogicalRng", "Stream", "dropout", "keep_threshold", "normal_", "trunc_normal_", "uniform_"]
