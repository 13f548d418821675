"""What is not a log, or no record of one, is refused by name."""

from typing import Any

import pytest

from ckpt.errors import CkptError, CorruptCheckpoint
from ckpt.store.log import Log
from ckpt.store.objects import ObjectStore
from tests.store.logs import BAD, GOOD, MemoryStore, Wrapped, _read, claim, commit, key, put, settled
from tests.support.raw import canonical


def test_a_gap_names_the_lost_record(store: ObjectStore) -> None:
    put(store, claim("a"), commit("a", "x", 1), commit("a", "y", 2, 2), claim("b"))
    store.delete([key(2)])
    log = Log(store)
    for _ in range(2):  # not even the second time is the part before the gap taken for all
        with pytest.raises(CorruptCheckpoint, match=r"log/000000000002\.json.*missing, though log/000000000004\.json"):
            log.read()
    store.delete([key(1)])
    with pytest.raises(CorruptCheckpoint, match=r"log/000000000001\.json.*missing"):
        Log(store).read()


def test_a_listing_that_misses_a_record_is_no_gap(store: ObjectStore) -> None:
    """A directory that is listed while others append may show a record and not the one before it."""
    put(store, claim("a"), commit("a", "x", 1), claim("b"))
    partial: Any = Wrapped(store, list=lambda prefix: {key(3): 1})
    assert Log(partial).read().last == 3


@pytest.mark.parametrize("name", ["readme.txt", "000000000002.json.bak", "2.json", "000000000000.json", "x/y.json"])
def test_a_foreign_file_in_the_log_is_named(store: ObjectStore, name: str) -> None:
    put(store, claim("a"))
    store.put(f"log/{name}", b"{}")
    with pytest.raises(CorruptCheckpoint, match=f"{name}: a foreign file in the log"):
        Log(store).read()


@pytest.mark.parametrize("name", BAD)
def test_a_malformed_record_is_refused_by_name(name: str) -> None:
    data, why = BAD[name]
    store = MemoryStore()
    put(store, claim("a"), data)
    with pytest.raises(CorruptCheckpoint, match=rf"memory://root/log/000000000002\.json: .*{why}"):
        Log(store).read()
    log = Log(store)
    log._records = list(_read(claim("a")).records)  # as one that read before the damage
    with pytest.raises(CorruptCheckpoint, match=why):
        log.append_fenced("a", GOOD, settled("x"))


@pytest.mark.parametrize("version", [2, 0, None, "1", True])
def test_another_format_version_asks_for_another_ckpt(version: Any) -> None:
    store = MemoryStore()
    put(store, claim("a"), canonical({**GOOD, "kind": "a kind to come", "format": version}))
    with pytest.raises(CkptError, match=rf"000000000002\.json: format version {version!r}; .* use a newer ckpt"):
        Log(store).read()
