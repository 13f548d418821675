"""Proves that a run's bits do not depend on its layout, and that the proof could fail.

    ./tools/invariance                  each axis alone and a covering set of mixed layouts, on the reference GPT
    ./tools/invariance --full           every layout of up to 8 ranks, all settings, Megatron Core too, the controls
    ./tools/invariance --megatron       on Megatron Core's GPTModel
    ./tools/invariance --controls       ordinary numerics, which must differ
    ./tools/invariance --catalogue      operations that depend on how their data are cut, measured here
    ./tools/invariance --walk 60        a run whose layout changes every few steps, with kills, against one on one rank

Every run saves every step. Losses, norms and state ids must be equal, to the bit, to those of one rank; where they are
not, the first step, tensor and element are named, with the bits of both.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from click.testing import CliRunner

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))  # for tests.support, which is not installed

from ckpt.cli.main import main as ckpt_command  # noqa: E402
from tests.support.ports import free_ports  # noqa: E402
from tests.support.ranks import Crew, RankErrors  # noqa: E402
from tools import invariance_catalogue  # noqa: E402
from tools.invariance_controls import CONTROLS  # noqa: E402
from tools.invariance_job import Case, Place, Row, Setting, job  # noqa: E402

ALONE = [Case(dp=n) for n in (2, 3, 4, 8)] + [Case(tp=n) for n in (2, 3, 4)] + [Case(pp=n) for n in (2, 3, 4)]
MIXED = [
    Case(dp=2, tp=2, pp=2, zero=True, sp=True),
    Case(dp=2, tp=3, sp=True),
    Case(dp=3, pp=2, zero=True),
    Case(tp=2, pp=3),
    Case(dp=2, pp=4, zero=True),
    Case(dp=4, tp=2),
    Case(dp=6, zero=True),
]
SETTINGS = [
    Setting(),
    Setting(tied=True, gated=True, norm="RMSNorm", leaf=2),
    Setting(bf16=True, microbatch=4),
    Setting(microbatch=1, shards=4, layers=4, heads=8, groups=4, tied=True, bf16=True),
]
MEGATRON = [
    Setting("megatron", gated=True, rope=True),
    Setting("megatron", tied=True, bf16=True),
    Setting("megatron", norm="RMSNorm", microbatch=1, shards=4, layers=8, heads=8, groups=4, gated=True, tied=True),
]
STEPS = 3


def everything() -> Iterator[Case]:
    """All layouts of up to 8 ranks whose sizes divide the default setting, with ZeRO and sequence parallelism."""
    for dp in (1, 2, 3, 4, 6, 8):
        for tp in (1, 2, 3, 4, 6):
            for pp in (1, 2, 3, 4, 6):
                if 1 < dp * tp * pp <= 8:
                    yield Case(dp, tp, pp)
                    if dp > 1 or tp > 1:
                        yield Case(dp, tp, pp, zero=dp > 1, sp=tp > 1)


class Prover:
    """Runs on some processes that stay alive, and compares."""

    def __init__(self, crew: Crew, folder: Path) -> None:
        self._crew, self._folder, self._count = crew, folder, 0

    def run(self, case: Case, setting: Setting, steps: int = STEPS) -> tuple[Path, list[Row]]:
        """A run from its beginning: where its checkpoints are, and its steps."""
        self._count += 1
        root = self._folder / f"run-{self._count}"
        found = self._crew.run(job, free_ports(1)[0], case, setting, Place(str(root), steps), timeout=600)
        return root, found[0]

    def differing(self, case: Case, setting: Setting, wanted: tuple[Path, list[Row]]) -> str:
        """The first thing in which a run on a layout differs from another run; nothing if the bits are equal."""
        root, rows = self.run(case, setting, len(wanted[1]))
        return first_difference(wanted[0], wanted[1], root, rows)


def first_difference(wanted_root: Path, wanted: Sequence[Row], root: Path, rows: Sequence[Row]) -> str:
    """The first differing step of two runs, and of its state the first differing tensor and element, with the bits."""
    if [row.step for row in wanted] != [row.step for row in rows]:
        return f"steps {[row.step for row in wanted]} and {[row.step for row in rows]}"
    for a, b in zip(wanted, rows, strict=True):
        if a == b:
            continue
        said = [
            f"{name} {getattr(a, name)} and {getattr(b, name)}"
            for name in ("loss", "norm")
            if getattr(a, name) != getattr(b, name)
        ]
        if a.state_id and b.state_id and a.state_id != b.state_id:
            said.append(_first_element(f"{wanted_root}@{a.step}", f"{root}@{b.step}"))
        return f"step {a.step}: {'; '.join(said)}"
    return ""


def _first_element(one: str, other: str) -> str:
    """By `ckpt diff`: which tensors of two steps differ, and the first element of the first of them."""
    said = CliRunner().invoke(ckpt_command, ["diff", one, other, "--json"]).stdout
    found = json.loads(said)["differences"] or []
    if not found:
        return "their values or names"
    names = [difference["name"] for difference in found]
    first = found[0]["first"]
    a, b = (f"{first[side]['value']} (0x{first[side]['bits']})" for side in "ab")
    more = f" (and {len(names) - 1} more tensors)" if len(names) > 1 else ""
    return f"{names[0]}{first['index']}: {a} and {b}{more}"


@contextmanager
def prover(world: int) -> Iterator[Prover]:
    with tempfile.TemporaryDirectory(prefix="ckpt-invariance-") as folder, Crew(world, init=False) as crew:
        yield Prover(crew, Path(folder))


# --- What can be asked for ---


def prove(cases: Sequence[Case], settings: Sequence[Setting], world: int, steps: int) -> int:
    """Prints a line for each run; the number of those that differ."""
    wrong = 0
    with prover(world) as proving:
        for setting in settings:
            began = time.monotonic()
            wanted = proving.run(Case(), setting, steps)
            last = wanted[1][-1]
            loss = float.fromhex(last.loss)
            print(f"{describe(setting)}: one rank, {steps} steps, loss {loss:.6f}, state {last.state_id[:12]}", end=" ")
            print(f"({time.monotonic() - began:.1f} s)", flush=True)
            for case in (case for case in cases if fits(case, setting)):
                began = time.monotonic()
                said = proving.differing(case, setting, wanted)
                wrong += bool(said)
                print(f"  {case!s:24} {said or 'equal'}  ({time.monotonic() - began:.1f} s)", flush=True)
    return wrong


def fits(case: Case, setting: Setting) -> bool:
    """Whether the libraries can run a setting on a layout; what they cannot is not the proof's to show."""
    divides = setting.layers % (case.pp * case.vpp) == 0 and setting.shards % case.tp == 0
    if setting.kind == "megatron":  # its schedules want as many microbatches on every rank
        divides &= setting.batch // setting.microbatch // setting.leaf % case.dp == 0
    return divides and case.dp <= setting.batch // setting.microbatch // setting.leaf


def refute(setting: Setting, world: int = 4) -> int:
    """The controls: each must differ on some layout, and says where. The number of those that do not."""
    wrong = 0
    layouts = {
        "all-reduce": [Case(dp=3), Case(tp=2)],
        "rank-rng": [Case(dp=2), Case(pp=2)],
        "rank-gemm": [Case(tp=2)],
        "rank-tree": [Case(dp=2)],
    }
    with prover(world) as proving:
        for control in CONTROLS:
            changed = replace(setting, control=control)
            wanted = proving.run(Case(), changed, 2)
            for case in layouts[control]:
                said = proving.differing(case, changed, wanted)
                wrong += not said
                print(f"  control {control:12} {case!s:8} {said or 'EQUAL, and must not be'}", flush=True)
    return wrong


def walk(steps: int, setting: Setting, seed: int, world: int = 4) -> int:
    """A run whose layout changes at random through checkpoints, with kills, against one on one rank."""
    chance = random.Random(seed)
    cases = [case for case in everything() if case.world <= world and fits(case, setting)]
    with tempfile.TemporaryDirectory(prefix="ckpt-walk-") as folder:
        root, rows = Path(folder) / "walk", Path(folder) / "rows.jsonl"
        done, legs, kills = 0, 0, 0
        while done < steps:
            case, until = chance.choice(cases), min(steps, done + chance.randint(1, 5))
            seconds = chance.uniform(0.0, 2.0) if chance.random() < 0.5 else None
            victim = chance.randrange(case.world)
            killed = leg(case, setting, Place(str(root), until, 2, str(rows)), seconds, victim)
            legs, kills = legs + 1, kills + killed
            done = max((row.step for row in read(rows) if row.state_id), default=0)
            print(f"  {case!s:24} to step {until}{', killed' if killed else ''}; committed: {done}", flush=True)
        with Crew(1, init=False) as crew:
            place = Place(str(Path(folder) / "one"), steps)
            wanted: list[Row] = crew.run(job, free_ports(1)[0], Case(), setting, place, timeout=1200)[0]
        by_step = {row.step: row for row in wanted}
        wrong = [row for row in read(rows) if not same(row, by_step[row.step])]
        layouts = f"{legs} layouts, {kills} kills, {len(read(rows))} steps run for {steps}"
        print(f"walk: {layouts}; {len(wrong)} steps differ from the run that never stopped")
        if wrong:
            print(f"  first: {wrong[0]}, not {by_step[wrong[0].step]}")
        return len(wrong)


def leg(case: Case, setting: Setting, place: Place, kill: float | None = None, victim: int = -1) -> bool:
    """Some steps on one layout, in processes of their own. kill: so many seconds after the first step is done, one of
    them is killed with SIGKILL: in a step, in a save, or when all is over. Whether that ended the leg."""
    with Crew(case.world, init=False) as crew:
        killer = None
        if kill is not None:
            killer = threading.Thread(target=_kill_after, args=(crew.pids()[victim], place, kill))
            killer.start()
        try:
            crew.run(job, free_ports(1)[0], case, setting, place, timeout=600)
        except RankErrors:  # the others are ended soon after the first
            if killer is None:
                raise
            return True
        finally:
            if killer is not None:
                killer.join()
        return False


def _kill_after(pid: int, place: Place, seconds: float) -> None:
    rows, deadline = Path(str(place.rows)), time.monotonic() + 120
    before = len(read(rows))
    while len(read(rows)) == before and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(seconds)
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def read(rows: Path) -> list[Row]:
    return [Row(**json.loads(line)) for line in rows.read_text().splitlines()] if rows.exists() else []


def same(row: Row, wanted: Row) -> bool:
    """Whether a step has the wanted bits; its state is compared where it was saved."""
    return (row.loss, row.norm) == (wanted.loss, wanted.norm) and row.state_id in ("", wanted.state_id)


def describe(setting: Setting) -> str:
    plain = Setting(setting.kind)
    changed = [f"{n} {v}" for n, v in vars(setting).items() if v != getattr(plain, n) or n in ("shards", "layers")]
    return f"{setting.kind} GPT, {', '.join(changed)}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="everything; takes long")
    parser.add_argument("--megatron", action="store_true", help="on Megatron Core's GPTModel")
    parser.add_argument("--controls", action="store_true", help="ordinary numerics, which must differ")
    parser.add_argument("--catalogue", action="store_true", help="operations that depend on how their data are cut")
    parser.add_argument("--walk", type=int, metavar="STEPS", help="change the layout every few steps")
    parser.add_argument("--seed", type=int, default=1, help="of the walk")
    parser.add_argument("--steps", type=int, default=STEPS, help="of every run that is compared")
    args = parser.parse_args()
    if args.catalogue:
        invariance_catalogue.main()
        return 0
    plain = replace(SETTINGS[0], layers=4) if args.walk or args.controls else SETTINGS[0]
    if args.megatron:
        plain = replace(MEGATRON[0], layers=4)
    wrong = 0
    if args.walk:
        wrong += walk(args.walk, plain, args.seed)
    if args.controls or args.full:
        wrong += refute(replace(plain, layers=4))
    if args.full:
        wrong += prove(list(everything()), [*SETTINGS, *MEGATRON], 8, args.steps)
    elif not (args.walk or args.controls):
        wrong += prove(ALONE + MIXED, [plain], 8, args.steps)
    print("proved" if not wrong else f"NOT proved: {wrong} runs or steps are not as they must be")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
