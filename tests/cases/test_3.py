"""Case 3, rocm-megatron-63: fused gate and up.

The fault: the first matrix of a gated MLP is gate stacked on up, and every TP rank stores its part of the one on its
part of the other. Loaded on another number of ranks, or cut further over data-parallel ranks, its rows come back
permuted. Here every layout gets the rows that it would have cut itself from the whole matrix, weights and moments; so
does one that keeps gate and up interleaved in memory. (Megatron's own matrix: tests/adapters/test_interleaved.py.)
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckpt
from tests.cases.turns import turns
from tests.support.layouts import attempts
from tests.support.parts import declared
from tests.support.ranks import Crew
from tests.support.raw import labelled, raw
from tests.support.roots import Root

WIDTH = 3
MATRICES = {"even": (16, WIDTH), "odd": (24, WIDTH), "bias": (256,)}
"""Shapes: gate, and as many rows of up. TP 4 leaves 3 rows of each half of "odd" on a rank; "bias" has more blocks."""

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Cut:
    """How `tp` x `dp` ranks share a matrix. TP takes part of gate and part of up; in memory they are stacked, or
    alternate in blocks of rows. That is cut again over DP: by rows, beside the border of gate and up, or by elements,
    which leaves flat pieces that begin and end within rows."""

    tp: int = 1
    dp: int = 1
    flat: bool = False
    interleaved: bool = False

    @property
    def world(self) -> int:
        return self.tp * self.dp

    def local(self, whole: torch.Tensor, rank: int) -> torch.Tensor:
        """What a rank has of a whole matrix: a copy."""
        gate, up = (half.chunk(self.tp)[rank % self.tp] for half in whole.chunk(2))
        fused = torch.cat([gate, up])
        if self.interleaved:
            block = min(32, gate.shape[0])
            fused = torch.cat([x for pair in zip(gate.split(block), up.split(block), strict=True) for x in pair])
        part = fused.reshape(-1) if self.flat else fused
        edges = [n * part.shape[0] // self.dp + (0 < n < self.dp) for n in range(self.dp + 1)]
        at = rank // self.tp
        return part[edges[at] : edges[at + 1]].clone()


CUTS = [
    Cut(),
    Cut(tp=4),
    Cut(dp=8),
    Cut(tp=4, dp=2),
    Cut(tp=2, dp=2, flat=True),
    Cut(tp=2, interleaved=True),
    Cut(dp=3, flat=True, interleaved=True),
]


def _whole(shape: tuple[int, ...], which: int = 0) -> torch.Tensor:
    """Gate row i holds i, up row i holds 1000 + i, each column an eighth more; moments have other thousands."""
    half = torch.arange(shape[0] // 2) + 10_000.0 * which
    rows = torch.cat([half, half + 1000])
    return rows if len(shape) == 1 else rows[:, None] + torch.arange(shape[1]) / 8


def _state(cut: Cut, rank: int, *, label: bool) -> dict[str, Any]:
    """The labelled state; or one that is -1 all over, with an optimizer that has never stepped."""
    entries: dict[str, Any] = {}
    for name, shape in MATRICES.items():
        local = cut.local(_whole(shape, 0), rank)
        parameter = nn.Parameter(local if label else torch.full_like(local, -1.0))
        entries[name] = declared(parameter, cut.local(labelled(shape, torch.int64), rank), shape)
    optimizer = torch.optim.AdamW([entry.local for entry in entries.values()])
    for name, shape in MATRICES.items() if label else ():
        moments = {key: cut.local(_whole(shape, 1 + n), rank) for n, key in enumerate(MOMENTS)}
        optimizer.state[entries[name].local] = {"step": torch.tensor(3.0), **moments}
    return {"mlp": entries, "optimizer": optimizer}


def _wrong(state: dict[str, Any], cut: Cut, rank: int) -> list[str]:
    lines = []
    for name, shape in MATRICES.items():
        parameter = state["mlp"][name].local
        moments = state["optimizer"].state[parameter]
        for which, found in enumerate([parameter, *(moments[key] for key in MOMENTS)]):
            wanted = cut.local(_whole(shape, which), rank)
            if (found.shape, raw(found)) != (wanted.shape, raw(wanted)):
                lines.append(f"{name} {which}: {found.tolist()}, not {wanted.tolist()}")
    return lines


def _matrix(rank: int, world: int, folder: str) -> tuple[list[str], set[str]]:
    """Every cut in turn on the first ranks of the crew: all save, then all load what each saved."""
    lines: list[str] = []
    ids = set()
    for loading, number, saved, group in turns(rank, [cut.world for cut in CUTS]):
        cut = CUTS[number]
        state = _state(cut, rank, label=not loading)
        with ckpt.Checkpointer(f"{folder}/{saved}", process_group=group, read_only=loading) as ck:
            if not loading:
                ids.add(ck.save(1, state).state_id)
                continue
            assert ck.load(state) is not None
        lines += [f"{CUTS[saved]} -> {cut}: {line}" for line in _wrong(state, cut, rank)]
    return lines, ids


@pytest.mark.ranks
@pytest.mark.slow
def test_every_cut_loads_what_every_cut_saved(tmp_path: Path) -> None:
    with Crew(max(cut.world for cut in CUTS)) as crew:
        visits = crew.run(_matrix, str(tmp_path), timeout=180)
    assert [line for lines, _ in visits for line in lines] == []
    assert len(set().union(*(ids for _, ids in visits))) == 1
    files = [attempts(Root(f"{tmp_path}/{number}"))[0] for number in range(len(CUTS))]
    assert files.count(files[0]) == len(CUTS)  # the order of rows at rest is that of the whole matrix, whoever saved it


def test_the_cuts_by_hand() -> None:
    whole = _whole((16,))
    assert Cut(tp=2).local(whole, 1).tolist() == [4, 5, 6, 7, 1004, 1005, 1006, 1007]
    assert Cut(tp=2, dp=2).local(whole, 1).tolist() == [4, 5, 6, 7, 1004]  # over the border of gate and up
    assert Cut(tp=2, interleaved=True).local(_whole((256,)), 1)[30:34].tolist() == [94, 95, 1064, 1065]
    naive = torch.cat([Cut(tp=2).local(whole, rank) for rank in (0, 1)])  # the fault: pieces in the order of ranks
    assert int((naive != whole).sum()) == 8
    entry = declared(Cut(tp=2).local(whole, 1), Cut(tp=2).local(torch.arange(16), 1), (16,))
    assert entry.boxes == [((4,), (4,), (0,)), ((12,), (4,), (4,))]
