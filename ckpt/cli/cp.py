"""`ckpt cp`: copy checkpoints from one root to another, verified."""

from __future__ import annotations

from typing import Any

import click

from ckpt.cli import output
from ckpt.cli.gc import may_be_alive
from ckpt.errors import CkptError, NothingCommitted
from ckpt.inspect.address import Address, find
from ckpt.store.copying import (
    THREADS,
    Copied,
    Side,
    ancestors,
    check_place,
    claim_for_copies,
    copy_commit,
    copy_of,
    outstanding,
)
from ckpt.store.log import Log, Record
from ckpt.store.objects import open_store


@click.command()
@click.argument("source", metavar="SRC[@STEP]", type=output.AddressType())
@click.argument("target", metavar="DST", type=output.AddressType())
@click.option("--all", "everything", is_flag=True, help="All steps of the newest lineage that DST lacks, in order.")
@click.option("--take-over", "force", is_flag=True, help="Fence the last job at DST off, even if it may be running.")
@click.option("--jobs", "-j", type=click.IntRange(1, 64), default=THREADS, show_default=True)
@output.json_option
def cp(source: Address, target: Address, everything: bool, force: bool, jobs: int, as_json: bool) -> None:
    """Copy a checkpoint (the newest, without @STEP) into the root DST. The copy has the same state id, and needs SRC no
    more. Every chunk's CRC32C and every tensor's fingerprint is checked, and all that is written is read back, before
    it is committed. What DST has already is not copied again, and a copy that was killed is gone on with. Each job
    holds up to two objects of 16 MiB in memory.

    DST may be empty or hold earlier steps of the same history; what would hide its newest step is refused. It is
    claimed for this, unless the last claim was made by ckpt cp; that is refused while the last job may be running.

    Exit codes: 0 done, 1 damage was found, 2 usage, 3 store unreachable, 4 no such checkpoint, 5 fenced, 6 refused.
    """
    if everything and source.by != "latest":
        raise click.UsageError("give either --all or @STEP")
    if target.by != "latest":
        raise click.UsageError(f"{target}: DST is a root, not one of its steps; drop the @")
    of, to = _side(source.url), _side(target.url)
    if of.store.url == to.store.url:
        raise click.UsageError(f"{of.store.url}: SRC and DST are the same root")
    chosen, late = _choose(of, to, source, everything)
    now = to.log.read()
    lacking = [record for record in chosen if copy_of(now, record.origin) is None]
    claim = _claim(of, to, lacking[0], force) if lacking else ""
    done = []
    for record in chosen:
        try:
            size = int(record.document.get("bytes", 0))
            with output.counting(f"step {record.step}", size) as progress:
                done.append(copy_commit(of, record.number, to, claim, threads=jobs, progress=progress))
        except NothingCommitted:
            if not everything:  # else it was retired meanwhile
                raise
    if as_json:
        output.write_json(
            {
                "source": of.store.url,
                "target": to.store.url,
                "checkpoints": [_document(one) for one in done],
                "left_out": [record.step for record in late],
            }
        )
        return
    for one in done:
        click.echo(_line(one))
    for record in late:
        click.echo(f"step {record.step:>10}  left out: {to.store.url} has a later step of this run")
    if not done and not late:
        click.echo(f"nothing to do: {to.store.url} has all steps")


def _side(url: str) -> Side:
    store = open_store(url)
    return Side(store, Log(store))


def _choose(of: Side, to: Side, source: Address, everything: bool) -> tuple[list[Record], list[Record]]:
    """What is to be copied, in order, and what comes too late for that. Raises NothingCommitted."""
    history = of.log.read()
    newest = find(history, source, of.store.url)
    return outstanding(history, to.log.read()) if everything else ([newest], [])


def _claim(of: Side, to: Side, first: Record, force: bool) -> str:
    """Looks whether the first copy will be allowed before it claims anything."""
    history = to.log.read()
    check_place(history, first, ancestors(of.log.read(), first), to.store.url)
    last = history.last_claim
    alive = None if last is None else may_be_alive(last, to.store)
    if alive and not force:
        raise CkptError(
            f"{to.store.url}: the last job there may be running: {alive}. Make sure that it has ended and give "
            "--take-over: a job that is running is stopped by that at its next save; or copy to another root"
        )
    return claim_for_copies(to)


def _line(done: Copied) -> str:
    head = f"step {done.record.step:>10}  "
    if not done.fresh:
        return head + "is there already"
    before = f", {done.found} objects were there" if done.found else ""
    return head + f"copied: {done.written} objects, {output.size(done.nbytes)}{before}, state id {_state_id(done)}"


def _state_id(done: Copied) -> str:
    return str(done.record.document["state_id"])


def _document(done: Copied) -> dict[str, Any]:
    return {
        "step": done.record.step,
        "copied": done.fresh,
        "source_seq": done.source.number,
        "seq": done.record.number,
        "objects": done.written,
        "bytes": done.nbytes,
        "found": done.found,
        "state_id": _state_id(done),
    }
