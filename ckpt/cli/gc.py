"""`ckpt gc`: retire what no rule keeps, and delete what nobody can need any more."""

from __future__ import annotations

import os
import socket
from typing import Any

import click

from ckpt.agent import registry
from ckpt.cli import output
from ckpt.errors import CkptError, NothingCommitted
from ckpt.store.collect import Collected, Collector, survey, take_over
from ckpt.store.log import Log, Record
from ckpt.store.objects import ObjectStore, open_store
from ckpt.store.retention import Keep


@click.command()
@click.argument("url")
@click.option("--keep-last", type=click.IntRange(1), metavar="N", help="Keep the newest N steps.")
@click.option("--keep-every", type=click.IntRange(1), metavar="K", help="Keep steps that are multiples of K.")
@click.option("--keep-best", type=click.IntRange(1), metavar="M", help="Keep the best M steps by --metric.")
@click.option("--metric", metavar="NAME", help="A number in the saved state, such as loss; lowest is best.")
@click.option("--highest", is_flag=True, help="Highest is best.")
@click.option("--keep-step", type=int, multiple=True, metavar="STEP", help="Keep this step; may be repeated.")
@click.option("--branches", is_flag=True, help="Retire commits that the newest does not descend from, too.")
@click.option("--grace", type=click.FloatRange(0), default=3600.0, show_default=True, metavar="SECONDS")
@click.option("--dry-run", is_flag=True, help="Only say what would be done, as if the last job had ended.")
@click.option("--take-over", "force", is_flag=True, help="Fence the last job off, even if it may be running.")
@output.json_option
def gc(
    url: str,
    keep_last: int | None,
    keep_every: int | None,
    keep_best: int | None,
    metric: str | None,
    highest: bool,
    keep_step: tuple[int, ...],
    branches: bool,
    grace: float,
    dry_run: bool,
    force: bool,
    as_json: bool,
) -> None:
    """Collect the checkpoints at URL. Commits that no rule keeps are retired: not offered any more, and deleted by a
    run at least --grace seconds (and a minute) later, unless somebody holds a lease on them. What interrupted saves
    left is deleted at once. Without --keep-last, --keep-every, --keep-best and --branches nothing is retired.

    Only the last job that claimed a root may delete from it. So this claims it, and refuses while that job may be
    running: a job collects for itself, with Checkpointer(keep=ckpt.Keep(...)).

    Exit codes: 0 done, 1 damaged, 2 usage, 3 store unreachable, 4 nothing there, 5 fenced, 6 refused.
    """
    try:
        keep = Keep(keep_last, keep_every, keep_best, metric, highest, keep_step, branches, grace)
    except CkptError as error:
        raise click.UsageError(str(error)) from None
    store = open_store(url)
    log = Log(store)
    last = log.read().last_claim
    if last is None:
        raise NothingCommitted(f"{store.url}: nothing was ever saved here; check the URL")
    alive = may_be_alive(last, store)
    if dry_run:
        done = survey(store, log, keep)
    elif alive and not force:
        raise CkptError(
            f"{store.url}: the last job may be running: {alive}. Let it collect for itself, with "
            "Checkpointer(keep=ckpt.Keep(...)), or make sure that it has ended and give --take-over: "
            "a job that is running is stopped by that at its next save"
        )
    else:
        done = Collector(store, log, take_over(store, log), keep).run()
    if as_json:
        output.write_json({"url": store.url, "dry_run": dry_run, "alive": alive, **_document(done)})
    else:
        _print(done, dry_run, alive)


def may_be_alive(claim: Record, store: ObjectStore) -> str | None:
    """Why the job of a claim may still be running; None if it is surely not. A collector's claim (world 0) stands for
    no job: whoever it fenced has ended as a writer, and to be fenced does it no harm."""
    for entry in registry.running():
        if entry.url == store.url:
            return f"an agent of this machine, process {entry.pid}, serves this root"
    host, pid = str(claim.document.get("host")), claim.document.get("pid")
    if claim.document.get("world") == 0:
        return None
    if host != socket.gethostname() or type(pid) is not int or pid < 1:
        return f"it claimed the root on host {host}, process {pid}, which cannot be seen from here"
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        pass
    return f"process {pid} of this machine, which claimed the root, is there"


def _document(done: Collected) -> dict[str, Any]:
    retired = {r.number for r in done.retired}
    return {
        "commits": [
            {
                "commit": v.record.number,
                "step": v.record.step,
                "retired": v.record.number in retired,
                "reasons": list(v.reasons),
            }
            for v in done.verdicts
        ],
        "removed": [
            {"attempt": one.prefix, "why": one.why, "objects": len(one.objects), "bytes": one.nbytes}
            for one in done.removed
        ],
        "waiting": [{"commit": r.number, "step": r.step, "why": why} for r, why in done.waiting],
    }


def _print(done: Collected, dry_run: bool, alive: str | None) -> None:
    would = "would be " if dry_run else ""
    retired = {r.number for r in done.retired}
    for v in done.verdicts:
        said = f"{would}retired" if v.record.number in retired else f"kept: {', '.join(v.reasons) or 'meanwhile'}"
        click.echo(f"step {v.record.step:>10}  {said}")
    for record, why in done.waiting:
        click.echo(f"step {record.step:>10}  retired, data kept: {why}")
    for one in done.removed:
        click.echo(f"{would}deleted: {one.prefix}  {one.why}, {len(one.objects)} objects, {output.size(one.nbytes)}")
    if not done.verdicts and not done.removed and not done.waiting:
        click.echo("nothing to do")
    if dry_run and alive:
        click.echo(f"a run without --dry-run needs --take-over: {alive}")
