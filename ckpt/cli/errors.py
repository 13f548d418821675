"""What an error means to whoever called the command: one line, an exit code, and a trace only with --debug."""

from __future__ import annotations

import json
import traceback
from dataclasses import dataclass
from typing import IO, Any

import click

from ckpt.errors import CkptError, CorruptCheckpoint, Fenced, NothingCommitted, StateInvalid, StoreError

DIFFERENT, USAGE, UNREACHABLE, NOTHING, FENCED, REFUSED, BUG, INTERRUPTED = 1, 2, 3, 4, 5, 6, 70, 130

_CODES: tuple[tuple[type[BaseException], int], ...] = (
    (CorruptCheckpoint, DIFFERENT),
    (StateInvalid, DIFFERENT),
    (StoreError, UNREACHABLE),
    (NothingCommitted, NOTHING),
    (Fenced, FENCED),
    (CkptError, REFUSED),
    (click.UsageError, USAGE),
    (KeyboardInterrupt, INTERRUPTED),
)


def exit_code(error: BaseException) -> int:
    """0 done, or no difference; 1 difference or damage; 2 usage; 3 the store cannot be reached or denies; 4 nothing
    such is committed; 5 fenced; 6 refused; 70 a bug; 130 interrupted."""
    return next((code for kind, code in _CODES if isinstance(error, kind)), BUG)


@dataclass
class Asked:
    """What of a command line concerns errors."""

    json: bool
    debug: bool = False


class Failure(click.ClickException):
    """An error on its way out of the command. With --json it is one JSON object on standard output, so that whoever
    reads that finds a document in any case."""

    def __init__(self, error: BaseException, asked: Asked) -> None:
        super().__init__(_said(error))
        self.error, self.asked = error, asked
        self.exit_code = exit_code(error)  # type: ignore[misc]  # click reads it from the instance

    def show(self, file: IO[Any] | None = None) -> None:
        if self.asked.debug:
            click.echo("".join(traceback.format_exception(self.error)), err=True, nl=False)
        if self.asked.json:
            kind = type(self.error).__name__
            document = {"error": {"kind": kind, "message": self.message, "exit_code": self.exit_code}}
            click.echo(json.dumps(document, indent=2))
        elif isinstance(self.error, click.UsageError):
            self.error.show(file)
        else:
            click.echo(f"Error: {self.message}", err=True)


def _said(error: BaseException) -> str:
    if isinstance(error, click.ClickException):
        return error.format_message()
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    if isinstance(error, CkptError):
        return str(error)
    return f"{type(error).__name__}: {error} (a bug of ckpt: please report it with what ckpt --debug shows)"


class _Reporting(click.Command):
    """May raise whatever it meets."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.obj = Asked("--json" in args)
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        asked: Asked = ctx.obj
        asked.debug = bool(ctx.params.get("debug"))
        try:
            return super().invoke(ctx)
        except (click.exceptions.Exit, click.Abort, BrokenPipeError):
            raise
        except (Exception, KeyboardInterrupt) as error:
            raise Failure(error, asked) from error


class Command(_Reporting):
    """A command of its own."""


class Group(_Reporting, click.Group):
    """A group of commands."""
