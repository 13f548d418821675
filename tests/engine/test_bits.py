"""Every bit comes back: all dtypes, awkward values, shapes, strides and names; and zarr-python reads the same bits."""

import json
import math
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr
from torch import nn

import ckpt
from tests.support.raw import attempt_folder, from_bits, labelled, random_bits, raw, tree

CARRIED = [
    torch.bool,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex32,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
    torch.float4_e2m1fn_x2,
]
WIDTHS = [torch.uint8, torch.bfloat16, torch.float32, torch.int64, torch.complex128]
SMALL = [(), (0,), (3, 0, 2), (1,), (1, 1, 1), (3, 5)]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _shapes(dtype: torch.dtype) -> list[tuple[int, ...]]:
    """The small ones, one that has an array of its own, and one that takes several stored objects."""
    return [*SMALL, (7, (96 << 10) // 7 // dtype.itemsize), ((5 << 20) // 997 // dtype.itemsize, 997)]


def _filled(shapes: list[tuple[int, ...]], dtype: torch.dtype, seed: int) -> dict[str, Any]:
    return {"x".join(map(str, shape)) or "0-dim": random_bits(shape, dtype, seed) for shape in shapes}


def _round_trip(root: Path, state: dict[str, Any], into: dict[str, Any]) -> ckpt.Restored:
    with ckpt.Checkpointer(root) as ck:
        receipt = ck.save(1, state)
        restored = ck.load(into)
    assert restored is not None and restored.verified
    assert restored.state_id == receipt.state_id
    return restored


@pytest.mark.parametrize("dtype", CARRIED, ids=_name)
def test_random_bytes_of_every_dtype_come_back_in_every_shape(dtype: torch.dtype, tmp_path: Path) -> None:
    saved, target = _filled(_shapes(dtype), dtype, 1), _filled(_shapes(dtype), dtype, 2)
    held = {name: (t, t.data_ptr(), t.stride()) for name, t in target.items()}
    restored = _round_trip(tmp_path, saved, target)
    assert restored.tensors == len(saved)
    assert len(list((attempt_folder(tmp_path) / "state" / "tensors").glob("*x997/c/*/*"))) > 1
    for name, (tensor, address, strides) in held.items():
        assert target[name] is tensor  # in place: the tensor itself, where it was
        assert (tensor.data_ptr(), tensor.stride()) == (address, strides)
        assert tensor.dtype is dtype and tensor.shape == saved[name].shape
        assert raw(tensor) == raw(saved[name])


def test_the_table_of_dtypes_is_that_of_torch() -> None:
    """A dtype that a new torch brings is either carried or refused by name, never forgotten here."""
    packed_bits = [f"{kind}{width}" for kind in ("int", "uint") for width in range(1, 8)]
    refused = {"quint8", "qint8", "qint32", "quint4x2", "quint2x4", "bits8", "bits16", "bits1x8", "bits2x4", "bits4x2"}
    known = {_name(d) for d in CARRIED} | refused | set(packed_bits)
    assert {_name(d) for d in vars(torch).values() if isinstance(d, torch.dtype)} <= known


AWKWARD = {
    torch.float64: ["7ff8000000000001", "fff4deadbeef0001", "7ff0000000000001", "8000000000000000", "0000000000000001",
                    "800fffffffffffff", "7ff0000000000000", "fff0000000000000", "7fefffffffffffff"],
    torch.float32: ["7fc00001", "ffa5dead", "7f800001", "80000000", "00000001", "807fffff", "7f800000", "ff800000"],
    torch.float16: ["7e01", "fd55", "7c01", "8000", "0001", "83ff", "7c00", "fc00"],
    torch.bfloat16: ["7fc1", "ffa5", "7f81", "8000", "0001", "807f", "7f80", "ff80"],
    torch.float8_e4m3fn: ["7f", "ff", "80", "01", "81", "7e"],
    torch.float8_e5m2: ["7d", "fe", "80", "01", "83", "7c", "fc"],
    torch.float8_e5m2fnuz: ["80", "01", "ff"],
    torch.bool: ["00", "01", "02", "80", "ff"],
    torch.int64: [f"{2**53 + 1:016x}", "7fffffffffffffff", "8000000000000000", f"{2**64 - 2**53 - 1:016x}"],
    torch.uint64: [f"{2**53 + 1:016x}", "ffffffffffffffff", f"{2**63 + 1:016x}"],
}  # fmt: skip


@pytest.mark.parametrize("dtype", AWKWARD, ids=_name)
def test_awkward_values_keep_their_bits(dtype: torch.dtype, tmp_path: Path) -> None:
    """NaN payloads (quiet and signalling), -0.0, denormals, infinities, odd bools, integers that no double holds."""
    patterns = [bytes.fromhex(x)[::-1] for x in AWKWARD[dtype]]
    many = -(-(200 << 10) // len(b"".join(patterns)))
    saved = {
        "vector": from_bits(b"".join(patterns), (len(patterns),), dtype),
        "scalar": from_bits(patterns[0], (), dtype),
        "large": from_bits(b"".join(patterns) * many, (many, len(patterns)), dtype),
    }
    target = {name: random_bits(tuple(t.shape), dtype, 3) for name, t in saved.items()}
    _round_trip(tmp_path, saved, target)
    assert raw(target["vector"]) == b"".join(patterns)
    assert raw(target["scalar"]) == patterns[0]
    assert raw(target["large"]) == b"".join(patterns) * many


def test_a_python_float_or_numpy_scalar_keeps_its_bits(tmp_path: Path) -> None:
    payload = struct.unpack("<d", bytes.fromhex("efbeadde0000f4ff"))[0]
    target: dict[str, Any] = {"nan": 0.0, "zero": 0.0, "tiny": 0.0, "scalar": 0, "big": 0}
    saved = {"nan": payload, "zero": -0.0, "tiny": 5e-324, "scalar": np.float32(-0.0), "big": 2**53 + 1}
    _round_trip(tmp_path, saved, target)
    assert {k: (type(v), struct.pack("<d", v)) for k, v in target.items() if isinstance(v, float)} == {
        k: (type(v), struct.pack("<d", v)) for k, v in saved.items() if isinstance(v, float)
    }
    assert type(target["scalar"]) is np.float32 and target["scalar"].tobytes() == np.float32(-0.0).tobytes()
    assert type(target["big"]) is int and target["big"] == 2**53 + 1


# Views of a base tensor, each with memory that is not simply its elements one after the other.
VIEWS: dict[str, Callable[[torch.dtype], torch.Tensor]] = {
    "transposed": lambda d: random_bits((7, 5), d, 9).t(),
    "permuted": lambda d: random_bits((3, 4, 5), d, 9).permute(2, 0, 1),
    "every other row": lambda d: random_bits((10, 3), d, 9)[::2],
    "every other column": lambda d: random_bits((4, 10), d, 9)[:, ::2],
    "one column": lambda d: random_bits((6, 4), d, 9)[:, 1],
    "offset": lambda d: random_bits((20,), d, 9)[3:],
    "block": lambda d: random_bits((6, 8), d, 9)[2:5, 3:6],
    "channels_last": lambda d: random_bits((2, 5, 4, 3), d, 9).permute(0, 3, 1, 2),
    "size-1 odd stride": lambda d: random_bits((64,), d, 9).as_strided((1,), (8,), 5),
    "size-1 axes odd stride": lambda d: random_bits((64,), d, 9).as_strided((1, 4, 1), (77, 2, 3), 1),
    "interleaved": lambda d: random_bits((9,), d, 9).as_strided((2, 3), (3, 2), 0),
    "0-dim of a view": lambda d: random_bits((5, 5), d, 9)[2, 3],
    "large transposed": lambda d: random_bits((301, 4096 // d.itemsize), d, 9).t(),
    "large block": lambda d: random_bits((600, 4096 // d.itemsize), d, 9)[1:599:2, 3:],
    "several objects, transposed": lambda d: random_bits((1001, (5 << 20) // 1001 // d.itemsize), d, 9).t(),
}


@pytest.mark.parametrize("dtype", WIDTHS, ids=_name)
def test_strided_sources_are_saved_as_their_elements(dtype: torch.dtype, tmp_path: Path) -> None:
    """The stored bits are the logical row-major values, and no more of the storage than the view."""
    views = {name: make(dtype) for name, make in VIEWS.items()}
    dense = {name: from_bits(raw(v), tuple(v.shape), dtype) for name, v in views.items()}
    with ckpt.Checkpointer(tmp_path / "views") as ck:
        seen = ck.save(1, views)
    with ckpt.Checkpointer(tmp_path / "dense") as ck:
        plain = ck.save(1, dense)
    assert (seen.state_id, seen.bytes) == (plain.state_id, sum(v.numel() * dtype.itemsize for v in views.values()))
    first, second = attempt_folder(tmp_path / "views"), attempt_folder(tmp_path / "dense")
    assert tree(first / "state") == tree(second / "state")
    assert (first / "manifest.json").read_bytes() == (second / "manifest.json").read_bytes()


@pytest.mark.parametrize("dtype", WIDTHS, ids=_name)
def test_strided_targets_are_filled_where_they_are_and_nothing_beside_them(dtype: torch.dtype, tmp_path: Path) -> None:
    targets = {name: make(dtype) for name, make in VIEWS.items()}
    saved = {name: random_bits(tuple(t.shape), dtype, 4) for name, t in targets.items()}
    strides = {name: (t.stride(), t.storage_offset(), t.data_ptr()) for name, t in targets.items()}
    around = {}
    for name, t in targets.items():  # what the storage must hold afterwards, built in a copy of it
        storage = bytearray(_storage(t))
        copy = torch.frombuffer(storage, dtype=torch.uint8).view(dtype)
        copy.view(_bits_of(dtype)).as_strided(t.shape, t.stride(), t.storage_offset()).copy_(
            saved[name].view(_bits_of(dtype))
        )
        around[name] = bytes(storage)
    _round_trip(tmp_path, saved, targets)
    for name, t in targets.items():
        assert (t.stride(), t.storage_offset(), t.data_ptr()) == strides[name]
        assert raw(t) == raw(saved[name]), name
        assert _storage(t) == around[name], name


def _storage(tensor: torch.Tensor) -> bytes:
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).numpy().tobytes()


def _bits_of(dtype: torch.dtype) -> torch.dtype:
    return {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}[dtype.itemsize]


class _Tied(nn.Module):
    """An embedding and a head that are one parameter; `tie=False` makes them two with other values."""

    def __init__(self, tie: bool, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.emb = nn.Embedding(300, 64)
        self.head = nn.Linear(64, 300, bias=False)
        if tie:
            self.head.weight = self.emb.weight


def test_tied_tensors_stay_tied_and_are_stored_once(tmp_path: Path) -> None:
    saved, target = _Tied(True, 1), _Tied(True, 2)
    with ckpt.Checkpointer(tmp_path) as ck:
        receipt = ck.save(1, {"m": saved})
        ck.load({"m": target})
    assert target.head.weight is target.emb.weight
    assert raw(target.emb.weight) == raw(saved.emb.weight)
    assert receipt.bytes == 300 * 64 * 4
    folder = attempt_folder(tmp_path)
    assert [f.name for f in (folder / "state" / "tensors" / "m").iterdir() if f.is_dir()] == ["emb.weight"]
    assert json.loads((folder / "manifest.json").read_bytes())["aliases"] == {"m/head.weight": "m/emb.weight"}


def test_a_tie_that_the_target_has_not_fills_both_tensors(tmp_path: Path) -> None:
    saved, target = _Tied(True, 1), _Tied(False, 2)
    _round_trip(tmp_path, {"m": saved}, {"m": target})
    assert target.head.weight.data_ptr() != target.emb.weight.data_ptr()
    assert raw(target.emb.weight) == raw(target.head.weight) == raw(saved.emb.weight)


def test_a_tie_that_only_the_target_has_needs_equal_bits(tmp_path: Path) -> None:
    saved, target = _Tied(False, 1), _Tied(True, 2)
    before = raw(target.emb.weight)
    with ckpt.Checkpointer(tmp_path) as ck:
        ck.save(1, {"m": saved})
        with pytest.raises(ckpt.StateMismatch, match=r"m/head\.weight: shares its memory with m/emb\.weight .* untie"):
            ck.load({"m": target})
        assert raw(target.emb.weight) == before
        with torch.no_grad():
            saved.head.weight.copy_(saved.emb.weight)
        ck.save(2, {"m": saved})
        restored = ck.load({"m": target})
    assert restored is not None and restored.step == 2
    assert target.head.weight is target.emb.weight
    assert raw(target.emb.weight) == raw(saved.emb.weight)


def test_the_same_view_under_three_names_is_a_tie_whatever_its_strides(tmp_path: Path) -> None:
    base, into = random_bits((8, 6), torch.int32, 1), random_bits((8, 6), torch.int32, 2)
    _round_trip(
        tmp_path, {"a": base.t(), "b": base.t(), "c": [base.t()]}, {"a": into.t(), "b": into.t(), "c": [into.t()]}
    )
    assert raw(into) == raw(base)


def _window(base: np.ndarray) -> dict[str, Any]:
    return {"first": base[:6], "second": base[4:]}


OVERLAPS: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "two ranges": (lambda: (lambda x: {"first": x[:6], "second": x[4:]})(torch.arange(10.0)), "first and second"),
    "a transpose": (lambda: (lambda x: {"first": x, "second": x.t()})(labelled((4, 4))), "first and second"),
    "a part": (lambda: (lambda x: {"first": x, "second": x[3]})(labelled((4, 4))), "first and second"),
    "other dtype": (
        lambda: (lambda x: {"first": x, "second": x.view(torch.int32)})(torch.arange(9.0)),
        "first and second",
    ),
    "other width": (
        lambda: (lambda x: {"first": x, "second": x.view(torch.int16)[3:5]})(torch.arange(9.0)),
        "first and second",
    ),
    "NumPy arrays": (lambda: _window(np.arange(10.0)), "first and second"),
    "a tensor over an array": (
        lambda: (lambda x: {"first": x, "second": torch.from_numpy(x[2:])})(np.arange(10.0)),
        "first and second",
    ),
    "within one view": (lambda: {"first": torch.arange(9.0).as_strided((3, 4), (2, 1))}, "first: several of its"),
    "expanded": (lambda: {"first": torch.arange(3.0)[:, None].expand(3, 4)}, "first: several of its"),
}


@pytest.mark.parametrize("kind", OVERLAPS)
def test_overlapping_storage_is_refused_on_save_with_nothing_written(kind: str, tmp_path: Path) -> None:
    make, named = OVERLAPS[kind]
    with ckpt.Checkpointer(tmp_path) as ck:
        with pytest.raises(ckpt.StateMismatch, match=f"{named}.*make one of them a copy"):
            ck.save(1, make())
    assert tree(tmp_path) == {}


@pytest.mark.parametrize("kind", OVERLAPS)
def test_overlapping_storage_is_refused_on_load_with_nothing_changed(kind: str, tmp_path: Path) -> None:
    make, named = OVERLAPS[kind]
    copies = {n: torch.as_tensor(t).clone(memory_format=torch.contiguous_format) + 1 for n, t in make().items()}
    target = make()
    before = {n: raw(torch.as_tensor(t)) for n, t in target.items()}
    with ckpt.Checkpointer(tmp_path) as ck:
        ck.save(1, copies)
        with pytest.raises(ckpt.StateMismatch, match=f"{named}.*make one of them a copy"):
            ck.load(target)
        assert {n: raw(torch.as_tensor(t)) for n, t in target.items()} == before
        ck.save(2, copies)  # phase 1: saving goes on


def test_neighbours_in_one_storage_do_not_overlap(tmp_path: Path) -> None:
    def parts(seed: int) -> tuple[torch.Tensor, dict[str, Any]]:
        flat = random_bits((100,), torch.float32, seed)
        grid = flat[40:].view(6, 10)
        return flat, {"front": flat[:25], "middle": flat[25:40], "even": grid[:, ::2], "odd": grid[:, 1::2]}

    saved, source = parts(1)
    filled, target = parts(2)
    _round_trip(tmp_path, source, target)
    assert raw(filled) == raw(saved)


NAMES: list[str | int] = [
    "plain",
    "a.b",
    "a/b",
    "a%2Fb",
    "a\\b",
    "..",
    ".",
    "...",
    "../../escape",
    "/absolute",
    "trailing/",
    "",
    " ",
    "%",
    "~1",
    "~",
    1,
    -1,
    "1",
    "zarr.json",
    "c",
    "__reserved",
    ".hidden",
    "Größe/Δ-模型-🧊",
    "e\u0301",
    "\u00e9",
    "UPPER",
    "upper",
    "nul\0byte",
    "new\nline",
    "lone\ud800surrogate",
    "x" * 300,
    "x" * 299 + "y",
    "🧊" * 300,
    "con:|<>?*\"'",
]


@pytest.mark.parametrize("elements", [3, 20_000], ids=["packed", "own array"])
def test_any_name_is_safe_and_distinct(elements: int, tmp_path: Path) -> None:
    """As key of a tensor and of a dict around it, with `a` beside `a/b` and `a.b`; no file outside of the root."""

    def build(seed: int) -> dict[Any, Any]:
        tensors: dict[Any, Any] = {
            name: random_bits((elements,), torch.float32, seed + i) for i, name in enumerate(NAMES)
        }
        tensors["a"] = {
            "b": random_bits((elements,), torch.float32, seed + 100),
            "": {"": random_bits((elements,), torch.float32, seed + 101)},
            "d" * 250: {"e" * 250: {"f" * 250: {"g" * 250: random_bits((elements,), torch.float32, seed + 102)}}},
            "c": {"0": random_bits((elements,), torch.float32, seed + 103)},
        }
        return tensors

    root = tmp_path / "deep" / "root"
    saved, target = build(1000), build(2000)
    restored = _round_trip(root, saved, target)
    assert restored.tensors == len(NAMES) + 4
    assert sorted(p.name for p in tmp_path.iterdir()) == ["deep"] and sorted(p.name for p in root.parent.iterdir()) == [
        "root"
    ]
    for name in NAMES:
        assert raw(target[name]) == raw(saved[name]), name
    assert _leaves(target["a"]) == _leaves(saved["a"])
    stored = [f.relative_to(root).as_posix() for f in root.rglob("*")]
    assert all(len(part.encode()) <= 255 for name in stored for part in name.split("/"))


def _leaves(node: Any) -> list[bytes]:
    if isinstance(node, torch.Tensor):
        return [raw(node)]
    return [leaf for key in sorted(node) for leaf in _leaves(node[key])]


def test_values_keep_any_name_too(tmp_path: Path) -> None:
    saved: dict[Any, Any] = {name: i for i, name in enumerate(NAMES)}
    target: dict[Any, Any] = dict.fromkeys(NAMES, -5)
    _round_trip(tmp_path, saved, target)
    assert target == saved and [type(k) for k in target] == [type(k) for k in saved]


def test_zarr_python_reads_the_same_bits(tmp_path: Path) -> None:
    """Every array of the state tree opens with zarr-python alone. Known to work: 3.1.6, the newest for Python 3.11;
    it has no bfloat16, float8, float4, complex32 and reads these as unsigned integers, with torch's name of the dtype
    in the attribute `logical_dtype`. Small tensors of one dtype lie in one array; its attribute `tensors` says where.
    """
    assert tuple(map(int, zarr.__version__.split(".")[:3])) >= (3, 1, 6)
    state = {
        _name(d): {
            **_filled(_shapes(d), d, 5),
            "ü/..": random_bits((2, 3), d, 6),
            "y" * 300: random_bits((300, 300), d, 7),
        }
        for d in CARRIED
    }
    with ckpt.Checkpointer(tmp_path) as ck:
        ck.save(1, state)
    expected = {}
    for dtype, tensors in state.items():
        for key, tensor in tensors.items():
            # names as docs/format.md gives them: "/" inside a key is %2F
            expected[f"{dtype}/{key.replace('/', '%2F')}"] = tensor
    group = zarr.open_group(attempt_folder(tmp_path) / "state", mode="r")
    found: dict[str, tuple[str, tuple[int, ...], bytes]] = {}
    packed = 0
    for _, array in group.members(max_depth=None):
        if not isinstance(array, zarr.Array):
            continue
        elements = np.asarray(array[...])
        dtype = str(array.attrs["logical_dtype"])
        if "tensors" in array.attrs:
            packed += 1
            rows: Any = array.attrs["tensors"]
            for name, shape, start in rows:
                part = elements[start : start + math.prod(shape)]
                found[name] = (dtype, tuple(shape), part.tobytes())
        else:
            found[str(array.attrs["name"])] = (dtype, elements.shape, elements.tobytes())
    assert packed == len(CARRIED)  # one for the small tensors of each dtype
    assert found == {n: (_name(t.dtype), tuple(t.shape), raw(t)) for n, t in expected.items()}


def test_zarr_python_sees_native_dtypes_where_its_core_has_them(tmp_path: Path) -> None:
    with ckpt.Checkpointer(tmp_path) as ck:
        ck.save(1, {_name(d): random_bits((300, 300), d, 1) for d in CARRIED})
    group = zarr.open_group(attempt_folder(tmp_path) / "state" / "tensors", mode="r")
    seen = {name: str(array.dtype) for name, array in group.arrays()}
    unnamed = {"bool", "bfloat16", "complex32", "float4_e2m1fn_x2", *(n for n in seen if n.startswith("float8"))}
    assert {n: d for n, d in seen.items() if n not in unnamed} == {n: n for n in seen if n not in unnamed}
    width = {n: getattr(torch, n).itemsize * 8 for n in unnamed}
    assert {n: seen[n] for n in unnamed} == {n: f"uint{width[n]}" for n in unnamed}
