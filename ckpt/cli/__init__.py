"""The command line. May import everything; nothing imports it.

Start reading at `main.main`, the command `ckpt`; each subcommand has a file of its own.
"""
