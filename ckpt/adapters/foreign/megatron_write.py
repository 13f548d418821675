"""Writes any state at rest as a `torch_dist` checkpoint of Megatron Core, for `dist_checkpointing.load` of any layout.

Format (megatron/core/dist_checkpointing, 0.16): a checkpoint of torch.distributed.checkpoint whose keys are those of
the sharded tensors and objects; `common.pt`, by `torch.save`, has what all ranks share; `metadata.json` says which
backends wrote both, and makes a folder a checkpoint.
"""

from __future__ import annotations

import io
import json
import pickle
import re
from collections.abc import Iterator
from itertools import product
from typing import Any

import torch

from ckpt.adapters.foreign.dcp_write import FILE_BYTES, DcpOutput
from ckpt.adapters.foreign.sidecar import foreign_names
from ckpt.engine.stream import Content
from ckpt.errors import CkptError, Unsupported
from ckpt.geometry import TensorSpec
from ckpt.state.names import split
from ckpt.state.values import decode

COMMON = "common.pt"
_BACKENDS = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
_OBJECT = re.compile(r".*/shard_[0-9.]*_[0-9.]*")  # `ShardedObject.unique_key`: the name, the offset, the shape
_LINEAR = re.compile(r"(?P<module>.*\.(self_attention|cross_attention|mlp|experts|shared_experts)\.)linear_\w+\.weight")


def megatron_output(content: Content, with_sidecar: bool = True, file_bytes: int = FILE_BYTES) -> DcpOutput:
    """The files of one state. Values become entries of `common.pt`, nested by their names' paths, with the step as
    `iteration` unless there is one. Linear layers of a GPT model get the empty extra states that Megatron insists on.

    Raises CkptError where a value's name is the path to another, and Unsupported for a value that Megatron could not
    read.
    """
    for name, value in content.values.items():
        if not is_object(name):
            _check_readable(decode(value, name), name)
    common = io.BytesIO()
    torch.save(common_of(content), common)
    objects = _extra_states(content) | _objects(content)
    beside = {COMMON: common.getvalue(), "metadata.json": json.dumps(_BACKENDS).encode()}
    return DcpOutput(content, with_sidecar, file_bytes, form="megatron", objects=objects, beside=beside)


def is_object(name: str) -> bool:
    """Whether a value is one of Megatron's sharded objects, which lie beside the tensors."""
    path = split(name)
    return len(path) == 1 and isinstance(path[0], str) and _OBJECT.fullmatch(path[0]) is not None


def _common_path(name: str) -> tuple[Any, ...]:
    """Where in `common.pt` a value lies: by its name, without the mark of where it came from."""
    path = split(name)
    return path[1:] if path[0] == COMMON and len(path) > 1 else path


def common_of(content: Content) -> dict[Any, Any]:
    """What `common.pt` has. Raises CkptError where a value's name is the path to another."""
    paths: dict[tuple[Any, ...], str] = {}
    for name in sorted(content.values):
        if not is_object(name) and paths.setdefault(_common_path(name), name) != name:
            _refuse(paths[_common_path(name)], name)
    for path, name in paths.items():
        for above in (path[:n] for n in range(1, len(path))):
            if above in paths:
                _refuse(paths[above], name)
    found: dict[Any, Any] = {}
    for path, name in paths.items():
        node = found
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = decode(content.values[name], name)
    if content.step is not None:
        found.setdefault("iteration", content.step)
    return found


def _refuse(one: str, other: str) -> None:
    raise CkptError(f"{one} and {other}: have one place in Megatron's {COMMON}; choose another with --rename")


def _check_readable(value: Any, name: str) -> None:
    """Raises Unsupported where Megatron, which loads by torch's weights-only loader, could not read a value."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    try:
        torch.load(file, weights_only=True)
    except pickle.UnpicklingError as error:
        raise Unsupported(
            f"{name}: a {type(value).__name__}, which torch's weights-only loader, and so Megatron, does not read; "
            "leave it out with --select"
        ) from error


def _objects(content: Content) -> dict[str, Any]:
    return {str(split(n)[0]): decode(v, n) for n, v in content.values.items() if is_object(n)}


def _extra_states(content: Content) -> dict[str, list[None]]:
    """Of every linear layer, and of the attention between two: as Megatron writes those that are empty, in a list."""
    keys = foreign_names(content)
    found: dict[str, list[None]] = {}
    for spec in content.tensors:
        match = _LINEAR.fullmatch(keys[spec.name])
        if match is None:
            continue
        modules = [keys[spec.name].removesuffix(".weight")]
        if modules[0].endswith("self_attention.linear_qkv"):
            modules.append(f"{match['module']}core_attention")
        for module, shard in product(modules, _shards(spec)):
            found[f"{module}._extra_state/shard_{shard}"] = [None]
    return found


def _shards(spec: TensorSpec) -> Iterator[str]:
    """Offset and shape of each object, as Megatron writes them: one for each layer, or expert of a layer."""
    shape = spec.shape[:-2] or (1,)
    for at in product(*map(range, shape)):
        yield f"{'.'.join(map(str, at))}_{'.'.join(map(str, shape))}"
