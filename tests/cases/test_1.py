"""Case 1: every rank continues its own random streams, never another rank's, never a fresh one."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ckpt
from tests.support.ranks import Crew

pytestmark = [pytest.mark.ranks]

WORLD = 4
LAYOUTS = {
    "TP2 x PP2": ckpt.Layout(tp=2, pp=2),
    "DP4": ckpt.Layout(dp=4),
    "CP4": ckpt.Layout(cp=4),
    "EP4": ckpt.Layout(dp=4, ep=4),
    "none given": None,
}


@pytest.fixture(scope="module")
def crew() -> Iterator[Crew]:
    with Crew(WORLD) as crew:
        yield crew


class Streams:
    """Six streams of a process, seeded by rank."""

    def __init__(self, seed: int) -> None:
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        self.torch = torch.Generator().manual_seed(seed)
        self.numpy = np.random.default_rng(seed)
        self.philox = np.random.Generator(np.random.Philox(seed))

    @property
    def state(self) -> ckpt.RngState:
        return ckpt.RngState({"torch": self.torch, "numpy": self.numpy, "philox": self.philox})

    def draw(self, n: int) -> list[Any]:
        """n draws of each; `gauss` and `standard_normal` keep a second number for the next call."""
        found: list[Any] = []
        for _ in range(n):
            found += [random.random(), random.gauss(0, 1), np.random.random(), np.random.standard_normal()]
            found += [torch.rand(1).item(), torch.rand(1, generator=self.torch).item()]
            found += [self.numpy.random(), self.philox.integers(1 << 32)]
        return found


def _save(rank: int, world: int, root: str, layout: Any) -> list[Any]:
    streams = Streams(1000 + rank)
    streams.draw(rank + 1)
    with ckpt.Checkpointer(root, layout) as ck:
        ck.save(1, {"rng": streams.state, "x": torch.zeros(3)})
    return streams.draw(8)


def _load(rank: int, world: int, root: str, layout: Any) -> list[Any]:
    streams = Streams(7)  # the same on every rank, and not those that were saved
    with ckpt.Checkpointer(root, layout) as ck:
        assert ck.load({"rng": streams.state, "x": torch.ones(3)}) is not None
    return streams.draw(8)


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_stream_goes_on_on_its_own_rank(crew: Crew, tmp_path: Path, name: str) -> None:
    root = str(tmp_path / "root")
    straight = crew.run(_save, root, LAYOUTS[name], timeout=60)
    assert len({str(one) for one in straight}) == WORLD
    assert crew.run(_load, root, LAYOUTS[name], timeout=60) == straight


def _refused(rank: int, world: int, root: str, layout: Any) -> tuple[str, bool, bool]:
    streams = Streams(7)
    x = torch.ones(3)
    before = str((random.getstate(), torch.get_rng_state().tolist(), streams.numpy.bit_generator.state))
    with ckpt.Checkpointer(root, layout) as ck:
        with pytest.raises(ckpt.StateMismatch) as error:
            ck.load({"rng": streams.state, "x": x})
        unchanged = x.tolist() == [1, 1, 1] and before == str(
            (random.getstate(), torch.get_rng_state().tolist(), streams.numpy.bit_generator.state)
        )
        left_out = ck.load({"x": x}, allow_extra=["rng/*"]) is not None
    return str(error.value), unchanged, left_out


def test_another_layout_is_refused_with_nothing_changed(crew: Crew, tmp_path: Path) -> None:
    root = str(tmp_path / "root")
    crew.run(_save, root, LAYOUTS["TP2 x PP2"], timeout=60)
    for said, unchanged, left_out in crew.run(_refused, root, LAYOUTS["DP4"], timeout=60):
        assert "rng/" in said and "allow_extra" in said and unchanged and left_out


def _replicated(rank: int, world: int, root: str) -> str:
    torch.manual_seed(1000 + rank)
    with ckpt.Checkpointer(root) as ck:
        with pytest.raises(ckpt.StateMismatch) as error:
            ck.save(1, {"stream": ckpt.replicated(torch.get_rng_state()), "x": torch.zeros(1)})
    return str(error.value)


def test_a_stream_declared_replicated_is_refused_where_ranks_differ(crew: Crew, tmp_path: Path) -> None:
    for said in crew.run(_replicated, str(tmp_path / "root"), timeout=60):
        assert "stream" in said and "different bits" in said
