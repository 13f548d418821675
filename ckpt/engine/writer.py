"""Stored objects on their way to the store: put together in buffers, each written while the next are put together."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from ckpt.engine.session import Buffers, InFlight, Session
from ckpt.geometry import Box, Catalogue
from ckpt.state.dtypes import STORED, opaque
from ckpt.store.arrays import Arrays, metadata_objects


class Writer:
    """Writes objects of some arrays, from one thread."""

    def __init__(self, session: Session, arrays: Arrays, catalogue: Catalogue, wrote: Callable[[int], None]) -> None:
        """wrote: told the bytes of each object that is written."""
        self._session, self._arrays, self._catalogue, self._wrote = session, arrays, catalogue, wrote
        self._buffers, self._flight = Buffers(), InFlight(session.budget // 2)
        self._begun: set[int] = set()

    def take(self, number: int, box: Box) -> torch.Tensor:
        """Elements of a box of an array, to be filled: zero where tensors are packed, which leave gaps."""
        array = self._catalogue.arrays[number]
        staging = self._buffers.take(box.volume * array.itemsize)
        if array.packed:
            staging.zero_()
        return staging.view(opaque(array.itemsize)).reshape(box.extent)

    def write(self, number: int, box: Box, elements: torch.Tensor) -> None:
        """Starts to write what `take` gave, which is not the caller's any more. Raises what an earlier write met."""
        array = self._catalogue.arrays[number]
        where = tuple(slice(o, s) for o, s in zip(box.offset, box.stop, strict=True))
        values = elements.numpy().view(np.dtype(STORED[array.dtype].zarr))
        future = self._arrays.handle(number)[where].write(values, can_reference_source_data_indefinitely=True)
        self._begun.add(number)
        nbytes = box.volume * array.itemsize

        def finish() -> None:
            self._arrays.finish_write(future.commit, f"{self._session.store.url}/{self._arrays.describe(number)}")
            self._buffers.give(elements)
            self._wrote(nbytes)

        self._flight.add(nbytes, finish)

    def drain(self) -> None:
        """Waits until all is written."""
        self._flight.drain()

    def sync(self) -> None:
        """Makes the names of all that was written survive a power loss."""
        self._session.store.sync(*(self._arrays.describe(number) for number in sorted(self._begun)))


def write_metadata(session: Session, arrays: Arrays, catalogue: Catalogue, prefix: str) -> None:
    """Every rank writes its share of the zarr.json files of an attempt."""
    mine = list(metadata_objects(catalogue).items())[session.comm.rank :: session.comm.world]
    started = [(key, arrays.put(key, data)) for key, data in mine]
    for key, future in started:
        arrays.finish_write(future, f"{session.store.url}/{prefix}state/{key}")
