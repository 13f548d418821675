"""`ckpt keep`: mark steps that no collector may delete."""

from __future__ import annotations

import click

from ckpt.store.leases import mark, unmark
from ckpt.store.log import Log
from ckpt.store.objects import open_store


@click.command()
@click.argument("url")
@click.argument("steps", type=int, nargs=-1, required=True)
@click.option("--undo", is_flag=True, help="Take the marks away.")
def keep(url: str, steps: tuple[int, ...], undo: bool) -> None:
    """Keep these STEPS of the checkpoints at URL for ever, whatever the rules of retention say. Needs no claim: the job
    may be running.

    Exit codes: 0 done, 1 damaged, 2 usage, 3 store unreachable, 4 no such step.
    """
    store = open_store(url)
    log = Log(store)
    for step in steps:
        (unmark if undo else mark)(store, log, step)
