"""What the tests of hostile files share: small checkpoints of the real libraries, and how to forge them."""

import io
import json
import pickle
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import ckpt
from ckpt.adapters.foreign.formats import READERS
from ckpt.adapters.foreign.into import open_session, save_from
from ckpt.adapters.foreign.rank_files import plan_files
from ckpt.adapters.foreign.rank_rules import Given, Placer
from ckpt.adapters.foreign.ranks_write import write_ranks
from ckpt.engine.rest import CommittedState
from ckpt.errors import CkptError
from tests.support.raw import random_bits, tree


def state() -> dict[str, Any]:
    return {
        "w": random_bits((300, 200), torch.float32),
        "z": random_bits((7, 5), torch.int64, 1),
        "scalar": torch.tensor(2.5),
        "epoch": 3,
        "note": "kept",
    }


def make(form: str, folder: Path) -> None:
    """A small checkpoint by the real library; of Megatron's format all that is beside the tensors is made here."""
    tensors = {name: t for name, t in state().items() if isinstance(t, torch.Tensor)}
    if form == "hf":
        folder.mkdir()
        files = {"a.safetensors": ["w"], "b.safetensors": ["z", "scalar"]}
        for file, names in files.items():
            save_file({n: tensors[n] for n in names}, folder / file)
        weights = {n: file for file, names in files.items() for n in names}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))
        return
    if form == "ranks":
        with tempfile.TemporaryDirectory() as root:
            with ckpt.Checkpointer(root) as ck:
                ck.save(1, state())
            session = open_session(root)
            record = session.log.read().newest()
            assert record is not None
            source = CommittedState(session, record)
            given = [Given.parse("w=0:tp,1:dp")]
            files = plan_files(source.content, Placer(source.content, ckpt.Layout(tp=2, dp=2), given))
            write_ranks([source], folder, files, session.comm)
        return
    dcp.save(state(), checkpoint_id=folder, no_dist=True)
    if form == "megatron":
        torch.save({"iteration": 7, "lr": 0.5}, folder / "common.pt")
        (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')


def refused(form: str, folder: Path, kind: type[CkptError] | tuple[type[CkptError], ...], word: str = "") -> str:
    """Expects one error, and neither a commit nor a file beside the destination."""
    before = tree(folder.parent)
    root = folder.parent / "dst"
    with pytest.raises(kind) as caught:
        save_from(open_session(str(root)), READERS[form](folder), 1)
    assert word in str(caught.value), str(caught.value)
    if root.exists():
        assert open_session(str(root)).log.read().newest() is None
        shutil.rmtree(root)
    assert tree(folder.parent) == before
    return str(caught.value)


def metadata_of(folder: Path) -> Any:
    return pickle.loads((folder / ".metadata").read_bytes())


def write_metadata(folder: Path, meta: Any) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(meta))


def saved(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def replace_item(folder: Path, meta: Any, info: Any, data: bytes) -> None:
    """Puts other bytes in place of an item, at the end of its file."""
    file = folder / info.relative_path
    info.offset, info.length = file.stat().st_size, len(data)
    file.write_bytes(file.read_bytes() + data)
    write_metadata(folder, meta)
