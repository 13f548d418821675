"""Every byte of a run's state on one rank, hashed by name. Nothing of ckpt is used."""

import hashlib
import random
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from tests.support.raw import raw

Digests = dict[str, str]


def digests(state: Mapping[str, Any]) -> Digests:
    """A SHA-256 of each leaf of nested dicts and lists: tensors (of a DTensor the local one), arrays, generators, lists
    of plain values and plain values, with their types. Empty dicts and lists have no leaf."""
    return {where: hashlib.sha256(data).hexdigest() for where, data in _leaves(state, "")}


def differing(some: Digests, others: Digests) -> list[str]:
    """Names of the leaves that are not the same in both, or are in one of them alone."""
    return sorted(name for name in some.keys() | others.keys() if some.get(name) != others.get(name))


def sections(names: list[str]) -> set[str]:
    """The top-level entries that leaves belong to."""
    return {name.split("/")[1] for name in names}


def module(owner: torch.nn.Module) -> dict[str, torch.Tensor]:
    """All parameters and buffers of a module, those too that its state_dict leaves out."""
    return {**dict(owner.named_parameters(remove_duplicate=False)), **dict(owner.named_buffers(remove_duplicate=False))}


def optimizer(owner: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Options and members' states of each parameter group."""
    return [
        {
            "options": {key: value for key, value in group.items() if key != "params"},
            "states": [owner.state.get(parameter, {}) for parameter in group["params"]],
        }
        for group in owner.param_groups
    ]


def streams(**generators: torch.Generator | np.random.Generator) -> dict[str, Any]:
    """The state of every random stream: the global ones, generators by name, those of Megatron's tracker where it is in
    use."""
    tracking = sys.modules.get("megatron.core.tensor_parallel.random")
    tracker = getattr(tracking, "_CUDA_RNG_STATE_TRACKER", None)
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=False),
        "torch": torch.get_rng_state(),
        **generators,
        **({} if tracker is None else tracker.get_states()),
    }


def _leaves(node: Any, where: str) -> Iterator[tuple[str, bytes]]:
    if isinstance(node, torch.Generator):
        node = node.get_state()
    elif isinstance(node, np.random.Generator):
        node = node.bit_generator.state
    if isinstance(node, Mapping):
        for key, value in node.items():
            yield from _leaves(value, f"{where}/{key}")
    elif isinstance(node, list | tuple) and not (node and all(isinstance(x, int | float | str | None) for x in node)):
        for number, value in enumerate(node):
            yield from _leaves(value, f"{where}/{number}")
    else:
        yield where, _bytes(node, where)


def _bytes(node: Any, where: str) -> bytes:
    if isinstance(node, torch.Tensor):
        local = getattr(node, "_local_tensor", node)
        return f"{local.dtype} {tuple(local.shape)} ".encode() + raw(local)
    if isinstance(node, np.ndarray):
        return f"{node.dtype} {node.shape} ".encode() + node.tobytes()
    if isinstance(node, list | tuple):
        return b" ".join(_bytes(x, where) for x in node)
    if isinstance(node, float):
        return float.hex(node).encode()
    if isinstance(node, int | str | bytes | None):
        return f"{type(node).__name__} {node!r}".encode()
    raise TypeError(f"{where}: no bytes are known of a {type(node).__name__}")
