"""What several tests here share: states to save, their bits, a load that comes back or is refused, and damage."""

import struct
from collections import namedtuple
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import ckpt
from tests.support.raw import objects_of, random_bits, raw

Pair = namedtuple("Pair", ["left", "right"])


def round_trip(root: Path, state: Any, into: Any, **options: Any) -> ckpt.Restored:
    """Saves one state as step 1 under a fresh root and loads it into another."""
    with ckpt.Checkpointer(root) as ck:
        receipt = ck.save(1, state)
        restored = ck.load(into, **options)
    assert restored is not None and restored.state_id == receipt.state_id, (restored, receipt)
    return restored


def tiny_net(seed: int) -> nn.Sequential:
    """Two linear layers, whose bits follow from the seed."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 6))


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    """One optimizer step on the data of this number."""
    data = torch.from_numpy(np.random.default_rng(number).standard_normal((4, 6)).astype(np.float32))

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (model(data) - data).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)  # type: ignore[arg-type]


def optimizer_bits(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The state_dict of an optimizer, with the bits of its tensors and floats, and the types of its other values."""

    def plain(x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            return (str(x.dtype), tuple(x.shape), raw(x))
        if isinstance(x, float):
            return struct.pack("<d", x)
        if isinstance(x, Mapping):
            return {k: plain(v) for k, v in x.items()}
        if isinstance(x, list | tuple):
            return type(x), [plain(v) for v in x]
        return type(x), x

    return plain(optimizer.state_dict())  # type: ignore[no-any-return]


def module_bits(module: nn.Module) -> dict[str, Any]:
    """The state_dict of a module, with the bits of its tensors."""
    found = module.state_dict()
    return {k: raw(v) if isinstance(v, torch.Tensor) else v for k, v in found.items()}


def typed_bits(node: Any) -> Any:
    """A nest of containers with its types and order, and the bits of all tensors, arrays and floats in it."""
    if isinstance(node, torch.Tensor):
        return torch.Tensor, str(node.dtype), tuple(node.shape), raw(node)
    if isinstance(node, np.ndarray):
        return np.ndarray, node.dtype, node.shape, node.tobytes()
    if isinstance(node, Mapping):
        return type(node), [(k, typed_bits(v)) for k, v in node.items()]
    if isinstance(node, list | tuple):
        return type(node), [typed_bits(x) for x in node]
    if isinstance(node, float):
        return float, struct.pack("<d", node)
    return type(node), node


def sample_state(seed: int, **more: Any) -> dict[str, Any]:
    """Two tensors with arrays of their own (the first in several objects), two packed ones, and plain values."""
    return {
        "big": random_bits((1300, 1000), torch.float32, seed),
        "own": random_bits((300, 100), torch.float32, seed + 1),
        "small": random_bits((5, 3), torch.float32, seed + 2),
        "count": random_bits((), torch.int64, seed + 3),
        "epoch": seed,
        "note": ["kept", (1, 2.5)],
        **more,
    }


def state_bits(state: Mapping[str, Any]) -> dict[str, Any]:
    """A flat state, with the bits of its tensors."""
    return {k: raw(v) if isinstance(v, torch.Tensor) else v for k, v in state.items()}


def refused_load(
    ck: ckpt.Checkpointer, target: dict[str, Any], kind: type[Exception], words: list[str], **options: Any
) -> str:
    """Loads, expects a refusal of phase 1 with these words, and that no byte of the target has changed."""
    before = state_bits(target)
    with pytest.raises(kind) as caught:
        ck.load(target, **options)
    message = str(caught.value)
    assert type(caught.value) is kind, message
    assert state_bits(target) == before, f"the target has changed: {message}"
    for word in words:
        assert word in message, f"no {word!r} in: {message}"
    return message


# Where the tensors of `sample_state` are: `big` and `own` have arrays of their own, `small` is packed.
FOLDERS = {"big": "tensors/big", "own": "tensors/own", "small": "packed/float32"}


def flip_bit(file: Path) -> None:
    """Flips a bit of the data; the same again undoes it."""
    data = bytearray(file.read_bytes())
    data[len(data) // 3] ^= 4
    file.write_bytes(data)


def swap_chunks(root: Path) -> None:
    """Swaps two whole objects of `big`, each with good checksums; the same again undoes it."""
    first, second = objects_of(root, "tensors/big")[:2]
    assert first.stat().st_size == second.stat().st_size
    a, b = first.read_bytes(), second.read_bytes()
    first.write_bytes(b)
    second.write_bytes(a)
