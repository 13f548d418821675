"""`ckpt agent`: the processes that write asynchronous saves on this machine."""

from __future__ import annotations

import click

from ckpt.agent import registry
from ckpt.cli import output

_LOOK = 0.2  # seconds in which an idle agent says so


@click.command()
@output.json_option
def agent(as_json: bool) -> None:
    """List the agents of this user on this machine: their process, whether they are writing, and to what root.

    A job starts them as it needs them, and they end by themselves once it has ended and all is written.

    Exit codes: 0 done, 2 usage.
    """
    found = [(entry, not registry.idle(entry, _LOOK)) for entry in registry.running()]
    if as_json:
        output.write_json([{"pid": e.pid, "writing": writing, "url": e.url} for e, writing in found])
        return
    for entry, writing in found:
        click.echo(f"{entry.pid:>8}  {'writing' if writing else 'idle':7}  {entry.url}")
    if not found:
        click.echo("no agents are running")
