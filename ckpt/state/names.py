"""Names of logical tensors and values, and the folders they are stored in.

A name is a path of keys joined with "/". Keys are escaped so that different paths have different names: in a string
key "%" becomes "%25", "/" becomes "%2F", a leading "~" becomes "%7E", and the empty key "%". An integer key k is "~k".
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable

from ckpt.errors import Unsupported

Key = str | int
_LONGEST_COMPONENT = 200
_LONGEST_FOLDER = 700
SURROGATE_PAIR = re.compile("[\ud800-\udbff][\udc00-\udfff]")


def join(path: Iterable[Key]) -> str:
    """Name of a path of keys. Raises Unsupported for keys that are neither str nor int."""
    return "/".join(_component(key) for key in path)


def _component(key: Key) -> str:
    if type(key) is int:
        return f"~{key}"
    if not isinstance(key, str):
        raise Unsupported(f"state key {key!r} is a {type(key).__name__}; only str and int keys can be named")
    if key == "":
        return "%"
    if SURROGATE_PAIR.search(key):
        raise Unsupported(f"state key {key!r} holds a surrogate pair as two characters, which JSON cannot keep")
    escaped = key.replace("%", "%25").replace("/", "%2F")
    return "%7E" + escaped[1:] if escaped.startswith("~") else escaped


def split(name: str) -> tuple[Key, ...]:
    """Inverse of `join`."""
    return tuple(_key(component) for component in name.split("/"))


def _key(component: str) -> Key:
    if component == "%":
        return ""
    if component.startswith("~"):
        return int(component[1:])
    return component.replace("%7E", "~").replace("%2F", "/").replace("%25", "%")


def folder(name: str) -> str:
    """The folder of a tensor's array below `state/tensors/`: safe on any file system and object store.

    Characters outside of A-Z a-z 0-9 . _ - and a leading ~ are percent-encoded (UTF-8, upper-case hex), as are a
    leading ".", a leading "__" (reserved by Zarr) and the name "zarr.json". A component longer than 200 characters is
    cut to 150 and ends in "~" and 32 hex digits of the SHA-256 of its full encoded form; a folder longer than 700
    characters is "~" and the SHA-256 of the name.
    """
    parts = "/".join(_safe(component) for component in name.split("/"))
    if len(parts) > _LONGEST_FOLDER:
        return "~" + hashlib.sha256(_utf8(name)).hexdigest()
    return parts


def _safe(component: str) -> str:
    encoded = re.sub(r"(?!^)~|[^A-Za-z0-9._~-]", lambda m: "".join(f"%{b:02X}" for b in _utf8(m[0])), component)
    if encoded.startswith(".") or encoded == "zarr.json":
        encoded = encoded.replace(".", "%2E", 1)
    if encoded.startswith("__"):
        encoded = "%5F" + encoded[1:]
    if len(encoded) > _LONGEST_COMPONENT:
        digest = hashlib.sha256(encoded.encode()).hexdigest()[:32]
        encoded = re.sub(r"%.?$", "", encoded[:150]) + "~" + digest
    return encoded


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")
