"""Padded vocabularies: tensors whose rows beyond the true vocabulary are padding, loaded into another padded size.

Padding is state as long as its size stays: Megatron's cross-entropy does not mask it, so it takes part in training.
Only where the user says that it may go are real rows loaded without it. What was saved of it is still read, into memory
of its own, so that the fingerprint of all that was saved can be compared.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from ckpt.errors import StateMismatch
from ckpt.geometry import Box
from ckpt.state import Vocabulary
from ckpt.state.captured import LocalTensor, Shard
from ckpt.state.dtypes import bits, torch_dtype

_LIKELY = ("*word_embeddings*", "*output_layer*", "*embed*", "*lm_head*", "*wte*")


def cut(tensor: LocalTensor, rows: int, vocabulary: Vocabulary) -> tuple[LocalTensor, list[torch.Tensor]]:
    """A rank's part of a tensor that was saved with another number of `rows`: what is to be loaded, in coordinates of
    the checkpoint, and live views of the rows of padding here. The ranks that hold the last real row also load the
    saved padding, into memory of its own. Raises StateMismatch where there are fewer rows than the vocabulary has."""
    spec, size = replace(tensor.spec, shape=(rows, *tensor.spec.shape[1:])), vocabulary.size
    if min(rows, tensor.spec.shape[0]) < size:
        raise StateMismatch(
            f"{spec.name}: {rows} rows in the checkpoint and {tensor.spec.shape[0]} here, but the vocabulary is said "
            f"to have {size}; correct Vocabulary(size=...)"
        )
    shards, pads = [], []
    for shard in tensor.shards:
        shards += [Shard(box, view) for box, view in _rows(shard, 0, size)]
        pads += [view for _, view in _rows(shard, size, tensor.spec.shape[0])]
    if rows > size and any(shard.box.stop[0] == size for shard in shards):
        box = Box((size, *(0 for _ in spec.shape[1:])), (rows - size, *spec.shape[1:]))
        shards.append(Shard(box, bits(torch.empty(box.extent, dtype=torch_dtype(spec.dtype)))))
    return LocalTensor(spec, shards), pads


def _rows(shard: Shard, first: int, stop: int) -> list[tuple[Box, torch.Tensor]]:
    rows = Box((first, *shard.box.offset[1:]), (stop - first, *shard.box.extent[1:]))
    common = shard.box.intersect(rows)
    return [] if common is None else [(common, shard.view[common.relative_to(shard.box).slices])]


def remedy(name: str, saved: tuple[int, ...], own: tuple[int, ...]) -> str:
    """What to do about two shapes that differ."""
    if saved and saved[1:] == own[1:] and Vocabulary(1, "drop", _LIKELY).names_it(name):
        return (
            "if these are two padded sizes of one vocabulary, build the model with the size it was saved with (set it "
            "or its divisor in the model's configuration, whatever the tensor parallelism), or load with "
            "vocabulary=ckpt.Vocabulary(size, padding=...): 'masked' if the loss masks padded logits, 'drop' to give "
            "the padding up, which changes the loss"
        )
    return "build the model with the sizes it was saved with"
