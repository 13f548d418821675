"""The hidden folder in which the files of another library are made, and how they get their places at the end.

    plan.json             which conversion it is; there from the first piece on, and gone before anything else goes
    files/<name>.part     the files under way
    pieces/<number>.json  a piece of the work that is done, and what tells whether its bytes are there

A file leaves the folder when all of them are whole, and last of all the one that makes the target a checkpoint to its
readers. So whatever is killed when, they find a whole checkpoint or none.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ckpt.engine.faults import FaultPoint
from ckpt.errors import CkptError, CorruptCheckpoint, StoreError
from ckpt.state.values import Json, canonical_json, parse_json

WORK = ".ckpt-work"
STAYS = "; what is done stays there, and the same call goes on with it"
_AT_ONCE = 1 << 20  # bytes read to check a digest


class WorkFolder:
    """The work on one output. Many processes may use it, each through its own object; what it says who may call."""

    def __init__(self, target: Path, identity: str, files: Sequence[str], further: Sequence[str], last: str) -> None:
        """identity: tells this conversion from any other. files: names of those made of pieces; further: of those made
        at the end; last: of the one of either that makes the target a checkpoint."""
        self.target, self.path = target, target / WORK
        self._identity, self._files, self._further, self._last = identity, files, further, last
        self._begun = False

    def begin(self, about: Mapping[str, Json]) -> bool:
        """By one process, before the others do anything. Makes the folder; or finds it as a call for the same
        conversion left it, and tells that it did. about: for the message to who comes with another.

        Raises CkptError where the folder is that of another conversion, StoreError where the target has something in it
        already, or cannot be written."""
        with self._writing(""):
            made, plan = not self.target.exists(), self.path / "plan.json"
            if plan.exists():
                self._check_same(plan)
                self._take_back()
                self._begun = True
                return True
            if self.path.exists():  # killed as it began, or as it ended
                shutil.rmtree(self.path)
            if not made and any(self.target.iterdir()):
                raise StoreError(
                    f"{self.target}: not empty; choose another place, or empty it, if nothing there is wanted"
                )
            for folder in ("files", "pieces"):
                (self.path / folder).mkdir(parents=True)
            _create(plan, canonical_json({**about, "identity": self._identity, "made": made}))
            self._begun = True
            return False

    def _check_same(self, plan: Path) -> None:
        found = _known(plan)
        if found.get("identity") != self._identity:
            raise CkptError(
                f"{self.target}: an unfinished conversion of {found.get('source')} to {found.get('format')} is there, "
                "and not this one: the source, an option or a version is another; choose another place, go on with "
                f"that one, or delete {self.target} if it is no longer wanted"
            )

    def _take_back(self) -> None:
        """Files that had their places already, so that nobody takes the target for a checkpoint until it is one."""
        for name in (self._last, *self._further, *self._files):
            placed = self.target / name
            if name in self._files and placed.exists():
                placed.replace(self._part(name))
            else:
                placed.unlink(missing_ok=True)
            if name == self._last:
                sync(self.target)

    def open(self, file: str) -> int:
        """A descriptor with which to read and write anywhere in a file; who calls closes it. Raises StoreError."""
        with self._writing():
            return os.open(self._part(file), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)

    def lay_out(self, file: str, head: bytes, nbytes: int) -> None:
        """By one process: a file of its full size, with its first bytes; whatever else it has is kept. Raises
        StoreError."""
        opened = self.open(file)
        with self._writing(), os.fdopen(opened, "r+b") as writing:
            writing.write(head)
            writing.truncate(nbytes)

    def record(self, number: int, document: Mapping[str, Any], *, synced: bool = True) -> None:
        """Notes that a piece is done. document: whatever it takes to go on without doing it again. synced: that its
        bytes are on the device, so the record has to be too. Raises StoreError."""
        with self._writing():
            if synced:
                sync(self.path / "files")
            data = canonical_json({**document, "identity": self._identity})
            _create(self._record(number), canonical_json([hashlib.sha256(data).hexdigest(), data.decode()]), synced)

    def recorded(self, pieces: int) -> list[int]:
        """The pieces that have a record, which says nothing of their bytes."""
        with self._writing():
            there = {path.name for path in (self.path / "pieces").iterdir()}
        return [number for number in range(pieces) if self._record(number).name in there]

    def kept(self, number: int, file: str) -> dict[str, Any] | None:
        """The record of a piece of one file, if the bytes are those that its `start`, `bytes` and `sha256` tell of.
        They are read. Raises StoreError."""
        document = self.known(number)
        if document is None:
            return None
        with self._writing():
            found = _digest(self._part(file), document["start"], document["bytes"])
        return document if found == document["sha256"] else None

    def known(self, number: int) -> dict[str, Any] | None:
        """The record of a piece, if it is one of this conversion; it says nothing of the bytes."""
        path = self._record(number)
        try:
            told, data = parse_json(path.read_bytes(), str(path))
            document: dict[str, Any] = parse_json(data.encode(), str(path))
            if told != hashlib.sha256(data.encode()).hexdigest() or document["identity"] != self._identity:
                return None
        except (OSError, CorruptCheckpoint, AttributeError, KeyError, TypeError, ValueError):
            return None  # then the piece is made once more, which is always right
        return document

    def finish(
        self,
        sizes: Mapping[str, int],
        further: Iterable[tuple[str, bytes]],
        faults: FaultPoint,
        same: Mapping[str, str] = {},
    ) -> None:
        """By one process, when all pieces are done. Gives all files their places, and removes the folder. sizes: of the
        files made of pieces; same: further names, and which of those they stand for. Raises CorruptCheckpoint where one
        is too short, StoreError."""
        with self._writing():
            for name, size in sizes.items():
                _cut(self._part(name), size)
            for name, first in same.items():
                _link(self._part(first), self._part(name))
            for name, data in further:
                _create(self._part(name), data)
            for name in [n for n in (*self._further, *self._files) if n != self._last]:
                self._part(name).replace(self.target / name)
                faults("files.placed")
            sync(self.target)
            self._part(self._last).replace(self.target / self._last)
            sync(self.target)
            faults("files.last")
            (self.path / "plan.json").unlink()  # first: without it the rest counts for nothing
            faults("files.ending")
            shutil.rmtree(self.path)
            sync(self.target)

    def discard(self) -> None:
        """By one process. Deletes all that this conversion wrote, as far as can be; nothing where `begin` failed."""
        if not self._begun:
            return
        with contextlib.suppress(OSError):
            made = _known(self.path / "plan.json").get("made")
            for name in (self._last, *self._further, *self._files):
                (self.target / name).unlink(missing_ok=True)
            shutil.rmtree(self.path)
            if made:
                self.target.rmdir()

    def _part(self, file: str) -> Path:
        return self.path / "files" / f"{file}.part"

    def _record(self, number: int) -> Path:
        return self.path / "pieces" / f"{number:06d}.json"

    @contextlib.contextmanager
    def _writing(self, stays: str = STAYS) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StoreError(f"{self.target}: cannot be written: {error}{stays}") from error


def sync(path: Path) -> None:
    """Brings a file or folder onto the device."""
    opened = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def unfinished(target: Path) -> bool:
    """Whether a conversion into this folder was killed, or is under way."""
    return (target / WORK / "plan.json").exists()


def _known(plan: Path) -> Mapping[str, Json]:
    """What a plan says; nothing where it is damaged."""
    try:
        found = parse_json(plan.read_bytes(), str(plan))
    except CorruptCheckpoint:
        return {}
    return found if isinstance(found, dict) else {}


def _create(path: Path, data: bytes, synced: bool = True) -> None:
    """Makes or replaces a small file: whole, and if `synced` on the device, or as it was."""
    part = path.with_name(f"{path.name}.{os.getpid()}")
    with part.open("wb") as file:
        file.write(data)
        if synced:
            file.flush()
            os.fsync(file.fileno())
    part.replace(path)
    if synced:
        sync(path.parent)


def _link(first: Path, path: Path) -> None:
    """Another name for a file, or a copy where the file system has no hard links."""
    path.unlink(missing_ok=True)
    try:
        os.link(first, path)
    except OSError:
        shutil.copyfile(first, path)
        sync(path)


def _digest(path: Path, start: int, nbytes: int) -> str | None:
    """The SHA-256 of a part of a file; None where it ends before."""
    found = hashlib.sha256()
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return None
    with file:
        file.seek(start)
        while nbytes:
            data = file.read(min(nbytes, _AT_ONCE))
            if not data:
                return None
            found.update(data)
            nbytes -= len(data)
    return found.hexdigest()


def _cut(path: Path, size: int) -> None:
    """Takes off what was behind the end of a file that an earlier call left."""
    there = path.stat().st_size
    if there < size:
        raise CorruptCheckpoint(f"{path}: changed while it was written; nothing else may write there")
    if there > size:
        os.truncate(path, size)
        sync(path)
