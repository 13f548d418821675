"""Small control objects (log records, receipts, manifests) behind six verbs.

`open_store(url)` gives a `PosixStore` for a path or `file://`, an `S3Store` for `s3://`, and a store that can
be read but not appended to for every other scheme that fsspec knows. Array data does not pass through here:
`kvstore_spec` gives the same root to TensorStore.
"""

import contextlib
import os
import re
import secrets
import urllib.parse
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from ckpt.errors import CorruptCheckpoint, StoreError

if TYPE_CHECKING:
    pass

Options = Mapping[str, Any] | None

_TRUSTED = "TENSORSTORE_CA_BUNDLE"
_BLANKS = 3  # in a row are no accident


class NotFound(StoreError):
    """There is no object of that name. Final: the store was reached and said so."""


class ObjectStore(Protocol):
    """Whole objects under one root, named by keys such as `log/12.json`.

    Keys are relative, `/`-separated, any unicode; no empty, dot-led or `..` component, no NUL (`StoreError`).
    Every verb may be called from any thread, several at once, but not in a forked child of the process that
    opened the store (open it again there, or spawn). A `StoreError` is final for the call: what can safely be
    tried again has been. Only `create` leaves its outcome open when it raises.
    """

    url: str
    """The root, normalised: opening it again gives the same root."""

    blanks: bool
    """Whether there may be blanks: some servers make an object of no bytes, for good, of a write whose connection
    ended before the first of them. Elsewhere such an object is damage."""

    def get(self, key: str) -> bytes:
        """The whole object, as last put. Raises `NotFound` naming the full URL if there is none."""

    def put(self, key: str, data: bytes) -> None:
        """Write the whole object; the last writer wins and readers see the old or the new one, never a mix.

        May be called again with the same bytes, also after an error. POSIX: durable on return.
        """

    def create(self, key: str, data: bytes) -> bool:
        """Write the whole object if the key is free: of any number of callers with different data exactly one gets
        True.

        True: this call created it, complete (POSIX: and durable). False: it was there, untouched; it may be a blank,
        even one of this call.
        `StoreError`: refused or unknown; read the key back to know. Over a network an answer may be lost, and then
        whoever finds its own bytes there gets True: data that must have one creator holds something of its own.
        """

    def list(self, prefix: str = "") -> dict[str, int]:
        """Key to size of every object whose key starts with `prefix` (a string, not a folder), recursively.

        Asked of the store each time, never cached, in the order of keys. Files that could not be keys
        (temporary files, dot files, links) are not shown. No such root or prefix: empty.
        """

    def delete(self, keys: Iterable[str]) -> None:
        """Remove objects; a missing one is fine, so it may be called again. Not durable by itself: after a
        power loss a removed file may be back. On POSIX folders left empty go too.
        """

    def sync(self, *prefixes: str) -> None:
        """POSIX: fsync every directory under these folders, deepest first, then their ancestors up to the
        root's parent, so that names written by others survive a power loss too (their writers fsync the
        files' contents). Elsewhere there is nothing to do. May be called again, also after an error.
        """


def key_fault(key: str) -> str | None:
    """Why `key` cannot name an object, or None if it can."""
    if "\0" in key:
        return "it holds a NUL"
    try:
        key.encode()
    except UnicodeEncodeError:
        return "it is not valid unicode"
    for part in key.split("/"):
        if not part:
            return "it is empty, absolute, or has an empty component"
        if part.startswith("."):
            return f"its component {part!r} starts with a dot"
    return None


def check_key(url: str, key: str) -> None:
    """Raise `StoreError` unless `key` may name an object under the root `url`."""
    fault = key_fault(key)
    if fault:
        raise StoreError(f"{url}: bad key {key!r}: {fault}; escape names before they become keys")


def check_prefix(url: str, prefix: str) -> None:
    """Raise `StoreError` unless some key may start with `prefix`."""
    if prefix:
        check_key(url, prefix.removesuffix("/"))


def split_url(url: str) -> tuple[str, str]:
    """(scheme, rest) of a root URL; a plain path has the scheme `file`, and its rest is a path, decoded."""
    match = re.match(r"([A-Za-z][A-Za-z0-9+.-]*)://", url)
    if not match:
        return "file", os.path.expanduser(url)
    scheme, rest = match[1].lower(), url[match.end() :]
    if scheme in ("file", "local"):
        host, slash, path = rest.partition("/")
        if host not in ("", "localhost") or not slash:
            raise StoreError(f"{url}: names the host {host!r}; a file URL has three slashes: file:///a/path")
        return "file", urllib.parse.unquote("/" + path, errors="surrogateescape")
    return ("s3" if scheme == "s3a" else scheme), rest


def split_s3(url: str) -> tuple[str, str]:
    """(bucket, prefix without slashes at its ends) of an s3 URL."""
    bucket, _, prefix = split_url(url)[1].partition("/")
    prefix = prefix.strip("/")
    if not bucket or "?" in prefix or "#" in prefix:
        raise StoreError(f"{url}: not an S3 root; write s3://bucket/prefix, and give settings in storage_options")
    check_prefix(url, prefix)
    return bucket, prefix


def open_store(url: str, storage_options: Options = None) -> ObjectStore:
    """The store at `url`; writes nothing, and only looks at the network when first used.

    S3 reads the options of `ckpt.store.remote.s3_settings`; other fsspec schemes get theirs as they are.
    """
    # Here, so that a job on a file system imports no S3 client.
    scheme, rest = split_url(url)
    if scheme == "file":
        from ckpt.store.posix import PosixStore

        return PosixStore(rest)
    if scheme == "s3":
        from ckpt.store.remote import S3Store

        return S3Store(url, storage_options)
    from ckpt.store.foreign import FsspecStore

    return FsspecStore(url, storage_options)


def probe(store: ObjectStore, beside: Callable[[str], None] | None = None) -> None:
    """Raise `StoreError` unless `store` can be listed, written, read and deleted from, and really creates only what is
    absent; call it before there is something to lose. Leaves nothing behind.

    Some servers accept the condition and ignore it, and there two jobs could both commit. Some make a missing bucket
    when they are first written to, so that only a listing tells of a wrong name.

    beside: called with a fresh prefix, ending in "/", under which it may write what it likes; all is deleted after it.
    """
    folder, first, second = f"probe/{secrets.token_hex(16)}/", secrets.token_bytes(16), secrets.token_bytes(16)
    key = f"{folder}object"
    where, remedy = (
        f"{store.url}/{key}",
        "use a store with conditional create (If-None-Match: *, or hard links)",
    )
    store.list("probe/")
    try:
        for _ in range(_BLANKS):
            if store.create(key, first):
                break
            if store.get(key) or not store.blanks:
                raise StoreError(f"{where}: create says that a new random key was there already; {remedy}")
            store.delete([key])
        else:
            raise StoreError(f"{where}: writing leaves an object of no bytes, again and again; look at the network")
        if store.create(key, second):
            raise StoreError(f"{where}: the store ignores create-if-absent: two creates both won; {remedy}")
        if store.get(key) != first:
            raise StoreError(f"{where}: a create that lost changed the object all the same; {remedy}")
        if beside is not None:
            beside(folder)
    except BaseException:
        with contextlib.suppress(StoreError):  # which would hide the first
            store.delete([key, *store.list(folder)])
        raise
    store.delete([key] if beside is None else store.list(folder))


def create_same(store: ObjectStore, key: str, data: bytes) -> None:
    """Creates an object that whoever creates it would write the same. Raises CorruptCheckpoint where it is there with
    other content, StoreError where it cannot be written."""
    try:
        if store.create(key, data):
            return
        found = store.get(key)
    except StoreError as error:  # whether it was created may be unknown
        try:
            found = store.get(key)
        except NotFound:
            raise error from None
    if not found and data:
        store.put(key, data)
    elif found != data:
        raise CorruptCheckpoint(
            f"{store.url}/{key}: exists with other content, so this attempt is not what it was; delete "
            "its folder, and save or convert again"
        )


def kvstore_spec(url: str, storage_options: Options = None) -> dict[str, Any]:
    """TensorStore's kvstore JSON for the root `url`: open it once per process and derive paths from that.

    TensorStore takes no keys inside its JSON (see `ckpt.store.credentials`): make the spec in the process that uses it.
    A file of trusted authorities is set for the whole process. May use the network to find keys.
    """
    scheme, rest = split_url(url)
    if scheme == "file":
        return {"driver": "file", "path": os.path.join(os.path.realpath(rest), "")}
    if scheme != "s3":
        raise StoreError(f"{url}: no array driver for {scheme}://; copy it to a path or to s3:// first")
    from ckpt.store.credentials import kvstore_credentials
    from ckpt.store.remote import s3_settings

    bucket, prefix = split_s3(url)
    settings = s3_settings(storage_options)
    spec: dict[str, Any] = {"driver": "s3", "bucket": bucket, "path": f"{prefix}/" if prefix else ""}
    if settings["endpoint"]:
        if not settings["path_style"] and not is_aws(settings["endpoint"]):
            raise StoreError(
                f"{url}: TensorStore speaks path-style only to {settings['endpoint']}; drop path_style=False"
            )
        spec["endpoint"] = settings["endpoint"]
    if settings["region"]:
        spec["aws_region"] = settings["region"]
    if settings["ca_bundle"]:
        _trust(settings["ca_bundle"])
    spec["aws_credentials"] = kvstore_credentials(settings)
    # The driver's own 32 attempts of up to 32 s each make a wrong endpoint look like a hang.
    spec["s3_request_retries"] = {"max_retries": 8, "initial_delay": "250ms", "max_delay": "8s"}
    return spec


def _trust(bundle: str) -> None:
    """Has TensorStore check certificates against a PEM file. It has one setting for the whole process, which it reads
    from the environment once, at its first request."""
    now = os.environ.setdefault(_TRUSTED, bundle)
    if os.path.realpath(now) != bundle:
        raise StoreError(
            f"ca_bundle {bundle}: {_TRUSTED} is {now} in this process, and TensorStore takes one file for all stores; "
            "put all authorities into one file, and set AWS_CA_BUNDLE to it"
        )


def is_aws(endpoint: str | None) -> bool:
    """Whether the endpoint is Amazon's own; None is."""
    host = urllib.parse.urlsplit(endpoint).hostname or "" if endpoint else "amazonaws.com"
    return host.endswith(("amazonaws.com", "amazonaws.com.cn"))
