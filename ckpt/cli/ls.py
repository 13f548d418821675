"""`ckpt ls`: the checkpoints of a root."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

import click

from ckpt.cli import output
from ckpt.errors import NothingCommitted
from ckpt.inspect.listing import Entry, attempts, commits
from ckpt.store.leases import read_leases, stamp
from ckpt.store.log import Log
from ckpt.store.objects import open_store

_STYLES = {"current": "", "shadowed": "dim", "branch": "yellow", "retired": "dim"}


@click.command()
@click.argument("url")
@click.option("--all", "everything", is_flag=True, help="Other branches, retired commits and dead attempts, too.")
@output.json_option
@output.pager_option
def ls(url: str, everything: bool, as_json: bool, no_pager: bool) -> None:
    """List the checkpoints at URL: what a load offers, newest last. Of each a small file is read.

    Exit codes: 0 done, 1 damaged, 2 usage, 3 store unreachable, 4 nothing was ever saved there.
    """
    store = open_store(url)
    history = Log(store).read()
    if not history.records:
        raise NothingCommitted(f"{store.url}: nothing was ever saved here; check the URL")
    now = time.time()
    found = commits(store, history, read_leases(store), now, everything=everything)
    if everything:
        found += attempts(store, history)
    if as_json:
        output.write_json({"url": store.url, "entries": [_document(entry) for entry in found]})
        return
    if not found:
        output.write(["nothing is committed; --all shows what else there is"])
        return
    output.write([_table(found, now)], paged=not no_pager)


def _table(found: list[Entry], now: float) -> output.Table:
    headings = ("step", "time", "age", "size", "layout", "state id", "seq", "notes")
    made = output.table(*headings, right=("step", "size", "seq"))
    for entry in found:
        notes: list[str] = [] if entry.status == "current" else [entry.status]
        notes += entry.notes
        if entry.number is None:
            notes.append(entry.attempt)
        made.add_row(
            "?" if entry.step is None else str(entry.step),
            output.stamp(entry.time),
            "" if entry.time is None else output.age(now - entry.time),
            "?" if entry.bytes is None else output.size(entry.bytes),
            output.safe(output.layout_text(entry.layout, entry.world)),
            output.safe((entry.state_id or "")[:12]),
            "" if entry.number is None else str(entry.number),
            output.safe(", ".join(notes)),
            style=_STYLES.get(entry.status, "red"),
        )
    return made


def _document(entry: Entry) -> dict[str, Any]:
    fields = asdict(entry)
    fields["seq"] = fields.pop("number")
    fields["time"] = None if entry.time is None else stamp(entry.time)
    fields["notes"] = list(entry.notes)
    return fields
