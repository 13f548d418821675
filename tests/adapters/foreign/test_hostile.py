"""Files that are damaged, or hold code: one clear error for each, and nothing is run."""

import io
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import ckpt
from ckpt.adapters.foreign.dcp_read import DcpCheckpoint
from ckpt.adapters.foreign.formats import READERS, detect
from ckpt.adapters.foreign.into import open_session, save_from
from ckpt.adapters.foreign.restricted import read_pickle
from ckpt.adapters.foreign.witness import state_id_of
from ckpt.errors import CkptError, CorruptCheckpoint, Unsupported
from tests.adapters.foreign.forging import make, metadata_of, refused, replace_item, saved, write_metadata

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


@pytest.fixture(params=sorted(READERS.keys() - {"mp_rank"}))  # test_mp_rank has those files, which lie in folders
def form(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def folder(form: str, tmp_path: Path) -> Path:
    make(form, tmp_path / "src")
    return tmp_path / "src"


def test_what_is_whole_is_read(form: str, folder: Path) -> None:
    assert detect(folder) == form
    assert len(READERS[form](folder).content.tensors) == 3


# Damage


ITEMS = {
    "dcp": ["__0_0.distcp", ".metadata"],
    "hf": ["a.safetensors", "model.safetensors.index.json"],
    "megatron": ["__0_0.distcp", ".metadata", "common.pt"],
    "ranks": ["rank_00002.safetensors", "ckpt-sidecar.json"],
}


def test_a_file_cut_short_is_an_error(form: str, folder: Path) -> None:
    for file in sorted(f for f in folder.iterdir() if f.name not in ("metadata.json", ".metadata")):
        data = file.read_bytes()
        for keep in (0, 1, 7, len(data) // 3, len(data) // 2, len(data) - 1):
            file.write_bytes(data[:keep])
            refused(form, folder, CkptError, str(folder))
        file.write_bytes(data)


def test_metadata_cut_short_is_an_error(tmp_path: Path) -> None:
    make("dcp", tmp_path / "src")
    file = tmp_path / "src" / ".metadata"
    data = file.read_bytes()
    for keep in range(0, len(data), 61):
        file.write_bytes(data[:keep])
        refused("dcp", tmp_path / "src", CorruptCheckpoint, ".metadata")


def test_a_flipped_bit_is_an_error_or_changes_nothing(form: str, folder: Path) -> None:
    """But for what no format protects: the elements of safetensors, and names and values in pickled metadata."""
    expected = state_id_of(READERS[form](folder))
    seen = 0
    for file in sorted(f for f in folder.iterdir() if f.suffix in (".distcp", ".pt", ".safetensors")):
        data = bytearray(file.read_bytes())
        header = 8 + int.from_bytes(data[:8], "little") if form == "hf" else len(data)
        places = sorted(
            {*range(0, header, max(1, header // 150)), *range(len(data) - 300, len(data), 7)} & {*range(header)}
        )
        for n, at in enumerate(places):
            data[at] ^= 1 << n % 8
            file.write_bytes(data)
            try:
                found = state_id_of(READERS[form](folder))
                assert form == "hf" or found == expected, (file, at)
            except CkptError as error:
                assert str(folder) in str(error)
                seen += 1
            data[at] ^= 1 << n % 8
        file.write_bytes(data)
    assert seen > 20 and state_id_of(READERS[form](folder)) == expected


def test_flipped_bits_of_metadata_raise_nothing_but_errors_of_ckpt(tmp_path: Path) -> None:
    make("dcp", tmp_path / "src")
    file = tmp_path / "src" / ".metadata"
    data = bytearray(file.read_bytes())
    seen = 0
    for at in range(0, len(data), 2):
        data[at] ^= 1 << at // 2 % 8
        file.write_bytes(data)
        try:
            state_id_of(DcpCheckpoint(tmp_path / "src"))
        except CkptError as error:
            assert str(tmp_path) in str(error)
            seen += 1
        data[at] ^= 1 << at // 2 % 8
    assert seen > 100


@pytest.mark.parametrize("what", ["missing", "folder", "loop"])
def test_a_file_that_is_none_is_an_error(form: str, folder: Path, what: str) -> None:
    for name in ITEMS[form]:
        (folder / name).rename(folder.parent / "aside")
        if what == "folder":
            (folder / name).mkdir()
        if what == "loop":
            (folder / name).symlink_to(name)
        if name.endswith(".json") and what == "missing":  # without an index, all the files there are read
            assert len(READERS[form](folder).content.tensors) == 3
        else:
            refused(form, folder, CkptError, str(folder))
        if what == "folder":
            (folder / name).rmdir()
        if what == "loop":
            (folder / name).unlink()
        (folder.parent / "aside").rename(folder / name)
    assert len(READERS[form](folder).content.tensors) == 3


# Code in pickles


class Payload:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.path}",)


def test_code_in_metadata_does_not_run(tmp_path: Path) -> None:
    make("dcp", tmp_path / "src")
    evil = tmp_path / "evil"
    meta = metadata_of(tmp_path / "src")
    for spoiled in (Payload(evil), {"a": Payload(evil)}):
        write_metadata(tmp_path / "src", spoiled)
        refused("dcp", tmp_path / "src", Unsupported, "posix.system")
    meta.planner_data = Payload(evil)
    write_metadata(tmp_path / "src", meta)
    refused("dcp", tmp_path / "src", Unsupported, "posix.system")
    assert not evil.exists()
    pickle.loads(pickle.dumps(Payload(evil)))
    assert evil.exists(), "the payload itself must work"


@pytest.mark.parametrize("key", ["w", "note"])
def test_code_in_an_item_does_not_run(tmp_path: Path, key: str) -> None:
    make("dcp", tmp_path / "src")
    evil = tmp_path / "evil"
    meta = metadata_of(tmp_path / "src")
    info = next(i for index, i in meta.storage_data.items() if index.fqn == key)
    replace_item(tmp_path / "src", meta, info, saved(Payload(evil)))
    if key == "w":
        refused("dcp", tmp_path / "src", CkptError, "w")
    else:
        assert "posix.system" in DcpCheckpoint(tmp_path / "src").content.left_out["note"]
    assert not evil.exists()


def test_code_in_common_does_not_run(tmp_path: Path) -> None:
    make("megatron", tmp_path / "src")
    evil = tmp_path / "evil"
    torch.save({"iteration": 7, "args": Payload(evil)}, tmp_path / "src" / "common.pt")
    content = READERS["megatron"](tmp_path / "src").content
    assert "posix.system" in content.left_out["common.pt: args"] and content.step == 7
    torch.save(Payload(evil), tmp_path / "src" / "common.pt")
    refused("megatron", tmp_path / "src", CorruptCheckpoint, "common.pt")
    assert not evil.exists()


@pytest.mark.parametrize(
    "data",
    [
        b"cbuiltins\neval\n(S'1'\ntR.",
        b"cos\nsystem\n(S'true'\ntR.",
        b"\x80\x04\x8c\x08builtins\x8c\x04exec\x93\x8c\x04pass\x85R.",
        b"ctorch\nSize\n(N}S'x'\nI1\ns\x86b.",
        b"ctorch.distributed.checkpoint.metadata\nMetadata\n(N}S'__eq__'\nN s\x86b.".replace(b" ", b""),
        b"ccollections\nOrderedDict\n}S'x'\nI1\nsb.",
        b"\x80\x02r\xff\xff\xff\xff.",
        b"\x80\x02]r\xff\xff\xff\x7f.",
        b"\x8e" + (1 << 50).to_bytes(8, "little") + b".",
        b"\x96" + (1 << 50).to_bytes(8, "little") + b".",
        b"\x8b\xff\xff\xff\x7f.",
        b"",
        b".",
        b"(" * 100000,
        b"]" + b"]" * 5000 + b"a" * 5000 + b".",
    ],
)
def test_a_pickle_that_is_no_metadata_is_refused(tmp_path: Path, data: bytes) -> None:
    make("dcp", tmp_path / "src")
    before = dict(vars(dcp.metadata.Metadata))
    (tmp_path / "src" / ".metadata").write_bytes(data)
    refused("dcp", tmp_path / "src", (Unsupported, CorruptCheckpoint), ".metadata")
    assert dict(vars(dcp.metadata.Metadata)) == before


def test_a_pickle_cannot_change_a_class() -> None:
    class Known:
        pass

    for state_of_class in (b"}S'x'\nI1\ns", b"(N}S'x'\nI1\nst"):
        with pytest.raises(CorruptCheckpoint, match="would change"):
            read_pickle(io.BytesIO(b"cm\nKnown\n" + state_of_class + b"b."), {("m", "Known"): Known}, "here")
    assert not hasattr(Known, "x")


def test_links_that_lead_to_files_are_followed_as_in_the_hub_cache(form: str, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "links").mkdir()
    for file in folder.iterdir():
        (tmp_path / "links" / file.name).symlink_to(file)
    save_from(open_session(str(tmp_path / "dst")), READERS[form](tmp_path / "links"), 1)
    with ckpt.Checkpointer(tmp_path / "dst", read_only=True) as ck:
        assert ck.latest() is not None
