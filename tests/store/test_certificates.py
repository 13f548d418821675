"""A server whose certificate a private authority gave: one setting for all that speaks to it."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

import ckpt
from ckpt.store.objects import kvstore_spec
from ckpt.store.remote import s3_settings
from tests.support.s3 import S3Server
from tests.support.tls_proxy import TlsProxy

ROOT = Path(__file__).resolve().parents[2]

# TensorStore reads its setting once in a process, so each case has its own.
JOB = """
import json, sys
import torch
import ckpt
url, options, how = json.loads(sys.argv[1])
state = {"x": torch.arange(50_000)}
try:
    with ckpt.Checkpointer(url, storage_options=options) as ck:
        if how == "async":
            ck.save_async(1, state).result(60)
        else:
            ck.save(1, state)
        state["x"].zero_()
        ck.load(state)
        assert state["x"].tolist() == list(range(50_000))
        if how == "s3fs":
            import s3fs
            keys = {"key": options["access_key"], "secret": options["secret_key"]}
            fs = s3fs.S3FileSystem(**keys, endpoint_url=options["endpoint"])
            assert [name for name in fs.find(url) if name.endswith("manifest.json")]
    print("saved")
except ckpt.StoreError as error:
    print(error)
"""


@pytest.fixture(scope="module")
def tls(s3: S3Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TlsProxy]:
    with TlsProxy(s3.endpoint, tmp_path_factory.mktemp("tls")) as proxy:
        yield proxy


def job(url: str, options: dict[str, Any], how: str = "", **environment: str) -> str:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("AWS_", "TENSORSTORE_"))}
    clean |= {"PYTHONPATH": str(ROOT), "AWS_EC2_METADATA_DISABLED": "true", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", JOB, json.dumps([url, options, how])],
        env=clean | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.s3
@pytest.mark.slow
def test_one_setting_serves_every_client(s3: S3Server, tls: TlsProxy) -> None:
    options = {**s3.storage_options, "endpoint": tls.endpoint}
    bundle = str(tls.authority)
    assert job(s3.url(f"tls-{uuid4().hex[:8]}"), options, "s3fs", AWS_CA_BUNDLE=bundle) == "saved"
    assert job(s3.url(f"tls-{uuid4().hex[:8]}"), {**options, "ca_bundle": bundle}, "async") == "saved"


@pytest.mark.s3
@pytest.mark.slow
def test_an_unknown_authority_is_told_with_the_remedy_by_both_ways(s3: S3Server, tls: TlsProxy, tmp_path: Path) -> None:
    options = {**s3.storage_options, "endpoint": tls.endpoint}
    remedy = "as storage_options ca_bundle or AWS_CA_BUNDLE"
    said = job(s3.url("tls"), options)
    assert "cannot list" in said and remedy in said
    # What TensorStore trusts already cannot be changed, and is not what botocore is told.
    import botocore

    public = str(Path(botocore.__file__).parent / "cacert.pem")
    said = job(s3.url("tls"), options, AWS_CA_BUNDLE=str(tls.authority), TENSORSTORE_CA_BUNDLE=public)
    assert "TensorStore takes one file for all stores" in said


def test_the_file_must_be_there_and_one_for_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_CA_BUNDLE", "TENSORSTORE_CA_BUNDLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    options = {"endpoint": "https://127.0.0.1:9", "access_key": "k", "secret_key": "s"}
    assert s3_settings(options)["ca_bundle"] is None
    with pytest.raises(ckpt.StoreError, match=r"no such file of trusted authorities; correct ca_bundle or AWS_CA_BUND"):
        s3_settings({**options, "ca_bundle": str(tmp_path / "none.pem")})
    one, two = tmp_path / "one.pem", tmp_path / "two.pem"
    for file in (one, two):
        file.write_text("-----BEGIN CERTIFICATE-----\n")
    (tmp_path / "config").write_text(f"[default]\nca_bundle = {two}\n")
    assert s3_settings(options)["ca_bundle"] == str(two)
    monkeypatch.setenv("AWS_CA_BUNDLE", str(one))
    assert s3_settings(options)["ca_bundle"] == str(one)
    monkeypatch.setenv("TENSORSTORE_CA_BUNDLE", str(one))
    kvstore_spec("s3://bucket/run", options)
    with pytest.raises(ckpt.StoreError, match="put all authorities into one file, and set AWS_CA_BUNDLE to it"):
        kvstore_spec("s3://bucket/run", {**options, "ca_bundle": str(two)})
