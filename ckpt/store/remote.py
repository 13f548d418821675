"""The object store on S3 and its compatibles.

S3 goes through a plain botocore client and not through s3fs. s3fs repeats a conditional create, and beneath s3fs
aiohttp sends a PUT again on its own when the connection drops, and then a create that has won reads 412 and takes its
own record for another's. Here one attempt is one request, all attempts are made by `S3Store._run`, and a create whose
answer was lost is read back before it is sent again. Every wait is bounded, and every error names its remedy.
"""

import contextlib
import functools
import os
import random
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypedDict, TypeVar

import botocore
import botocore.config
import botocore.exceptions as boto
import botocore.parsers
import botocore.session
from urllib3.exceptions import HTTPError

from ckpt.errors import StoreError
from ckpt.store.credentials import NOT_RENEWED, aws_configuration
from ckpt.store.objects import (
    NotFound,
    Options,
    check_key,
    check_prefix,
    is_aws,
    key_fault,
    split_s3,
)
from ckpt.store.remedies import BUSY_CODES, CERTIFICATE, EXPIRED_CODES, FULL_CODES, KEYS, SIGN_IN, s3_remedy

T = TypeVar("T")

ATTEMPTS = 4
PATIENCE = 60.0  # seconds after which nothing is tried again; so long a server is asked that says that it is busy
FIRST_WAIT, LONGEST_WAIT = 0.2, 5.0  # seconds; each wait is twice the one before, and then shortened at random
CONNECT_SECONDS = 3
READ_SECONDS = 20
DAMAGED_CODES = {"RequestTimeout", "IncompleteBody", "BadDigest", "XAmzContentSHA256Mismatch"}  # on the way there
# botocore lets through what its parsers and, in the middle of a body, urllib3 raise.
FAILURES = (
    boto.BotoCoreError,
    boto.ClientError,
    botocore.parsers.ResponseParserError,
    HTTPError,
    OSError,
    *NOT_RENEWED,
)
NO_KEYS = (boto.NoCredentialsError, boto.PartialCredentialsError)


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
    ca_bundle: str | None


def s3_settings(storage_options: Options = None) -> S3Settings:
    """Resolve the options `endpoint region access_key secret_key session_token profile anonymous path_style
    ca_bundle`.

    Absent, the endpoint and region come from AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL, AWS_REGION,
    AWS_DEFAULT_REGION, then the profile's configuration, and the file of trusted authorities, ca_bundle, from
    AWS_CA_BUNDLE or the profile. Pure but for reading those.
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
        with aws_configuration():
            session = botocore.session.Session(profile=options.get("profile"))
            configured = session.get_scoped_config()
            services = session.full_config.get("services", {}).get(configured.get("services"), {})
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
        ca_bundle=_ca_bundle(options),
    )


def _ca_bundle(options: Mapping[str, Any]) -> str | None:
    """The PEM file of authorities that servers' certificates are checked against; None for those of the system."""
    found: str | None = options.get("ca_bundle")
    if not found:
        with aws_configuration():
            found = botocore.session.Session(profile=options.get("profile")).get_config_variable("ca_bundle")
    if not found:
        return None
    path: str = os.path.realpath(os.path.expanduser(found))
    if not os.path.isfile(path):
        raise StoreError(f"{found}: no such file of trusted authorities; correct ca_bundle or AWS_CA_BUNDLE")
    return path


class S3Store:
    """See `ObjectStore`. Any thread may call; after a fork every verb raises."""

    blanks = True

    def __init__(self, url: str, storage_options: Options = None) -> None:
        self._bucket, prefix = split_s3(url)
        self._start = f"{prefix}/" if prefix else ""
        self.url = f"s3://{self._bucket}/{prefix}".removesuffix("/")
        self._settings = s3_settings(storage_options)
        self._pid = os.getpid()
        self._client: Any = None
        self._keys: tuple[str, ...] = ()  # in use, where the AWS chain gave them
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
        sent = False  # whether an earlier request may have done it, or may do it yet

        def request(s3: Any) -> bool:
            nonlocal sent
            if sent and (found := _found(s3, name)) is not None:
                return found == data
            before, sent = sent, True
            try:
                s3.put_object(**name, Body=data, IfNoneMatch="*")
            except boto.ClientError as error:
                if _status(error) == 412 and (found := _found(s3, name)) is not None:
                    return found == data  # perhaps our own: a request may arrive twice
                if _status(error) < 500 and _status(error) != 412:  # refused, so nothing was done
                    sent = before
                raise
            return True

        return self._run(key, "create", request)

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

    def _run(self, key: str, doing: str, request: Callable[[Any], T]) -> T:
        """Makes the request, and again after each error that may pass. Waits without touching Python's own random
        stream, which is part of the trainer's state."""
        where = f"{self.url}/{key}"
        if os.getpid() != self._pid:
            raise StoreError(f"{where}: opened before a fork; open the store again here, or spawn instead")
        began, attempt = time.monotonic(), 1
        while True:
            try:
                return request(self._connected())
            except FAILURES as error:
                expired = _code(error) in EXPIRED_CODES and self._renewed()
                lasting = not (expired or _busy(error) or (_transient(error) and attempt < ATTEMPTS))
                if lasting or time.monotonic() - began > PATIENCE:
                    raise self._explained(error, where, doing) from error
            wait = min(LONGEST_WAIT, FIRST_WAIT * 2 ** (attempt - 1))
            time.sleep(wait * random.SystemRandom().uniform(0.5, 1.0))
            attempt += 1

    def _renewed(self) -> bool:
        """Whether the AWS chain has other credentials than those in use, which have expired; if so they are used."""
        if self._settings["access_key"]:
            return False
        with aws_configuration():
            now = _chain(botocore.session.Session(profile=self._settings["profile"]))
        with self._lock:
            if now == self._keys:
                return False
            self._client = None
        return True

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
                session = botocore.session.Session(profile=settings["profile"])
                if not settings["access_key"] and not settings["anonymous"]:
                    self._keys = _chain(session)
                self._client = session.create_client(
                    "s3",
                    region_name=settings["region"],
                    endpoint_url=settings["endpoint"],
                    verify=settings["ca_bundle"],
                    aws_access_key_id=settings["access_key"],
                    aws_secret_access_key=settings["secret_key"],
                    aws_session_token=settings["session_token"],
                    config=config,
                )
            return self._client

    def _explained(self, error: BaseException, where: str, doing: str) -> StoreError:
        at = self._settings["endpoint"] or "Amazon S3"
        code, status, said = _code(error), _status(error), f"{type(error).__name__}: {' '.join(str(error).split())}"
        if isinstance(error, boto.ClientError):
            said = f"{code}: {error.response.get('Error', {}).get('Message', '')} (HTTP {status})"
        if doing == "read" and code == "NoSuchKey":
            return NotFound(f"{where}: not found; check the name, or list what is there")
        if isinstance(error, boto.ParamValidationError):
            code = "InvalidBucketName"
        if isinstance(error, boto.SSLError):
            remedy = CERTIFICATE
        elif isinstance(error, NOT_RENEWED):
            remedy = SIGN_IN
        elif isinstance(error, NO_KEYS):
            remedy = KEYS
        else:
            remedy = s3_remedy(code, status, at, self._bucket, self._settings["region"])
        unknown = "; it may have happened: read it back" if doing == "create" and status not in range(400, 500) else ""
        return StoreError(f"{where}: cannot {doing}: {said}; {remedy}{unknown}")


def _delete(s3: Any, bucket: str, what: dict[str, Any]) -> Any:
    return s3.delete_objects(Bucket=bucket, Delete=what)


def _found(s3: Any, name: dict[str, str]) -> bytes | None:
    """What is stored under this bucket and key, if anything."""
    try:
        with contextlib.closing(s3.get_object(**name)["Body"]) as body:
            data: bytes = body.read()
    except boto.ClientError as error:
        if _code(error) == "NoSuchKey":
            return None
        raise
    return data


def _chain(session: Any) -> tuple[str, ...]:
    """The keys that the AWS chain gives a new session, or nothing."""
    found = session.get_credentials()
    return () if found is None else tuple(found.get_frozen_credentials())


def _code(error: BaseException) -> str:
    return str(error.response.get("Error", {}).get("Code", "")) if isinstance(error, boto.ClientError) else ""


def _status(error: BaseException) -> int:
    if not isinstance(error, boto.ClientError):
        return 0
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def _busy(error: BaseException) -> bool:
    """Whether the server asks for the same request later."""
    return _status(error) in (429, 503) or _code(error) in BUSY_CODES


def _transient(error: BaseException) -> bool:
    """Whether the same request may do better a moment later."""
    if isinstance(error, boto.ClientError):
        if _code(error) in FULL_CODES or _status(error) in (501, 507):
            return False
        if _code(error).isdigit():  # no error document of S3: a gateway's answer, or cut short
            return True
        # 412 comes here where nothing was found: the object that was in the way is still being written.
        return _status(error) in (409, 412, 429) or _status(error) >= 500 or _code(error) in DAMAGED_CODES
    return not isinstance(error, (*NOT_RENEWED, *NO_KEYS, boto.ParamValidationError))
