"""Keys that botocore gets from elsewhere and renews serve TensorStore too."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from uuid import uuid4

import pytest
import torch

import ckpt
from ckpt.store.objects import kvstore_spec
from tests.support.fault_proxy import FaultProxy, Request, answer
from tests.support.s3 import S3Server

pytestmark = pytest.mark.s3

Issue = Callable[[str, str, int], None]


@pytest.fixture
def issue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Issue:
    """Has the program of the profile `work` print these keys from now on, good for some seconds from each time that it
    is asked. The environment has no others."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    (tmp_path / "config").write_text(f"[profile work]\ncredential_process = sh {tmp_path}/sign-in\n")

    def give(key: str, secret: str, seconds: int) -> None:
        until = f'$(date -u -d "{seconds} seconds" +%Y-%m-%dT%H:%M:%SZ)'
        keys = {
            "Version": 1,
            "AccessKeyId": key,
            "SecretAccessKey": secret,
            "SessionToken": None,
            "Expiration": "UNTIL",
        }
        (tmp_path / "sign-in").write_text(f"cat <<END\n{json.dumps(keys).replace('UNTIL', until)}\nEND\n")

    return give


def signed_by(key: str) -> Callable[[Request], bool]:
    return lambda request: request.access_key == key


@pytest.mark.parametrize("how", ["profile=", "AWS_PROFILE"])
def test_keys_of_a_program_serve_both_ways(
    s3: S3Server, issue: Issue, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    issue(s3.access_key, s3.secret_key, 3600)
    options = {"endpoint": s3.endpoint, "region": "us-east-1"}
    if how == "profile=":
        options["profile"] = "work"
    else:
        monkeypatch.setenv("AWS_PROFILE", "work")
    url = s3.url(f"program-{uuid4().hex[:8]}")
    state = {"x": torch.arange(5.0)}
    with ckpt.Checkpointer(url, storage_options=options) as ck:
        ck.save_async(1, state).result()
        ck.save(2, state)
        state["x"].zero_()
        assert ck.load(state, 1).step == 1 and state["x"].tolist() == [0, 1, 2, 3, 4]
    assert s3.secret_key not in str(kvstore_spec(url, options))


def test_renewed_keys_are_used_and_the_old_ones_no_more(s3: S3Server, issue: Issue, tmp_path: Path) -> None:
    """The server takes the first keys until they expire, and says ExpiredToken from then on."""
    second = s3.add_key("Admin")
    issue(s3.access_key, s3.secret_key, 60)  # so little that botocore asks again at each use
    with FaultProxy(s3.endpoint) as proxy:
        options = {"endpoint": proxy.endpoint, "region": "us-east-1", "profile": "work"}
        state = {"x": torch.arange(5.0)}
        with ckpt.Checkpointer(s3.url(f"renewed-{uuid4().hex[:8]}"), storage_options=options) as ck:
            ck.save(1, state)
            ck.save_async(2, state).result()
            assert proxy.seen(signed_by(second["access_key"])) == []

            issue(second["access_key"], second["secret_key"], 3600)
            proxy.on(signed_by(s3.access_key), answer(400, "ExpiredToken"))
            ck.save(3, state)
            ck.save_async(4, state).result()
            state["x"].zero_()
            assert ck.load(state).step == 4 and state["x"].tolist() == [0, 1, 2, 3, 4]
            assert ck.steps() == [1, 2, 3, 4]
        new = [request.path for request in proxy.seen(signed_by(second["access_key"]))]
        assert any("/state/" in path for path in new) and any("/log/" in path for path in new)


def test_a_program_that_gives_no_keys_is_named(s3: S3Server, issue: Issue) -> None:
    options = {"endpoint": s3.endpoint, "region": "us-east-1", "profile": "work"}
    with pytest.raises(ckpt.StoreError, match=r"custom-process.*sign-in.*sign in again"):
        ckpt.Checkpointer(s3.url("none"), storage_options=options)


def test_keys_that_cannot_be_renewed_are_told(s3: S3Server, issue: Issue) -> None:
    issue(s3.access_key, s3.secret_key, 60)
    options = {"endpoint": s3.endpoint, "region": "us-east-1", "profile": "work"}
    with ckpt.Checkpointer(s3.url(f"expired-{uuid4().hex[:8]}"), storage_options=options) as ck:
        ck.save(1, {"x": 1})
        issue(s3.access_key, s3.secret_key, -60)
        with pytest.raises(ckpt.StoreError, match=r"refreshed credentials are still expired.*sign in again"):
            ck.save(2, {"x": 2})
        issue(s3.access_key, s3.secret_key, 3600)
        ck.save(3, {"x": 3})
        assert ck.steps() == [1, 3]
