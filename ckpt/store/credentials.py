"""The keys of S3 that TensorStore takes.

TensorStore knows keys in the environment, in the files of AWS, and of AWS machines. Whatever else botocore knows (a
role that is taken on, single sign-on, a web identity, a program that prints keys) is handed over through a nameless
file in memory. TensorStore reads such a file once, when it opens a store, so keys that botocore has renewed go into
another file, and from there to the stores that are opened from then on.
"""

import contextlib
import functools
import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import botocore.exceptions as boto
import botocore.session

from ckpt.errors import StoreError
from ckpt.store.remedies import SIGN_IN

if TYPE_CHECKING:
    from ckpt.store.remote import S3Settings

_RENEWED_THERE = ("iam-role", "container-role")  # botocore's names of what TensorStore finds and renews by itself
_IN_FILES = ("shared-credentials-file", "config-file")  # and of keys in the files of AWS
_issuers: dict[str, Any] = {}  # botocore's credentials that renew themselves, by the file that their keys were put into


# What botocore raises where a source of keys fails; the last for keys that are expired when they are new.
NOT_RENEWED = (boto.CredentialRetrievalError, RuntimeError)


@contextlib.contextmanager
def aws_configuration() -> Iterator[None]:
    """Raises StoreError for what botocore finds wrong with the files and variables of AWS, or with keys."""
    try:
        yield
    except (boto.BotoCoreError, RuntimeError) as error:
        said = " ".join(str(error).split())
        raise StoreError(f"AWS configuration: {said}; fix ~/.aws/config or AWS_PROFILE, or {SIGN_IN}") from error


def kvstore_credentials(settings: "S3Settings") -> dict[str, str]:
    """TensorStore's `aws_credentials` for these settings, for use in this process. May use the network."""
    if settings["anonymous"]:
        return {"type": "anonymous"}
    access, secret, token = settings["access_key"], settings["secret_key"], settings["session_token"]
    if access is None or secret is None:
        return _of_chain(settings["profile"])
    names = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
    if (access, secret, token) == tuple(os.environ.get(name) or None for name in names):
        return {"type": "environment"}
    return _handed(access, secret, token)


def _of_chain(profile: str | None) -> dict[str, str]:
    """The keys that botocore would use, so that both ways to a store go as the same identity."""
    with aws_configuration():
        session = botocore.session.Session(profile=profile)
        found = session.get_credentials()
        if found is None and profile:
            raise StoreError(f"storage_options: profile {profile} gives no keys; correct it in ~/.aws/config")
        if found is None or found.method in _RENEWED_THERE:
            return {"type": "default"}
        if found.method == "env":
            return {"type": "environment"}
        if found.method in _IN_FILES:
            return _profile_files(session)
        keys = found.get_frozen_credentials()
    handed = _handed(*keys[:3])
    _issuers[handed["credentials_file"]] = found
    return handed


def _profile_files(session: Any) -> dict[str, str]:
    """For a profile whose keys are in the AWS files.

    Names the files, because TensorStore's own search fails whatever HOME and the AWS variables say.
    """
    found = {kind: session.get_config_variable(kind) for kind in ("credentials_file", "config_file")}
    paths = {kind: os.path.expanduser(path or "") for kind, path in found.items()}
    return {
        "type": "profile",
        "profile": session.profile or "default",
        **{kind: path if os.path.isfile(path) else os.devnull for kind, path in paths.items()},
    }


def with_current_keys(kvstore: Mapping[str, Any]) -> dict[str, Any]:
    """TensorStore's description of a root, with the keys that botocore has now if they were botocore's. To be called
    where a store is opened. May use the network, shortly before keys expire. Raises StoreError where they cannot be
    renewed."""
    issuer = _issuers.get(kvstore.get("aws_credentials", {}).get("credentials_file", ""))
    if issuer is None:
        return dict(kvstore)
    with aws_configuration():
        keys = issuer.get_frozen_credentials()
    handed = _handed(*keys[:3])
    _issuers[handed["credentials_file"]] = issuer
    return {**kvstore, "aws_credentials": handed}


def _handed(access: str, secret: str, token: str | None) -> dict[str, str]:
    if not hasattr(os, "memfd_create"):
        raise StoreError(
            "storage_options: on this system TensorStore takes keys only from the environment or a file of AWS; "
            "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (and AWS_SESSION_TOKEN) to the same values"
        )
    # Always with an empty config file: where there is no HOME the driver fails to find its default one.
    path = f"/proc/self/fd/{_credentials_file(access, secret, token)}"
    return {"type": "profile", "profile": "ckpt", "credentials_file": path, "config_file": os.devnull}


@functools.cache  # one descriptor for each set of keys, open as long as the process
def _credentials_file(access: str, secret: str, token: str | None) -> int:
    fields = {"aws_access_key_id": access, "aws_secret_access_key": secret}
    if token is not None:
        fields["aws_session_token"] = token
    if any(value.split() != [value] for value in fields.values()):
        raise StoreError("storage_options: a key is empty or holds white space; give it as it was issued")
    handle = os.memfd_create("ckpt-credentials")
    os.write(handle, "\n".join(["[ckpt]", *(f"{name} = {value}" for name, value in fields.items()), ""]).encode())
    return handle
