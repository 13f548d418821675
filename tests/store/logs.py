"""Records by kind, and stores in memory or with some verbs replaced; for the tests of the log."""

import json
from collections.abc import Callable, Iterable
from typing import Any

from ckpt.store.log import History, Log, Record
from ckpt.store.objects import NotFound, ObjectStore
from tests.support.raw import canonical

Document = dict[str, Any]


def claim(name: str) -> Document:
    return {"kind": "claim", "claim": name, "host": f"host-of-{name}"}


def commit(name: str, attempt: str, step: int, parent: int | None = None) -> Document:
    pinned = {"state_id": "s", "manifest": "m", "ranks": "r", "run": "p"}
    return {"kind": "commit", "claim": name, "attempt": attempt, "step": step, "parent": parent, **pinned}


def void(name: str, attempt: str) -> Document:
    return {"kind": "void", "claim": name, "attempt": attempt, "reason": "test"}


def retire(name: str, number: int) -> Document:
    return {"kind": "retire", "claim": name, "commit": number}


def key(number: int) -> str:
    return f"log/{number:012d}.json"


def stored(document: Document) -> bytes:
    return canonical({"format": 1, **document})


def unsettled(history: History) -> None:
    return None


def settled(attempt: str) -> Callable[[History], Record | None]:
    return lambda history: history.outcome(attempt)


def written_as(record: Record) -> Document:
    return {k: v for k, v in record.document.items() if k != "format"}


class Wrapped:
    """A store with some verbs replaced."""

    def __init__(self, store: ObjectStore, **verbs: Callable[..., Any]) -> None:
        self._store, self._verbs = store, verbs

    def __getattr__(self, name: str) -> Any:
        return self._verbs.get(name) or getattr(self._store, name)


class MemoryStore:
    """The verbs that a log needs, over a dict. `before_create` is called once, then forgotten."""

    url = "memory://root"
    blanks = False

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.before_create: Callable[[], None] | None = None

    def get(self, key: str) -> bytes:
        if key not in self.objects:
            raise NotFound(f"{key}: not found")
        return self.objects[key]

    def put(self, key: str, data: bytes) -> None:
        self.objects[key] = data

    def create(self, key: str, data: bytes) -> bool:
        act, self.before_create = self.before_create, None
        if act is not None:
            act()
        return self.objects.setdefault(key, data) is data

    def list(self, prefix: str = "") -> dict[str, int]:
        return {k: len(v) for k, v in sorted(self.objects.items()) if k.startswith(prefix)}

    def delete(self, keys: Iterable[str]) -> None:
        for k in keys:
            self.objects.pop(k, None)

    def sync(self, *prefixes: str) -> None:
        pass


def put(store: ObjectStore, *documents: Document | bytes) -> None:
    for number, document in enumerate(documents, 1):
        store.put(key(number), document if isinstance(document, bytes) else stored(document))


GOOD = commit("a", "x", 1)

BAD: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "not a canonical JSON"),
    "cut off": (stored(GOOD)[:-9], "not a canonical JSON"),
    "not JSON": (b"\xff\xfe", "not a canonical JSON"),
    "spaces": (json.dumps({"format": 1, **GOOD}, sort_keys=True).encode(), "canonical"),
    "order": (json.dumps({"zzz": 0, "format": 1, **GOOD}, separators=(",", ":")).encode(), "canonical"),
    "twice the same key": (stored(GOOD)[:-1] + b',"step":1}', "canonical"),
    "newline": (stored(GOOD) + b"\n", "canonical"),
    "a list": (b"[]", "not an object"),
    "no kind": (stored({"claim": "a"}), "its kind is None"),
    "unknown kind": (stored({**GOOD, "kind": "pin"}), "its kind is 'pin'"),
    "no claim": (stored({k: v for k, v in GOOD.items() if k != "claim"}), "claim of a commit is None"),
    "no attempt": (stored({k: v for k, v in GOOD.items() if k != "attempt"}), "attempt of a commit is None"),
    "no manifest": (stored({k: v for k, v in GOOD.items() if k != "manifest"}), "manifest of a commit is None"),
    "step is text": (stored({**GOOD, "step": "1"}), "step of a commit is '1'"),
    "step is true": (stored({**GOOD, "step": True}), "step of a commit is True"),
    "parent to come": (stored({**GOOD, "parent": 2}), "no earlier commit"),
    "parent zero": (stored({**GOOD, "parent": 0}), "no earlier commit"),
    "parent is text": (stored({**GOOD, "parent": "1"}), "no earlier commit"),
    "parent is a claim": (stored({**GOOD, "parent": 1}), "no earlier commit"),
    "retires a claim": (stored(retire("a", 1)), "no earlier commit"),
    "retires nothing": (stored({"kind": "retire", "claim": "a"}), "commit of a retire is None"),
}


def _read(*documents: Document) -> History:
    store = MemoryStore()
    put(store, *documents)
    return Log(store).read()
