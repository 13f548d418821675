"""The command `ckpt`."""

from __future__ import annotations

import click

from ckpt.cli.info import info


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="bitexact-ckpt", prog_name="ckpt")
def main() -> None:
    """Bit-exact checkpoints of large-model training."""


main.add_command(info)
