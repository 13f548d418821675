"""The one way to name a checkpoint: the URL of its root, and `@` with which of the root's commits is meant.

`@latest` (also without any), `@1200` or `@step=1200`, `@seq=17` (number of the commit in the log), `@e0d1c3` (the first
six or more digits of a state id, one of them a letter; `@id=012345` in any case). The `@` that counts is the last one,
and only after the last slash: in `/data/@home/run` there is none. A root whose own last part has one is written with a
slash at its end, `/data/run@home/`, or with a selector, `/data/run@home@latest`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from ckpt.errors import NothingCommitted
from ckpt.store.log import History, Record

By = Literal["latest", "step", "seq", "id"]

_FORMS: tuple[tuple[By, re.Pattern[str]], ...] = (
    ("latest", re.compile(r"(latest)")),
    ("step", re.compile(r"(?:step=)?([0-9]{1,18})")),
    ("seq", re.compile(r"seq=([0-9]{1,12})")),
    ("id", re.compile(r"id=([0-9a-f]{6,64})")),
    ("id", re.compile(r"([0-9a-f]{6,64})")),
)


@dataclass(frozen=True)
class Address:
    """A root and one of its commits: by "latest"; by "step" or "seq", a decimal number; by "id", hex digits."""

    url: str
    by: By = "latest"
    value: str = "latest"

    def __str__(self) -> str:
        prefix = "" if self.by == "latest" else f"{self.by}="
        return f"{self.url}@{prefix}{self.value}"


def parse_address(text: str) -> Address:
    """Raises ValueError, saying what to write, for an empty URL or an `@` that no known selector follows."""
    folder, slash, last = text.rpartition("/")
    name, at, selector = last.rpartition("@")
    url = folder + slash + name if at else text
    if not url:
        raise ValueError(f"{text!r} names no root; write URL or URL@STEP")
    if not at:
        return Address(url)
    for by, form in _FORMS:
        found = form.fullmatch(selector)
        if found:
            return Address(url, by, found[1])
    raise ValueError(
        f"{selector!r} after the @ is no step; write @STEP, @latest, @seq=NUMBER or @id=DIGITS of a state id. "
        f"If the @ belongs to the name of the root, end it with a slash: {text}/"
    )


def find(history: History, address: Address, url: str) -> Record:
    """The commit that an address means. By step it is the newest of the newest commit's lineage, as for a load; by
    number or state id any commit that is not retired. Raises NothingCommitted saying what there is."""
    retired = history.retired
    alive = [r for r in reversed(history.records) if r.kind == "commit" and r.number not in retired]
    if not alive:
        raise NothingCommitted(f"{url}: nothing is committed here; check the URL")
    if address.by == "latest":
        return history.lineage()[0]
    if address.by == "step":
        found = history.newest(int(address.value))
        if found is None:
            steps = sorted({r.step for r in history.lineage()})
            raise NothingCommitted(f"{url}: no committed step {int(address.value)}; there are {_few(steps)}")
        return found
    if address.by == "seq":
        matching = [r for r in alive if r.number == int(address.value)]
    else:
        matching = [r for r in alive if str(r.document["state_id"]).startswith(address.value)]
        if len({r.document["state_id"] for r in matching}) > 1:
            numbers = _few(sorted(r.number for r in matching))
            raise NothingCommitted(f"{url}: several states begin with {address.value}; name one by @seq=, of {numbers}")
    if not matching:
        raise NothingCommitted(
            f"{url}: nothing committed is {address.by}={address.value}; ckpt ls --all {url} shows what there is"
        )
    return matching[0]


def _few(numbers: list[int], most: int = 20) -> str:
    shown = ", ".join(map(str, numbers[-most:]))
    return shown if len(numbers) <= most else f"{len(numbers)}, the last of them {shown}"
