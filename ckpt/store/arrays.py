"""Zarr v3 arrays through TensorStore: their metadata, their objects, and open handles.

The metadata of an array is a pure function of the catalogue, so any rank can write into an array that another rank
describes, and a reader can check what it finds.
"""

from __future__ import annotations

import os
import posixpath
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import tensorstore as ts

from ckpt.errors import CorruptCheckpoint, StoreError
from ckpt.geometry import Catalogue, StoredArray
from ckpt.state.dtypes import STORED
from ckpt.state.names import folder
from ckpt.state.values import Json, canonical_json
from ckpt.store.remedies import OLDER, explained, is_refusal, said
from ckpt.store.shards import FileRead, RemoteRead, StartedRead

GROUP: Json = {"zarr_format": 3, "node_type": "group", "attributes": {}}
_DAMAGE = ("NOT_FOUND", "DATA_LOSS", "OUT_OF_RANGE", "FAILED_PRECONDITION", "INVALID_ARGUMENT")
_LITTLE: list[Json] = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]


def array_folder(catalogue: Catalogue, array: StoredArray) -> str:
    """Folder of an array below `state/`."""
    if array.packed:
        return f"packed/{array.dtype}"
    return "tensors/" + folder(catalogue.tensors[array.tensors[0][0]].name)


def array_metadata(catalogue: Catalogue, array: StoredArray) -> Json:
    """The array's `zarr.json`: sharded with CRC32C on every inner chunk and on the index, C order, no compression.

    Attributes: `logical_dtype`, torch's name of the dtype; `name`, or for a packed array `tensors`, a list of name,
    shape and first element.
    """
    attributes: dict[str, Json] = {"logical_dtype": array.dtype}
    if array.packed:
        attributes["tensors"] = [
            [catalogue.tensors[t].name, list(catalogue.tensors[t].shape), start] for t, start in array.tensors
        ]
    else:
        attributes["name"] = catalogue.tensors[array.tensors[0][0]].name
    sharding = {
        "chunk_shape": list(array.grid.chunk),
        "codecs": _LITTLE,
        "index_codecs": _LITTLE,
        "index_location": "end",
    }
    stored = STORED[array.dtype].zarr
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": list(array.grid.shape),
        "data_type": stored,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(array.grid.cell)}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": [0, 0] if stored.startswith("complex") else 0,
        "codecs": [{"name": "sharding_indexed", "configuration": sharding}],
        "attributes": attributes,
    }


def metadata_objects(catalogue: Catalogue) -> dict[str, bytes]:
    """Every `zarr.json` of the state tree, by key below `state/`: all arrays, and the groups above them."""
    found = {"zarr.json": canonical_json(GROUP)}
    for array in catalogue.arrays:
        where = array_folder(catalogue, array)
        found[f"{where}/zarr.json"] = canonical_json(array_metadata(catalogue, array))
        parent = posixpath.dirname(where)
        while parent:
            found.setdefault(f"{parent}/zarr.json", canonical_json(GROUP))
            parent = posixpath.dirname(parent)
    return dict(sorted(found.items()))


def object_key(catalogue: Catalogue, array: StoredArray, index: tuple[int, ...]) -> str:
    """Key of a stored object below `state/`."""
    return "/".join([array_folder(catalogue, array), "c", *map(str, index)])


def expected_objects(catalogue: Catalogue) -> dict[str, int]:
    """Every data object of the state tree, by key below `state/`, with its exact size in bytes."""
    return {
        object_key(catalogue, array, index): array.grid.object_bytes(box, array.itemsize)
        for array in catalogue.arrays
        for index, box in array.grid.cells()
    }


# The driver drops a silent connection after a minute by itself, and with its retries that is longer than other ranks
# wait.
_STALLED = {
    "TENSORSTORE_CURL_CONNECT_TIMEOUT_SECONDS": "5",
    "TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS": "30",
    "TENSORSTORE_CURL_LOW_SPEED_LIMIT_BYTES": "1",
}


def context(threads: int, *, sync: bool = True) -> ts.Context:
    """One TensorStore context per process: `threads` bounds copies and file operations at a time; files are
    flushed to the device before a write counts as done when `sync` is true.

    Sets how long TensorStore waits for a silent server, where the environment does not: it reads that once, at its
    first request."""
    for name, value in _STALLED.items():
        os.environ.setdefault(name, value)
    return ts.Context(
        {
            "data_copy_concurrency": {"limit": threads},
            "file_io_concurrency": {"limit": max(4, threads)},
            "s3_request_concurrency": {"limit": 32},
            "file_io_sync": sync,
            "cache_pool": {"total_bytes_limit": 0},
        }
    )


class Arrays:
    """Open handles on the arrays of one `state/` tree. Handles are kept; usable from any thread of the process that
    made it, never in a forked child (TensorStore aborts there)."""

    def __init__(self, kvstore: Mapping[str, Any], prefix: str, catalogue: Catalogue, ctx: ts.Context) -> None:
        """kvstore: TensorStore's description of the root; prefix: key of the state tree, ending in "/state/". Keys that
        botocore gave for it are those that it has now."""
        if kvstore["driver"] == "s3":
            from ckpt.store.credentials import with_current_keys

            kvstore = with_current_keys(kvstore)
        self._kvstore, self._prefix = dict(kvstore), prefix
        self._catalogue, self._context = catalogue, ctx
        self._open: dict[int, ts.TensorStore] = {}

    def handle(self, number: int) -> ts.TensorStore:
        """Handle of the array `number` of the catalogue. Writes store chunks that equal the fill value; reads of a
        missing chunk fail."""
        if number not in self._open:
            self._open[number] = self._make(self._catalogue.arrays[number])
        return self._open[number]

    def _make(self, array: StoredArray) -> ts.TensorStore:
        metadata = array_metadata(self._catalogue, array)
        del metadata["attributes"]
        where = self._prefix + array_folder(self._catalogue, array) + "/"
        kvstore = self._kvstore | {"path": self._kvstore.get("path", "") + where}
        spec = {
            "driver": "zarr3",
            "kvstore": kvstore,
            "metadata": metadata,
            "store_data_equal_to_fill_value": True,
            "fill_missing_data_reads": False,
            "recheck_cached_metadata": False,
            "recheck_cached_data": False,
        }
        try:
            return ts.open(spec, open=True, assume_metadata=True, context=self._context).result()
        except Exception as error:
            raise StoreError(f"{where}: cannot open: {explained(error, self._kvstore)}") from error

    def put(self, key: str, data: bytes) -> ts.Future[Any]:
        """Starts to write a small object of the state tree, a `zarr.json`. The future must be kept until it is done."""
        return self._objects.write(key, data)

    def read_object(self, number: int, index: tuple[int, ...]) -> StartedRead:
        """Starts to read a whole stored object. Raises StoreError where the file cannot be opened."""
        key = object_key(self._catalogue, self._catalogue.arrays[number], index)
        if self._kvstore["driver"] == "file":
            return FileRead(self._kvstore["path"] + self._prefix + key)
        return RemoteRead(self._objects, key, lambda error: explained(error, self._kvstore))

    @cached_property
    def _objects(self) -> ts.KvStore:
        path = self._kvstore.get("path", "") + self._prefix
        return ts.KvStore.open(self._kvstore | {"path": path}, context=self._context).result()

    def finish_write(self, commit: ts.Future[Any], where: str) -> None:
        """Waits for a write. Raises StoreError with what was written, `where`, the cause and the remedy."""
        try:
            commit.result()
        except Exception as error:
            raise StoreError(f"{where}: writing failed: {explained(error, self._kvstore)}") from error

    def describe(self, number: int) -> str:
        """Folder of an array, for messages."""
        return self._prefix + array_folder(self._catalogue, self._catalogue.arrays[number])

    def read_error(self, error: Exception, where: str) -> CorruptCheckpoint | StoreError:
        """What a failed read of `where` through a handle means: missing or damaged bytes, or a store that refuses or
        cannot be reached; with the remedy."""
        if is_refusal(error) or not any(word in str(error) for word in _DAMAGE):
            return StoreError(f"{where}: reading failed: {explained(error, self._kvstore)}")
        return CorruptCheckpoint(f"{where}: a stored chunk is missing or damaged: {said(error)}; {OLDER}")
