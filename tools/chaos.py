"""Kills random processes of jobs that save and load, again and again, and checks after each kill that nothing is lost.

    tools/chaos [--minutes 10] [--kills N] [--ranks 2] [--s3] [--keep] [--tiers] [--loss 0.08] [--seed 1]

Each launch is a job of some ranks on one root, over two nodes as far as it knows. After a random time one rank, some,
all, an agent, or trainers and agents together get SIGKILL; now and then the next job starts while survivors still run.
After each launch the root is read by this process: the newest step must load and verify; every step that any rank was
told is committed must be there, with the state id that the step has always had; so must every step that all ranks had
staged, unless agents were killed or another job took over; and a committed step, chosen at random, must load too. With
--keep the jobs retire what they need not keep, and are killed as they do: a step may be gone then if the log says that
it was retired and no rule or mark keeps it. With --tiers saves go to a fast directory and are copied on, the kills
come in the middle of copies too, and now and then the node is lost with its fast root (`chaos_tiers`). With --kills it
ends after so many, or later: when all of this has happened that --keep and --tiers are for. Exits with 1 at the first
thing that is wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

import ckpt
from ckpt.agent import registry
from ckpt.store.leases import mark
from ckpt.store.log import Log
from ckpt.store.objects import open_store
from tests.support.ports import free_ports
from tests.support.s3 import S3Server
from tools import chaos_job
from tools.chaos_tiers import COPIED, LOST, UNCOPIED, Roots, rightly_gone

AIMS = ("one rank", "one rank", "all ranks", "an agent", "agents and all ranks", "some ranks")
LONGEST = 6.0  # seconds from the start of a launch to its kill
RETIRED = "steps retired"
ENDS = 60.0  # seconds in which survivors must have ended by themselves


@dataclass
class Ledger:
    """What has happened. ids: of each step that somebody was told is committed; there: of these, the steps that no lost
    node took along; promised: steps that must be committed once agents have written them; marked: steps that are kept
    for ever."""

    ids: dict[int, str] = field(default_factory=dict)
    there: set[int] = field(default_factory=set)
    promised: set[int] = field(default_factory=set)
    marked: set[int] = field(default_factory=set)
    counts: Counter[str] = field(default_factory=Counter)

    def commit(self, step: int, state_id: str, where: str) -> None:
        if self.ids.setdefault(step, state_id) != state_id:
            raise SystemExit(f"{where}: step {step} has id {state_id}, but had {self.ids[step]}")
        self.there.add(step)

    def read(self, notes: Path) -> set[int]:
        """Takes over what a rank noted, and gives the steps that it has staged; the last line may be cut short."""
        staged = set()
        for line in notes.read_text().splitlines() if notes.exists() else []:
            try:
                fact = json.loads(line)
            except ValueError:
                continue
            if "staged" in fact:
                staged.add(fact["staged"])
            if "committed" in fact:
                self.commit(fact["committed"], fact["id"], notes.name)
            if "loaded" in fact:
                self.commit(fact["loaded"], fact["id"], notes.name)
                self.counts["loads by ranks"] += 1
            if "raised" in fact:
                self.counts[f"raised {fact['raised']}"] += 1
                if fact["raised"] not in chaos_job.EXPECTED:
                    raise SystemExit(f"{notes.name}: {fact['raised']}: {fact['message']}")
        return staged


@dataclass
class Launch:
    """A job of some ranks."""

    processes: list[ForkServerProcess]
    notes: list[Path]
    agents_live: bool = True
    alone: bool = True

    def living(self) -> list[ForkServerProcess]:
        return [p for p in self.processes if p.exitcode is None]


def start(context: ForkServerContext, ranks: int, roots: Roots, seed: str, scratch: Path) -> Launch:
    port = free_ports(1)[0]
    launch = Launch([], [])
    for rank in range(ranks):
        notes = scratch / f"{seed.replace(' ', '-')}-{rank}.jsonl"
        fast = None if roots.fast is None else str(roots.fast)
        arguments = (rank, ranks, port, roots.url, roots.options, fast, roots.keeping, seed, str(notes))
        process = context.Process(target=chaos_job.main, args=arguments, daemon=True)
        process.start()
        launch.processes.append(process)
        launch.notes.append(notes)
    return launch


def agents_of(launch: Launch) -> list[int]:
    """Agents whose trainers are ranks of this launch and live."""
    parents = ",".join(str(p.pid) for p in launch.living())
    if not parents:
        return []
    found = subprocess.run(["pgrep", "-P", parents, "-f", "ckpt.agent"], capture_output=True, text=True, check=False)
    return [int(pid) for pid in found.stdout.split()]


def kill(launch: Launch, aim: str, chance: random.Random, counts: Counter[str]) -> None:
    agents = agents_of(launch)
    living = launch.living()
    some = {"one rank": 1, "some ranks": max(1, len(living) // 2)}.get(aim, len(living))
    ranks = [] if aim == "an agent" and agents else chance.sample(living, min(some, len(living)))
    chosen = {"an agent": agents[:1], "agents and all ranks": agents}.get(aim, [])
    for pid in [p.pid for p in ranks] + chosen:
        try:
            os.kill(int(pid or 0), signal.SIGKILL)
        except ProcessLookupError:
            continue
        counts["agents killed" if pid in chosen else "ranks killed"] += 1
        launch.agents_live = launch.agents_live and pid not in chosen


def stacks(process: ForkServerProcess, launch: Launch) -> str:
    """What a rank that hangs is doing, and what it has noted."""
    os.kill(process.pid or 0, signal.SIGUSR2)
    time.sleep(1.0)
    notes = launch.notes[launch.processes.index(process)]
    return Path(chaos_job.stacks_of(str(notes))).read_text() + notes.read_text()


def end(launch: Launch, ledger: Ledger) -> None:
    """Waits for the survivors, who must end by themselves, and reads what all noted."""
    deadline = time.monotonic() + ENDS
    for process in launch.processes:
        process.join(max(0.1, deadline - time.monotonic()))
        if process.exitcode is None:
            raise SystemExit(f"a rank hangs {ENDS:.0f} s after the kill:\n{stacks(process, launch)}")
    for process in launch.processes:
        process.close()
    staged = [ledger.read(notes) for notes in launch.notes]
    if launch.agents_live and launch.alone:
        ledger.promised |= set.intersection(*staged)
        ledger.counts["steps staged by all ranks"] += len(set.intersection(*staged))


def may_retire(roots: Roots, gone: set[int], ledger: Ledger) -> set[int]:
    """Which steps that are gone from the durable root were rightly retired there."""
    if not roots.keeping:
        return set()
    history = Log(open_store(roots.url, roots.options)).read()
    commits = [r for r in history.records if r.kind == "commit"]
    retired = {r.step for r in commits if r.number in history.retired}
    newest = set(sorted({r.step for r in commits})[-chaos_job.LAST :])
    return {step for step in gone & retired - newest - ledger.marked if step % chaos_job.EVERY}


def mark_one(roots: Roots, steps: list[int], ledger: Ledger, chance: random.Random) -> None:
    """Keeps a step of the durable root for ever that the rules would let go."""
    store = open_store(roots.url, roots.options)
    ledger.marked.add(mark(store, Log(store), chance.choice(steps)).step)


def verify(roots: Roots, ledger: Ledger, chance: random.Random) -> None:
    """Reads the roots as somebody who was not there."""
    found = [load_some(url, options, ledger, chance) for url, options in roots.all]
    steps = found[-1] if roots.fast is None else roots.steps()
    committed = ledger.there | ledger.promised
    gone = committed - set(steps)
    if roots.fast is None:
        rightly = may_retire(roots, gone, ledger)
    else:
        rightly = rightly_gone(roots, gone, committed, lambda some: may_retire(roots, some, ledger))
    if gone - rightly:
        raise SystemExit(f"{roots.url}: committed steps are lost: {sorted(gone - rightly)}; there are {steps}")
    if rightly:
        ledger.counts[RETIRED] = len(rightly)
    if roots.fast is not None:
        roots.count(ledger.counts)
    if roots.keeping and found[-1] and chance.random() < 0.1:
        mark_one(roots, found[-1], ledger, chance)


def load_some(url: str, options: Any, ledger: Ledger, chance: random.Random) -> list[int]:
    """Loads the newest step of a root and another one; gives all that it has."""
    with ckpt.Checkpointer(url, storage_options=options, read_only=True) as ck:
        registry.wait_for_others(ck.url, ENDS)
        steps = ck.steps()
        for step in {steps[-1], chance.choice(steps)} if steps else ():
            held = chaos_job.state(0, 1, 0)
            restored = ck.load(held, step=step)
            assert restored is not None
            chaos_job.check(held, chaos_job.state(0, 1, step), step)
            ledger.commit(step, restored.state_id, url)
            ledger.counts["loads here"] += 1
    return steps


def chaos(roots: Roots, args: argparse.Namespace, scratch: Path) -> Ledger:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed.tensor", "ml_dtypes", "numpy"])
    chance, ledger = random.Random(args.seed), Ledger()
    until = time.monotonic() + 60 * args.minutes
    number = 0
    before: Launch | None = None
    wanted = [RETIRED] * args.keep + [COPIED, UNCOPIED, LOST] * args.tiers

    def enough() -> bool:
        return ledger.counts["kills"] >= args.kills and all(ledger.counts[what] for what in wanted)

    while time.monotonic() < until and not enough():
        number += 1
        launch = start(context, args.ranks, roots, f"{args.seed} {number}", scratch)
        if before is not None:  # survivors of the one before, who meet the next job
            end(before, ledger)
            before = None
        time.sleep(chance.uniform(0.2, LONGEST))
        kill(launch, chance.choice(AIMS), chance, ledger.counts)
        ledger.counts["kills"] += 1
        if launch.living() and chance.random() < 0.3:
            before = launch
            before.alone = False
            ledger.counts["jobs that met their successor"] += 1
            continue
        end(launch, ledger)
        verify(roots, ledger, chance)
        left = None if roots.fast is None else roots.lose_node(chance)
        if left is not None:
            ledger.counts[LOST] += 1
            ledger.there &= left
            ledger.promised &= left
        if number % 10 == 0:
            print(f"{ledger.counts['kills']} kills, {len(ledger.ids)} committed steps, none lost", flush=True)
    if before is not None:
        kill(before, "all ranks", chance, ledger.counts)
        end(before, ledger)
    verify(roots, ledger, chance)
    return ledger


def run(roots: Roots, args: argparse.Namespace, scratch: Path) -> Ledger:
    """Chaos, and the end of all agents that are left of it."""
    try:
        return chaos(roots, args, scratch)
    finally:
        urls = {open_store(url, options).url for url, options in roots.all}
        for entry in registry.running():
            if entry.url in urls:
                os.kill(entry.pid, signal.SIGKILL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--kills", type=int, default=1 << 30, help="stop after so many, or soon after")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--s3", action="store_true", help="on an S3 server instead of a directory")
    parser.add_argument("--keep", action="store_true", help="with retention")
    parser.add_argument("--tiers", action="store_true", help="with a fast directory before the root")
    parser.add_argument("--loss", type=float, default=0.08, help="how likely the node is lost, with --tiers")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    os.environ["TORCH_CPP_LOG_LEVEL"] = "FATAL"  # a killed peer is no news here
    with tempfile.TemporaryDirectory(prefix="ckpt-chaos-", ignore_cleanup_errors=True) as scratch:
        fast = Path(scratch, "fast") if args.tiers else None
        with contextlib.ExitStack() as serving:
            url, options = f"{scratch}/root", None
            if args.s3:
                server = serving.enter_context(S3Server())
                url, options = server.url("chaos"), server.storage_options
            ledger = run(Roots(url, options, fast, args.keep, args.loss), args, Path(scratch))
    if ledger.marked:
        ledger.counts["steps marked"] = len(ledger.marked)
    print(f"{len(ledger.ids)} steps were committed; none is lost, and all have the bits and ids they should")
    for what, count in sorted(ledger.counts.items()):
        print(f"  {what}: {count}")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
