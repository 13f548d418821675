"""Every rank finds out that it cannot write before there is anything to lose, through both ways to the store."""

import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import torch

import ckpt
from tests.support.fault_proxy import FaultProxy, answer, puts
from tests.support.ranks import Crew
from tests.support.s3 import S3Server

WORLD = 2
OF_ARRAYS = "packed/uint8"


@pytest.fixture(scope="module")
def crew() -> Iterator[Crew]:
    with Crew(WORLD) as crew:
        yield crew


def begin(rank: int, world: int, urls: list[str], options: list[Any], how: str) -> str:
    """Starts a job that begins with a load, and gives the error."""
    if rank == 1 and how == "unprivileged":
        os.seteuid(65534)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 1 and how.startswith("files of "):
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(how.split()[2]), limit[1]))
    try:
        with ckpt.Checkpointer(urls[rank], ckpt.Layout(dp=world), storage_options=options[rank], timeout=60) as ck:
            with pytest.raises(ckpt.StoreError) as error:
                ck.load({"x": torch.zeros(3)})
            return str(error.value)
    finally:
        os.seteuid(os.getuid())
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)


def refused(crew: Crew, urls: list[str], options: list[Any], how: str, *words: str) -> None:
    """Both ranks say that it is rank 1, and why."""
    said = crew.run(begin, urls, options, how, timeout=90)
    for one in said:
        assert "rank 1 on " in one and "cannot write checkpoints" in one, one
        assert all(word in one for word in words), one
        assert "\n" not in one and "<" not in one


@pytest.mark.ranks
def test_one_rank_that_cannot_write_to_its_disk(crew: Crew, tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    for folder in tmp_path.parents:
        if folder.owner() == "root" and "pytest" in folder.name:
            folder.chmod(0o755)
    cases = [
        ("files of 8 bytes", "object: cannot create: File too large", "ulimit -f"),
        ("files of 32 bytes", OF_ARRAYS, "writing failed", "ulimit -f"),
    ]
    if os.getuid() == 0:
        cases.append(("unprivileged", "Permission denied", "check who owns it and its permissions"))
    for number, (how, *words) in enumerate(cases):
        roots = [tmp_path / f"{number}-{rank}" for rank in range(WORLD)]
        for root in roots:
            root.mkdir()
        refused(crew, [str(root) for root in roots], [None] * WORLD, how, *words)
        assert [list(root.rglob("*")) for root in roots] == [[], []]  # neither a probe nor a claim


@pytest.mark.ranks
@pytest.mark.s3
def test_one_rank_whose_keys_or_server_refuse(crew: Crew, s3: S3Server) -> None:
    url, good = s3.url(f"preflight-{uuid4().hex[:8]}"), s3.storage_options
    with FaultProxy(s3.endpoint) as proxy:
        through = {**good, "endpoint": proxy.endpoint}
        remedy = "check the keys or profile in use"
        refused(crew, [url] * 2, [good, s3.add_key("Read,List")], "", "object: cannot create", "HTTP 403", remedy)
        for status, code, words in (
            (403, "AccessDenied", remedy),
            (507, "XMinioStorageFull", "raise the quota"),
            (400, "ExpiredToken", "renew the credentials"),
            (404, "NoSuchBucket", "create the bucket ckpt"),
        ):
            proxy.on(puts(OF_ARRAYS), answer(status, code))
            refused(crew, [url] * 2, [good, through], "", OF_ARRAYS, "writing failed", f"HTTP {status}", words)
            assert proxy.heal() > 0
    client = s3.client()
    found = client.list_objects_v2(Bucket="ckpt", Prefix=url.removeprefix("s3://ckpt/"))
    client.close()
    assert "Contents" not in found


@pytest.mark.s3
def test_two_ways_to_two_places(s3: S3Server, tmp_path: Path) -> None:
    """An array that TensorStore has written must be there for the verbs, too."""
    with ckpt.Checkpointer(tmp_path / "one") as ck:
        ck._session.kvstore = {"driver": "file", "path": f"{tmp_path}/two/"}
        with pytest.raises(ckpt.StoreError, match="is not there for others; give both the same endpoint"):
            ck.save(1, {"x": torch.zeros(3)})
