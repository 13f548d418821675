"""What a job on S3 learns at its start, before training, and what becomes of credentials that expire. On a real server,
through a proxy that makes the answers which that server never gives."""

from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest
import torch

import ckpt
from tests.support.fault_proxy import FaultProxy, answer, puts
from tests.support.raw import random_bits, raw
from tests.support.s3 import S3Server

pytestmark = pytest.mark.s3


@pytest.fixture
def proxy(s3: S3Server) -> Iterator[FaultProxy]:
    with FaultProxy(s3.endpoint) as proxy:
        yield proxy


# --- Before training: what the first claim says ---


def refused_at_once(url: str, options: dict[str, str], *words: str) -> None:
    """A job learns of it when it starts, from its first load, and leaves nothing behind."""
    with ckpt.Checkpointer(url, storage_options=options) as ck:
        with pytest.raises(ckpt.StoreError) as caught:
            ck.load({"x": torch.zeros(2)})
        for word in words:
            assert word in str(caught.value), str(caught.value)


def test_a_wrong_bucket_is_told_before_training(s3: S3Server) -> None:
    """The server would make the bucket when it is first written to."""
    for bucket in ("no-such-bucket", "Not_A_Bucket"):
        refused_at_once(f"s3://{bucket}/run", s3.storage_options, f"create the bucket {bucket}, or correct the URL")
    client = s3.client()
    assert [b["Name"] for b in client.list_buckets()["Buckets"]] == ["ckpt"]
    client.close()


def test_keys_that_may_not_are_told_before_training(s3: S3Server, proxy: FaultProxy) -> None:
    url = s3.url(f"denied-{uuid4().hex[:8]}")
    remedy = "they may Get, Put, List and Delete there"
    for options in ({**s3.storage_options, "secret_key": "wrong"}, s3.add_key("Read,List"), s3.add_key("Write")):
        refused_at_once(url, options, "HTTP 403", remedy)
    through = {**s3.storage_options, "endpoint": proxy.endpoint}
    proxy.on(lambda request: request.method == "POST", answer(403), times=2)
    refused_at_once(url, through, "cannot delete", "HTTP 403", remedy)
    assert proxy.heal() > 0
    for fault, said in ((answer(507, "XMinioStorageFull"), "raise the quota"), (answer(501), "lacks this operation")):
        proxy.on(puts("/probe/"), fault)
        refused_at_once(url, through, "cannot create", said)
        assert proxy.heal() > 0


# --- Credentials that expire ---


def expire(proxy: FaultProxy, key: str) -> None:
    proxy.on(lambda request: request.access_key == key, answer(400, "ExpiredToken", "The provided token has expired."))


def test_given_keys_that_expire_are_an_error_at_once(s3: S3Server, proxy: FaultProxy) -> None:
    options = {**s3.storage_options, "endpoint": proxy.endpoint}
    with ckpt.Checkpointer(s3.url(f"expired-{uuid4().hex[:8]}"), storage_options=options) as ck:
        ck.save(1, _state_of_one(1))
        proxy.heal()  # forgets the requests so far
        expire(proxy, options["access_key"])
        with pytest.raises(ckpt.StoreError, match=r"ExpiredToken.*renew the credentials"):
            ck.save(2, _state_of_one(2))
        assert len(proxy.seen()) < 5
        proxy.heal()
        ck.save(2, _state_of_one(2))
        assert ck.steps() == [1, 2]


def test_credentials_that_change_are_found(
    s3: S3Server, proxy: FaultProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A profile's keys expire; once its file has new ones, the same checkpointer goes on with them."""
    both = [s3.add_key("Admin"), s3.add_key("Admin")]

    def write(options: dict[str, str]) -> None:
        lines = (f"aws_access_key_id = {options['access_key']}", f"aws_secret_access_key = {options['secret_key']}")
        (tmp_path / "credentials").write_text("\n".join(["[lab]", *lines, ""]))

    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    (tmp_path / "config").write_text("[profile lab]\nregion = us-east-1\n")
    write(both[0])
    options = {"profile": "lab", "endpoint": proxy.endpoint, "region": "us-east-1"}
    with ckpt.Checkpointer(s3.url(f"renewed-{uuid4().hex[:8]}"), storage_options=options) as ck:
        ck.save(1, _state_of_one(1))
        expire(proxy, both[0]["access_key"])
        with pytest.raises(ckpt.StoreError, match=r"ExpiredToken.*renew the credentials"):
            ck.save(2, _state_of_one(2))
        write(both[1])
        ck.save(2, _state_of_one(2))
        assert {r.access_key for r in proxy.seen()} == {o["access_key"] for o in both}
        state = _state_of_one(0)
        assert ck.load(state) is not None and raw(state["x"]) == raw(_state_of_one(2)["x"])
    proxy.heal()


def _state_of_one(step: int) -> dict[str, torch.Tensor]:
    return {"x": random_bits((300, 100), torch.float32, step)}
