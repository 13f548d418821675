"""The state id of what is read, from the very bits that went to the writer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import TypeAlias

import torch

from ckpt.adapters.foreign.slabs import slabs
from ckpt.engine.stream import Source
from ckpt.errors import CorruptCheckpoint
from ckpt.fingerprint import Digest, box_digests, from_hex, to_hex
from ckpt.geometry import Box, Catalogue
from ckpt.state.values import Json
from ckpt.store.commit import held_digests
from ckpt.store.records import Manifest

Seen: TypeAlias = tuple[str, Box, Digest]  # of a tensor, by its name


class Witness:
    """`source`, with a digest of each box that is read from it. A box may be read more than once."""

    def __init__(self, source: Source) -> None:
        self.url, self.content, self._source = source.url, source.content, source
        self._shapes = {t.name: t.shape for t in source.content.tensors}
        self._seen: dict[str, dict[Box, Digest]] = defaultdict(dict)

    def read(self, name: str, box: Box) -> torch.Tensor:
        """See `ckpt.engine.stream.Source`. Raises CorruptCheckpoint where a box is not what it was before."""
        found = self._source.read(name, box)
        if box.volume:
            self.add([(name, box, box_digests([(found, box, self._shapes[name])])[0])])
        return found

    @property
    def seen(self) -> list[Seen]:
        """What was read, for another that reads the rest of the same state."""
        return [(name, box, digest) for name, boxes in self._seen.items() for box, digest in boxes.items()]

    def add(self, seen: Iterable[Seen]) -> None:
        """What another has read. Raises CorruptCheckpoint where it is not what was read here."""
        for name, box, digest in seen:
            if self._seen[name].setdefault(box, digest) != digest:
                raise CorruptCheckpoint(f"{self.url}: {name} changed while it was read; nothing may write there")

    def state_id(self) -> str:
        """Of the state, once every tensor has been read whole, in boxes that do not overlap. Raises StateMismatch
        where it was not, CorruptCheckpoint where it is not the id that the source says it has."""
        catalogue = Catalogue.of(self.content.tensors)
        seen = {0: {name: list(boxes.items()) for name, boxes in self._seen.items()}}
        digests = held_digests(catalogue, seen)
        found = Manifest.of(catalogue, digests, self.content.aliases, self.content.values).state_id
        if self.content.state_id not in (None, found):
            raise CorruptCheckpoint(
                f"{self.url}: what was read is the state {found}, but it says that it is {self.content.state_id}: it "
                "is damaged, or has changed since it was written"
            )
        return found


def seen_document(seen: Iterable[Seen]) -> Json:
    """What a Witness has seen, as JSON."""
    return [[name, list(box.offset), list(box.extent), to_hex(digest)] for name, box, digest in seen]


def parse_seen(document: Json) -> list[Seen]:
    """The inverse of `seen_document`, of a document of ours."""
    return [(n, Box(tuple(offset), tuple(extent)), from_hex(d)) for n, offset, extent, d in document]


def state_id_of(source: Source, slab: int = 16 << 20) -> str:
    """Reads all of a state, and gives its id."""
    witness = Witness(source)
    for spec in source.content.tensors:
        for box in slabs(spec.shape, spec.itemsize, slab):
            witness.read(spec.name, box)
    return witness.state_id()
