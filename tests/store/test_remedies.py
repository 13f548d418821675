"""What TensorStore says, as it says it, becomes one line with the remedy."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore as ts

from ckpt.errors import CorruptCheckpoint, StoreError
from ckpt.geometry import Catalogue, TensorSpec
from ckpt.store.arrays import Arrays, context
from ckpt.store.objects import kvstore_spec
from ckpt.store.remedies import explained
from ckpt.store.shards import RemoteRead

S3 = {"driver": "s3", "bucket": "runs", "endpoint": "https://s3.lab", "aws_credentials": {"type": "environment"}}
BODY = "<?xml version=\\'1.0\\'?><Error><Code>{0}</Code><Message>told</Message></Error>"


@pytest.mark.parametrize(
    ("said", "kvstore", "expected"),
    [
        (
            "PERMISSION_DENIED: AccessDenied: Access Denied. [http_response_body='"
            + BODY.format("AccessDenied")
            + "'] [x-amzn-requestid='18ED'] [http_response_code='403'] [source locations='x.cc:1']",
            S3,
            "PERMISSION_DENIED: AccessDenied: Access Denied. (HTTP 403); check the keys or profile in use at "
            "https://s3.lab, and that they may Get, Put, List and Delete there",
        ),
        (
            "ExpiredToken: Old [http_response_code='400'] [http_response_body='" + BODY.format("ExpiredToken") + "']",
            S3,
            "ExpiredToken: Old (HTTP 400); renew the credentials where they come from, or start again with new ones",
        ),
        (
            "ABORTED: All 8 retry attempts failed: CURL error Could not connect to server: Failed to connect to s3.lab "
            "port 443 after 0 ms: Could not connect to server [curl_code='7']",
            S3,
            "ABORTED: All 8 retry attempts failed: CURL error Could not connect to server: Failed to connect to s3.lab "
            "port 443 after 0 ms: Could not connect to server; check that https://s3.lab is the right endpoint and up, "
            "then try again",
        ),
        (
            "UNKNOWN: CURL error SSL peer certificate or SSH remote key was not OK: SSL certificate OpenSSL verify "
            "result: unable to get local issuer certificate (20) [curl_code='60']",
            S3,
            "UNKNOWN: CURL error SSL peer certificate or SSH remote key was not OK: SSL certificate OpenSSL verify "
            "result: unable to get local issuer certificate (20); give its authority's certificates, a PEM file, as "
            "storage_options ca_bundle or AWS_CA_BUNDLE, and before this process's first request to any store",
        ),
        (
            'RESOURCE_EXHAUSTED: Failed writing: "/r/y.__lock": Failed to write 5 bytes to file 20: No space left on '
            "device [os_error_code='28']",
            {"driver": "file", "path": "/r/"},
            'RESOURCE_EXHAUSTED: Failed writing: "/r/y.__lock": Failed to write 5 bytes to file 20: No space left on '
            "device; free some space there",
        ),
        (
            "INTERNAL: something else",
            {"driver": "file", "path": "/r/"},
            "INTERNAL: something else; check the file system and its mount",
        ),
    ],
)
def test_one_line_with_the_remedy(said: str, kvstore: dict[str, object], expected: str) -> None:
    assert explained(ValueError(said), kvstore) == expected


def test_keys_that_tensorstore_may_not_have_found() -> None:
    said = "PERMISSION_DENIED: AccessDenied: Access Denied. [http_response_code='403']"
    assert "give access_key and secret_key" in explained(
        ValueError(said), S3 | {"aws_credentials": {"type": "default"}}
    )


CATALOGUE = Catalogue.of([TensorSpec("w", (300, 300), "float32", 4)])


@pytest.mark.parametrize(
    ("said", "kind", "expected"),
    [
        (
            "INVALID_ARGUMENT: ExpiredToken: Old [http_response_code='400'] [http_response_body='"
            + BODY.format("ExpiredToken")
            + "']",
            StoreError,
            "here: reading failed: INVALID_ARGUMENT: ExpiredToken: Old (HTTP 400); renew the credentials",
        ),
        (
            "NOT_FOUND: NoSuchBucket: none [http_response_code='404'] [http_response_body='"
            + BODY.format("NoSuchBucket")
            + "']",
            StoreError,
            "here: reading failed: NOT_FOUND: NoSuchBucket: none (HTTP 404); create the bucket runs, or correct",
        ),
        (
            "NOT_FOUND: Error reading w/c/0/0: chunk is missing [source locations='x.cc:1']",
            CorruptCheckpoint,
            "here: a stored chunk is missing or damaged: NOT_FOUND: Error reading w/c/0/0: chunk is missing; restore "
            "the file, or load an older step",
        ),
        (
            "DATA_LOSS: Digest mismatch [source locations='x.cc:1']",
            CorruptCheckpoint,
            "here: a stored chunk is missing or damaged: DATA_LOSS: Digest mismatch; restore the file",
        ),
    ],
)
def test_a_store_that_refuses_is_no_damage(said: str, kind: type[Exception], expected: str) -> None:
    error = Arrays(S3, "state/", CATALOGUE, context(1)).read_error(ValueError(said), "here")
    assert type(error) is kind and str(error).startswith(expected)


def test_what_real_reads_say(tmp_path: Path) -> None:
    """A part of an object through TensorStore, and whole ones through either reader: missing, or out of reach."""
    arrays = Arrays(kvstore_spec(str(tmp_path)), "state/", CATALOGUE, context(1))
    array = CATALOGUE.arrays[0]
    into, cell = np.empty((300, 300), "u4"), array.grid.cell_box((0, 0))

    def part() -> Exception:
        with pytest.raises(Exception, match="chunk") as raised:
            arrays.handle(0)[:3].read().result()
        return arrays.read_error(raised.value, "here")

    assert isinstance(part(), CorruptCheckpoint)
    with pytest.raises(CorruptCheckpoint, match="there is no such object"):
        arrays.read_object(0, (0, 0)).decode(array.grid, cell, into)
    nobody: dict[str, Any] = {"driver": "s3", "bucket": "runs", "endpoint": "http://127.0.0.1:9", "aws_region": "x"}
    nobody |= {"aws_credentials": {"type": "anonymous"}, "s3_request_retries": {"max_retries": 1}}
    remote = RemoteRead(ts.KvStore.open(nobody).result(), "w", lambda error: explained(error, nobody))
    with pytest.raises(StoreError, match=r"cannot read: .*; check that http://127.0.0.1:9 is the right end") as error:
        remote.decode(array.grid, cell, into)
    assert "source locations" not in str(error.value)
