"""A fingerprint of a data set: cheap, the same on every rank, and plain about what it looks at."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sized
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ckpt.data.permutation import Permutation
from ckpt.data.seeding import fetch_seeded
from ckpt.errors import Unsupported
from ckpt.state.dtypes import bits, dtype_name

_ITEMS = 64
_HEADER = b"ckpt data set fingerprint 1\0"
_INSTEAD = "pass fingerprint=, any text that changes when the data do, such as a digest of the files"


def dataset_fingerprint(dataset: Sized) -> str:
    """SHA-256 (hex) of the length and of 64 items, or all where there are no more: the first, the last, and others that
    a fixed permutation picks. It is against a wrong or reordered data set, not a digest of all of it: a change in other
    items goes unseen.

    Items may be tensors, arrays, bytes, str, numbers, bools, None, and dicts, lists and tuples of these. They are
    fetched with fixed seeds in the global generators of random, NumPy and torch, so that an augmented item is the same
    each time. Raises Unsupported for an item of another type, or one that is not the same twice.
    """
    length = len(dataset)
    hasher = hashlib.sha256(_HEADER + struct.pack("<Q", length))
    for index in sample_of(length).tolist():
        digest = _item_digest(dataset, index)
        if index == 0 and _item_digest(dataset, index) != digest:
            raise Unsupported(f"item 0 of {_kind(dataset)} is not the same when fetched twice; {_INSTEAD}")
        hasher.update(struct.pack("<Q", index) + digest)
    return hasher.hexdigest()


def sample_of(length: int) -> npt.NDArray[np.int64]:
    """The indices that a fingerprint looks at, ascending: int64 [at most 64]."""
    if length <= _ITEMS:
        return np.arange(length, dtype=np.int64)
    picked = Permutation(0, 0, length)(np.arange(_ITEMS - 2))
    return np.unique(np.append(picked, [0, length - 1]))


def array_fingerprint(array: npt.NDArray[np.int64]) -> str:
    """SHA-256 (hex) of all of a one-dimensional array of integers, block by block."""
    hasher = hashlib.sha256(struct.pack("<Q", array.size))
    for start in range(0, array.size, 1 << 20):
        hasher.update(np.ascontiguousarray(array[start : start + (1 << 20)], "<i8").tobytes())
    return hasher.hexdigest()


def _item_digest(dataset: Any, index: int) -> bytes:
    (item,) = fetch_seeded(dataset, 0, [(index, index)])
    hasher = hashlib.sha256()
    _feed(hasher, item, f"item {index} of {_kind(dataset)}")
    return hasher.digest()


def _feed(hasher: Any, node: Any, where: str) -> None:
    """Feeds each part with its type and length, so that no two items give the same bytes."""
    kind = type(node)
    if node is None or kind in (bool, int):
        _put(hasher, kind.__name__, repr(node).encode())
    elif kind is str:
        _put(hasher, "str", node.encode("utf-8", "surrogatepass"))
    elif kind is float:
        _put(hasher, "float", struct.pack("<d", node))
    elif kind is complex:
        _put(hasher, "complex", struct.pack("<dd", node.real, node.imag))
    elif kind in (bytes, bytearray):
        _put(hasher, "bytes", bytes(node))
    elif isinstance(node, torch.Tensor):
        _feed_tensor(hasher, node, where)
    elif isinstance(node, np.ndarray | np.generic):
        _feed_array(hasher, np.asarray(node), where)
    elif isinstance(node, Mapping):
        if any(type(key) is not str for key in node):
            raise Unsupported(f"{where} is a dict with keys that are no str, which cannot be digested; {_INSTEAD}")
        _put(hasher, "dict", struct.pack("<Q", len(node)))
        for key in sorted(node):
            _feed(hasher, key, where)
            _feed(hasher, node[key], f"{where}, entry {key!r}")
    elif isinstance(node, list | tuple):
        _put(hasher, "list" if isinstance(node, list) else "tuple", struct.pack("<Q", len(node)))
        for i, value in enumerate(node):
            _feed(hasher, value, f"{where}, entry {i}")
    else:
        raise Unsupported(f"{where} is a {kind.__module__}.{kind.__qualname__}, which cannot be digested; {_INSTEAD}")


def _feed_tensor(hasher: Any, tensor: torch.Tensor, where: str) -> None:
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.device.type == "meta":
        raise Unsupported(f"{where} is a tensor that is not a plain dense one, which cannot be digested; {_INSTEAD}")
    raw = bits(tensor.detach().resolve_conj().resolve_neg().cpu()).contiguous()
    _put(hasher, f"tensor {dtype_name(tensor.dtype, where)} {list(tensor.shape)}", raw.numpy().tobytes())


def _feed_array(hasher: Any, array: npt.NDArray[Any], where: str) -> None:
    if array.dtype.hasobject:
        raise Unsupported(f"{where} is a NumPy array of Python objects, which cannot be digested; {_INSTEAD}")
    _put(hasher, f"array {array.dtype.descr} {list(array.shape)}", array.tobytes())


def _put(hasher: Any, tag: str, content: bytes) -> None:
    hasher.update(f"{tag}\0{len(content)}\0".encode())
    hasher.update(content)


def _kind(dataset: Any) -> str:
    return f"the data set {type(dataset).__qualname__}"
