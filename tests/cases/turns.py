"""Every cut of a state saved by the ranks that it needs, and loaded by those of every other."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch.distributed as dist


def turns(rank: int, worlds: Sequence[int]) -> Iterator[tuple[bool, int, int, Any]]:
    """Collective over a crew. Each cut in turn, given by how many ranks it has, is on the first ranks of the crew: all
    save, then all load what each saved. Gives on those ranks (whether to load, number of the cut, number of the one
    that saved, process group)."""
    groups = {world: dist.new_group(list(range(world))) for world in sorted(set(worlds))}
    for loading in (False, True):
        for number, world in enumerate(worlds):
            dist.barrier()
            if rank < world:
                for saved in range(len(worlds)) if loading else (number,):
                    yield loading, number, saved, groups[world]
