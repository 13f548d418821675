"""Object stores over the network: S3 and its compatibles for everything, other fsspec schemes for reading.

S3 goes through s3fs's event loop and client, with its listing cache off, but not through its verbs: they
retry a conditional create on their own and fold 412 and bad requests into one OSError. Here each attempt is
one request; what is idempotent is tried a few times, so that nothing hangs and errors name their remedy.
"""

import asyncio
import functools
import os
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, TypedDict, TypeVar

import aiohttp
import botocore.exceptions as boto
import botocore.session
import fsspec
import fsspec.asyn

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
FAILURES = (boto.BotoCoreError, boto.ClientError, aiohttp.ClientError, OSError, asyncio.TimeoutError)


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
    keys = [options.get(name) for name in ("access_key", "secret_key")]
    if (keys[0] is None) != (keys[1] is None) or ("session_token" in options and not keys[0]):
        raise StoreError(
            "storage_options: half of a key pair; give both access_key and secret_key, or neither"
        )
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
        import s3fs

        self._bucket, prefix = split_s3(url)
        self._start = f"{prefix}/" if prefix else ""
        self.url = f"s3://{self._bucket}/{prefix}".removesuffix("/")
        self._settings = settings = s3_settings(storage_options)
        self._pid = os.getpid()
        checks = "when_supported" if is_aws(settings["endpoint"]) else "when_required"
        style = "path" if settings["path_style"] else "virtual" if settings["endpoint"] else "auto"
        self._fs = s3fs.S3FileSystem(
            anon=settings["anonymous"],
            endpoint_url=settings["endpoint"],
            key=settings["access_key"],
            secret=settings["secret_key"],
            token=settings["session_token"],
            client_kwargs={"region_name": settings["region"]} if settings["region"] else {},
            config_kwargs={
                # Signed payloads: a server must refuse bytes that changed on the way to it.
                "s3": {"addressing_style": style, "payload_signing_enabled": True},
                "retries": {"mode": "standard", "total_max_attempts": 1},
                "connect_timeout": CONNECT_SECONDS,
                "read_timeout": READ_SECONDS,
                "request_checksum_calculation": checks,
                "response_checksum_validation": checks,
                "ignore_configured_endpoint_urls": True,  # s3_settings has read them
            },
            use_listings_cache=False,
            skip_instance_cache=True,
            **({"profile": settings["profile"]} if settings["profile"] else {}),
        )

    def get(self, key: str) -> bytes:
        async def request(s3: Any) -> bytes:
            answer = await s3.get_object(Bucket=self._bucket, Key=self._start + key)
            async with answer["Body"] as body:
                data: bytes = await body.read()
            return data

        return self._run(key, "read", request)

    def put(self, key: str, data: bytes) -> None:
        async def request(s3: Any) -> None:
            await s3.put_object(Bucket=self._bucket, Key=self._start + key, Body=data)

        self._run(key, "write", request)

    def create(self, key: str, data: bytes) -> bool:
        async def request(s3: Any) -> bool:
            try:
                await s3.put_object(Bucket=self._bucket, Key=self._start + key, Body=data, IfNoneMatch="*")
            except boto.ClientError as error:
                if _status(error) == 412:
                    return False
                raise
            return True

        return self._run(key, "create", request, again=lambda error: _status(error) == 409)

    def list(self, prefix: str = "") -> dict[str, int]:
        check_prefix(self.url, prefix)
        found: dict[str, int] = {}
        page: dict[str, str] = {}
        while True:

            async def request(s3: Any, page: dict[str, str] = page) -> Any:
                return await s3.list_objects_v2(Bucket=self._bucket, Prefix=self._start + prefix, **page)

            answer = self._run(prefix, "list", request)
            for item in answer.get("Contents", ()):
                found[item["Key"][len(self._start) :]] = item["Size"]
            if not answer.get("IsTruncated"):
                return {key: found[key] for key in sorted(found) if not key_fault(key)}
            page = {"ContinuationToken": answer["NextContinuationToken"]}

    def delete(self, keys: Iterable[str]) -> None:
        names = list(keys)
        for key in names:
            check_key(self.url, key)
        for first in range(0, len(names), 1000):
            objects = [{"Key": self._start + key} for key in names[first : first + 1000]]

            async def request(s3: Any, objects: Any = objects) -> Any:
                return await s3.delete_objects(
                    Bucket=self._bucket, Delete={"Objects": objects, "Quiet": True}
                )

            for fault in self._run("", "delete", request).get("Errors", ()):
                where = f"s3://{self._bucket}/{fault.get('Key')}"
                said = f"{fault.get('Code')}: {fault.get('Message')}"
                raise StoreError(f"{where}: cannot delete: {said}; check the policy, then delete again")

    def sync(self, prefix: str) -> None:
        check_prefix(self.url, prefix)

    def _run(
        self,
        key: str,
        doing: str,
        request: Callable[[Any], Awaitable[T]],
        again: Callable[[BaseException], bool] | None = None,
    ) -> T:
        """Make the request on s3fs's loop, and once more after each error that `again` lets pass."""
        if doing not in ("list", "delete"):
            check_key(self.url, key)
        where = f"{self.url}/{key}"
        if os.getpid() != self._pid:
            raise StoreError(f"{where}: opened before a fork; open the store again here, or spawn instead")

        async def attempts() -> T:
            for attempt in range(ATTEMPTS):
                if attempt:
                    await asyncio.sleep(FIRST_WAIT * 3 ** (attempt - 1))
                try:
                    return await request(await self._fs.set_session())
                except FAILURES as error:
                    if attempt + 1 == ATTEMPTS or not (again or _transient)(error):
                        raise self._explained(error, where, doing) from error
            raise AssertionError

        result: T = fsspec.asyn.sync(self._fs.loop, attempts)
        return result

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
            remedy = (
                f"check the keys or profile in use at {at}, and that they may Get, Put, List and Delete there"
            )
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

    def sync(self, prefix: str) -> None:
        check_prefix(self.url, prefix)

    def _call(self, key: str, doing: str, act: Callable[[], Any]) -> Any:
        where = f"{self.url}/{key}"
        try:
            return act()
        except FileNotFoundError as error:
            raise NotFound(f"{where}: not found; check the name, or list what is there") from error
        except Exception as error:  # each driver has its own kinds
            said = f"{type(error).__name__}: {error}"
            raise StoreError(
                f"{where}: cannot {doing}: {said}; check storage_options and the service"
            ) from error
