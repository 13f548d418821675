"""Who held what when a checkpoint was saved, from its receipts."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from ckpt.errors import CorruptCheckpoint
from ckpt.geometry import Holdings
from ckpt.inspect.committed import Committed
from ckpt.store.objects import NotFound
from ckpt.store.records import Receipt, read_receipt, receipt_key

_READERS = 16


@dataclass(frozen=True)
class RankShare:
    """What one rank held and wrote. held: bytes of its boxes; wrote: bytes of stored objects."""

    rank: int
    tensors: int
    boxes: int
    held: int
    objects: int
    wrote: int


@dataclass(frozen=True)
class Held:
    """tensors: the holdings of each, by name; ranks: the share of each rank, in order."""

    tensors: Mapping[str, Holdings]
    ranks: tuple[RankShare, ...]


def holders(committed: Committed) -> Held | str:
    """Reads the receipts; where there can be none, says why. Nothing pins receipts, so they are checked against the
    commit as far as they go. Raises CorruptCheckpoint where they are damaged or belong to another attempt."""
    if "origin" in committed.record.document:
        return "This checkpoint is a copy. Receipts, which say which rank held which box, stay with its original."
    if "source" in committed.run:
        return "This checkpoint was converted from another format: no job of several ranks held it."
    with ThreadPoolExecutor(_READERS) as pool:
        receipts = list(pool.map(lambda rank: _receipt(committed, rank), range(len(committed.ranks))))
    catalogue = committed.manifest.catalogue
    specs = {t.name: t for t in catalogue.tensors}
    sizes = {
        (number, index): array.grid.object_bytes(box, array.itemsize)
        for number, array in enumerate(catalogue.arrays)
        for index, box in array.grid.cells()
    }
    shares = []
    for receipt in receipts:
        unknown = [n for n in receipt.held if n not in specs] + [str(o) for o in receipt.objects if o not in sizes]
        if unknown:
            raise CorruptCheckpoint(
                f"{_where(committed, receipt.rank)}: {unknown[0]} is not of this checkpoint; run ckpt verify"
            )
        held = [box.volume * specs[name].itemsize for name, boxes in receipt.held.items() for box, _ in boxes]
        written = sum(sizes[one] for one in receipt.objects)
        shares.append(RankShare(receipt.rank, len(receipt.held), len(held), sum(held), len(receipt.objects), written))
    found = {name: Holdings.of((r.rank, box) for r in receipts for box, _ in r.held.get(name, ())) for name in specs}
    return Held(found, tuple(shares))


def _receipt(committed: Committed, rank: int) -> Receipt:
    where = _where(committed, rank)
    try:
        receipt = read_receipt(committed.store, committed.prefix, rank)
    except NotFound:
        raise CorruptCheckpoint(f"{where}: missing; run ckpt verify") from None
    if receipt.rank != rank or receipt.attempt != committed.record.attempt:
        raise CorruptCheckpoint(f"{where}: not the receipt of rank {rank} of this attempt; run ckpt verify")
    return receipt


def _where(committed: Committed, rank: int) -> str:
    return f"{committed.store.url}/{receipt_key(committed.prefix, rank)}"
