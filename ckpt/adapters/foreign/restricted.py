"""Pickles of other libraries, read without running anything that they name.

A pickle may name any function of any module and have it called. This reader knows a short list of names and gives for
each a harmless class or function of its own choice; any other name ends the reading.
"""

from __future__ import annotations

import io
import pickle
import zipfile
import zlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import IO, Any, ClassVar

import torch

from ckpt.errors import CorruptCheckpoint, Unsupported
from ckpt.state.dtypes import STORED

Known = Mapping[tuple[str, str], Any]

_LARGEST_HEADER = 64 << 20  # bytes of a pickle that describes tensors; it holds no elements
_DTYPES: Known = {("torch", name): getattr(torch, name) for name in STORED if hasattr(torch, name)}
_STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "ComplexDoubleStorage": torch.complex128,
    "ComplexFloatStorage": torch.complex64,
}


_PythonUnpickler: Any = pickle._Unpickler  # type: ignore[attr-defined]


class _Inert:
    """Stands for an object of a class that is not known: nothing that is done to it does anything."""

    def __new__(cls, *args: Any, **kwargs: Any) -> _Inert:
        return super().__new__(cls)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def _nothing(self, *args: Any) -> None:
        pass

    __setstate__ = append = extend = add = update = __setitem__ = _nothing


class _Unpickler(_PythonUnpickler):  # type: ignore[misc]
    """Python's own, not the C twin: that one allocates as much as a damaged or hostile pickle says (CPython issue
    115952). An object may only get state if it is an instance; classes and functions stay as they are."""

    dispatch: ClassVar = dict(_PythonUnpickler.dispatch)

    def __init__(
        self, file: IO[bytes], known: Known, where: str, find_storage: Callable[[Any], Any], inert: bool
    ) -> None:
        super().__init__(file)
        self._known, self._where, self._find_storage, self._inert = known, where, find_storage, inert

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in self._known:
            return self._known[module, name]
        if self._inert:
            return type(name, (_Inert,), {"__module__": module, "__qualname__": name})
        raise Unsupported(
            f"{self._where}: holds {module}.{name}, which is not read, since a pickle could run code by it; if you "
            "trust the file, open it with its own library and save tensors and plain values"
        )

    def persistent_load(self, pid: Any) -> Any:
        return self._find_storage(pid)

    def _build(self) -> None:
        stack: list[Any] = self.stack
        if callable(stack[-2]):
            raise CorruptCheckpoint(f"{self._where}: a pickle that would change {stack[-2]!r}")
        self.load_build()

    dispatch[pickle.BUILD[0]] = _build


def read_pickle(
    file: IO[bytes],
    known: Known,
    where: str,
    find_storage: Callable[[Any], Any] | None = None,
    *,
    inert: bool = False,
) -> Any:
    """What a pickle holds, made of `known` things only: (module, name) and what stands for it.

    Raises CorruptCheckpoint for bytes that are no such pickle, and Unsupported for any other name, unless `inert`: then
    objects that do nothing stand for those. Both name `where`.
    """

    def no_storage(pid: Any) -> Any:
        raise CorruptCheckpoint(f"{where}: refers to a storage, where there is none")

    try:
        return _Unpickler(file, {**_DTYPES, **known}, where, find_storage or no_storage, inert).load()
    except (Unsupported, CorruptCheckpoint):
        raise
    except Exception as error:  # a damaged pickle raises nearly anything
        raise CorruptCheckpoint(f"{where}: not a readable pickle: {type(error).__name__}: {error}") from None


@dataclass(frozen=True)
class SavedTensor:
    """A tensor as `torch.save` left it. record: name of its storage in the archive; offset, shape and stride are in
    elements."""

    record: str
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(frozen=True)
class Place:
    """Where an entry of an archive lies in its file, and the CRC32 of it; 0 where torch was told to make none."""

    start: int
    nbytes: int
    crc: int


def check_within(saved: SavedTensor, place: Place, where: str) -> None:
    """Raises CorruptCheckpoint where not all elements of a tensor lie in its storage."""
    reach = saved.offset + sum(s * (n - 1) for s, n in zip(saved.stride, saved.shape, strict=True)) + 1
    short = reach * saved.dtype.itemsize > place.nbytes and 0 not in saved.shape
    if min((saved.offset, *saved.stride, *saved.shape)) < 0 or short:
        raise CorruptCheckpoint(f"{where}: the elements reach past the end of their storage")


@dataclass(frozen=True)
class _Storage:
    record: str
    dtype: torch.dtype | None


def read_archive(file: IO[bytes], where: str, *, inert: bool = False) -> tuple[Any, Mapping[str, Place]]:
    """What `torch.save` wrote, with a `SavedTensor` for each tensor, and where each storage lies. Nothing of the
    elements is read.

    Raises Unsupported and CorruptCheckpoint as `read_pickle`; CorruptCheckpoint too for a compressed archive, which
    torch never writes.
    """
    infos = _entries(file, where)
    try:
        root = next(name for name in infos if name.endswith("/data.pkl"))[: -len("data.pkl")]
        if infos[f"{root}data.pkl"].file_size > _LARGEST_HEADER:
            raise ValueError("its pickle is too large for one that holds no elements")
        places = {n.removeprefix(root): _place(file, i) for n, i in infos.items()}
        if "byteorder" in places and _entry(file, places["byteorder"]) != b"little":
            raise ValueError("it is not little-endian")
        pickled = _entry(file, places["data.pkl"])
    except StopIteration:
        raise CorruptCheckpoint(f"{where}: not what torch.save writes: it has no data.pkl") from None
    except (OSError, ValueError) as error:
        raise CorruptCheckpoint(f"{where}: not what torch.save writes: {error}") from None

    def find_storage(pid: Any) -> _Storage:
        kind, dtype, key = pid[0], pid[1], pid[2]
        if kind != "storage" or f"data/{key}" not in places:
            raise CorruptCheckpoint(f"{where}: refers to the storage {key!r}, which is not there")
        return _Storage(f"data/{key}", dtype)

    return read_pickle(io.BytesIO(pickled), _ARCHIVE, where, find_storage, inert=inert), places


def load_plain(data: bytes, where: str) -> Any:
    """What `torch.save` wrote, with tensors; objects that are neither plain nor tensors are left as empty shells of the
    same class name. Raises CorruptCheckpoint for a damaged archive, or one that torch does not write."""
    file = io.BytesIO(data)
    found, places = read_archive(file, where, inert=True)
    try:
        return _filled(found, {record: _entry(file, place) for record, place in places.items()})
    except (OSError, ValueError, RuntimeError, TypeError, RecursionError) as error:
        raise CorruptCheckpoint(f"{where}: not what torch.save writes: {error}") from None


def _filled(value: Any, records: Mapping[str, bytes]) -> Any:
    kind = type(value)
    if kind in (dict, OrderedDict):
        return kind((key, _filled(v, records)) for key, v in value.items())
    if kind in (list, tuple):
        return kind(_filled(v, records) for v in value)
    if kind is not SavedTensor:
        return value
    data = bytearray(records[value.record])
    if 0 in value.shape:
        return torch.empty(value.shape, dtype=value.dtype)
    flat = torch.frombuffer(data[: len(data) // value.dtype.itemsize * value.dtype.itemsize], dtype=value.dtype)
    return flat.as_strided(value.shape, value.stride, value.offset)


def _entries(file: IO[bytes], where: str) -> dict[str, zipfile.ZipInfo]:
    try:
        listed = zipfile.ZipFile(file).infolist()
    except Exception as error:  # a damaged directory raises nearly anything
        raise CorruptCheckpoint(f"{where}: not what torch.save writes: {error}") from None
    if any(i.compress_type != zipfile.ZIP_STORED or i.compress_size != i.file_size for i in listed):
        raise CorruptCheckpoint(f"{where}: not what torch.save writes: it is compressed")
    infos = {i.filename: i for i in listed}
    end = file.seek(0, 2)
    if len(infos) != len(listed) or sum(i.file_size for i in listed) > end:
        raise CorruptCheckpoint(f"{where}: not what torch.save writes: its entries overlap or have one name")
    return infos


def _place(file: IO[bytes], info: zipfile.ZipInfo) -> Place:
    """A stored entry lies after its local header, whose name and extra field may be longer than those of the directory
    (APPNOTE.TXT 4.3.7)."""
    file.seek(info.header_offset)
    header = file.read(30)
    if len(header) != 30 or header[:4] != b"PK\x03\x04":
        raise ValueError("an entry has no header")
    start = info.header_offset + 30 + int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
    if start + info.file_size > file.seek(0, 2):
        raise ValueError("an entry reaches past the end")
    return Place(start, info.file_size, info.CRC)


def _entry(file: IO[bytes], place: Place) -> bytes:
    file.seek(place.start)
    data = file.read(place.nbytes)
    if place.crc and zlib.crc32(data) != place.crc:
        raise ValueError("its CRC32 is not the recorded one: the file is damaged")
    return data


def _tensor(storage: _Storage, offset: int, shape: Any, stride: Any, *_: Any) -> SavedTensor:
    assert storage.dtype is not None
    return SavedTensor(storage.record, storage.dtype, int(offset), tuple(map(int, shape)), tuple(map(int, stride)))


def _tensor_of_dtype(
    storage: _Storage, offset: int, shape: Any, stride: Any, grad: Any, hooks: Any, dtype: torch.dtype, *_: Any
) -> SavedTensor:
    return _tensor(_Storage(storage.record, dtype), offset, shape, stride)


def _latin_1(text: str, encoding: str) -> bytes:
    """How old pickles keep bytes."""
    return text.encode("latin-1")


def _parameter(data: SavedTensor, *_: Any) -> SavedTensor:
    return data


_ARCHIVE: Known = {
    ("torch._utils", "_rebuild_tensor_v2"): _tensor,
    ("torch._utils", "_rebuild_tensor_v3"): _tensor_of_dtype,
    ("torch._utils", "_rebuild_parameter"): _parameter,
    ("torch", "Size"): torch.Size,
    ("torch.storage", "UntypedStorage"): None,
    ("torch", "UntypedStorage"): None,
    ("collections", "OrderedDict"): OrderedDict,
    ("collections", "Counter"): Counter,
    ("torch", "device"): torch.device,
    ("builtins", "complex"): complex,
    ("__builtin__", "complex"): complex,
    ("_codecs", "encode"): _latin_1,
    **{("torch", name): dtype for name, dtype in _STORAGES.items()},
}
