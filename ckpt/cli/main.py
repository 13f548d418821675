"""The command `ckpt`."""

from __future__ import annotations

import click

from ckpt.cli.agent import agent
from ckpt.cli.cp import cp
from ckpt.cli.diff import diff
from ckpt.cli.errors import Group
from ckpt.cli.gc import gc
from ckpt.cli.info import info
from ckpt.cli.keep import keep
from ckpt.cli.ls import ls
from ckpt.cli.show import show
from ckpt.cli.verify import verify


@click.group(cls=Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="bitexact-ckpt", prog_name="ckpt")
@click.option("--debug", is_flag=True, help="Show the trace of an error.")
def main(debug: bool) -> None:
    """Bit-exact checkpoints of large-model training."""


main.add_command(agent)
main.add_command(cp)
main.add_command(diff)
main.add_command(gc)
main.add_command(info)
main.add_command(keep)
main.add_command(ls)
main.add_command(show)
main.add_command(verify)
