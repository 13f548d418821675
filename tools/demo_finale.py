"""The demo's last act: a run that changes its layout and loses processes, beside the run that never stopped.

Both train Megatron Core's GPTModel with the layers of `ckpt.invariant`. The control has the same model and data, with
ordinary reductions.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.support.ports import free_ports
from tests.support.ranks import Crew
from tools.invariance import first_difference, leg, read
from tools.invariance_job import Case, Place, Row, Setting, job

SETTING = Setting("megatron", layers=4, gated=True, rope=True)
LEGS = [(Case(dp=2, tp=2, zero=True, sp=True), 3), (Case(pp=4), 6), (Case(dp=3), 8), (Case(tp=3), 10)]
KILLED = 1  # the leg that is killed, once it has done a step that was not saved yet
EVERY = 3


class NotTheSame(Exception):
    """The runs differ where they must not, or the control does not."""


def finale(url: str, options: Mapping[str, Any], folder: Path) -> None:
    """Prints both runs side by side, then the control. Raises NotTheSame."""
    last = LEGS[-1][1]
    print(f"\nThe same run twice, {last} steps of Megatron Core's GPT: on one process, and on layouts that change")
    rows = folder / "changing.jsonl"
    with Crew(1, init=False) as crew:
        wanted = _run(crew, Case(), SETTING, Place(str(folder / "one"), last))
    layouts = _changing(Place(f"{url}-changing", last, EVERY, str(rows), dict(options) or None))
    _show(wanted, read(rows), layouts)
    control = Setting(**{**vars(SETTING), "control": "all-reduce"})
    roots = folder / "control-one", folder / "control-dp3"
    with Crew(3, init=False) as crew:
        plain = _run(crew, Case(), control, Place(str(roots[0]), 1))
        other = _run(crew, Case(dp=3), control, Place(str(roots[1]), 1))
    said = first_difference(roots[0], plain, roots[1], other)
    if not said:
        raise NotTheSame("ordinary reductions gave the same bits on one process and on DP3: the proof shows nothing")
    print(f"The control, with ordinary reductions, on one process and on DP3: differs at {said}")


def _run(crew: Crew, case: Case, setting: Setting, place: Place) -> list[Row]:
    found: list[Row] = crew.run(job, free_ports(1)[0], case, setting, place, timeout=300)[0]
    return found


def _changing(place: Place) -> list[str]:
    """Runs all legs. For each row that was written: the layout it is from."""
    names: list[str] = []
    rows = Path(str(place.rows))
    for number, (case, until) in enumerate(LEGS):
        part = Place(place.root, until, place.every, place.rows, place.options)
        for kill in [0.0, None] if number == KILLED else [None]:
            if leg(case, SETTING, part, kill) != (kill is not None):
                raise NotTheSame(f"{case}: the run was over before it could be killed")
            names += [f"{case}{'' if kill is None else ' (killed)'}"] * (len(read(rows)) - len(names))
    return names


def _show(wanted: list[Row], found: list[Row], layouts: list[str]) -> None:
    by_step = {row.step: row for row in wanted}
    print(f"{'step':>4}  {'never stopped':<22}{'changing':<22}{'state id':<14}{'layout':<20}")
    for row, layout in zip(found, layouts, strict=True):
        one = by_step[row.step]
        for what in ("loss", "norm", *(["state_id"] if row.state_id else [])):
            if getattr(row, what) != getattr(one, what):
                raise NotTheSame(f"step {row.step} on {layout}: {what} {getattr(row, what)}, not {getattr(one, what)}")
        print(f"{row.step:>4}  {one.loss:<22}{row.loss:<22}{row.state_id[:12] or '-':<14}{layout:<20}", flush=True)
    print("Every loss, every norm and every state id is the same, to the bit.")
