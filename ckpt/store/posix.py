"""The object store on a POSIX file system: a temporary file, fsync, one atomic rename or link, fsync.

`link` has exactly one winner and never shows a half-written file. `rename` lets every racer win, and O_EXCL
shows the file before it is complete, so `create` needs hard links and refuses to go on without them.
"""

import contextlib
import errno
import os
import secrets
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from ckpt.errors import StoreError
from ckpt.store.objects import NotFound, check_key, check_prefix, key_fault
from ckpt.store.remedies import file_remedy

TEMP = ".tmp-"
STALE_SECONDS = 24 * 3600
ABSENT = (FileNotFoundError, NotADirectoryError)
NO_LINK = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EXDEV}


@contextlib.contextmanager
def _explained(where: str, doing: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        said = error.strerror or error
        raise StoreError(f"{where}: cannot {doing}: {said}; {file_remedy(error.errno)}") from error


class PosixStore:
    """See `ObjectStore`. Holds nothing but two strings, so it may be used from any thread or process."""

    blanks = False

    def __init__(self, root: str) -> None:
        if "\0" in root or not root:
            raise StoreError(f"{root!r}: not a path; give a directory")
        self._root = os.path.realpath(root)
        self.url = Path(self._root).as_uri()
        if os.path.lexists(self._root) and not os.path.isdir(self._root):
            raise StoreError(f"{self.url}: is not a directory; give a directory, or a path that is free")

    def get(self, key: str) -> bytes:
        path, where = self._path(key)
        with _explained(where, "read"):
            try:
                with open(self._inside(path, where), "rb") as file:
                    return file.read()
            except (*ABSENT, IsADirectoryError) as error:
                raise NotFound(f"{where}: not found; check the name, or list what is there") from error

    def put(self, key: str, data: bytes) -> None:
        path, where = self._path(key)
        with _explained(where, "write"):
            folder = self._inside(os.path.dirname(path), where)
            temp = self._temp(folder, where, data)
            try:
                os.replace(temp, os.path.join(folder, os.path.basename(path)))
            except BaseException:
                _unlink(temp)
                raise
            self._fsync_up(self._up(folder))

    def create(self, key: str, data: bytes) -> bool:
        path, where = self._path(key)
        with _explained(where, "create"):
            folder = self._inside(os.path.dirname(path), where)
            final = os.path.join(folder, os.path.basename(path))
            temp = self._temp(folder, where, data)
            try:
                created = _link(temp, final, where)
            finally:
                _unlink(temp)
            if created:
                self._fsync_up(self._up(folder))
            elif os.path.isdir(final):
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
            return created

    def list(self, prefix: str = "") -> dict[str, int]:
        check_prefix(self.url, prefix)
        base = prefix.rpartition("/")[0]
        where = f"{self.url}/{prefix}"
        with _explained(where, "list"):
            folder = self._inside(os.path.join(self._root, base), where)
            return dict(sorted(_files(folder, f"{base}/" if base else "", prefix)))

    def delete(self, keys: Iterable[str]) -> None:
        folders = set()
        for key in keys:
            path, where = self._path(key)
            with _explained(where, "delete"):
                folder = self._inside(os.path.dirname(path), where)
                folders.add(folder)
                with contextlib.suppress(*ABSENT):
                    os.unlink(os.path.join(folder, os.path.basename(path)))
        for folder in sorted(folders, key=len, reverse=True):
            _sweep(folder)
            with contextlib.suppress(OSError):  # not empty, gone, or another's
                while folder != self._root:
                    os.rmdir(folder)
                    folder = os.path.dirname(folder)

    def sync(self, *prefixes: str) -> None:
        above: set[str] = set()
        for prefix in prefixes:
            check_prefix(self.url, prefix)
            where = f"{self.url}/{prefix}"
            with _explained(where, "fsync"):
                top = self._inside(os.path.join(self._root, prefix.removesuffix("/")), where)
                for folder, _, _ in os.walk(top, topdown=False, onerror=_unless_absent):
                    if folder != top:
                        _fsync(folder)
                above.update(self._up(top))
        with _explained(self.url, "fsync"):
            self._fsync_up(above)

    def _path(self, key: str) -> tuple[str, str]:
        check_key(self.url, key)
        path = os.path.join(self._root, *key.split("/"))
        return path, Path(path).as_uri()

    def _inside(self, path: str, where: str) -> str:
        """`path` with its links resolved, or an error if they lead out of the root."""
        real = os.path.realpath(path)
        if real != self._root and not real.startswith(os.path.join(self._root, "")):
            raise StoreError(f"{where}: a symbolic link leads out of {self.url}; remove the link")
        return real

    def _temp(self, folder: str, where: str, data: bytes) -> str:
        """A new temporary file in `folder`, which is made if need be, complete and fsynced."""
        for _ in range(16):
            temp = os.path.join(folder, TEMP + secrets.token_hex(8))
            try:
                _mkdir(folder)
                handle = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            except FileNotFoundError:
                continue  # a delete took the empty folder away between the two steps
            try:
                with open(handle, "wb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(handle)
            except BaseException:
                _unlink(temp)
                raise
            return temp
        raise StoreError(f"{where}: its folder is removed as fast as it is made; stop what deletes there")

    def _up(self, folder: str) -> Iterator[str]:
        """`folder` and its ancestors up to the root."""
        yield folder
        while folder != self._root:
            folder = os.path.dirname(folder)
            yield folder

    def _fsync_up(self, folders: Iterable[str]) -> None:
        """fsync folders, the deepest first, and the root's parent. Missing ones have no names to keep."""
        for folder in sorted(folders, key=len, reverse=True):
            _fsync(folder)
        # A parent that may be entered but not read was not made by us, nor was the root in it.
        with contextlib.suppress(PermissionError):
            _fsync(os.path.dirname(self._root))


def _link(temp: str, final: str, where: str) -> bool:
    """Give `temp` the name `final` if that is free, and say whether it has it now."""
    try:
        os.link(temp, final)
        return True
    except OSError as error:
        # NFS may lose the answer of a link that was made, and then the retry says that the name exists.
        with contextlib.suppress(OSError):
            if os.path.samestat(os.lstat(temp), os.lstat(final)):
                return True
        if isinstance(error, FileExistsError):
            return False
        if error.errno in NO_LINK:
            raise StoreError(
                f"{where}: no hard links here ({error.strerror}), so no safe commit; use a file system "
                "that has them (ext4, XFS, NFS, Lustre), or an object store"
            ) from error
        raise


def _files(folder: str, start: str, prefix: str) -> Iterator[tuple[str, int]]:
    """(key, size) of the regular files under `folder`, whose keys begin with `start`."""
    try:
        with os.scandir(folder) as found:
            entries = list(found)
    except ABSENT:
        return
    for entry in entries:
        key = start + entry.name
        if key_fault(key) or not (key.startswith(prefix) or prefix.startswith(key)):
            continue
        with contextlib.suppress(FileNotFoundError):  # deleted meanwhile
            if entry.is_dir(follow_symlinks=False):
                yield from _files(entry.path, key + "/", prefix)
            elif entry.is_file(follow_symlinks=False) and key.startswith(prefix):
                yield key, entry.stat(follow_symlinks=False).st_size


def _mkdir(folder: str) -> None:
    if os.path.isdir(folder):
        return
    parent = os.path.dirname(folder)
    _mkdir(parent)
    try:
        os.mkdir(folder)
    except FileExistsError:
        if not os.path.isdir(folder) and os.path.lexists(folder):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR)) from None
    _fsync(parent)


def _fsync(folder: str) -> None:
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except ABSENT:
        return
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno != errno.EROFS:  # read-only: nothing can be waiting
            raise
    finally:
        os.close(handle)


def _sweep(folder: str) -> None:
    """Remove temporary files of writers that died long ago."""
    with contextlib.suppress(OSError), os.scandir(folder) as found:
        for entry in found:
            if entry.name.startswith(TEMP) and entry.stat().st_mtime < time.time() - STALE_SECONDS:
                _unlink(entry.path)


def _unlink(path: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)


def _unless_absent(error: OSError) -> None:
    if not isinstance(error, ABSENT):
        raise error
