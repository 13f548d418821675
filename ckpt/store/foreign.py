"""Object stores behind other schemes of fsspec, for reading: none has a conditional create that could be relied on."""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import fsspec

from ckpt.errors import StoreError
from ckpt.store.objects import NotFound, Options, check_key, check_prefix, key_fault, split_url


class FsspecStore:
    """Any other scheme of fsspec, with `storage_options` as its driver wants them: all but `create`."""

    blanks = True

    def __init__(self, url: str, storage_options: Options = None) -> None:
        scheme, rest = split_url(url)
        self.url = f"{scheme}://{rest.rstrip('/')}"
        try:
            self._fs, root = fsspec.core.url_to_fs(
                self.url,
                **{"use_listings_cache": False, "skip_instance_cache": True, **(storage_options or {})},
            )
        except (ImportError, ValueError, TypeError) as error:
            raise StoreError(f"{url}: {error}; install that driver, or use a path or s3://") from error
        self._root = root.rstrip("/")

    def get(self, key: str) -> bytes:
        check_key(self.url, key)
        data: bytes = self._call(key, "read", lambda: self._fs.cat_file(f"{self._root}/{key}"))
        return data

    def put(self, key: str, data: bytes) -> None:
        check_key(self.url, key)
        self._call(key, "write", lambda: self._fs.pipe_file(f"{self._root}/{key}", data))

    def create(self, key: str, data: bytes) -> bool:
        raise StoreError(
            f"{self.url}/{key}: this scheme has no known conditional create, so no safe commit; save to a "
            "path or to s3://, and copy from there"
        )

    def list(self, prefix: str = "") -> dict[str, int]:
        check_prefix(self.url, prefix)
        self._fs.invalidate_cache()
        try:
            found = self._call(prefix, "list", lambda: self._fs.find(self._root, detail=True))
        except NotFound:
            return {}
        sizes = {path[len(self._root) + 1 :]: int(entry["size"] or 0) for path, entry in found.items()}
        return {key: sizes[key] for key in sorted(sizes) if key.startswith(prefix) and not key_fault(key)}

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            check_key(self.url, key)
            try:
                self._call(key, "delete", functools.partial(self._fs.rm_file, f"{self._root}/{key}"))
            except NotFound:
                continue

    def sync(self, *prefixes: str) -> None:
        for prefix in prefixes:
            check_prefix(self.url, prefix)

    def _call(self, key: str, doing: str, act: Callable[[], Any]) -> Any:
        where = f"{self.url}/{key}"
        try:
            return act()
        except FileNotFoundError as error:
            raise NotFound(f"{where}: not found; check the name, or list what is there") from error
        except Exception as error:  # each driver has its own kinds
            said = f"{type(error).__name__}: {error}"
            raise StoreError(f"{where}: cannot {doing}: {said}; check storage_options and the service") from error
