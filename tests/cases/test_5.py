"""Case 5, zarr-3682: a write race in one chunk.

The fault: several writers fill disjoint parts of one stored chunk; a partial write is read-modify-write of the whole
object, and the last one wins. Here each object has exactly one writer, which gets the others' parts before and writes
it whole, once; so the result is complete however the ranks' cuts lie to the chunks.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from tests.support.ranks import Crew
from tests.support.raw import attempt_folder, labelled, raw, tree
from tests.support.roots import Root

pytestmark = pytest.mark.ranks

# name: global shape, and for a world the cuts along the first axis that is not 1
SHAPES = {"twelve": (12,), "ten": (10,), "columns": (1, 10, 3), "objects": (1301, 1000)}


def _cuts(size: int, world: int) -> list[int]:
    """Cuts at no border of a chunk: 10 over 3 ranks gives 4, 3, 3; 12 over 4 gives 3 each."""
    return [-(-size * r // world) for r in range(world + 1)]


def _parts(rank: int, world: int, filled: bool) -> dict[str, ckpt.ShardedTensor]:
    parts = {}
    for name, shape in SHAPES.items():
        axis = next(i for i, n in enumerate(shape) if n > 1)
        a, b = _cuts(shape[axis], world)[rank : rank + 2]
        local = labelled(shape).narrow(axis, a, b - a).clone()
        if not filled:
            local.fill_(-1)
        offset = tuple(a if i == axis else 0 for i in range(len(shape)))
        parts[name] = ckpt.ShardedTensor(local, [(offset, tuple(local.shape), (0,) * len(shape))], shape)
    return parts


def _save(rank: int, world: int, root: Root, writers: int, repeats: int) -> None:
    import torch.distributed as dist

    group = dist.new_group(list(range(writers)))
    if rank < writers:
        with ckpt.Checkpointer(root.url, process_group=group, storage_options=root.storage_options) as ck:
            for step in range(repeats):
                ck.save(step, _parts(rank, writers, True))


@pytest.fixture(scope="module")
def crew() -> Iterator[Crew]:
    with Crew(4) as made:
        yield made


@pytest.mark.parametrize("writers", [4, 3])
def test_many_writers_of_one_chunk_lose_nothing(writers: int, root: Root, crew: Crew) -> None:
    """Every repeat is loaded, by one rank, and compared with the labels."""
    repeats = 3 if root.on_s3 else 10
    crew.run(_save, root, writers, repeats)
    with ckpt.Checkpointer(root.url, storage_options=root.storage_options, read_only=True) as ck:
        assert ck.steps() == list(range(repeats))
        for step in range(repeats):
            target = {name: torch.full(shape, -1.0) for name, shape in SHAPES.items()}
            assert ck.load(target, step=step) is not None
            assert {n: raw(t) for n, t in target.items()} == {n: raw(labelled(s)) for n, s in SHAPES.items()}


@pytest.mark.parametrize("writers", [4, 3])
def test_every_object_has_one_writer_and_is_written_once(writers: int, tmp_path: Path, crew: Crew) -> None:
    crew.run(_save, Root(str(tmp_path / "many")), writers, 1)
    folder = attempt_folder(tmp_path / "many")
    arrays = json.loads((folder / "manifest.json").read_bytes())["arrays"]
    written: list[str] = []
    for receipt in sorted((folder / "receipts").iterdir()):
        for array, index in json.loads(receipt.read_bytes())["objects"]:
            written.append("/".join([arrays[array]["folder"], "c", *map(str, index)]))
    stored = [name for name in tree(folder / "state") if not name.endswith("zarr.json")]
    assert sorted(written) == sorted(stored)
    with ckpt.Checkpointer(tmp_path / "one") as ck:  # the same files as one writer makes
        whole: dict[str, Any] = {name: labelled(shape) for name, shape in SHAPES.items()}
        ck.save(0, whole)
    assert tree(attempt_folder(tmp_path / "one") / "state") == tree(folder / "state")
