"""A small state, and its intent, receipts and records made without ranks and arrays; for the tests of commits."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch

from ckpt.fingerprint import ZERO, Digest, add, box_digest
from ckpt.geometry import Box, Catalogue, TensorSpec
from ckpt.state.values import encode
from ckpt.store.commit import Sealed, void
from ckpt.store.log import Log, Record
from ckpt.store.objects import ObjectStore
from ckpt.store.records import Intent, Manifest, Receipt, attempt_prefix, sha256
from tests.support.raw import canonical, random_bits

URL = "memory://root"

RUN = canonical({"format": 1, "layout": None, "world": 2})

SHAPES = {
    "big": ((320, 128), torch.float32),  # an array of its own
    "deep": ((8, 64, 128), torch.bfloat16),  # another one, stacked
    "small/a": ((6, 4), torch.float32),  # these two share a packed array
    "small/b": ((3,), torch.float32),
    "empty": ((0, 5), torch.float32),
    "scalar": ((), torch.int64),
}

TENSORS = {n: random_bits(shape, dtype, seed) for seed, (n, (shape, dtype)) in enumerate(SHAPES.items())}

SPECS = tuple(
    TensorSpec(n, tuple(t.shape), str(t.dtype).removeprefix("torch."), t.element_size(), int(n == "deep"))
    for n, t in sorted(TENSORS.items())
)

ALIASES = {"tied": "big"}

VALUES = {"step": encode(7, ""), "options": encode({"lr": 1e-3, "betas": (0.9, 0.95)}, "")}


@functools.cache
def digest(name: str, box: Box) -> Digest:
    return box_digest(TENSORS[name][box.slices], box, tuple(TENSORS[name].shape))


def boxes_of(name: str, rank: int, world: int) -> list[Box]:
    """`big` is cut by rows; all else is replicated."""
    shape = tuple(TENSORS[name].shape)
    if name != "big":
        return [Box.whole(shape)]
    rows = shape[0] // world
    last = shape[0] - rows * (world - 1)
    return [Box((rows * rank, 0), (rows if rank + 1 < world else last, shape[1]))]


def make_attempt(
    world: int = 2, claim: str = "claim", attempt: str = "attempt", step: int = 7, parent: int | None = None
) -> tuple[Intent, list[Receipt]]:
    """What a faultless save of TENSORS leaves: objects dealt out in turn, digests of the bits themselves."""
    intent = Intent(claim, attempt, step, parent, world, f"plan of {world}", SPECS, ALIASES, VALUES)
    catalogue = Catalogue.of(SPECS)
    written: list[dict[str, Digest]] = [{} for _ in range(world)]
    objects: list[list[tuple[int, tuple[int, ...]]]] = [[] for _ in range(world)]
    for number, stored in enumerate(catalogue.objects()):
        rank = number % world
        objects[rank].append((stored.array, stored.index))
        for tensor, box, _ in stored.pieces:
            name = catalogue.tensors[tensor].name
            written[rank][name] = add(written[rank].get(name, ZERO), digest(name, box))
    return intent, [
        Receipt(
            attempt,
            rank,
            sha256(intent.document()),
            {n: [(b, digest(n, b)) for b in boxes_of(n, rank, world)] for n in TENSORS},
            written[rank],
            objects[rank],
            {"seed": encode(rank, "")},
        )
        for rank in range(world)
    ]


def change(receipts: list[Receipt], rank: int, **fields: Any) -> list[Receipt]:
    return [dataclasses.replace(r, **fields) if r.rank == rank else r for r in receipts]


def other(found: Digest) -> Digest:
    return add(found, (1, 0))


def claim(store: ObjectStore, name: str) -> Record:
    return Log(store).claim({"kind": "claim", "claim": name, "host": "here"})


def write(store: ObjectStore, intent: Intent, receipts: list[Receipt], *, run: bytes | None = RUN) -> str:
    """Puts an attempt into the store, as the ranks of a job would; returns its prefix."""
    prefix = attempt_prefix(intent.claim, intent.attempt)
    assert store.create(prefix + "intent.json", intent.document())
    if run is not None:
        assert store.create(prefix + "run.json", run)
    for r in receipts:
        assert store.create(f"{prefix}receipts/{r.rank:06d}.json", r.document())
    return prefix


def log_of(store: ObjectStore) -> list[tuple[str, str, str]]:
    return [(r.kind, r.claim, r.attempt) for r in Log(store).read().records]


def pinned(store: ObjectStore, record: Record) -> Sealed:
    """What a commit pins, as it lies in the store; the hashes are checked."""
    prefix = attempt_prefix(record.claim, record.attempt)
    files = {k: store.get(prefix + f) for k, f in [("manifest", "manifest.json"), ("ranks", "ranks/manifest.json")]}
    assert {k: sha256(d) for k, d in files.items()} == {k: record.document[k] for k in files}
    assert sha256(store.get(prefix + "run.json")) == record.document["run"]
    return Sealed(Manifest.parse(files["manifest"], URL), files["ranks"], record.document)


UNFINISHED: dict[str, Callable[[ObjectStore, str], None]] = {
    "a receipt is missing": lambda s, p: s.delete([p + "receipts/000001.json"]),
    "all receipts are missing": lambda s, p: s.delete([p + f"receipts/{r:06d}.json" for r in range(2)]),
    "no intent": lambda s, p: s.delete([p + "intent.json"]),
    "no run": lambda s, p: s.delete([p + "run.json"]),
    "intent damaged": lambda s, p: s.put(p + "intent.json", s.get(p + "intent.json")[:-9]),
    "receipt damaged": lambda s, p: s.put(p + "receipts/000001.json", b"{}"),
    "receipt foreign": lambda s, p: s.put(p + "receipts/000001.json", s.get(p + "receipts/000000.json")),
    "one receipt too many": lambda s, p: s.put(p + "receipts/000002.json", s.get(p + "receipts/000001.json")),
    "manifest of another": lambda s, p: s.put(p + "manifest.json", b"{}"),
    "voided": lambda s, p: _void_it(s),
    "in the folder of another": lambda s, p: _put_another(s, p),
}


def _void_it(store: ObjectStore) -> None:
    assert void(Log(store), "claim", "attempt", "test").kind == "void"


def _put_another(store: ObjectStore, prefix: str) -> None:
    intent, receipts = make_attempt(attempt="x")
    store.put(prefix + "intent.json", intent.document())
    for r in receipts:
        store.put(f"{prefix}receipts/{r.rank:06d}.json", r.document())
