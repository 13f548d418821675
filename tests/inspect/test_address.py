"""Addresses: which text names which root and commit, and which commit that is."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt.errors import NothingCommitted
from ckpt.inspect.address import Address, find, parse_address
from ckpt.store.log import History, Record

ID = "e0d1c36064ba5b5ed1156f644c8c1f62d45b95854ab2c4412625fe4e3c22aff0"


@pytest.mark.parametrize(
    ("text", "url", "by", "value"),
    [
        ("runs/a", "runs/a", "latest", "latest"),
        ("runs/a@latest", "runs/a", "latest", "latest"),
        ("s3://bucket/run@1200", "s3://bucket/run", "step", "1200"),
        ("/run@step=5", "/run", "step", "5"),
        ("/run@seq=17", "/run", "seq", "17"),
        ("/run@e0d1c3", "/run", "id", "e0d1c3"),
        ("/run@123456", "/run", "step", "123456"),  # digits alone are a step
        ("/run@id=123456", "/run", "id", "123456"),
        (f"/run@{ID}", "/run", "id", ID),
        ("/data/@home/run", "/data/@home/run", "latest", "latest"),
        ("/data/a@5/run", "/data/a@5/run", "latest", "latest"),
        ("/data/me@home/run@7", "/data/me@home/run", "step", "7"),
        ("/data/run@home/", "/data/run@home/", "latest", "latest"),
        ("/data/run@5/", "/data/run@5/", "latest", "latest"),
        ("/data/run@home@7", "/data/run@home", "step", "7"),
        ("/data/@5", "/data/", "step", "5"),
        ("s3://key@bucket/run", "s3://key@bucket/run", "latest", "latest"),
        ("file:///tmp/x@0", "file:///tmp/x", "step", "0"),
        ("run@1", "run", "step", "1"),
    ],
)
def test_text_names_a_root_and_a_commit(text: str, url: str, by: Any, value: str) -> None:
    assert parse_address(text) == Address(url, by, value)


_NONE = ["", "home", "-1", "1.5", "e0d1", " 5", "seq=", "5@", "٣", "E0D1C3"]


@pytest.mark.parametrize("text", [f"/run@{selector}" for selector in _NONE])
def test_what_no_selector_follows_is_refused_with_the_remedy(text: str) -> None:
    with pytest.raises(ValueError, match="end it with a slash"):
        parse_address(text)


@pytest.mark.parametrize("text", ["", "@5", "@latest"])
def test_no_root(text: str) -> None:
    with pytest.raises(ValueError, match="names no root"):
        parse_address(text)


_urls = st.text(min_size=1).filter(lambda s: not s.startswith("@") or "/" in s)


@given(_urls, st.integers(0, 10**17))
def test_whatever_the_url_a_step_at_its_end_is_the_step(url: str, step: int) -> None:
    assert parse_address(f"{url}@{step}") == Address(url, "step", str(step))
    assert str(parse_address(f"{url}@step={step}")) == f"{url}@step={step}"


@given(st.text(min_size=1))
def test_a_slash_at_the_end_names_any_root(path: str) -> None:
    assert parse_address(f"{path}/") == Address(f"{path}/")


def _history(*rows: dict[str, Any]) -> History:
    return History(tuple(Record(n, {"claim": "c", **row}) for n, row in enumerate(rows, 1)))


def _commit(step: int, parent: int | None, state_id: str) -> dict[str, Any]:
    return {"kind": "commit", "step": step, "parent": parent, "attempt": "a", "state_id": state_id}


# 2 and 3 are a line; 4 branches off 2, is the newest, and has the state of 3; 5 retires 2's other child 6.
LOG = _history(
    {"kind": "claim"},
    _commit(10, None, "aaaaaa1" + ID[7:]),
    _commit(20, 2, "bbbbbb1" + ID[7:]),
    _commit(30, 2, "aaaaaa2" + ID[7:]),
    _commit(40, 2, "cccccc1" + ID[7:]),
    {"kind": "retire", "commit": 5},
    _commit(20, 4, "bbbbbb1" + ID[7:]),
)


@pytest.mark.parametrize(
    ("selector", "number"),
    [("", 7), ("@latest", 7), ("@30", 4), ("@20", 7), ("@10", 2), ("@seq=3", 3), ("@bbbbbb", 7), ("@aaaaaa2", 4)],
)
def test_the_commit_that_is_meant(selector: str, number: int) -> None:
    assert find(LOG, parse_address(f"/run{selector}"), "/run").number == number


@pytest.mark.parametrize(
    ("selector", "said"),
    [
        ("@40", "no committed step 40; there are 10, 20, 30"),
        ("@seq=5", "ckpt ls --all"),
        ("@seq=1", "ckpt ls --all"),
        ("@cccccc", "ckpt ls --all"),
        ("@aaaaaa", "several states begin with aaaaaa"),
    ],
)
def test_what_is_not_there(selector: str, said: str) -> None:
    with pytest.raises(NothingCommitted, match=said):
        find(LOG, parse_address(f"/run{selector}"), "/run")


def test_an_empty_log() -> None:
    with pytest.raises(NothingCommitted, match="nothing is committed here; check the URL"):
        find(_history({"kind": "claim"}), parse_address("/run"), "/run")
