"""A state, and its writing as files of ranks, for the tests of both."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import ckpt
from ckpt import Layout
from ckpt.adapters.foreign.into import open_session
from ckpt.adapters.foreign.rank_files import plan_files
from ckpt.adapters.foreign.rank_rules import Given, Placer
from ckpt.adapters.foreign.ranks_write import write_ranks
from tests.support.at_rest import committed
from tests.support.raw import random_bits

LAYOUT = Layout(tp=2, pp=2, dp=2)


def layered(path: Path) -> Path:
    """A root with a step that has layers of Megatron's names, of several bands."""
    model = {
        "decoder.layers.self_attention.linear_qkv.weight": random_bits((4, 96, 640), torch.float32, 1),
        "decoder.layers.mlp.linear_fc1.weight": random_bits((4, 512, 640), torch.bfloat16, 2),
        "decoder.layers.mlp.linear_fc2.weight": random_bits((4, 640, 256), torch.bfloat16, 3),
        "embedding.word_embeddings.weight": random_bits((1000, 640), torch.float32, 4),
        "decoder.final_layernorm.weight": random_bits((640,), torch.float32, 5),
    }
    with ckpt.Checkpointer(path) as ck:
        ck.save(1, {"model": model, "step": 1})
    return path


def write(
    root: Path,
    folder: Path,
    layout: Layout,
    shard: Sequence[str] = (),
    *,
    jobs: int = 1,
    band: int = 1 << 20,
    **more: Any,
) -> str:
    """The state id of what was written."""
    sources = [committed(root) for _ in range(jobs)]
    content = sources[0].content
    files = plan_files(content, Placer(content, layout, [Given.parse(text) for text in shard]))
    return write_ranks(sources, folder, files, open_session(str(root)).comm, band=band, **more)
