"""Canonical values: plain Python data as JSON that keeps exact types, order and bits. No pickle.

None, bool and str are themselves. Everything else is an object with one key, the type:
{"int": "12"}, {"float": "3ff0000000000000"} (IEEE bits, big-endian), {"complex": [re, im]}, {"bytes": "00ff"},
{"list": [...]}, {"tuple": [...]}, {"dict": [[key, value], ...]}, {"OrderedDict": [...]}, {"Counter": [...]},
{"numpy": [dtype, hex]} for a NumPy scalar, {"torch.dtype": name}, {"torch.Size": [...]}, {"torch.device": text},
{"torch.Tensor": [dtype, [shape], hex]} for a small tensor inside other values.
"""

from __future__ import annotations

import json
import re
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import torch

from ckpt.errors import CorruptCheckpoint, Unsupported
from ckpt.state.dtypes import bits, dtype_name, torch_dtype
from ckpt.state.names import SURROGATE_PAIR

Json: TypeAlias = Any

_LARGEST_TENSOR = 4096
_NUMPY_DTYPE = re.compile(r"[<>|]([biufcSU]\d+|[mM]8(\[\w+\])?)")  # what dtype.str gives; np.dtype reads much more
_LARGEST_INT = 1 << 14000  # Python refuses to read longer decimal numbers


def canonical_json(document: Json) -> bytes:
    """The one byte form of a JSON document: sorted keys, no spaces, ASCII, no floating-point numbers."""
    return json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")


def parse_json(data: bytes, where: str) -> Json:
    """Parses a document that must be canonical. Raises CorruptCheckpoint naming `where`."""
    try:
        document = json.loads(data)
        if canonical_json(document) != data:
            raise ValueError("it is not in canonical form")
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpoint(f"{where}: not a canonical JSON document: {error}") from None
    return document


def encode(value: Any, where: str) -> Json:
    """Canonical JSON form of a plain value. Raises Unsupported naming `where` for a type that it does not keep."""
    kind = type(value)
    if kind is str and SURROGATE_PAIR.search(value):
        raise Unsupported(f"{where}: text with a surrogate pair as two characters, which JSON cannot keep")
    if value is None or kind in (bool, str):
        return value
    encoder = _ENCODERS.get(kind)
    if encoder is not None:
        return encoder(value, where)
    if isinstance(value, np.generic) and value.dtype.kind in "biufcSUmM" and value.dtype.char not in "gG":
        return {"numpy": [value.dtype.str, value.tobytes().hex()]}
    if isinstance(value, torch.Tensor):
        return _encode_tensor(value, where)
    raise Unsupported(
        f"{where}: cannot keep a value of type {kind.__module__}.{kind.__qualname__}; use plain Python data, "
        "a tensor, or an object with state_dict and load_state_dict"
    )


def decode(document: Json, where: str) -> Any:
    """Inverse of `encode`. Raises CorruptCheckpoint naming `where` for anything that `encode` cannot have made."""
    value = _decode(document, where)
    try:
        canonical = canonical_json(encode(value, where)) == canonical_json(document)
    except (Unsupported, ValueError):
        canonical = False
    if not canonical:
        raise CorruptCheckpoint(f"{where}: {str(document)[:80]} is not a canonical value")
    return value


def _decode(document: Json, where: str) -> Any:
    if document is None or isinstance(document, bool | str):
        return document
    if isinstance(document, dict) and len(document) == 1:
        kind, content = next(iter(document.items()))
        decoder = _DECODERS.get(kind)
        if decoder is not None:
            try:
                return decoder(content, where)
            except (ValueError, TypeError, LookupError, struct.error, RuntimeError) as error:
                raise CorruptCheckpoint(f"{where}: bad {kind} value: {error}") from None
    raise CorruptCheckpoint(f"{where}: {str(document)[:80]} is not a canonical value")


def _float_hex(value: float) -> str:
    return struct.pack(">d", value).hex()


def _hex_float(text: str) -> float:
    return float(struct.unpack(">d", bytes.fromhex(text))[0])


def _items(value: dict[Any, Any], where: str) -> Json:
    return [[encode(k, where), encode(v, f"{where}/{k}")] for k, v in value.items()]


def _encode_int(value: int, where: str) -> Json:
    if abs(value) >= _LARGEST_INT:
        raise Unsupported(f"{where}: an int of {value.bit_length()} bits; keep it as bytes")
    return {"int": str(value)}


def _decode_numpy(content: Json, where: str) -> Any:
    name, data = content[0], bytes.fromhex(content[1])
    if not _NUMPY_DTYPE.fullmatch(name):
        raise ValueError(f"{name!r} is not the dtype of a NumPy scalar")
    dtype = np.dtype(name)
    text = data[: dtype.itemsize]  # NumPy gives one zero character for an empty text
    if dtype.kind == "U":
        return np.str_(text.decode("utf-32-le", "surrogatepass"))
    return np.bytes_(text) if dtype.kind == "S" else np.frombuffer(data, dtype)[0]


def _encode_tensor(value: torch.Tensor, where: str) -> Json:
    kept = type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout is torch.strided
    if not kept or value.device.type == "meta" or value.numel() * value.element_size() > _LARGEST_TENSOR:
        raise Unsupported(
            f"{where}: a tensor inside a plain value must be small (at most {_LARGEST_TENSOR} bytes), strided and not "
            "on the meta device; make it an entry of its own in the state"
        )
    name = dtype_name(value.dtype, where)
    dense = bits(value.detach().resolve_conj().resolve_neg().cpu())
    raw = torch.empty(dense.shape, dtype=dense.dtype).copy_(dense).numpy().tobytes()
    return {"torch.Tensor": [name, list(value.shape), raw.hex()]}


def _decode_tensor(content: Json, where: str) -> torch.Tensor:
    name, shape, raw = content
    data = bytearray.fromhex(raw)
    if not data:
        return torch.empty(0, dtype=torch_dtype(name)).reshape(shape)
    return torch.frombuffer(data, dtype=torch.uint8).view(torch_dtype(name)).reshape(shape)


_ENCODERS: dict[type, Callable[[Any, str], Json]] = {
    int: _encode_int,
    float: lambda v, w: {"float": _float_hex(v)},
    complex: lambda v, w: {"complex": [_float_hex(v.real), _float_hex(v.imag)]},
    bytes: lambda v, w: {"bytes": v.hex()},
    list: lambda v, w: {"list": [encode(x, f"{w}/{i}") for i, x in enumerate(v)]},
    tuple: lambda v, w: {"tuple": [encode(x, f"{w}/{i}") for i, x in enumerate(v)]},
    torch.Size: lambda v, w: {"torch.Size": [str(n) for n in v]},
    dict: lambda v, w: {"dict": _items(v, w)},
    OrderedDict: lambda v, w: {"OrderedDict": _items(v, w)},
    Counter: lambda v, w: {"Counter": _items(v, w)},
    torch.dtype: lambda v, w: {"torch.dtype": dtype_name(v, w)},
    torch.device: lambda v, w: {"torch.device": str(v)},
}

_DECODERS: dict[str, Callable[[Any, str], Any]] = {
    "int": lambda c, w: int(c),
    "float": lambda c, w: _hex_float(c),
    "complex": lambda c, w: complex(_hex_float(c[0]), _hex_float(c[1])),
    "bytes": lambda c, w: bytes.fromhex(c),
    "list": lambda c, w: [_decode(x, w) for x in c],
    "tuple": lambda c, w: tuple(_decode(x, w) for x in c),
    "torch.Size": lambda c, w: torch.Size([int(n) for n in c]),
    "dict": lambda c, w: {_decode(k, w): _decode(v, w) for k, v in c},
    "OrderedDict": lambda c, w: OrderedDict((_decode(k, w), _decode(v, w)) for k, v in c),
    "Counter": lambda c, w: Counter({_decode(k, w): _decode(v, w) for k, v in c}),
    "numpy": _decode_numpy,
    "torch.dtype": lambda c, w: torch_dtype(c),
    "torch.device": lambda c, w: torch.device(c),
    "torch.Tensor": _decode_tensor,
}
