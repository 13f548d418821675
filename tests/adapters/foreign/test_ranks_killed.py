"""Files of ranks whose writing was killed: the next call goes on, and believes only what it finds to be right."""

from pathlib import Path

import pytest

from ckpt import Layout
from ckpt.adapters.foreign.work_folder import WORK
from ckpt.errors import CkptError
from tests.adapters.foreign.in_ranks import LAYOUT, layered, write
from tests.support.at_rest import committed
from tests.support.raw import flip_bit, tree


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return layered(tmp_path_factory.mktemp("ranks") / "src")


class Stop(Exception):
    """Stands for a kill: nothing is cleaned up after it."""


def stopped(root: Path, folder: Path, point: str, after: int) -> None:
    """A call that ends when it is at a point for the time number `after`."""
    passed = 0

    def fault(here: str) -> None:
        nonlocal passed
        passed += here == point
        if here == point and passed == after:
            raise Stop

    with pytest.raises(Stop):
        write(root, folder, LAYOUT, faults=fault)


def again(root: Path, folder: Path) -> int:
    """Goes on; returns how many bytes of the state were written already."""
    done: list[int] = []
    write(root, folder, LAYOUT, advance=done.append)
    return done[0]


@pytest.mark.parametrize(
    ("point", "after"),
    [("files.piece", 1), ("files.piece", 5), ("files.placed", 1), ("files.placed", 6), ("files.last", 1)],
)
def test_what_is_done_is_not_done_again(root: Path, tmp_path: Path, point: str, after: int) -> None:
    write(root, tmp_path / "whole", LAYOUT)
    stopped(root, tmp_path / "r", point, after)
    found = [path.name for path in (tmp_path / "r").glob("rank_*")]
    assert ("rank_00000.safetensors" in found) == (point == "files.last")
    done = again(root, tmp_path / "r")
    total = committed(root).content.nbytes
    assert 0 < done < total if point == "files.piece" else done == total
    assert tree(tmp_path / "r") == tree(tmp_path / "whole")


@pytest.mark.parametrize("where", ["element", "copy", "record", "header", "file"])
def test_what_is_damaged_is_made_again(root: Path, tmp_path: Path, where: str) -> None:
    write(root, tmp_path / "whole", LAYOUT)
    stopped(root, tmp_path / "r", "files.placed", 1)
    work = tmp_path / "r" / WORK
    parts = {file.name: file for file in (work / "files").glob("*.part")}
    if where == "element":
        flip_bit(parts["rank_00001.safetensors.part"], parts["rank_00001.safetensors.part"].stat().st_size // 2)
    elif where == "copy":  # of an element that the file of another stage has too
        flip_bit(parts["rank_00004.safetensors.part"], -5)
    elif where == "record":
        flip_bit(work / "pieces" / "000003.json", 40)
    elif where == "header":
        flip_bit(parts["rank_00000.safetensors.part"], 20)
    else:
        parts["rank_00005.safetensors.part"].unlink()
    done, total = again(root, tmp_path / "r"), committed(root).content.nbytes
    assert done == total if where == "header" else done < total
    assert tree(tmp_path / "r") == tree(tmp_path / "whole")


def test_bands_of_another_size_are_another_conversion(root: Path, tmp_path: Path) -> None:
    stopped(root, tmp_path / "r", "files.piece", 2)
    before = tree(tmp_path / "r")
    for other in ({"band": 1 << 19}, {"layout": Layout(tp=4)}):
        with pytest.raises(CkptError, match="unfinished conversion"):
            write(root, tmp_path / "r", **{"layout": LAYOUT, **other})
        assert tree(tmp_path / "r") == before


def test_ranks_share_files_by_copies_where_there_are_no_hard_links(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(root, tmp_path / "linked", LAYOUT)

    def refuse(*_: object) -> None:
        raise PermissionError("no hard links here")

    monkeypatch.setattr("ckpt.adapters.foreign.work_folder.os.link", refuse)
    write(root, tmp_path / "r", LAYOUT)
    assert {path.stat().st_nlink for path in (tmp_path / "r").iterdir()} == {1}
    assert tree(tmp_path / "r") == tree(tmp_path / "linked")
