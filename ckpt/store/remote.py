"""Object stores over the network: S3 and its compatibles for everything, other fsspec schemes for reading.

S3 goes through a plain botocore client and not through s3fs. A conditional create must be sent exactly once:
s3fs repeats it, and beneath s3fs aiohttp sends a PUT again on its own when the connection drops, and then a
create that has won reads 412 and takes its own record for another's. Here one attempt is one request; what is
idempotent is tried a few times, so that nothing hangs and every error names its remedy.
"""

import contextlib
import functools
import os
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, TypedDict, TypeVar

import botocore
import botocore.config
import botocore.exceptions as boto
import botocore.session
import fsspec

from ckpt.errors import StoreError
from ckpt.store.objects import (
    NotFound,
    Options,
    check_key,
    check_prefix,
    is_aws,
    key_fault,
    split_s3,
    split_url,
)

T = TypeVar("T")

ATTEMPTS = 4
FIRST_WAIT = 0.2
CONNECT_SECONDS = 3
READ_SECONDS = 30
TRANSIENT_CODES = {"SlowDown", "RequestTimeout", "Throttling", "ThrottlingException", "RequestLimitExceeded"}
FAILURES = (boto.BotoCoreError, boto.ClientError, OSError)


class S3Settings(TypedDict):
    """Where and as whom to speak S3. Keys are set only if given explicitly: else the AWS chain finds them."""

    endpoint: str | None
    region: str | None
    access_key: str | None
    secret_key: str | None
    session_token: str | None
    profile: str | None
    anonymous: bool
    path_style: bool


def s3_settings(storage_options: Options = None) -> S3Settings:
    """Resolve the options `endpoint region access_key secret_key session_token profile anonymous path_style`.

    Absent, the endpoint and region come from AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL, AWS_REGION,
    AWS_DEFAULT_REGION, then the profile's configuration. Pure but for reading those.
    """
    options = {key: value for key, value in (storage_options or {}).items() if value is not None}
    unknown = sorted(set(options) - S3Settings.__annotations__.keys())
    if unknown:
        known = ", ".join(S3Settings.__annotations__)
        raise StoreError(f"storage_options: {', '.join(unknown)} not known for s3://; use {known}")
    for name, value in options.items():
        kind = bool if name in ("anonymous", "path_style") else str
        if not isinstance(value, kind):
            raise StoreError(f"storage_options: {name} is a {type(value).__name__}; give a {kind.__name__}")
    keys = [options.get(name) for name in ("access_key", "secret_key")]
    if (keys[0] is None) != (keys[1] is None) or ("session_token" in options and not keys[0]):
        raise StoreError("storage_options: half of a key pair; give both access_key and secret_key, or neither")
    if sum((keys[0] is not None, "profile" in options, bool(options.get("anonymous")))) > 1:
        raise StoreError("storage_options: access_key, profile and anonymous exclude each other; give one")
    endpoint, region = options.get("endpoint"), options.get("region")
    region = region or os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    ignored = os.environ.get("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", "").lower() == "true"
    if not endpoint and not ignored:
        endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    if not endpoint or not region:
        try:
            session = botocore.session.Session(profile=options.get("profile"))
            configured = session.get_scoped_config()
            services = session.full_config.get("services", {}).get(configured.get("services"), {})
        except boto.BotoCoreError as error:
            raise StoreError(f"AWS configuration: {error}; fix ~/.aws/config or AWS_PROFILE") from error
        region = region or configured.get("region")
        if not endpoint and not ignored:
            endpoint = services.get("s3", {}).get("endpoint_url") or configured.get("endpoint_url")
    if endpoint and not endpoint.startswith(("http://", "https://")):
        raise StoreError(f"{endpoint}: not an S3 endpoint; it starts with http:// or https://")
    return S3Settings(
        endpoint=endpoint.rstrip("/") if endpoint else None,
        region=region or ("us-east-1" if endpoint else None),
        access_key=keys[0],
        secret_key=keys[1],
        session_token=options.get("session_token"),
        profile=options.get("profile"),
        anonymous=bool(options.get("anonymous", False)),
        path_style=bool(options.get("path_style", endpoint is not None and not is_aws(endpoint))),
    )


class S3Store:
    """See `ObjectStore`. Any thread may call; after a fork every verb raises."""

    def __init__(self, url: str, storage_options: Options = None) -> None:
        self._bucket, prefix = split_s3(url)
        self._start = f"{prefix}/" if prefix else ""
        self.url = f"s3://{self._bucket}/{prefix}".removesuffix("/")
        self._settings = s3_settings(storage_options)
        self._pid = os.getpid()
        self._client: Any = None
        self._lock = threading.Lock()

    def get(self, key: str) -> bytes:
        check_key(self.url, key)

        def request(s3: Any) -> bytes:
            with contextlib.closing(s3.get_object(Bucket=self._bucket, Key=self._start + key)["Body"]) as body:
                data: bytes = body.read()
            return data

        return self._run(key, "read", request)

    def put(self, key: str, data: bytes) -> None:
        check_key(self.url, key)
        name = {"Bucket": self._bucket, "Key": self._start + key}
        self._run(key, "write", lambda s3: s3.put_object(**name, Body=data))

    def create(self, key: str, data: bytes) -> bool:
        check_key(self.url, key)
        name = {"Bucket": self._bucket, "Key": self._start + key}

        def request(s3: Any) -> bool:
            try:
                s3.put_object(**name, Body=data, IfNoneMatch="*")
            except boto.ClientError as error:
                if _status(error) == 412:
                    return False
                raise
            return True

        return self._run(key, "create", request, again=lambda error: _status(error) == 409)

    def list(self, prefix: str = "") -> dict[str, int]:
        check_prefix(self.url, prefix)
        found: dict[str, int] = {}
        where = {"Bucket": self._bucket, "Prefix": self._start + prefix}
        while True:
            page = self._run(prefix, "list", lambda s3: s3.list_objects_v2(**where))
            for item in page.get("Contents", ()):
                found[item["Key"][len(self._start) :]] = item["Size"]
            if not page.get("IsTruncated"):
                return {key: found[key] for key in sorted(found) if not key_fault(key)}
            where["ContinuationToken"] = page["NextContinuationToken"]

    def delete(self, keys: Iterable[str]) -> None:
        names = list(keys)
        for key in names:
            check_key(self.url, key)
        for first in range(0, len(names), 1000):
            objects = [{"Key": self._start + key} for key in names[first : first + 1000]]

            what = {"Objects": objects, "Quiet": True}
            request = functools.partial(_delete, bucket=self._bucket, what=what)
            for fault in self._run("", "delete", request).get("Errors", ()):
                where = f"s3://{self._bucket}/{fault.get('Key')}"
                said = f"{fault.get('Code')}: {fault.get('Message')}"
                raise StoreError(f"{where}: cannot delete: {said}; check the policy, then delete again")

    def sync(self, *prefixes: str) -> None:
        for prefix in prefixes:
            check_prefix(self.url, prefix)

    def _run(
        self,
        key: str,
        doing: str,
        request: Callable[[Any], T],
        again: Callable[[BaseException], bool] | None = None,
    ) -> T:
        """Make the request, and once more after each error that `again` lets pass."""
        where = f"{self.url}/{key}"
        if os.getpid() != self._pid:
            raise StoreError(f"{where}: opened before a fork; open the store again here, or spawn instead")
        for attempt in range(ATTEMPTS):
            if attempt:
                time.sleep(FIRST_WAIT * 3 ** (attempt - 1))
            try:
                return request(self._connected())
            except FAILURES as error:
                if attempt + 1 == ATTEMPTS or not (again or _transient)(error):
                    raise self._explained(error, where, doing) from error
        raise AssertionError

    def _connected(self) -> Any:
        """The client, made when first needed: looking for credentials may use the network."""
        settings = self._settings
        checks = "when_supported" if is_aws(settings["endpoint"]) else "when_required"
        style = "path" if settings["path_style"] else "virtual" if settings["endpoint"] else "auto"
        with self._lock:
            if self._client is None:
                config = botocore.config.Config(
                    # Signed payloads: a server must refuse bytes that changed on the way to it.
                    s3={"addressing_style": style, "payload_signing_enabled": True},
                    signature_version=botocore.UNSIGNED if settings["anonymous"] else None,
                    retries={"mode": "standard", "total_max_attempts": 1},
                    connect_timeout=CONNECT_SECONDS,
                    read_timeout=READ_SECONDS,
                    max_pool_connections=32,
                    tcp_keepalive=True,
                    request_checksum_calculation=checks,
                    response_checksum_validation=checks,
                    ignore_configured_endpoint_urls=True,  # s3_settings has read them
                )
                self._client = botocore.session.Session(profile=settings["profile"]).create_client(
                    "s3",
                    region_name=settings["region"],
                    endpoint_url=settings["endpoint"],
                    aws_access_key_id=settings["access_key"],
                    aws_secret_access_key=settings["secret_key"],
                    aws_session_token=settings["session_token"],
                    config=config,
                )
            return self._client

    def _explained(self, error: BaseException, where: str, doing: str) -> StoreError:
        at = self._settings["endpoint"] or "Amazon S3"
        code, said = "", f"{type(error).__name__}: {error}"
        if isinstance(error, boto.ClientError):
            code = str(error.response.get("Error", {}).get("Code", ""))
            said = f"{code}: {error.response.get('Error', {}).get('Message', '')} (HTTP {_status(error)})"
        if doing == "read" and (code == "NoSuchKey"):
            return NotFound(f"{where}: not found; check the name, or list what is there")
        if code == "NoSuchBucket":
            remedy = f"create the bucket {self._bucket}, or correct the URL or the endpoint ({at})"
        elif _status(error) in (401, 403):
            remedy = f"check the keys or profile in use at {at}, and that they may Get, Put, List and Delete there"
        elif _status(error) in (301, 307) or code == "AuthorizationHeaderMalformed":
            remedy = f"set the bucket's own region (now {self._settings['region']}) or endpoint"
        elif _status(error) == 501:
            remedy = f"{at} lacks this operation: use a store that has it"
        elif isinstance(error, (boto.NoCredentialsError, boto.PartialCredentialsError)):
            remedy = "give access_key and secret_key, profile or anonymous=True, or set AWS_ACCESS_KEY_ID"
        else:
            remedy = f"check that {at} is the right endpoint and up, then try again"
        unknown = (
            "; it may have happened: read it back"
            if doing == "create" and _status(error) not in range(400, 500)
            else ""
        )
        return StoreError(f"{where}: cannot {doing}: {said}; {remedy}{unknown}")


def _delete(s3: Any, bucket: str, what: dict[str, Any]) -> Any:
    return s3.delete_objects(Bucket=bucket, Delete=what)


def _status(error: BaseException) -> int:
    if not isinstance(error, boto.ClientError):
        return 0
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def _transient(error: BaseException) -> bool:
    """Whether the same request may do better a moment later."""
    if isinstance(error, boto.ClientError):
        busy = _status(error) == 429 or (_status(error) >= 500 and _status(error) != 501)
        return busy or error.response.get("Error", {}).get("Code") in TRANSIENT_CODES
    lasting = (boto.NoCredentialsError, boto.PartialCredentialsError, boto.ParamValidationError)
    return not isinstance(error, lasting)


class FsspecStore:
    """Any other scheme of fsspec, with `storage_options` as its driver wants them: all but `create`."""

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
