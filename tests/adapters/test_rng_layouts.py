"""Random streams of real ranks on another layout: what means the same goes on, the rest is refused or made anew."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import ckpt
from ckpt import Layout
from tests.support.ranks import Crew

pytestmark = [pytest.mark.ranks]

SAVED = Layout(tp=2, dp=2)


@pytest.fixture(scope="module")
def crew() -> Iterator[Crew]:
    with Crew(4) as crew:
        yield crew


class Job:
    """Streams as a job seeds them: `torch` by TP rank, `own` by DP rank, those of python and NumPy alike everywhere."""

    def __init__(self, layout: Layout, rank: int, seed: int) -> None:
        here = layout.coords(rank)
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed + here.tp)
        self.own = np.random.Generator(np.random.Philox(seed + here.dp))

    def draw(self) -> dict[str, Any]:
        return {
            "python": [random.gauss(0, 1) for _ in range(3)],
            "numpy": np.random.standard_normal(3).tolist(),
            "torch": torch.rand(3).tolist(),
            "own": self.own.random(3).tolist(),
        }


def _save(rank: int, world: int, root: str) -> dict[str, Any]:
    job = Job(SAVED, rank, 100)
    job.draw()
    with ckpt.Checkpointer(root, SAVED) as ck:
        ck.save(1, {"rng": ckpt.RngState({"own": job.own}), "x": torch.zeros(2)})
    return job.draw()


def _load(
    rank: int, world: int, root: str, layout: Layout, rederive: list[str]
) -> tuple[str | None, tuple[str, ...], dict[str, Any]] | None:
    """What a load says (None if it is done), which streams it made anew, and what is drawn then."""
    group = dist.new_group(list(range(layout.world)))
    if rank >= layout.world:
        return None
    job = Job(layout, rank, 7)
    state = {"rng": ckpt.RngState({"own": job.own}, rederive=rederive), "x": torch.ones(2)}
    said, made = None, ()
    with ckpt.Checkpointer(root, layout, process_group=group, read_only=True) as ck:
        try:
            restored = ck.load(state)
            assert restored is not None
            made = restored.rederived
        except ckpt.StateMismatch as error:
            said = str(error)
            assert state["x"].tolist() == [1, 1]
    return said, made, job.draw()


def test_streams_between_layouts(crew: Crew, tmp_path: Path) -> None:
    root = str(tmp_path / "root")
    straight = {(SAVED.coords(r).tp, SAVED.coords(r).dp): d for r, d in enumerate(crew.run(_save, root, timeout=60))}

    turned = Layout(tp=2, dp=2, order="dp-cp-ep-tp-pp")
    for rank, (said, made, drawn) in enumerate(crew.run(_load, root, turned, [], timeout=60)):
        assert (said, made) == (None, ())
        assert drawn == straight[turned.coords(rank).tp, turned.coords(rank).dp]

    fewer = Layout(tp=2)
    for said, _, _ in crew.run(_load, root, fewer, [], timeout=60)[:2]:
        assert said is not None and "rng/generator/own" in said and "differs along dp" in said
        assert "rederive=['generator/own']" in said and "allow_extra" in said
    once, again = (crew.run(_load, root, fewer, ["generator/*"], timeout=60)[:2] for _ in range(2))
    assert once == again
    for rank, (said, made, drawn) in enumerate(once):
        assert said is None and made == ("rng/generator/own",)
        before = straight[rank, 0]
        assert {k: drawn[k] for k in ("python", "numpy", "torch")} == {
            k: before[k] for k in ("python", "numpy", "torch")
        }
        assert drawn["own"] not in [d["own"] for d in straight.values()]
    assert once[0][2]["own"] == once[1][2]["own"]  # it did not differ along tp

    apart = Layout(dp=4)
    assert all(said and "rng/torch" in said for said, _, _ in crew.run(_load, root, apart, ["generator/*"], timeout=60))
    found = crew.run(_load, root, apart, ["*"], timeout=60)
    assert {made for _, made, _ in found} == {("rng/generator/own", "rng/torch")}
    assert len({str(drawn["own"]) for _, _, drawn in found}) == 4
    assert len({str(drawn["torch"]) for _, _, drawn in found}) == 1  # it was the same along dp, and tp is gone
