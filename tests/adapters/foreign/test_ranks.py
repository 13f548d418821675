"""The format `ranks`: the real library opens each file, it holds the rank's part, and all come back as they were."""

import contextlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import ckpt
from ckpt import Layout
from ckpt.adapters.foreign import mapped, ranks_write
from ckpt.adapters.foreign.formats import detect
from ckpt.adapters.foreign.into import open_session, save_from
from ckpt.adapters.foreign.rank_files import ABOUT, plan_files
from ckpt.adapters.foreign.rank_rules import Placer
from ckpt.adapters.foreign.ranks_read import RanksCheckpoint
from ckpt.adapters.foreign.ranks_write import write_ranks
from ckpt.adapters.foreign.safetensors_read import DTYPES
from ckpt.adapters.foreign.sidecar import NAME
from ckpt.adapters.foreign.witness import state_id_of
from ckpt.errors import CkptError, CorruptCheckpoint, StoreError, Unsupported
from tests.adapters.foreign.drawn import SHAPES
from tests.adapters.foreign.in_ranks import LAYOUT, layered, write
from tests.support.at_rest import committed
from tests.support.ranks import run_ranks
from tests.support.raw import random_bits, raw, tree


def imported(folder: Path, root: Path) -> str:
    return str(save_from(open_session(str(root)), RanksCheckpoint(folder), 1).record.document["state_id"])


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return layered(tmp_path_factory.mktemp("ranks") / "src")


LAYOUTS = st.builds(Layout, tp=st.integers(1, 3), dp=st.integers(1, 2), pp=st.integers(1, 2))


@settings(max_examples=8, suppress_health_check=[HealthCheck.too_slow])
@given(st.data(), LAYOUTS, st.sampled_from([64, 10**4, 10**8]), st.integers(1, 2))
def test_files_hold_the_parts_and_come_back_with_the_state_id(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, layout: Layout, band: int, jobs: int
) -> None:
    tmp = tmp_path_factory.mktemp("ranks")
    shapes = data.draw(st.lists(SHAPES, min_size=1, max_size=5))
    names = data.draw(st.lists(st.sampled_from(sorted(DTYPES)), min_size=len(shapes), max_size=len(shapes)))
    tensors = {
        f"t{n}": random_bits(s, getattr(torch, d), n) for n, (s, d) in enumerate(zip(shapes, names, strict=True))
    }
    shard = []
    for name, tensor in tensors.items():
        axes = data.draw(st.permutations(range(tensor.dim())))
        groups = data.draw(st.permutations(["tp", "dp", "pp"]))
        how = [f"{a}:{g}" for a, g in zip(axes, groups, strict=False)][: data.draw(st.integers(0, 3))]
        shard.append(f"m/{name}={','.join(how) or 'replicated'}")
    state = {"m": tensors, "tied": tensors["t0"], "lr": 0.5, "rank": ckpt.per_rank({"seed": 3})}
    with ckpt.Checkpointer(tmp / "a") as ck:
        expected = ck.save(1, state).state_id
    assert write(tmp / "a", tmp / "r", layout, shard, jobs=jobs, band=band) == expected
    _check_parts(tmp / "r", layout, {f"m.{n}": t for n, t in tensors.items()} | {"tied": tensors["t0"]})
    assert imported(tmp / "r", tmp / "b") == expected
    first, again = committed(tmp / "a").content, committed(tmp / "b").content
    assert (again.tensors, again.aliases, again.ranks) == (first.tensors, first.aliases, first.ranks)


def _check_parts(folder: Path, layout: Layout, whole: dict[str, torch.Tensor]) -> None:
    """By what each file says of itself, its elements are those of the logical tensors, and all are in some file."""
    seen = {key: torch.zeros(tensor.shape, dtype=torch.bool) for key, tensor in whole.items()}
    for rank in range(layout.world):
        path = folder / f"rank_{rank:05d}.safetensors"
        local = load_file(path)
        with safe_open(path, framework="pt") as opened:
            about = json.loads(opened.metadata()[ABOUT])["tensors"]
        assert about.keys() == local.keys()
        for key, told in about.items():
            assert tuple(told["shape"]) == whole[key].shape and local[key].dtype == whole[key].dtype
            elements = 0
            for offset, extent, inner in told["boxes"]:
                there = tuple(slice(o, o + e) for o, e in zip(offset, extent, strict=True))
                here = tuple(slice(o, o + e) for o, e in zip(inner, extent, strict=True))
                assert raw(local[key][here]) == raw(whole[key][there]), (rank, key)
                seen[key][there] = True
                elements += int(torch.tensor(extent).prod()) if extent else 1
            assert elements == local[key].numel()
    assert all(bool(mask.all()) for mask in seen.values())


def test_ranks_that_hold_the_same_share_a_file(root: Path, tmp_path: Path) -> None:
    write(root, tmp_path / "r", LAYOUT)
    inodes = [(tmp_path / "r" / f"rank_{n:05d}.safetensors").stat().st_ino for n in range(8)]
    assert [inodes.index(i) for i in inodes] == [0, 1, 0, 1, 4, 5, 4, 5]
    fc1 = load_file(tmp_path / "r" / "rank_00005.safetensors")["model.decoder.layers.mlp.linear_fc1.weight"]
    whole = random_bits((4, 512, 640), torch.bfloat16, 2)
    assert raw(fc1) == raw(torch.cat([whole[2:, 128:256], whole[2:, 384:]], 1))


def test_without_hard_links_files_are_copied(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(root, tmp_path / "linked", LAYOUT)

    def refuse(*_: object) -> None:
        raise PermissionError("no hard links here")

    monkeypatch.setattr(os, "link", refuse)
    write(root, tmp_path / "copied", LAYOUT)
    assert tree(tmp_path / "linked") == tree(tmp_path / "copied")
    assert len({f.stat().st_ino for f in (tmp_path / "copied").iterdir()}) == 9
    assert state_id_of(RanksCheckpoint(tmp_path / "copied")) == committed(root).content.state_id


def test_bands_and_threads_do_not_change_what_is_written(root: Path, tmp_path: Path) -> None:
    write(root, tmp_path / "a", LAYOUT, band=100_000)
    write(root, tmp_path / "b", LAYOUT, band=1 << 26, jobs=3)
    assert tree(tmp_path / "a") == tree(tmp_path / "b")


def _write_in_processes(rank: int, world: int, root: str, folder: str) -> list[int]:
    """What this process read."""
    source = committed(Path(root))
    files = plan_files(source.content, Placer(source.content, LAYOUT))
    done: list[int] = []
    write_ranks([source], Path(folder), files, open_session(root).comm, band=1 << 18, advance=done.append)
    try:
        damaged = committed(Path(root))
        damaged.read = _fails if rank else damaged.read  # type: ignore[method-assign]
        write_ranks([damaged], Path(folder + "-failed"), files, open_session(root).comm, band=1 << 18)
    except StoreError:
        return done
    raise AssertionError("one process cannot read, and no error was raised")


def _fails(name: str, box: Any) -> torch.Tensor:
    raise StoreError("the disk is gone")


@pytest.mark.ranks
def test_processes_share_the_work_and_fail_together(root: Path, tmp_path: Path) -> None:
    write(root, tmp_path / "1", LAYOUT)
    read = run_ranks(2, _write_in_processes, str(root), str(tmp_path / "2"), timeout=90)
    assert tree(tmp_path / "1") == tree(tmp_path / "2")
    total = committed(root).content.nbytes
    assert sum(map(sum, read)) == total and abs(sum(read[0]) - sum(read[1])) <= 1 << 18
    # What could be read was written, and stays: one process goes on with it.
    kept: list[int] = []
    source = committed(root)
    files = plan_files(source.content, Placer(source.content, LAYOUT))
    group = open_session(str(root)).comm
    write_ranks([source], tmp_path / "2-failed", files, group, band=1 << 18, advance=kept.append)
    assert kept[0] == sum(read[0]) and sum(kept) == total
    assert tree(tmp_path / "1") == tree(tmp_path / "2-failed")


def test_more_files_than_a_process_may_open(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(root, tmp_path / "all", LAYOUT)
    most, pwrite = 0, os.pwrite

    def counted(*arguments: Any) -> int:
        nonlocal most
        most = max(most, _open_files(tmp_path))
        return pwrite(*arguments)

    monkeypatch.setattr(os, "pwrite", counted)
    monkeypatch.setattr(ranks_write, "OPEN", 3)
    monkeypatch.setattr(mapped, "OPEN", 2)
    write(root, tmp_path / "few", LAYOUT)
    assert most == 1 and tree(tmp_path / "few") == tree(tmp_path / "all")
    source = RanksCheckpoint(tmp_path / "few")
    assert state_id_of(source) == committed(root).content.state_id and _open_files(tmp_path) == 2


def _open_files(folder: Path) -> int:
    """Files below a folder that this process has open."""
    found = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the one that lists them
            found.append(descriptor.readlink())
    return sum(str(path).startswith(f"{folder}{os.sep}") for path in found)


# Damage


def test_a_flipped_bit_is_seen(root: Path, tmp_path: Path) -> None:
    write(root, tmp_path / "r", LAYOUT)
    file = tmp_path / "r" / "rank_00004.safetensors"
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.unlink()
    file.write_bytes(data)
    with pytest.raises(CorruptCheckpoint, match=r"rank_0000\d.safetensors and rank_0000\d.safetensors hold different"):
        imported(tmp_path / "r", tmp_path / "b")  # rank 6 still has the right one
    (tmp_path / "r" / "rank_00006.safetensors").unlink()
    os.link(file, tmp_path / "r" / "rank_00006.safetensors")
    with pytest.raises(CorruptCheckpoint, match="says that it is"):
        imported(tmp_path / "r", tmp_path / "b")
    assert open_session(str(tmp_path / "b")).log.read().newest() is None
    (tmp_path / "r" / NAME).unlink()
    imported(tmp_path / "r", tmp_path / "c")  # safetensors have no checksums of their own


def test_missing_and_mixed_files_are_refused(root: Path, tmp_path: Path) -> None:
    write(root, tmp_path / "r", LAYOUT)
    write(root, tmp_path / "other", Layout(tp=4, dp=2))
    files = [tmp_path / "r" / f"rank_{n:05d}.safetensors" for n in range(8)]
    kept = files[3].read_bytes()
    files[3].unlink()
    with pytest.raises(CorruptCheckpoint, match=r"rank_00003.safetensors: missing"):
        RanksCheckpoint(tmp_path / "r")
    shutil.copy(tmp_path / "other" / "rank_00003.safetensors", files[3])
    with pytest.raises(CkptError, match="several layouts"):
        RanksCheckpoint(tmp_path / "r")
    files[3].write_bytes(kept)
    files[7].unlink()
    with pytest.raises(CorruptCheckpoint, match="files of 7 ranks"):
        RanksCheckpoint(tmp_path / "r")
    files[0].unlink()
    assert detect(tmp_path / "r") == "ranks"
    with pytest.raises(CorruptCheckpoint, match=r"rank_00000.safetensors: missing"):
        RanksCheckpoint(tmp_path / "r")


@pytest.mark.parametrize(
    "change",
    [
        {"shape": [4]},
        {"shape": [5, 4]},
        {"boxes": []},
        {"boxes": [[[0, 0], [4, 4], [1, 0]]]},
        {"boxes": [[[0, 0], [4, 4], [0, 0]], [[0, 0], [4, 4], [0, 0]]]},
        {"boxes": [[[1, 0], [4, 4], [0, 0]]]},
        {"boxes": [[[0], [4], [0]]]},
        {"boxes": [[[0, 0], [4, "4"], [0, 0]]]},
        {"boxes": [[[0, 0], [4, -4], [0, 0]]]},
        {"boxes": 7},
    ],
)
def test_forged_boxes_are_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    told = {"shape": [4, 4], "boxes": [[[0, 0], [4, 4], [0, 0]]]}
    about = {"format": 1, "layout": {"tp": 1}, "tensors": {"w": told}}
    (tmp_path / "r").mkdir()
    path = tmp_path / "r" / "rank_00000.safetensors"
    save_file({"w": torch.ones(4, 4)}, path, {ABOUT: json.dumps(about)})
    assert [t.shape for t in RanksCheckpoint(tmp_path / "r").content.tensors] == [(4, 4)]
    about["tensors"] = {"w": told | change}
    save_file({"w": torch.ones(4, 4)}, path, {ABOUT: json.dumps(about)})
    with pytest.raises(CorruptCheckpoint, match=r"rank_00000.safetensors|make up the state"):
        RanksCheckpoint(tmp_path / "r")


@pytest.mark.parametrize(
    "about",
    [None, "x", "{}", '{"format": 1, "layout": {"tp": 0}, "tensors": {}}', '{"format": 1, "layout": 3, "tensors": {}}'],
)
def test_other_safetensors_under_these_names_are_refused(tmp_path: Path, about: str | None) -> None:
    save_file({"w": torch.ones(4)}, tmp_path / "rank_00000.safetensors", None if about is None else {ABOUT: about})
    with pytest.raises(CkptError, match=r"rank_00000.safetensors"):
        RanksCheckpoint(tmp_path)


def test_what_the_format_lacks_is_refused(tmp_path: Path) -> None:
    with ckpt.Checkpointer(tmp_path / "a") as ck:
        ck.save(1, {"z": random_bits((3,), torch.complex128)})
    with pytest.raises(Unsupported, match="z: "):
        write(tmp_path / "a", tmp_path / "r", Layout())
    assert not (tmp_path / "r").exists()


def test_a_failed_write_leaves_nothing(root: Path, tmp_path: Path) -> None:
    shutil.copytree(root, tmp_path / "a")
    file = max((f for f in (tmp_path / "a").rglob("*") if f.is_file()), key=lambda f: f.stat().st_size)
    data = bytearray(file.read_bytes())
    data[5000] ^= 1
    file.write_bytes(data)
    for jobs in (1, 2):
        with pytest.raises(CorruptCheckpoint, match="damaged"):
            write(tmp_path / "a", tmp_path / "r", LAYOUT, jobs=jobs)
        assert not (tmp_path / "r").exists()
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "mine").write_text("x")
    with pytest.raises(StoreError, match="not empty"):
        write(root, tmp_path / "r", LAYOUT)
    assert [p.name for p in (tmp_path / "r").iterdir()] == ["mine"]
