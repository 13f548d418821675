"""`Receipt.summary()`: what was captured, what was not, and why."""

from pathlib import Path

import torch
from torch import nn

import ckpt
from ckpt.engine.contents import Contents
from ckpt.engine.merge import Union
from ckpt.geometry import Box, Catalogue, Holdings, TensorSpec


def _cells(summary: str) -> dict[str, list[str]]:
    return {line.split()[0]: line.split()[1:] for line in summary.splitlines()[3:] if ":" not in line}


def test_entries_ties_and_what_was_left_out(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(300, 300), nn.Linear(300, 300, bias=False))
    model[1].weight = model[0].weight
    model.register_buffer("kept", torch.zeros(3))
    model[0].register_buffer("cache", torch.zeros(3), persistent=False)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 300)).sum().backward()
    optimizer.step()
    state = ckpt.TrainState(model=model, optimizer=optimizer, rng=ckpt.RngState(), epoch=3)
    with ckpt.Checkpointer(tmp_path) as ck:
        receipt = ck.save(7, state)
        optimizer.zero_grad()
        without_gradients = ck.save(8, state).summary()
    said = receipt.summary()
    assert said.startswith(f"step 7, state id {receipt.state_id}\n9 tensors of {receipt.bytes:,} bytes\n")
    cells = _cells(said)
    assert int(cells.pop("rng")[0]) >= 3  # and one for each CUDA device
    assert cells == {
        "epoch": ["1"],
        "model": ["3", "352.7", "KiB"],
        "optimizer": ["6", "2", "705.5", "KiB"],  # a value for the options of each parameter's group
    }
    assert "stored once: model/1.weight is model/0.weight" in said
    assert "not captured: model/0.cache: a buffer registered with persistent=False" in said
    assert "not captured: model/(gradients): gradients are no state between steps" in said
    assert "gradients" not in without_gradients


def test_sharded_tensors_are_told_from_whole_ones() -> None:
    halves = [(0, Box((0, 0), (2, 3))), (1, Box((2, 0), (2, 3)))]
    copies = [(0, Box((0,), (5,))), (1, Box((0,), (5,)))]
    specs = [TensorSpec("m/a", (4, 3), "float32", 4), TensorSpec("m/b", (5,), "float32", 4)]
    union = Union(Catalogue.of(specs), (Holdings.of(halves), Holdings.of(copies)), {})
    left_out = {f"m/{n}": "why" for n in range(9)}
    contents = Contents(union, [], [], left_out)
    assert contents.table().splitlines()[1].split() == ["m", "1", "1", "68", "B"]
    assert contents.notes() == ["not captured: m/0, m/1, m/2, m/3, m/4 and 4 more: why"]
