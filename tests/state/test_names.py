"""Names of any path of keys are distinct, and so are the folders they are stored in, which are safe everywhere."""

from __future__ import annotations

import hashlib
import itertools
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ckpt.errors import Unsupported
from ckpt.state.names import Key, folder, join, split

Path = tuple[Key, ...]


def unpaired(text: str) -> bool:
    """Whether no high surrogate is followed by a low one."""
    return not any("\ud800" <= a <= "\udbff" and "\udc00" <= b <= "\udfff" for a, b in itertools.pairwise(text))


awkward = st.text(
    st.sampled_from(["/", "%", "~", ".", "_", "\\", " ", "\0", "2", "5", "7", "E", "F", "a", "A"]), max_size=6
)
unicode = st.text(st.characters(exclude_categories=()), max_size=6).filter(unpaired)
long = st.tuples(st.sampled_from(["x", "é", "%", "漢", "~"]), st.integers(60, 320)).map(lambda t: t[0] * t[1])
special = st.sampled_from(
    [
        "",
        ".",
        "..",
        "...",
        "~",
        "~1",
        "~-1",
        "%",
        "%7E",
        "%25",
        "%2F",
        "/",
        "//",
        "zarr.json",
        "__",
        "__a",
        "c",
        "c/0",
        "0",
        "1",
    ]
)
keys = st.one_of(awkward, unicode, special, long, st.integers(-3, 12), st.integers())
paths = st.lists(keys, min_size=1, max_size=6).map(tuple)


@settings(max_examples=400)
@given(paths)
@example(("a.b",))
@example(("..", "", 0, "0", "~0", "%", "/"))
def test_split_inverts_join(path: Path) -> None:
    back = split(join(path))
    assert back == path
    assert [type(k) for k in back] == [type(k) for k in path]


@settings(max_examples=300)
@given(paths, paths)
def test_different_paths_have_different_names_and_folders(a: Path, b: Path) -> None:
    same = a == b
    assert (join(a) == join(b)) == same
    assert (folder(join(a)) == folder(join(b))) == same


@settings(max_examples=400)
@given(paths)
def test_folders_are_safe(path: Path) -> None:
    check_safe(folder(join(path)))


def check_safe(found: str) -> None:
    assert re.fullmatch(r"[A-Za-z0-9._~%/-]+", found)
    assert len(found) <= 700
    for component in found.split("/"):
        assert component
        assert len(component.encode()) < 255
        assert not component.startswith((".", "__"))
        assert component != "zarr.json"


CLOSE: list[Path] = [
    ("a", "b"),
    ("a.b",),
    ("a/b",),
    ("a%2Fb",),
    ("a%252Fb",),
    ("a\\b",),
    ("A", "b"),
    ("a", "", "b"),
    ("a", "b", ""),
    ("", "a", "b"),
    ("",),
    ("", ""),
    ("%",),
    ("%25",),
    ("/",),
    (".",),
    ("..",),
    ("%2E",),
    ("%2E.",),
    ("..", "..", "etc"),
    (1,),
    ("1",),
    ("~1",),
    ("%7E1",),
    (-1,),
    ("-1",),
    (11,),
    (1, 1),
    ("zarr.json",),
    ("zarr%2Ejson",),
    ("x", "zarr.json"),
    ("__x",),
    ("%5F_x",),
    ("_x",),
    ("é",),
    ("e\u0301",),
    ("%C3%A9",),
    ("\ud800",),
    ("%ED%A0%80",),
    ("a~b",),
    ("a%7Eb",),
    ("n" * 300,),
    ("n" * 301,),
    ("n" * 299 + "m",),
    ("é" * 300,),
    ("漢" * 299 + "字",),
    ("漢" * 300,),
    ("n" * 300, "a"),
    tuple("n" * 199 for _ in range(9)),
    tuple("n" * 199 for _ in range(10)),
    (*("n" * 199 for _ in range(8)), "m" * 199),
]


def test_names_that_look_alike_are_kept_apart() -> None:
    names = [join(path) for path in CLOSE]
    folders = [folder(name) for name in names]
    assert len(set(names)) == len(CLOSE)
    assert len(set(folders)) == len(CLOSE)
    for found in folders:
        check_safe(found)
    assert [split(name) for name in names] == CLOSE


def test_names_and_folders_by_hand() -> None:
    assert join(("model", "layer.weight")) == "model/layer.weight" == folder("model/layer.weight")
    assert join(("a", 3, "", "~x", "b/c", "50%")) == "a/~3/%/%7Ex/b%2Fc/50%25"
    assert folder("a/~3/%/%7Ex/b%2Fc/50%25") == "a/~3/%25/%257Ex/b%252Fc/50%2525"
    assert folder(join(("..", ".hidden", "__x", "zarr.json"))) == "%2E./%2Ehidden/%5F_x/zarr%2Ejson"
    assert folder(join(("ä b",))) == "%C3%A4%20b"
    cut = folder(join(("n" * 300,)))
    assert cut == "n" * 150 + "~" + hashlib.sha256(b"n" * 300).hexdigest()[:32]
    whole = join(tuple("n" * 199 for _ in range(9)))
    assert folder(whole) == "~" + hashlib.sha256(whole.encode()).hexdigest()


@pytest.mark.parametrize("length", [201, 300, 5000])
@pytest.mark.parametrize("letter", ["n", "é", "漢", "%"])
def test_a_name_equal_to_a_shortened_one_has_another_folder(letter: str, length: int) -> None:
    long = folder(join((letter * length,)))
    assert folder(join((long,))) != long
    assert folder(join((long.replace("%", ""),))) != long
    many = folder(join((letter * length,) * 40))
    assert many.startswith("~")
    assert folder(join((many,))) != many


def test_cutting_never_splits_an_escape() -> None:
    for shift in range(12):
        found = folder(join(("a" * shift + "漢" * 100,)))
        head, digest = found.split("~")
        assert re.fullmatch(r"(a|%[0-9A-F]{2})*", head)
        assert len(digest) == 32


def bad_keys() -> list[Any]:
    return [True, None, 1.5, (1,), b"a", np.int64(3)]


@pytest.mark.parametrize("key", bad_keys(), ids=repr)
def test_keys_of_other_types_are_refused(key: Any) -> None:
    with pytest.raises(Unsupported, match=rf"state key .* is a {type(key).__name__}; only str and int"):
        join(("a", key))


def test_a_surrogate_pair_in_two_characters_is_refused() -> None:
    """JSON has one form for it and for the character that it spells, so the two names would be one."""
    with pytest.raises(Unsupported, match="surrogate pair"):
        join(("a", "\ud83d" + "\ude00"))
    assert split(join(("😀", "\ude00\ud83d"))) == ("😀", "\ude00\ud83d")
