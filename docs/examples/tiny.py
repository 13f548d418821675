"""What the examples share: a text that lies on any machine, and a small language model of its bytes."""

import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

SEQUENCE = 32


class Text(torch.utils.data.Dataset[torch.Tensor]):
    """Windows of SEQUENCE + 1 bytes of a module of Python's own library: int64 [SEQUENCE + 1]."""

    def __init__(self, windows: int = 80) -> None:
        self.bytes = Path(os.__file__).read_bytes()[: windows * SEQUENCE + 1]

    def __len__(self) -> int:
        return (len(self.bytes) - 1) // SEQUENCE

    def __getitem__(self, index: int) -> torch.Tensor:
        window = self.bytes[index * SEQUENCE : (index + 1) * SEQUENCE + 1]
        return torch.frombuffer(bytearray(window), dtype=torch.uint8).long()


class ByteModel(nn.Module):
    """Guesses the next byte from the last eight. Takes int64 [batch, SEQUENCE + 1], gives the mean loss."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.mixing = nn.Conv1d(width, 2 * width, kernel_size=8)
        self.dropout = nn.Dropout(0.1)
        self.output = nn.Linear(2 * width, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        seen = nn.functional.pad(self.embedding(tokens[:, :-1]).transpose(1, 2), (7, 0))
        hidden = self.dropout(nn.functional.gelu(self.mixing(seen))).transpose(1, 2)
        return nn.functional.cross_entropy(self.output(hidden).flatten(0, 1), tokens[:, 1:].flatten())


def start_ranks() -> tuple[int, int]:
    """Rank and number of ranks, as torchrun tells them; joins them by torch.distributed."""
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1 and not dist.is_initialized():
        dist.init_process_group("gloo")
    return rank, world
