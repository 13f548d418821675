"""The S3 server: it takes and gives objects, honours conditional puts, and leaves nothing behind."""

import urllib.request
from pathlib import Path
from urllib.error import HTTPError

import pytest

from tests.support.ports import free_ports
from tests.support.roots import Root
from tests.support.s3 import BUCKET, S3Server

pytestmark = pytest.mark.s3


def test_ports_are_different_and_low_enough() -> None:
    ports = free_ports(6, shadow=10_000)
    assert len(set(ports)) == 6
    assert max(ports) < 55_000


def test_a_conditional_put_has_one_winner(s3: S3Server) -> None:
    from botocore.exceptions import ClientError

    client = s3.client()
    client.put_object(Bucket=BUCKET, Key="self-test/x", Body=b"first", IfNoneMatch="*")
    with pytest.raises(ClientError, match="PreconditionFailed"):
        client.put_object(Bucket=BUCKET, Key="self-test/x", Body=b"second", IfNoneMatch="*")
    assert client.get_object(Bucket=BUCKET, Key="self-test/x")["Body"].read() == b"first"
    client.close()


def test_strangers_are_refused(s3: S3Server) -> None:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with pytest.raises(HTTPError) as caught:
        opener.open(f"{s3.endpoint}/{BUCKET}", timeout=10)
    assert caught.value.code == 403
    caught.value.close()


def test_a_root_is_fresh_on_both_kinds_of_store(root: Root) -> None:
    assert root.on_s3 == (root.storage_options is not None)
    assert root.on_s3 or not Path(root.url).exists()


@pytest.mark.slow
def test_a_stopped_server_leaves_nothing_behind() -> None:
    with S3Server() as server:
        pid, directory = server.pid, server.directory
        assert directory is not None and directory.is_dir()
        assert server.seconds_to_start < 60
        ports = [int(server.endpoint.rsplit(":", 1)[1])]
    assert not directory.exists()
    assert not Path(f"/proc/{pid}").exists()
    assert not [path for port in ports for path in Path("/tmp").glob(f"seaweedfs-*{port}.sock")]
    server.stop()
