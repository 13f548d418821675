"""`ckpt diff` against a comparison of the states themselves, byte for byte."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ckpt
from ckpt.inspect import diff as differences
from ckpt.state.dtypes import STORED
from tests.cli.commands import document, run, set_variables
from tests.engine.states import flip_bit
from tests.support.raw import from_bits, objects_of, random_bits, raw
from tests.support.roots import Root

SHAPE = (7, 5)


class Pairs:
    """One root whose step 1 has a tensor of each dtype, and one in an array of its own; more steps to compare with."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.base = {n: random_bits(SHAPE, getattr(torch, n), 1) for n in STORED}
        self.base["own"] = random_bits((200, 130), torch.float32, 2)
        self.step = 1
        self.ck = ckpt.Checkpointer(folder)
        self.ck.save(1, self.base)

    def compare(self, other: dict[str, Any], *options: str, code: int = 1) -> Any:
        self.step += 1
        self.ck.save(self.step, other)
        return document("diff", f"{self.folder}@1", f"{self.folder}@{self.step}", *options, code=code)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pairs]:
    made = Pairs(tmp_path_factory.mktemp("pairs") / "run")
    yield made
    made.ck.close()


def changed(tensor: torch.Tensor, flips: list[tuple[int, int]]) -> torch.Tensor:
    """A copy in which bytes (numbers modulo their count) are xored."""
    data = bytearray(raw(tensor))
    for at, mask in flips:
        data[at % len(data)] ^= mask
    return from_bits(bytes(data), tuple(tensor.shape), tensor.dtype)


def wrong_elements(a: torch.Tensor, b: torch.Tensor) -> list[int]:
    x, y, size = raw(a), raw(b), a.element_size()
    return [i for i in range(a.numel()) if x[size * i : size * (i + 1)] != y[size * i : size * (i + 1)]]


def bits_of(tensor: torch.Tensor, number: int) -> str:
    size = tensor.element_size()
    data = raw(tensor)[size * number : size * (number + 1)]
    if tensor.dtype.is_complex:
        return f"{data[: size // 2][::-1].hex()} {data[size // 2 :][::-1].hex()}"
    return data[::-1].hex()


_flips = st.dictionaries(
    st.sampled_from([*STORED, "own"]),
    st.lists(st.tuples(st.integers(0, 1 << 20), st.integers(1, 255)), min_size=1, max_size=4),
    max_size=5,
)


@given(flips=_flips)
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_dtype_against_brute_force(pairs: Pairs, flips: dict[str, list[tuple[int, int]]]) -> None:
    other = {n: changed(t, flips.get(n, [])) for n, t in pairs.base.items()}
    wrong = {n: w for n, t in pairs.base.items() if (w := wrong_elements(t, other[n]))}
    found = pairs.compare(other, code=1 if wrong else 0)
    assert found["same"] is found["same_state"] is (not wrong)
    assert found["tensors"] == {
        "equal": len(pairs.base) - len(wrong),
        "only_a": [],
        "only_b": [],
        "changed": [],
        "unequal": [[n] for n in sorted(wrong)],
    }
    assert [d["name"] for d in found["differences"]] == sorted(wrong)
    for d in found["differences"]:
        name, a = d["name"], pairs.base[d["name"]]
        first = wrong[name][0]
        assert d["differing"] == len(wrong[name]) and d["elements"] == a.numel() and d["shape"] == list(a.shape)
        index = d["first"]["index"]
        assert sum(i * s for i, s in zip(index, a.stride(), strict=True)) == first
        assert (d["first"]["a"]["bits"], d["first"]["b"]["bits"]) == (bits_of(a, first), bits_of(other[name], first))


def test_special_values_by_their_bits(pairs: Pairs) -> None:
    values = [0.0, -0.0, float("nan"), float("inf"), 1.0]
    other = [-0.0, -0.0, float("nan"), -float("inf"), torch.tensor(1.0).nextafter(torch.tensor(2.0)).item()]
    with ckpt.Checkpointer(pairs.folder.parent / "special") as ck:
        ck.save(1, {"w": torch.tensor(values)})
        ck.save(2, {"w": torch.tensor(other)})
        url = ck.url
    (d,) = document("diff", f"{url}@1", f"{url}@2", code=1)["differences"]
    assert d["differing"] == 3 and d["max_abs"] == "inf" and d["max_ulp"] == 2 * 0x7F800000 and d["nan"] == 0
    zero = {"value": "0.0", "bits": "00000000"}
    assert d["first"] == {"index": [0], "a": zero, "b": {"value": "-0.0", "bits": "80000000"}, "ulp": 0}
    text = run("diff", f"{url}@1", f"{url}@2")
    assert text.exit_code == 1 and all(word in text.output for word in ("0x00000000", "0x80000000", "-0.0", "inf"))


def test_names_shapes_dtypes_values_and_ties(tmp_path: Path) -> None:
    x, y = torch.ones(4), torch.arange(6.0)
    with ckpt.Checkpointer(tmp_path / "a") as ck:
        ck.save(1, {"gone": x, "shape": y, "dtype": y, "tie": [y, y], "lr": 0.1, "old": 1, "rng": ckpt.per_rank([1])})
    with ckpt.Checkpointer(tmp_path / "b") as ck:
        z = y + 1
        ck.save(1, {"new": x, "shape": y[:3], "dtype": y.long(), "tie": [z, z], "lr": 0.2, "rng": ckpt.per_rank([2])})
    found = document("diff", tmp_path / "a", tmp_path / "b", code=1)
    assert found["tensors"] == {
        "equal": 0,
        "only_a": ["gone"],
        "only_b": ["new"],
        "changed": [
            {"name": "dtype", "a": "float32 6", "b": "int64 6"},
            {"name": "shape", "a": "float32 6", "b": "float32 3"},
        ],
        "unequal": [["tie/~0", "tie/~1"]],
    }
    (d,) = found["differences"]
    assert d["name"] == "tie/~0" and d["tied"] == ["tie/~1"] and d["max_abs"] == 1.0
    assert found["values"] == {"only_a": ["old"], "only_b": [], "changed": ["lr"]}
    assert found["per_rank"] == {"only_a": [], "only_b": [], "changed": ["rank 0: rng"]}
    text = run("diff", tmp_path / "a", tmp_path / "b").output
    said = [
        "only in A: gone",
        "only in B: new",
        "shape: float32 6 in A, float32 3 in B",
        "value differs: lr: 0.1 in A, 0.2 in B",
        "rank 0: rng",
    ]
    assert [word for word in said if word not in text] == []


def test_the_same_tensors_in_other_places(tmp_path: Path) -> None:
    """Another neighbour moves a packed tensor, another `stack` changes no bits: only names tell."""
    small = torch.arange(50.0)
    with ckpt.Checkpointer(tmp_path / "a") as ck:
        ck.save(1, {"w": small})
    with ckpt.Checkpointer(tmp_path / "b") as ck:
        ck.save(1, {"v": torch.zeros(9), "w": changed(small, [(100, 1)])})
    found = document("diff", tmp_path / "a", tmp_path / "b", code=1)
    assert found["tensors"]["only_b"] == ["v"] and [d["first"]["index"] for d in found["differences"]] == [[25]]


def test_what_is_equal_is_not_read(pairs: Pairs, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    really = differences._Side.read

    def counted(self: Any, name: str, box: Any) -> Any:
        read.append(name)
        return really(self, name, box)

    monkeypatch.setattr(differences._Side, "read", counted)
    pairs.compare(pairs.base, code=0)
    assert read == []
    other = {**pairs.base, "own": changed(pairs.base["own"], [(5, 5)])}
    assert pairs.compare(other, "--brief")["differences"] is None and read == []
    pairs.compare(other)
    assert read == ["own", "own"]


def test_memory_is_bounded_by_the_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor of many objects is read a piece at a time, and the first difference is the first in row-major order,
    though another object comes before it."""
    big = torch.zeros(2600, 1000)
    with ckpt.Checkpointer(tmp_path / "run") as ck:
        ck.save(1, {"w": big})
        big[1299, 0] = 1  # in the first object
        big[3, 999] = 2  # in the second, but an earlier row
        big[2599, 999] = 4
        ck.save(2, {"w": big})
    sizes = []
    monkeypatch.setattr(differences, "PIECE", 1 << 20)
    read = differences._Side.read

    def counted(self: Any, name: str, box: Any) -> Any:
        sizes.append(box.volume * 4)
        return read(self, name, box)

    monkeypatch.setattr(differences._Side, "read", counted)
    (d,) = document("diff", f"{tmp_path}/run@1", f"{tmp_path}/run@2", code=1)["differences"]
    assert d["differing"] == 3 and d["first"]["index"] == [3, 999] and d["max_abs"] == 4.0
    assert max(sizes) <= 1 << 20 and sum(sizes) == 2 * big.nbytes


def test_damage_is_an_error_with_its_place(pairs: Pairs) -> None:
    other = {**pairs.base, "own": changed(pairs.base["own"], [(5, 5)])}
    pairs.compare(other)
    file = objects_of(pairs.folder, "tensors/own")[0]
    flip_bit(file)
    try:
        done = run("diff", f"{pairs.folder}@1", pairs.folder, "--json")
    finally:
        flip_bit(file)
    error = json.loads(done.stdout)["error"]
    assert done.exit_code == 1 and error["kind"] == "CorruptCheckpoint" and "tensor own" in error["message"]


def test_over_stores(root: Root, pairs: Pairs, monkeypatch: pytest.MonkeyPatch) -> None:
    set_variables(monkeypatch, root)
    other = {**pairs.base, "own": changed(pairs.base["own"], [(40, 1)]), "int8": changed(pairs.base["int8"], [(3, 1)])}
    with ckpt.Checkpointer(root.url, storage_options=root.storage_options) as ck:
        ck.save(9, pairs.base)
        ck.save(10, other)
    assert run("diff", f"{pairs.folder}@1", f"{root.url}@9").exit_code == 0
    found = document("diff", f"{pairs.folder}@1", root.url, code=1)
    assert [(d["name"], d["first"]["index"]) for d in found["differences"]] == [("int8", [0, 3]), ("own", [0, 10])]
    assert found["b"]["step"] == 10 and found["b"]["url"] == ck.url
