"""The documents of one attempt: intent, receipts, manifests, provenance. Each is canonical JSON, created once."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ckpt.errors import CorruptCheckpoint
from ckpt.fingerprint import Digest, from_hex, to_hex
from ckpt.geometry import Box, Catalogue, Grid, StoredArray, TensorSpec
from ckpt.state.dtypes import STORED
from ckpt.state.identity import state_id
from ckpt.state.values import Json, canonical_json, parse_json
from ckpt.store.arrays import array_folder
from ckpt.store.log import FORMAT, Record, check_format
from ckpt.store.objects import NotFound, ObjectStore
from ckpt.store.remedies import OLDER


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def attempt_prefix(claim: str, attempt: str) -> str:
    """Key prefix of everything that an attempt writes."""
    return f"attempts/{claim}/{attempt}/"


PINNED = {"manifest.json": "manifest", "ranks/manifest.json": "ranks", "run.json": "run"}
"""Documents of a commit, by their name below its attempt: the field of the commit that has the SHA-256 of each."""


def pinned(store: ObjectStore, record: Record, name: str, remedy: str = OLDER) -> bytes:
    """One of the PINNED documents. Raises CorruptCheckpoint where it is missing or not what the commit pins."""
    key = attempt_prefix(record.claim, record.attempt) + name
    where = f"{store.url}/{key}"
    try:
        data = store.get(key)
    except NotFound:
        raise CorruptCheckpoint(f"{where}: missing, though step {record.step} is committed; {remedy}") from None
    if sha256(data) != record.document[PINNED[name]]:
        raise CorruptCheckpoint(f"{where}: not the bytes that the commit of step {record.step} pins; {remedy}")
    return data


@dataclass(frozen=True)
class Intent:
    """What an attempt is going to write: fixed by one rank before the others begin, the same for all of them."""

    claim: str
    attempt: str
    step: int
    parent: int | None
    world: int
    plan: str
    tensors: tuple[TensorSpec, ...]
    aliases: Mapping[str, str]
    values: Mapping[str, Json]

    def document(self) -> bytes:
        return canonical_json(
            {
                "format": FORMAT,
                "claim": self.claim,
                "attempt": self.attempt,
                "step": self.step,
                "parent": self.parent,
                "world": self.world,
                "plan": self.plan,
                "tensors": [[t.name, t.dtype, list(t.shape), t.stack] for t in self.tensors],
                "aliases": dict(self.aliases),
                "values": dict(self.values),
            }
        )

    @staticmethod
    def parse(data: bytes, where: str) -> Intent:
        d = _parsed(data, where)
        try:
            tensors = tuple(_spec(*row, where=where) for row in d["tensors"])
            intent = Intent(
                d["claim"],
                d["attempt"],
                _int(d["step"]),
                None if d["parent"] is None else _int(d["parent"]),
                _int(d["world"]),
                d["plan"],
                tensors,
                d["aliases"],
                d["values"],
            )
            _check_same(intent.document(), data)
            return intent
        except _MALFORMED as error:
            raise CorruptCheckpoint(f"{where}: malformed intent: {error!r}") from None


@dataclass(frozen=True)
class Receipt:
    """What one rank held and wrote: digests of every box it held, sums of digests of what it wrote, the objects it
    wrote (array number and grid index), and the plain values that are its own."""

    attempt: str
    rank: int
    intent: str
    held: Mapping[str, list[tuple[Box, Digest]]]
    written: Mapping[str, Digest]
    objects: list[tuple[int, tuple[int, ...]]]
    per_rank: Mapping[str, Json]

    def document(self) -> bytes:
        return canonical_json(
            {
                "format": FORMAT,
                "attempt": self.attempt,
                "rank": self.rank,
                "intent": self.intent,
                "held": {
                    name: [[list(b.offset), list(b.extent), to_hex(d)] for b, d in boxes]
                    for name, boxes in self.held.items()
                },
                "written": {name: to_hex(d) for name, d in self.written.items()},
                "objects": [[array, list(index)] for array, index in self.objects],
                "per_rank": dict(self.per_rank),
            }
        )

    @staticmethod
    def parse(data: bytes, where: str) -> Receipt:
        d = _parsed(data, where)
        try:
            held = {
                name: [(Box(_ints(o), _ints(e)), from_hex(x)) for o, e, x in boxes] for name, boxes in d["held"].items()
            }
            written = {name: from_hex(x) for name, x in d["written"].items()}
            objects = [(_int(array), _ints(index)) for array, index in d["objects"]]
            receipt = Receipt(d["attempt"], _int(d["rank"]), d["intent"], held, written, objects, d["per_rank"])
            _check_same(receipt.document(), data)
            return receipt
        except _MALFORMED as error:
            raise CorruptCheckpoint(f"{where}: malformed receipt: {error!r}") from None


def receipt_key(prefix: str, rank: int) -> str:
    """Where an attempt has the receipt of a rank."""
    return f"{prefix}receipts/{rank:06d}.json"


def read_receipt(store: ObjectStore, prefix: str, rank: int) -> Receipt:
    """The receipt of a rank, which nothing pins. Raises NotFound, or CorruptCheckpoint where it is not readable."""
    key = receipt_key(prefix, rank)
    return Receipt.parse(store.get(key), f"{store.url}/{key}")


@dataclass(frozen=True)
class Manifest:
    """A committed state: what the state alone determines. `catalogue` says where each tensor lies."""

    state_id: str
    catalogue: Catalogue
    digests: tuple[Digest, ...]
    aliases: Mapping[str, str]
    values: Mapping[str, Json]

    @staticmethod
    def of(
        catalogue: Catalogue,
        digests: Mapping[str, Digest],
        aliases: Mapping[str, str],
        values: Mapping[str, Json],
    ) -> Manifest:
        """Computes the state id; a tied tensor counts under each of its names."""
        specs = {t.name: t for t in catalogue.tensors}
        rows = [(t, digests[t.name]) for t in catalogue.tensors]
        for name, kept in aliases.items():
            t = specs[kept]
            rows.append((TensorSpec(name, t.shape, t.dtype, t.itemsize, t.stack), digests[kept]))
        ordered = tuple(digests[t.name] for t in catalogue.tensors)
        return Manifest(state_id(rows, values), catalogue, ordered, dict(aliases), dict(values))

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.catalogue.tensors)

    def document(self) -> bytes:
        where = {t: (number, start) for number, a in enumerate(self.catalogue.arrays) for t, start in a.tensors}
        tensors = [
            {
                "name": t.name,
                "dtype": t.dtype,
                "shape": list(t.shape),
                "stack": t.stack,
                "fingerprint": to_hex(self.digests[i]),
                "array": where[i][0],
                "start": where[i][1],
            }
            for i, t in enumerate(self.catalogue.tensors)
        ]
        arrays = [
            {
                "folder": array_folder(self.catalogue, a),
                "dtype": a.dtype,
                "packed": a.packed,
                "shape": list(a.grid.shape),
                "cell": list(a.grid.cell),
                "chunk": list(a.grid.chunk),
            }
            for a in self.catalogue.arrays
        ]
        return canonical_json(
            {
                "format": FORMAT,
                "state_id": self.state_id,
                "tensors": tensors,
                "arrays": arrays,
                "aliases": dict(self.aliases),
                "values": dict(self.values),
            }
        )

    @staticmethod
    def parse(data: bytes, where: str) -> Manifest:
        """Raises CorruptCheckpoint where the document contradicts itself (its state id included)."""
        d = _parsed(data, where)
        try:
            manifest = _manifest(d, where)
            _check_same(manifest.document(), data)
            return manifest
        except _MALFORMED as error:
            raise CorruptCheckpoint(f"{where}: malformed manifest: {error!r}; load an older step") from None


_MALFORMED = (AttributeError, IndexError, KeyError, TypeError, ValueError)


def _check_same(again: bytes, data: bytes) -> None:
    """A record must be what its own content gives again: nothing more is in it, and a state id is the right one."""
    if again != data:
        raise ValueError("it contradicts itself")


def _manifest(d: dict[str, Any], where: str) -> Manifest:
    rows = d["tensors"]
    specs = tuple(_spec(r["name"], r["dtype"], r["shape"], r["stack"], where=where) for r in rows)
    if list(specs) != sorted(specs) or len({s.name for s in specs}) != len(specs):
        raise ValueError("tensors are not sorted by distinct names")
    arrays = []
    for number, a in enumerate(d["arrays"]):
        members = [(i, r["start"]) for i, r in enumerate(rows) if r["array"] == number]
        members.sort(key=lambda m: (m[1], m[0]))
        grid = Grid(_ints(a["shape"]), _ints(a["cell"]), _ints(a["chunk"]))
        itemsize = STORED[a["dtype"]].itemsize
        _check_members(specs, members, grid, a)
        arrays.append(StoredArray(a["dtype"], itemsize, a["packed"], grid, tuple(members)))
    if sum(len(a.tensors) for a in arrays) != len(specs):
        raise ValueError("a tensor lies in no array")
    digests = {s.name: from_hex(r["fingerprint"]) for s, r in zip(specs, rows, strict=True)}
    return Manifest.of(Catalogue(specs, tuple(arrays)), digests, d["aliases"], d["values"])


def _check_members(
    specs: tuple[TensorSpec, ...], members: list[tuple[int, int]], grid: Grid, array: dict[str, Any]
) -> None:
    end = 0
    for index, start in members:
        spec = specs[index]
        if spec.dtype != array["dtype"] or start < end:
            raise ValueError(f"{spec.name} does not fit its array")
        end = start + spec.nbytes // spec.itemsize
    if type(array["packed"]) is not bool or not members:
        raise ValueError("an array is of no known kind, or holds nothing")
    if array["packed"] and grid.shape != (end,):
        raise ValueError("a packed array does not end with its last tensor")
    if not array["packed"] and (len(members) != 1 or members[0][1] or specs[members[0][0]].shape != grid.shape):
        raise ValueError("an array does not have its tensor's shape")


def _spec(name: str, dtype: str, shape: list[int], stack: int, *, where: str) -> TensorSpec:
    if dtype not in STORED:
        raise CorruptCheckpoint(f"{where}: {name} has the unknown dtype {dtype!r}; use a newer ckpt")
    if not isinstance(name, str) or min([*_ints(shape), _int(stack)]) < 0:
        raise ValueError(f"bad shape of {name}")
    return TensorSpec(name, _ints(shape), dtype, STORED[dtype].itemsize, stack)


def _int(value: Json) -> int:
    if type(value) is not int:
        raise ValueError(f"{value!r} is not an integer")
    return value


def _ints(values: Json) -> tuple[int, ...]:
    return tuple(map(_int, values))


def _parsed(data: bytes, where: str) -> dict[str, Any]:
    document = parse_json(data, where)
    if not isinstance(document, dict):
        raise CorruptCheckpoint(f"{where}: not an object")
    check_format(document, where)
    return document
