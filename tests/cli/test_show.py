"""`ckpt show`: provenance, the tree of tensors, values, and what each rank has its own of."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from tests.cli.commands import document, run, set_variables
from tests.support.ranks import Crew
from tests.support.raw import forge_pinned, objects_of
from tests.support.roots import Root


def state() -> dict[str, Any]:
    big = torch.zeros(2600, 1000)
    return {
        "model": {"embed": big, "head": big, "norm": torch.ones(7)},
        "opt": {"step": torch.tensor(3), "lr": 0.25},
        "note": "two\nlines \x1b[31mred",
        "empty": torch.zeros(0, 4),
        "rng": ckpt.per_rank(b"abc"),
    }


def test_one_checkpoint(root: Root, monkeypatch: pytest.MonkeyPatch) -> None:
    set_variables(monkeypatch, root)
    with ckpt.Checkpointer(root.url, storage_options=root.storage_options) as ck:
        receipt = ck.save(12, state())
    found = document("show", f"{root.url}@12")
    assert (found["url"], found["step"], found["seq"], found["parent"]) == (ck.url, 12, 2, None)
    assert found["state_id"] == receipt.state_id and found["bytes"] == receipt.bytes
    assert found["run"]["world"] == 1 and "torch" in found["run"]["versions"]
    tensors = {t["name"]: t for t in found["tensors"]}
    assert list(tensors) == ["empty", "model/embed", "model/norm", "opt/step"]
    embed = tensors["model/embed"]
    assert (embed["shape"], embed["dtype"], embed["bytes"]) == ([2600, 1000], "float32", 10_400_000)
    assert (embed["cell"], embed["chunk"], embed["objects"], embed["chunks"]) == ([1300, 500], [650, 500], 4, 8)
    assert embed["tied"] == ["model/head"] and embed["start"] is None and len(embed["fingerprint"]) == 32
    assert tensors["model/norm"]["objects"] == tensors["model/norm"]["chunks"] == 1
    assert tensors["model/norm"]["start"] == 0 and tensors["model/norm"]["array"] == "packed/float32"
    assert tensors["empty"]["objects"] == tensors["empty"]["bytes"] == 0
    assert found["values"]["opt/lr"] == {"float": "3fd0000000000000"}
    assert found["ranks"] == [{"rng": {"bytes": "616263"}}]
    text = run("show", root.url).output
    for line in ("model/embed"[6:], "is also model/head", "2600x1000", "650x500", "packed", "opt/lr", "0.25", "b'abc'"):
        assert line in text, line
    assert "\x1b" not in text and receipt.state_id in text


def test_stored_objects_are_as_many_as_it_says(tmp_path: Path) -> None:
    with ckpt.Checkpointer(tmp_path / "run") as ck:
        ck.save(1, state())
    shown = {t["name"]: t for t in document("show", tmp_path / "run")["tensors"]}
    assert len(objects_of(tmp_path / "run", "tensors/model/embed")) == shown["model/embed"]["objects"]


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("model/*", ["model/embed", "model/norm"]),
        ("*embed", ["model/embed"]),
        ("model/head", ["model/embed"]),  # by its other name
        ("opt/ste?", ["opt/step"]),
        ("[em]*m*", ["empty", "model/embed", "model/norm"]),
        ("MODEL/*", []),
    ],
)
def test_patterns(tmp_path: Path, pattern: str, names: list[str]) -> None:
    with ckpt.Checkpointer(tmp_path / "run") as ck:
        ck.save(1, state())
    found = document("show", tmp_path / "run", "--tensors", pattern)
    assert [t["name"] for t in found["tensors"]] == names
    text = run("show", tmp_path / "run", "--tensors", pattern).output
    assert all((name.rpartition("/")[2] in text) for name in names) and "opt/lr" not in text


def test_a_forged_checkpoint_is_refused(tmp_path: Path) -> None:
    with ckpt.Checkpointer(tmp_path / "run") as ck:
        ck.save(1, state())
    forge_pinned(tmp_path / "run", "ranks/manifest.json", lambda d: d.update(world=9))
    done = run("show", tmp_path / "run")
    assert done.exit_code == 1 and done.stdout == "" and "ranks/manifest.json: malformed" in done.stderr


@pytest.fixture(scope="module")
def crew() -> Iterator[Crew]:
    with Crew(2) as made:
        yield made


def _save(rank: int, world: int, root: str) -> None:
    part = (rank * 100, 0), (100, 300), (0, 0)
    with ckpt.Checkpointer(root, layout=ckpt.Layout(tp=2)) as ck:
        for step in (1, 2):
            w = ckpt.ShardedTensor(torch.full((100, 300), float(rank)), [part], (200, 300))
            ck.save(step, {"w": w, "seed": ckpt.per_rank(rank + (step if rank else 0))})


@pytest.mark.ranks
def test_two_ranks(crew: Crew, tmp_path: Path) -> None:
    """Layout and values of each rank, two receipts, and a state id in which what ranks have of their own is not."""
    folder = tmp_path / "run"
    crew.run(_save, str(folder))
    found = document("show", folder)
    assert found["run"]["layout"]["tp"] == 2
    assert found["ranks"] == [{"seed": {"int": "0"}}, {"seed": {"int": "3"}}]
    text = run("show", folder).output
    assert "tp2" in text and ", 2 ranks" in text and "values of rank 1" in text
    assert " tp2 " in run("ls", folder).output
    assert [c["ok"] for c in document("verify", folder, "--all")["checkpoints"]] == [True, True]
    apart = document("diff", f"{folder}@1", f"{folder}@2", code=1)
    assert apart["same_state"] and not apart["same"] and apart["per_rank"]["changed"] == ["rank 1: seed"]
    assert "rank's own value differs: rank 1: seed" in run("diff", f"{folder}@1", f"{folder}@2").output
    with ckpt.Checkpointer(tmp_path / "one") as ck:
        w = torch.cat([torch.zeros(100, 300), torch.ones(100, 300)])
        ck.save(1, {"w": w, "seed": ckpt.per_rank(0)})
    other = document("diff", folder, tmp_path / "one")
    assert other["same"] and other["per_rank"] is None
    assert "saved by 2 and 1 ranks" in run("diff", folder, tmp_path / "one").output
    receipt = next(folder.rglob("receipts/000001.json"))
    receipt.write_bytes(receipt.read_bytes().replace(b'"rank":1', b'"rank":0'))
    damage = [d for c in document("verify", folder, "--all", code=1)["checkpoints"] for d in c["damage"]]
    assert [d["file"] for d in damage] == [receipt.relative_to(folder).as_posix()]
