"""Output for people: plain tables, colours and a pager on a terminal only, a progress bar on standard error."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console, RenderableType
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table
from rich.text import Text

from ckpt.errors import CkptError
from ckpt.inspect.address import Address, parse_address
from ckpt.inspect.wording import place as place
from ckpt.inspect.wording import printable
from ckpt.inspect.wording import shape as shape
from ckpt.inspect.wording import size as size
from ckpt.state.values import Json, decode

NO_LEASE = "no lease: the store cannot be written, and a collector may delete what is read"
_LONGEST = 100  # characters of a value that are shown
_WIDE = 100_000  # columns where nobody looks at a screen: nothing is folded or cut


class AddressType(click.ParamType):
    """URL or URL@STEP, as `ckpt.inspect.address` has it."""

    name = "URL[@STEP]"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Address:
        try:
            return value if isinstance(value, Address) else parse_address(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


def json_option(command: Callable[..., Any]) -> Callable[..., Any]:
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON document, described in docs/cli.md.")(
        command
    )


def pager_option(command: Callable[..., Any]) -> Callable[..., Any]:
    return click.option("--no-pager", is_flag=True, help="Do not page what is longer than the screen.")(command)


def html_option(command: Callable[..., Any]) -> Callable[..., Any]:
    return click.option(
        "--html",
        "page",
        metavar="FILE",
        type=click.Path(dir_okay=False, path_type=Path),
        callback=_check_folder,
        help="Write a page with pictures, in one file that needs no other, instead of printing text.",
    )(command)


def _check_folder(ctx: click.Context, param: click.Parameter, page: Path | None) -> Path | None:
    """Before anything is read: it may take long."""
    if page is not None and not os.access(page.parent, os.W_OK | os.X_OK):
        raise click.BadParameter(f"{page.parent} is no directory that can be written", ctx, param)
    return page


def write_page(page: Path, text: str) -> None:
    """Writes a page whole, or leaves what was there. Raises CkptError where it cannot be written."""
    made = page.with_name(f".{page.name}.{os.getpid()}")
    try:
        made.write_text(text, encoding="utf-8")
        made.replace(page)
    except OSError as error:
        made.unlink(missing_ok=True)
        raise CkptError(f"{page}: cannot be written: {error.strerror}; choose another file") from error


def write_json(document: Any) -> None:
    click.echo(json.dumps(document, indent=2, allow_nan=False))


def write(parts: Sequence[RenderableType], *, paged: bool = False) -> None:
    """Prints parts one after the other. paged: through $PAGER, if this is a terminal and they do not fit on it."""
    terminal = sys.stdout.isatty()
    size = shutil.get_terminal_size()
    out = io.StringIO()
    console = Console(
        file=out, force_terminal=terminal, width=size.columns if terminal else _WIDE, highlight=False, markup=False
    )
    for part in parts:
        console.print(part)
    lines = [line.rstrip() for line in out.getvalue().splitlines()]
    text = "\n".join(lines) + "\n" if lines else ""
    if paged and terminal and len(lines) >= size.lines:
        os.environ.setdefault("LESS", "FRX")  # so that colours show, and short output needs no key
        click.echo_via_pager(text.removesuffix("\n"), color=True)  # which ends the last line itself
    else:
        click.echo(text, nl=False)


def table(*headings: str, right: Sequence[str] = ()) -> Table:
    """A table without lines; `right` names the columns of numbers."""
    made = Table(box=None, pad_edge=False, header_style="bold")
    for heading in headings:
        number = heading in right
        made.add_column(heading, justify="right" if number else "left", no_wrap=number, overflow="fold")
    return made


def safe(value: object, style: str = "") -> Text:
    """Text from a checkpoint as it is, but what could move the cursor or change colours is escaped."""
    return Text(printable(str(value)), style=style)


def facts(rows: Sequence[tuple[str, object]]) -> Table:
    """Names and values, a line each."""
    made = Table(box=None, pad_edge=False, show_header=False)
    made.add_column(style="bold", no_wrap=True)
    made.add_column(overflow="fold")
    for name, value in rows:
        made.add_row(name, safe(value))
    return made


def count(number: int, what: str) -> str:
    """A number of things, such as `2 ranks`."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def value_text(document: Json, name: str) -> str:
    """A plain value of a checkpoint as Python writes it, cut where it is long. Raises CorruptCheckpoint."""
    text = repr(decode(document, name))
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}… ({len(text):,} characters)"


def age(seconds: float) -> str:
    """How long ago something was, in its largest unit."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{int(seconds // length)} {unit} ago"
    return f"{max(0, int(seconds))} s ago"


def layout_text(layout: Any, world: Any) -> str:
    """A layout as its sizes above 1, such as `tp2 pp4 dp2`."""
    if not isinstance(layout, dict):
        return count(world, "rank") if isinstance(world, int) else "?"
    sizes = [f"{k}{v}" for k, v in layout.items() if isinstance(v, int) and v > 1]
    return " ".join(sizes) or "1 rank"


@contextlib.contextmanager
def progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on standard error while the body runs, if that is a terminal; called with bytes done and bytes in all."""
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextlib.contextmanager
def counting(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """The same bar, called with how many more bytes are done, from any thread. total: as far as is known."""
    done, lock = 0, threading.Lock()
    with progress(what) as bar:

        def advance(nbytes: int) -> None:
            nonlocal done
            with lock:
                done += nbytes
                bar(done, max(total, done))

        yield advance


def stamp(seconds: float | None) -> str:
    """A time for people: UTC, to the second."""
    return "?" if seconds is None else time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime(seconds))
