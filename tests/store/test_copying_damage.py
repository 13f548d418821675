"""Copies and damage: at the source, at the target, in what an earlier copy has left, and by kill -9 at any point."""

import json
import multiprocessing
import os
import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ckpt.errors import CorruptCheckpoint
from ckpt.store.copying import POINTS, Side, claim_for_copies, copy_commit
from ckpt.store.objects import ObjectStore
from tests.store.copies import PINNED, commits, copy, loads, side, steps
from tests.support.raw import attempt_folder, flip_bit, forge_commit, forge_pinned, objects_of
from tests.support.roots import Root


def swap(root: Path) -> None:
    first, second, *_ = objects_of(root, "tensors/big")
    a, b = first.read_bytes(), second.read_bytes()
    first.write_bytes(b)
    second.write_bytes(a)


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "chunk": (lambda r: flip_bit(objects_of(r, "tensors/big")[1], 5000), "digest mismatch in chunk"),
    "index": (lambda r: flip_bit(objects_of(r, "tensors/big")[0], -30), "digest mismatch in the index"),
    "short": (lambda r: os.truncate(objects_of(r, "tensors/big")[0], 100), "100 bytes instead of"),
    "packed": (lambda r: flip_bit(objects_of(r, "packed/bfloat16")[0], 3), "digest mismatch in chunk"),
    "missing": (lambda r: objects_of(r, "tensors/big")[0].unlink(), "missing, though"),
    "swapped": (swap, "big: its stored objects are whole, but not those of its fingerprint"),
    "manifest": (
        lambda r: flip_bit(attempt_folder(r) / "manifest.json", 60),
        "not the bytes that the commit of step 3 pins",
    ),
    "ranks": (
        lambda r: flip_bit(attempt_folder(r) / "ranks/manifest.json", 20),
        "not the bytes that the commit of step 3 pins",
    ),
    "run": (lambda r: flip_bit(attempt_folder(r) / "run.json", 20), "not the bytes that the commit of step 3 pins"),
    "no run": (lambda r: (attempt_folder(r) / "run.json").unlink(), "missing, though step 3 is committed"),
    "state id": (lambda r: forge_commit(r, lambda d: d.update(state_id="0" * 64)), "state id is not the committed"),
    "values": (
        lambda r: forge_pinned(r, "manifest.json", lambda d: d["values"].update(step={"int": "7"})),
        "malformed manifest",
    ),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_at_the_source_is_found_and_nothing_is_committed(source: Root, there: Root, kind: str) -> None:
    damage, said = DAMAGE[kind]
    damage(Path(source.url))
    with pytest.raises(CorruptCheckpoint, match=said):
        copy(source, 3, there)
    assert commits(there) == [] and steps(there) == []


class Damaging:
    """A store in which one put in so many goes wrong, and says nothing."""

    def __init__(self, store: ObjectStore, chosen: Callable[[str], bool], how: Callable[[bytes], bytes]) -> None:
        self._store, self._chosen, self._how = store, chosen, how

    def put(self, key: str, data: bytes) -> None:
        self._store.put(key, self._how(data) if self._chosen(key) else data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


@pytest.mark.parametrize("name", ["tensors/big/c/1/0", "packed/int64/c/0", "tensors/big/zarr.json", *PINNED])
@pytest.mark.parametrize("how", [lambda d: d[:20] + bytes([d[20] ^ 4]) + d[21:], lambda d: d[:-1]])
def test_a_wrong_byte_at_the_target_is_never_committed(
    made: Root, there: Root, name: str, how: Callable[[bytes], bytes]
) -> None:
    of, to = side(made), side(there)
    bad = Side(Damaging(to.store, lambda key: key.endswith("/" + name), how), to.log)  # type: ignore[arg-type]
    with pytest.raises(CorruptCheckpoint, match="reads back as something else"):
        copy_commit(of, commits(made)[2].number, bad, claim_for_copies(to))
    assert commits(there) == []
    assert copy(made, 3, there).fresh, "the next one repairs it"
    loads(there, 3)


def test_an_attempt_that_lost_an_object_meanwhile_is_not_committed(made: Root, there: Root) -> None:
    def lose(point: str) -> None:
        if point == "copy.records":
            next(Path(there.url).rglob("c/1/0")).unlink()

    with pytest.raises(CorruptCheckpoint, match="missing, or not of"):
        copy(made, 3, there, fault=lose)
    assert commits(there) == []


class Fault(Exception):
    pass


def test_what_was_left_half_wrong_is_not_taken_for_right(made: Root, there: Root) -> None:
    with pytest.raises(Fault):
        copy(made, 3, there, fault=lambda point: raise_at(point, "copy.objects"))
    flip_bit(next(Path(there.url).rglob("big/c/0/0")), 77)
    os.truncate(next(Path(there.url).rglob("big/c/1/0")), 50)
    done = copy(made, 3, there)
    assert done.fresh and done.written == 2 + len(list(Path(there.url).rglob("zarr.json")))
    loads(there, 3)


def raise_at(point: str, wanted: str) -> None:
    if point == wanted:
        raise Fault


# --- kill -9 ---


def _doomed(source: str, target: Root, doom: str, count: int) -> None:
    """Copies step 3 and dies at the count-th time that a point is reached."""
    left = [count]

    def fault(point: str) -> None:
        if point == doom:
            left[0] -= 1
            if not left[0]:
                os.kill(os.getpid(), signal.SIGKILL)

    copy(Root(source), 3, target, fault=fault)


@pytest.fixture(scope="module")
def server() -> Iterator[Any]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed.tensor", "ml_dtypes", "numpy"])
    yield context


@pytest.mark.ranks
def test_kills_at_random_points_lose_no_object_and_commit_no_half(made: Root, root: Root, server: Any) -> None:
    seed = random.SystemRandom().randrange(1 << 30)
    print(f"seed {seed}")
    chance, objects = random.Random(seed), 0
    dooms = [
        ("copy.object", chance.randint(1, 3)),
        ("copy.object", chance.randint(4, 7)),
        (chance.choice(POINTS[2:]), 1),
    ]
    for doom, count in dooms:
        child = server.Process(target=_doomed, args=(made.url, root, doom, count))
        child.start()
        child.join(60)
        assert child.exitcode == -signal.SIGKILL, (doom, count, child.exitcode)
        history, store = side(root).log.read(), side(root).store
        committed = [r for r in history.records if r.kind == "commit"]
        assert len(committed) == (doom == "copy.commit")
        kept = [key for key in store.list("attempts/") if "/c/" in key]
        assert len(kept) >= min(objects, 1)
        objects = len(kept)
    done = copy(made, 3, root)
    assert done.found == objects or not done.fresh
    claims = [r for r in side(root).log.read().records if r.kind == "claim"]
    assert len(claims) == 1 and claims[0].document["copies"] is True and len(commits(root)) == 1
    assert json.loads(side(root).store.get("log/000000000002.json"))["step"] == 3
    loads(root, 3)
