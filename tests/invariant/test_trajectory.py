"""Training goes on with the same bits on every layout; and where numerics are ordinary, it does not.

The loss and the norm of every step, and the state id of what it left, against those of one rank. `./tools/invariance
--full` has all layouts and settings.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.ranks import Crew
from tools.invariance import ALONE, MEGATRON, SETTINGS, Prover, read, refute, same, walk
from tools.invariance_job import Case, Row, Setting

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

STEPS = 2
MIXED = [
    (SETTINGS[0], Case(dp=2, tp=2, pp=2, zero=True, sp=True)),
    (SETTINGS[1], Case(dp=3, pp=2, zero=True)),
    (SETTINGS[1], Case(tp=3, pp=2, sp=True)),
    (SETTINGS[2], Case(dp=6, zero=True)),
    (SETTINGS[2], Case(dp=2, pp=3)),
    (SETTINGS[3], Case(dp=5)),
    (SETTINGS[3], Case(tp=3, pp=2)),
    (SETTINGS[3], Case(dp=2, tp=2, sp=True)),
    (replace(MEGATRON[0], layers=4), Case(dp=2, tp=2, pp=2, zero=True, sp=True)),
    (replace(MEGATRON[0], layers=4), Case(pp=4)),
    (replace(MEGATRON[1], layers=4), Case(dp=3, pp=2, zero=True)),
    (replace(MEGATRON[1], layers=4), Case(tp=4, sp=True)),
    (MEGATRON[2], Case(pp=2, vpp=2, dp=2)),
    (MEGATRON[2], Case(pp=4, vpp=2)),
    (MEGATRON[2], Case(dp=4, tp=2, zero=True)),
]


@pytest.fixture(scope="module")
def prover(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prover]:
    with Crew(8, init=False) as crew:
        yield Prover(crew, tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def wanted(prover: Prover) -> dict[Setting, tuple[Path, list[Row]]]:
    settings = dict.fromkeys(setting for setting, _ in MIXED)
    return {setting: prover.run(Case(), setting, STEPS) for setting in settings}


@pytest.mark.parametrize("case", ALONE, ids=str)
def test_each_axis_alone(prover: Prover, wanted: dict[Setting, tuple[Path, list[Row]]], case: Case) -> None:
    assert prover.differing(case, SETTINGS[0], wanted[SETTINGS[0]]) == ""


@pytest.mark.parametrize(("setting", "case"), MIXED, ids=str)
def test_axes_mixed(
    prover: Prover, wanted: dict[Setting, tuple[Path, list[Row]]], setting: Setting, case: Case
) -> None:
    assert prover.differing(case, setting, wanted[setting]) == ""


def test_ordinary_numerics_differ_at_the_first_step() -> None:
    assert refute(Setting(layers=2)) == 0


def test_a_run_that_changes_its_layout_and_loses_processes_keeps_its_bits() -> None:
    assert walk(8, Setting(layers=2), seed=2) == 0


def test_a_difference_is_found_and_named(prover: Prover, capsys: pytest.CaptureFixture[str]) -> None:
    """Two runs that only differ in the control report step, tensor, element and bits."""
    setting = Setting(layers=2)
    plain = prover.run(Case(), setting, STEPS)
    other = Setting(layers=2, control="rank-gemm")
    said = prover.differing(Case(tp=2), other, plain)
    assert said.startswith("step 1: ") and "0x" in said and "exp_avg" in said


def test_rows_are_compared_by_bits() -> None:
    row = Row(1, (1.0).hex(), (2.0).hex(), "abc")
    assert same(row, row) and same(Row(1, row.loss, row.norm), row)
    assert not same(Row(1, (1.0 + 2**-52).hex(), row.norm), row) and not same(Row(1, row.loss, row.norm, "d"), row)
    assert read(Path("/nowhere")) == []
