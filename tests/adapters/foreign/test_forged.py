"""Files that lie: of absurd sizes, compressed, or pointing elsewhere. One clear error for each, and no memory."""

import io
import json
import resource
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt.adapters.foreign.restricted import load_plain
from ckpt.errors import CkptError, CorruptCheckpoint
from tests.adapters.foreign.forging import make, metadata_of, refused, replace_item, saved, write_metadata

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


# Bombs, absurd shapes, other folders


def bomb() -> bytes:
    """An archive like those of torch, of 256 MiB of zeros in a few hundred KiB."""
    whole = saved(torch.zeros(10))
    file = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(whole)) as old, zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as new:
        for info in old.infolist():
            data = bytes(256 << 20) if info.filename.endswith("data/0") else old.read(info)
            new.writestr(info.filename, data)
    return file.getvalue()


def test_compressed_archives_are_refused(tmp_path: Path) -> None:
    make("megatron", tmp_path / "src")
    data = bomb()
    with pytest.raises(CorruptCheckpoint, match="compressed"):
        load_plain(data, "here")
    meta = metadata_of(tmp_path / "src")
    (tmp_path / "src" / "common.pt").write_bytes(data)
    refused("megatron", tmp_path / "src", CorruptCheckpoint, "compressed")
    shutil.rmtree(tmp_path / "src")
    for key in ("w", "note"):
        make("dcp", tmp_path / "src")
        meta = metadata_of(tmp_path / "src")
        info = next(i for index, i in meta.storage_data.items() if index.fqn == key)
        replace_item(tmp_path / "src", meta, info, data)
        refused("dcp", tmp_path / "src", CorruptCheckpoint, "compressed")
        shutil.rmtree(tmp_path / "src")


def _sizes(shape: tuple[int, ...]) -> Callable[[Any], None]:
    def change(meta: Any) -> None:
        entry = meta.state_dict_metadata["w"]
        entry.size = entry.chunks[0].sizes = torch.Size(shape)

    return change


def _file(name: str) -> Callable[[Any], None]:
    def change(meta: Any) -> None:
        for info in meta.storage_data.values():
            info.relative_path = name

    return change


def _set(path: str, value: Any) -> Callable[[Any], None]:
    def change(meta: Any) -> None:
        *names, last = path.split(".")
        node = meta
        for name in names:
            node = node["w"] if name == "w" else node[0] if name == "0" else getattr(node, name)
        setattr(node, last, value)

    return change


@pytest.mark.parametrize(
    "change",
    [
        _sizes((2**62, 1)),
        _sizes((2**40, 2**40)),
        _sizes((2**62,)),
        _sizes((300, 201)),
        _sizes((-300, -200)),
        _sizes((1,) * 5000),
        _file("../outside"),
        _file("/etc/passwd"),
        _file(""),
        _file("."),
        _file(".."),
        _file("a\0b"),
        _file("x" * 5000),
        _set("state_dict_metadata.w.chunks", []),
        _set("state_dict_metadata.w.chunks", None),
        _set("state_dict_metadata.w.size", "text"),
        _set("state_dict_metadata.w.size", torch.Size([300])),
        _set("state_dict_metadata.w.properties", None),
        _set("state_dict_metadata.w.properties.dtype", torch.int32),
        _set("state_dict_metadata.w.properties.dtype", torch.qint8 if hasattr(torch, "qint8") else torch.bits8),
        _set("state_dict_metadata.w.chunks.0.offsets", torch.Size([2**62, 0])),
        _set("state_dict_metadata", {}),
        _set("state_dict_metadata", None),
        _set("state_dict_metadata", {1: 2}),
        _set("storage_data", {}),
        _set("storage_data", None),
    ],
)
def test_forged_metadata_is_refused(tmp_path: Path, change: Callable[[Any], None]) -> None:
    make("dcp", tmp_path / "src")
    (tmp_path / "outside").write_bytes((tmp_path / "src" / "__0_0.distcp").read_bytes())
    meta = metadata_of(tmp_path / "src")
    change(meta)
    write_metadata(tmp_path / "src", meta)
    refused("dcp", tmp_path / "src", CkptError, str(tmp_path))


@pytest.mark.parametrize(
    "index",
    [
        {"weight_map": {"w": "../outside.safetensors"}},
        {"weight_map": {"w": "/etc/passwd"}},
        {"weight_map": {"w": ".."}},
        {"weight_map": {"w": ""}},
        {"weight_map": {"w": "a\0b"}},
        {"weight_map": {"w": 1}},
        {"weight_map": {"w": "b.safetensors"}},
        {"weight_map": {"w": "gone.safetensors"}},
        {"weight_map": {}},
        {"weight_map": []},
        {"weights": {}},
        [],
        "text",
    ],
)
def test_forged_indices_are_refused(tmp_path: Path, index: Any) -> None:
    make("hf", tmp_path / "src")
    shutil.copy(tmp_path / "src" / "a.safetensors", tmp_path / "outside.safetensors")
    (tmp_path / "src" / "model.safetensors.index.json").write_text(json.dumps(index))
    refused("hf", tmp_path / "src", CkptError, "src")


@pytest.mark.parametrize(
    "header",
    [
        {"w": {"dtype": "F32", "shape": [2**62], "data_offsets": [0, 2**64 - 1]}},
        {"w": {"dtype": "F32", "shape": [2**62, 2**62], "data_offsets": [0, 4]}},
        {"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 2**40]}},
        {"w": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}},
        {"w": {"dtype": "EVIL", "shape": [1], "data_offsets": [0, 4]}},
    ],
)
def test_forged_headers_are_refused(tmp_path: Path, header: Any) -> None:
    data = json.dumps(header).encode()
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "a.safetensors").write_bytes(len(data).to_bytes(8, "little") + data + bytes(4))
    refused("hf", tmp_path / "src", CkptError, "a.safetensors")


def test_a_header_as_long_as_it_says_is_refused(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "a.safetensors").write_bytes((2**63).to_bytes(8, "little") + b"{}")
    refused("hf", tmp_path / "src", CorruptCheckpoint, "a.safetensors")


def test_hostile_files_take_no_memory(tmp_path: Path) -> None:
    """All of them in one child that may have little more than torch itself takes."""
    make("dcp", tmp_path / "shape")
    meta = metadata_of(tmp_path / "shape")
    _sizes((2**30, 2**10))(meta)
    write_metadata(tmp_path / "shape", meta)
    make("dcp", tmp_path / "memo")
    (tmp_path / "memo" / ".metadata").write_bytes(b"\x80\x02]r\xff\xff\xff\x7f.")
    make("megatron", tmp_path / "bomb")
    (tmp_path / "bomb" / "common.pt").write_bytes(bomb())
    make("dcp", tmp_path / "item")
    meta = metadata_of(tmp_path / "item")
    info = next(i for index, i in meta.storage_data.items() if index.fqn == "note")
    replace_item(tmp_path / "item", meta, info, bomb())
    child = """
import sys
from pathlib import Path
from ckpt.adapters.foreign.formats import READERS
from ckpt.adapters.foreign.witness import state_id_of
from ckpt.errors import CkptError
def peak():
    return int(next(l for l in open("/proc/self/status") if l.startswith("VmHWM")).split()[1]) >> 10
before = peak()
for form, name in (("dcp", "shape"), ("dcp", "memo"), ("megatron", "bomb"), ("dcp", "item")):
    try:
        state_id_of(READERS[form](Path(name)))
        sys.exit(f"{name} was read")
    except CkptError:
        pass
    if peak() - before > 64:
        sys.exit(f"{name} took {peak() - before} MiB")
"""
    limit = 16 << 30
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", child],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)),
    )
    assert done.returncode == 0, done.stderr[-2000:]
