"""What to do about a store that refuses, by what it says: the same words for both ways to it, the object verbs and
TensorStore."""

import errno
import re
from collections.abc import Mapping
from typing import Any

BUSY_CODES = {"SlowDown", "Throttling", "ThrottlingException", "RequestLimitExceeded", "TooManyRequests"}
EXPIRED_CODES = {"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired"}
FULL_CODES = {"QuotaExceeded", "XMinioStorageFull", "XMinioAdminBucketQuotaExceeded", "InsufficientStorage"}
BUCKET_CODES = {"NoSuchBucket", "InvalidBucketName"}
CERTIFICATE = "give its authority's certificates, a PEM file, as storage_options ca_bundle or AWS_CA_BUNDLE"
OLDER = "restore the file, or load an older step"
SIGN_IN = "sign in again where the keys come from"
KEYS = "give access_key and secret_key, profile or anonymous=True, or set AWS_ACCESS_KEY_ID"

_FILE = {
    errno.ENOSPC: "free some space there",
    errno.EDQUOT: "raise the quota or free some space there",
    errno.EACCES: "check who owns it and its permissions",
    errno.EPERM: "check who owns it and its permissions",
    errno.EROFS: "mount it writable",
    errno.EFBIG: "raise the largest size of a file (ulimit -f)",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ENFILE: "raise this machine's limit of open files (fs.file-max)",
    errno.EIO: "the device or its server fails: check it",
    errno.ESTALE: "the server has another file system there now: mount it again",
    errno.ENAMETOOLONG: "use a shorter name",
    errno.ENOTDIR: "a file stands where a folder is needed: move it away",
    errno.EISDIR: "a folder stands where a file is needed: move it away",
}
_CURL_CERTIFICATE = {"35", "60", "77"}  # CURLE_SSL_CONNECT_ERROR, _PEER_FAILED_VERIFICATION, _SSL_CACERT_BADFILE


def file_remedy(number: int | None) -> str:
    """For an `errno` of a file system."""
    return _FILE.get(number or 0, "check the file system and its mount")


def s3_remedy(code: str, status: int, at: str, bucket: str, region: str | None) -> str:
    """For an error code and an HTTP status of an S3 server; empty and 0 where there was no answer. at: the server."""
    if code in BUCKET_CODES:
        return f"create the bucket {bucket}, or correct the URL or the endpoint ({at})"
    if code in EXPIRED_CODES:
        return "renew the credentials where they come from, or start again with new ones"
    if code in FULL_CODES or status == 507:
        return f"free some space at {at}, or raise the quota"
    if code == "RequestTimeTooSkewed":
        return "set the clock of this machine"
    if status in (429, 503) or code in BUSY_CODES:
        return f"{at} is too busy: lower its load, or ask for a higher request rate, then try again"
    if status in (401, 403):
        return f"check the keys or profile in use at {at}, and that they may Get, Put, List and Delete there"
    if status in (301, 307) or code == "AuthorizationHeaderMalformed":
        return f"set the bucket's own region (now {region}) or endpoint"
    if status == 501:
        return f"{at} lacks this operation: use a store that has it"
    return f"check that {at} is the right endpoint and up, then try again"


def said(error: BaseException) -> str:
    """The words of an error of TensorStore, in one line."""
    text = str(error).split(" [source locations")[0]
    return " ".join(re.split(r" \[[a-z_-]+=['\"]", text)[0].split(" [tensorstore_spec")[0].split())


def is_refusal(error: BaseException) -> bool:
    """Whether TensorStore failed because an S3 server refused, whatever it calls that: expired keys are
    INVALID_ARGUMENT, a bucket that is not there NOT_FOUND."""
    status = re.search(r"\[http_response_code='(\d+)'\]", str(error))
    return status is not None and (status[1] != "404" or any(f"<Code>{c}<" in str(error) for c in BUCKET_CODES))


def explained(error: BaseException, kvstore: Mapping[str, Any]) -> str:
    """What an error of TensorStore says, in one line without the bodies that servers send, and the remedy.

    kvstore: the root as `kvstore_spec` gives it. TensorStore puts what it knows after the words, each as
    `[name='value']`, and nowhere else."""
    text, words = str(error), said(error)
    known = dict(re.findall(r"\[([a-z_-]+)=['\"](.*?)['\"]\]", text, re.DOTALL))
    if kvstore["driver"] != "s3":
        number = int(known.get("os_error_code", 0))
        return f"{words}; {file_remedy(number)}"
    at = kvstore.get("endpoint") or "Amazon S3"
    if known.get("curl_code") in _CURL_CERTIFICATE:
        return f"{words}; {CERTIFICATE}, and before this process's first request to any store"
    code = re.search(r"<Code>(\w+)</Code>", text) or re.search(r"(?:^|: )([A-Z]\w*[a-z]\w*): ", words)
    status = int(known.get("http_response_code", 0))
    if status in (401, 403) and kvstore.get("aws_credentials") == {"type": "default"}:  # it may have found none
        return (
            f"{words} (HTTP {status}); {KEYS}: TensorStore finds keys in the environment, files and AWS machines only"
        )
    remedy = s3_remedy(code[1] if code else "", status, at, kvstore["bucket"], kvstore.get("aws_region"))
    return f"{words}{f' (HTTP {status})' if status else ''}; {remedy}"
