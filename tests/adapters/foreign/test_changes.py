"""Choosing, renaming and casting: what comes out, and what is refused."""

from fractions import Fraction
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ckpt
from ckpt.adapters.foreign.changes import Changed, Changes, rounded
from ckpt.adapters.foreign.into import open_session, save_from
from ckpt.engine.rest import CommittedState
from ckpt.errors import CkptError, Unsupported
from tests.support.at_rest import committed
from tests.support.raw import from_bits, random_bits, raw


def source_of(root: Path, state: dict[str, object]) -> CommittedState:
    with ckpt.Checkpointer(root) as ck:
        ck.save(3, state)
    return committed(root)


@pytest.fixture
def source(tmp_path: Path) -> CommittedState:
    tied = random_bits((4, 3), torch.float32, 1)
    model = {"embed": tied, "out": tied, "w": random_bits((300, 100), torch.float32, 2), "n": torch.arange(5)}
    return source_of(tmp_path / "src", {"model": model, "epoch": 4, "rng": ckpt.per_rank({"seed": 9})})


def saved(source: object, root: Path) -> str:
    return str(save_from(open_session(str(root)), source, 3).record.document["state_id"])  # type: ignore[arg-type]


def state_id(root: Path, state: dict[str, object]) -> str:
    with ckpt.Checkpointer(root) as ck:
        return ck.save(3, state).state_id


def test_a_selection_has_the_id_of_a_state_that_never_had_more(source: CommittedState, tmp_path: Path) -> None:
    w = random_bits((300, 100), torch.float32, 2)
    found = saved(Changed(source, Changes(select=("model/w", "epoch"))), tmp_path / "a")
    assert found == state_id(tmp_path / "b", {"model": {"w": w}, "epoch": 4})


def test_of_tied_names_the_one_that_is_selected_has_the_tensor(source: CommittedState, tmp_path: Path) -> None:
    changed = Changed(source, Changes(select=("model/out",)))
    found = saved(changed, tmp_path / "a")
    assert found == state_id(tmp_path / "b", {"model": {"out": random_bits((4, 3), torch.float32, 1)}})
    assert "model/embed" in changed.map["left_out"]


def test_ties_stay_with_new_names_whichever_is_smaller(source: CommittedState, tmp_path: Path) -> None:
    changed = Changed(source, Changes(select=("model/[eo]*",), rename=(("embed", "zz"),)))
    tied = random_bits((4, 3), torch.float32, 1)
    assert saved(changed, tmp_path / "a") == state_id(tmp_path / "b", {"model": {"zz": tied, "out": tied}})
    assert changed.content.aliases == {"model/zz": "model/out"}
    assert changed.map["changed"] == [["model/embed", "float32", "model/zz", "float32"]]


def test_the_map_says_all_that_changed(source: CommittedState) -> None:
    changed = Changed(source, Changes(("model/[wn]", "epoch"), (("^model/", "m/"), ("epoch", "e")), "bfloat16"))
    assert changed.map == {
        "changed": [["model/n", "int64", "m/n", "int64"], ["model/w", "float32", "m/w", "bfloat16"]],
        "values": [["epoch", "e"]],
        "left_out": ["model/embed", "model/out", "rng"],
    }


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"select": ("nothing",)}, "nothing there fits"),
        ({"rename": (("w$|n$", "x"),)}, "model/x"),
        ({"rename": (("epoch", "model/w"),)}, "model/w"),
        ({"rename": (("model/out", "model/w"),)}, "model/w"),
        ({"rename": (("model", ""),)}, "no name"),
        ({"rename": (("model", "~x"),)}, "no name"),
        ({"rename": (("(", ""),)}, "regular expression"),
        ({"rename": (("a", r"\2"),)}, "regular expression"),
        ({"dtype": "int32"}, "int32"),
        ({"dtype": "float99"}, "float99"),
        ({"dtype": "float4_e2m1fn_x2"}, "float4"),
    ],
)
def test_what_cannot_be_is_refused(source: CommittedState, changes: dict[str, object], word: str) -> None:
    with pytest.raises(CkptError, match=word.replace("(", r"\(")):
        Changed(source, Changes(**changes))  # type: ignore[arg-type]


def test_packed_float4_is_not_cast(tmp_path: Path) -> None:
    source = source_of(tmp_path / "src", {"q": random_bits((4, 4), torch.float4_e2m1fn_x2)})
    with pytest.raises(Unsupported, match="q: "):
        Changed(source, Changes(dtype="float32"))


NARROW = [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2]


def _finite(dtype: torch.dtype) -> list[Fraction]:
    bits = torch.arange(-(2**15), 2**15).to(torch.int16) if dtype.itemsize == 2 else torch.arange(256).to(torch.uint8)
    numbers = bits.view(dtype).double()
    return sorted({Fraction(x) for x in numbers[numbers.isfinite()].tolist()})


FINITE = {dtype: _finite(dtype) for dtype in NARROW}


@given(st.sampled_from(NARROW), st.data())
def test_a_cast_from_float64_gives_the_nearest_number(dtype: torch.dtype, data: st.DataObject) -> None:
    numbers = FINITE[dtype]
    at = data.draw(st.integers(1, len(numbers) - 3))
    middle = (numbers[at] + numbers[at + 1]) / 2
    step = abs(numbers[at + 1] - numbers[at]) / 2 ** data.draw(st.integers(2, 40))
    nudge = data.draw(st.sampled_from([0, 1, -1])) * step
    x = float(middle + nudge)
    found = Fraction(rounded(torch.tensor([x], dtype=torch.float64), dtype).double().item())
    distances = {abs(n - Fraction(x)) for n in numbers[at - 1 : at + 3]}
    assert abs(found - Fraction(x)) == min(distances)


@pytest.mark.parametrize("count", [1, 64])
@pytest.mark.parametrize("wide", [torch.float64, torch.float32, torch.float16, torch.float8_e5m2])
def test_a_cast_keeps_what_is_no_number(wide: torch.dtype, count: int) -> None:
    payloads = from_bits(b"\xff" * wide.itemsize * count, (count,), wide)
    assert raw(rounded(payloads, torch.bfloat16)) == raw(torch.full((count,), 0x7FC0, dtype=torch.int16))
    x = torch.tensor([float("inf"), -float("inf"), 0.0, -0.0, 60000], dtype=wide).repeat(count)
    assert raw(rounded(x, torch.bfloat16)) == raw(x.to(torch.bfloat16))
