"""Canonical values keep exact types, order and bits; what they cannot keep is refused by name."""

from __future__ import annotations

import itertools
import json
import math
import struct
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ckpt.errors import CorruptCheckpoint, Unsupported
from ckpt.state.values import canonical_json, decode, encode, parse_json


def same(a: Any, b: Any) -> bool:
    """Whether two values have the same types, order and bits, all the way down."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float) and not isinstance(a, np.generic):
        return struct.pack("=d", a) == struct.pack("=d", b)
    if isinstance(a, complex) and not isinstance(a, np.generic):
        return same(a.real, b.real) and same(a.imag, b.imag)
    if isinstance(a, np.str_ | np.bytes_):
        return len(a) == len(b) and bool(a == b)
    if isinstance(a, np.generic):
        return a.dtype == b.dtype and a.tobytes() == b.tobytes()
    if isinstance(a, torch.Tensor):
        return (a.dtype, a.shape) == (b.dtype, b.shape) and raw(a) == raw(b)
    if isinstance(a, dict):
        return len(a) == len(b) and all(
            same(k, m) and same(v, w) for (k, v), (m, w) in zip(a.items(), b.items(), strict=True)
        )
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def raw(tensor: torch.Tensor) -> bytes:
    plain = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
    return tensor.view(plain[tensor.element_size()]).contiguous().numpy().tobytes()


def through(value: Any) -> Any:
    """A value after saving and loading: encoded, written as JSON bytes, parsed, decoded."""
    return decode(parse_json(canonical_json(encode(value, "x")), "x"), "x")


def floating(bits: int) -> float:
    return float(struct.unpack(">d", bits.to_bytes(8, "big"))[0])


def unpaired(text: str) -> bool:
    """Whether no high surrogate is followed by a low one."""
    return not any("\ud800" <= a <= "\udbff" and "\udc00" <= b <= "\udfff" for a, b in itertools.pairwise(text))


floats = st.integers(0, 2**64 - 1).map(floating)
text = st.text(st.characters(exclude_categories=()), max_size=8).filter(unpaired)
numpy_scalars = st.one_of(
    st.tuples(st.sampled_from("?bBhHiIlLefdFD"), st.binary(min_size=16, max_size=16)).map(
        lambda t: np.frombuffer(t[1], dtype=t[0])[0] if t[0] != "?" else np.bool_(t[1][0] & 1)
    ),
    text.map(np.str_),
    st.binary(max_size=5).map(np.bytes_),
    st.integers(-(2**63), 2**63 - 1).map(lambda n: np.int64(n).view("<M8[ns]")),
    st.integers(-(2**63), 2**63 - 1).map(lambda n: np.int64(n).view("<m8[us]")),
)
TENSOR_TYPES = [torch.bool, torch.uint8, torch.bfloat16, torch.float32, torch.int64, torch.complex128]
tensors = st.tuples(
    st.sampled_from(TENSOR_TYPES), st.lists(st.integers(0, 3), max_size=3), st.binary(min_size=432)
).map(
    lambda t: (
        torch.frombuffer(bytearray(t[2][: 16 * 27]), dtype=torch.uint8)
        .view(t[0])[: math.prod(t[1])]
        .reshape(t[1])
        .clone()
    )
)
keys = st.one_of(st.none(), st.booleans(), text, st.integers(), floats, st.binary(max_size=4), st.tuples(text))
leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(2**53, 2**200),
    floats,
    st.builds(complex, floats, floats),
    text,
    st.binary(max_size=6),
    numpy_scalars,
    tensors,
    st.lists(st.integers(0, 2**40), max_size=3).map(torch.Size),
    st.sampled_from([torch.float32, torch.bfloat16, torch.bool, torch.float8_e5m2]),
    st.sampled_from([torch.device("cpu"), torch.device("cuda"), torch.device("cuda:3"), torch.device("meta")]),
)
values = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(keys, inner, max_size=4),
        st.lists(st.tuples(text, inner), max_size=4).map(OrderedDict),
        st.dictionaries(text, st.integers(), max_size=3).map(Counter),
    ),
    max_leaves=12,
)


@settings(max_examples=300)
@given(values)
def test_values_come_back_with_types_order_and_bits(value: Any) -> None:
    assert same(through(value), value)


@settings(max_examples=150)
@given(values, values)
def test_different_values_have_different_bytes(a: Any, b: Any) -> None:
    assert (canonical_json(encode(a, "x")) == canonical_json(encode(b, "x"))) == same(a, b)


SINGLES: list[Any] = [
    None,
    True,
    0,
    1,
    -1,
    2**53 + 1,
    -(2**200) - 1,
    10**4200,
    0.0,
    -0.0,
    1.0,
    5e-324,
    math.inf,
    -math.inf,
    floating(0x7FF8000000000000),
    floating(0x7FF8DEADBEEF1234),
    floating(0xFFF8000000000001),
    floating(0x7FF0000000000001),
    complex(-0.0, floating(0x7FF8000000000007)),
    "",
    "a\0b\n\u2028",
    "ä漢😀",
    "\ud800 alone",
    "\udc00\ud800 reversed",
    b"",
    b"\x00\xff",
    [],
    (),
    {},
    [[], ((),), {}],
    (1,),
    {1: "int", "1": "str"},
    {True: "bool"},
    {(1, "a"): [None], None: 1, 2.5: 2, b"k": 3},
    OrderedDict([("z", 1), ("a", 2)]),
    Counter({3: 5, 1: 2}),
    torch.Size([]),
    torch.Size([2**40, 0]),
    (2, 3),
    torch.float32,
    torch.bfloat16,
    torch.device("cpu"),
    torch.device("cuda:1"),
    np.float64(1.0),
    np.float32(1.0),
    np.uint32(0x7FC12345).view(np.float32),
    np.float16(-0.0),
    np.int8(-128),
    np.uint64(2**64 - 1),
    np.bool_(True),
    np.complex64(1 - 2j),
    np.str_(""),
    np.str_("ends in zero\0"),
    np.str_("\ud83d\ude00"),
    np.bytes_(b""),
    np.bytes_(b"zero\0"),
    np.datetime64("NaT"),
    np.datetime64("2024-02-29", "D"),
    np.timedelta64(5, "s"),
    torch.tensor(3.0),
    torch.tensor([]),
    torch.zeros(2, 0, 3, dtype=torch.int16),
    torch.arange(6).reshape(2, 3).t(),
    torch.tensor([1 + 2j]).conj(),
    torch.tensor([2, 0, 255, 1], dtype=torch.uint8).view(torch.bool),
    torch.tensor([2, 0, 255, 1], dtype=torch.uint8).view(torch.bool)[::2],
    torch.arange(8, dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
    torch.arange(8, dtype=torch.uint8).view(torch.float8_e4m3fn),
    torch.arange(8, dtype=torch.uint8).view(torch.complex32),
]


@pytest.mark.parametrize("number", range(len(SINGLES)), ids=lambda n: f"{n}-{type(SINGLES[n]).__name__}")
def test_special_values_come_back_exactly(number: int) -> None:
    value = SINGLES[number]
    assert same(through(value), value.resolve_conj() if isinstance(value, torch.Tensor) else value)


def test_special_values_all_have_different_bytes() -> None:
    """1, 1.0, True, "1", (1,), [1], np.float32(1) and so on are different values."""
    encoded = [canonical_json(encode(v, "x")) for v in SINGLES]
    assert len(set(encoded)) == len(encoded)


def test_the_form_is_the_documented_one() -> None:
    value = {"b": 1.0, "a": [2**70, None, True, "é"], (1,): b"\x00\xff"}
    assert canonical_json(encode(value, "x")) == (
        b'{"dict":[["b",{"float":"3ff0000000000000"}],["a",{"list":[{"int":"1180591620717411303424"},null,true,'
        b'"\\u00e9"]}],[{"tuple":[{"int":"1"}]},{"bytes":"00ff"}]]}'
    )
    assert encode(-0.0, "x") == {"float": "8000000000000000"}
    assert encode(1 - 2j, "x") == {"complex": ["3ff0000000000000", "c000000000000000"]}
    assert encode(np.float32(1), "x") == {"numpy": ["<f4", "0000803f"]}
    assert encode(torch.Size([3]), "x") == {"torch.Size": ["3"]}
    assert encode(torch.tensor([1, 2], dtype=torch.int16), "x") == {"torch.Tensor": ["int16", [2], "01000200"]}


def test_a_decoded_tensor_owns_its_memory() -> None:
    value = torch.arange(4)
    back = through(value)
    back += 1
    assert back.tolist() == [1, 2, 3, 4]
    assert value.tolist() == [0, 1, 2, 3]


Point = namedtuple("Point", "x y")


class Loud(str):
    __slots__ = ()


REFUSED: dict[str, Callable[[], Any]] = {
    "object": object,
    "set": lambda: {1},
    "function": lambda: len,
    "bytearray": lambda: bytearray(b"x"),
    "defaultdict": lambda: defaultdict(int),
    "deque": lambda: deque([1]),
    "namedtuple": lambda: Point(1, 2),
    "subclass of str": lambda: Loud("x"),
    "range": lambda: range(3),
    "numpy array": lambda: np.zeros(3),
    "longdouble": lambda: np.longdouble(1),
    "structured scalar": lambda: np.zeros(1, dtype="f4,f4")[0],
    "a very long int": lambda: 10**5000,
    "surrogate pair": lambda: "\ud83d" + "\ude00",
    "large tensor": lambda: torch.zeros(4097, dtype=torch.uint8),
    "sparse tensor": lambda: torch.eye(2).to_sparse(),
    "tensor on the meta device": lambda: torch.empty(2, device="meta"),
    "tensor of another dtype": lambda: torch.empty(2, dtype=torch.bits8),
    "a dtype that is not carried": lambda: torch.qint8,
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_kept_is_refused_with_its_place(kind: str) -> None:
    with pytest.raises(Unsupported, match=r"^optimizer/lr: "):
        encode(REFUSED[kind](), "optimizer/lr")
    with pytest.raises(Unsupported, match=r"^cfg/a/1/0: "):
        encode({"a": [1, (REFUSED[kind](),)]}, "cfg")


def test_a_refused_key_is_refused_with_its_place() -> None:
    with pytest.raises(Unsupported, match=r"^cfg: .*frozenset"):
        encode({frozenset([1]): 1}, "cfg")


ZERO = "0000000000000000"
MALFORMED: list[Any] = [
    1,
    1.5,
    [],
    ["a"],
    {},
    {"int": "1", "float": ZERO},
    {"unknown": 1},
    {"int": 5},
    {"int": None},
    {"int": "1.5"},
    {"int": " 1"},
    {"int": "01"},
    {"int": "-0"},
    {"int": "1_000"},
    {"int": "9" * 5000},
    {"float": "3ff0"},
    {"float": 1.5},
    {"float": "3FF0000000000000"},
    {"float": ZERO + ZERO},
    {"float": "zz" * 8},
    {"complex": [ZERO]},
    {"complex": []},
    {"complex": {"a": ZERO}},
    {"complex": [ZERO, ZERO, ZERO]},
    {"bytes": "0"},
    {"bytes": "00 ff"},
    {"bytes": "FF"},
    {"bytes": ["00"]},
    {"list": "abc"},
    {"list": {"a": None}},
    {"list": [1]},
    {"list": None},
    {"tuple": 3},
    {"dict": {"a": None}},
    {"dict": [["a"]]},
    {"dict": [["a", None], ["a", True]]},
    {"dict": [[{"list": []}, None]]},
    {"OrderedDict": [["a", None, None]]},
    {"Counter": [5]},
    {"numpy": []},
    {"numpy": ["<f4"]},
    {"numpy": ["<f4", ""]},
    {"numpy": ["<f4", "0000"]},
    {"numpy": ["<f4", "0000803f0000803f"]},
    {"numpy": ["<f4", "0000803F"]},
    {"numpy": ["f4", "0000803f"]},
    {"numpy": [">f4", "3f800000"]},
    {"numpy": ["O", ZERO]},
    {"numpy": ["|V4", "00000000"]},
    {"numpy": ["f4,f4", ZERO]},
    {"numpy": ["nonsense", "00"]},
    {"numpy": [4, "00"]},
    {"numpy": ["<U1", "ffffffff"]},
    {"numpy": ["<M8[zz]", ZERO]},
    {"torch.Size": ["x"]},
    {"torch.Size": "12"},
    {"torch.Size": [3]},
    {"torch.device": "nowhere"},
    {"torch.device": 0},
    {"torch.dtype": 5},
    {"torch.dtype": ["float32"]},
    {"torch.Tensor": []},
    {"torch.Tensor": ["float32", [3], "00"]},
    {"torch.Tensor": ["float32", [5], ""]},
    {"torch.Tensor": ["float32", [-1], "00000000"]},
    {"torch.Tensor": ["float32", [2.0], ZERO]},
    {"torch.Tensor": ["float32", ["2"], ZERO]},
    {"torch.Tensor": ["float32", [True], "00000000"]},
    {"torch.Tensor": ["float32", [10**30], ""]},
    {"torch.Tensor": ["float32", [2], "0000000000000000 "]},
]


@pytest.mark.parametrize("document", MALFORMED, ids=lambda d: str(d)[:50])
def test_what_encode_cannot_have_made_is_corrupt(document: Any) -> None:
    with pytest.raises(CorruptCheckpoint, match=r"^run/seed: "):
        decode(document, "run/seed")
    with pytest.raises(CorruptCheckpoint, match=r"^run/seed: "):
        decode({"list": [True, {"tuple": [document]}]}, "run/seed")


@pytest.mark.parametrize("kind", ["torch.dtype", "torch.Tensor"])
def test_a_dtype_of_a_newer_torch_is_unsupported(kind: str) -> None:
    document = {"torch.dtype": "float3_e1m1"} if kind == "torch.dtype" else {"torch.Tensor": ["float3_e1m1", [1], "00"]}
    with pytest.raises(Unsupported, match="float3_e1m1 is unknown to torch"):
        decode(document, "x")


json_documents = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(), st.text(max_size=5), st.sampled_from([ZERO, "00", "<f4", "float32"])
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.sampled_from(["int", "float", "complex", "bytes", "list", "tuple", "dict", "numpy", "torch.Size"]),
            inner,
            min_size=1,
            max_size=1,
        ),
    ),
    max_leaves=6,
)


@settings(max_examples=300)
@given(json_documents)
@example({"numpy": ["a", "00"]})
@example({"numpy": "a"})
def test_any_document_is_either_canonical_or_corrupt(document: Any) -> None:
    """Nothing else comes out of decode, and what it accepts is what encode makes of the value."""
    try:
        value = decode(document, "x")
    except (CorruptCheckpoint, Unsupported):
        return
    assert canonical_json(encode(value, "x")) == canonical_json(document)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b'{"b":1,"a":2}',
        b'{"a": 1}',
        b'{"a":1}\n',
        b'"\xc3\xa9"',
        b'{"a":1,"a":1}',
        b"NaN",
        b"[1e5]",
        b"\xff",
    ],
)
def test_bytes_that_are_not_canonical_json_are_corrupt(data: bytes) -> None:
    with pytest.raises(CorruptCheckpoint, match=r"^receipt 3: "):
        parse_json(data, "receipt 3")


def test_json_nested_too_deep_is_corrupt() -> None:
    with pytest.raises(CorruptCheckpoint, match=r"^x: "):
        parse_json(b"[" * 100_000 + b"]" * 100_000, "x")


def test_canonical_json_is_sorted_and_ascii() -> None:
    assert canonical_json({"b": [1, None], "a": "é\ud800"}) == b'{"a":"\\u00e9\\ud800","b":[1,null]}'
    assert json.loads(canonical_json({"n": 2**70})) == {"n": 2**70}
    with pytest.raises(ValueError, match="Out of range"):
        canonical_json(math.nan)
