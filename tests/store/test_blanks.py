"""An object of no bytes, as some servers make of a write that is cut off before its first byte, stops nobody."""

from collections.abc import Iterator
from uuid import uuid4

import pytest
import torch

import ckpt
from ckpt.errors import CorruptCheckpoint, StoreError
from ckpt.store.leases import read_leases
from ckpt.store.log import BLANK, Log
from ckpt.store.objects import create_same, open_store, probe
from tests.support.fault_proxy import Exchange, FaultProxy, puts
from tests.support.s3 import S3Server

pytestmark = pytest.mark.s3


@pytest.fixture
def proxy(s3: S3Server) -> Iterator[FaultProxy]:
    with FaultProxy(s3.endpoint) as proxy:
        yield proxy


def cut_off(exchange: Exchange) -> None:
    """The server gets the request's head, and the end of the connection; the client is reset."""
    exchange.cut_to_server(0.0)
    exchange.reset()


def test_a_record_of_no_bytes_takes_its_number_and_says_nothing(s3: S3Server, proxy: FaultProxy) -> None:
    url, options = s3.url(f"blank-{uuid4().hex[:8]}"), {**s3.storage_options, "endpoint": proxy.endpoint}
    log = Log(open_store(url, options))
    claim = log.claim({"kind": "claim", "claim": "a"})
    proxy.on(puts("/log/"), cut_off, times=2)
    log.append_fenced("a", {"kind": "void", "claim": "a", "attempt": "x"}, lambda history: None)
    assert proxy.heal() == 2
    for reader in (log, Log(open_store(url, s3.storage_options))):
        history = reader.read()
        assert [record.kind for record in history.records] == ["claim", BLANK, BLANK, "void"]
        assert history.last_claim == claim and history.outcome("x") == history.records[3]
    proxy.on(puts("/log/"), cut_off, times=1)
    late = Log(open_store(url, options))
    assert late.claim({"kind": "claim", "claim": "b"}).number == 6
    with pytest.raises(ckpt.Fenced):
        log.append_fenced("a", {"kind": "void", "claim": "a", "attempt": "y"}, lambda history: None)


def test_a_blank_at_the_end_and_every_part_of_a_save(s3: S3Server, proxy: FaultProxy) -> None:
    """The last job left a blank and nothing after it; then each kind of document meets one."""
    url, options = s3.url(f"blank-{uuid4().hex[:8]}"), {**s3.storage_options, "endpoint": proxy.endpoint}
    state = {"x": torch.arange(5.0)}
    with ckpt.Checkpointer(url, storage_options=options) as ck:
        proxy.on(puts("/probe/.*/object"), cut_off, times=1)
        ck.save(1, state)
        assert proxy.heal() == 1
    s3.client().put_object(Bucket="ckpt", Key=url.removeprefix("s3://ckpt/") + "/log/000000000003.json", Body=b"")
    with ckpt.Checkpointer(url, storage_options=options) as ck:
        assert ck.load(state).step == 1
        for step, part in enumerate(["intent.json", "run.json", "receipts/", "/ranks/", "/manifest.json", "/log/"], 2):
            proxy.on(puts(part), cut_off, times=1)
            ck.save(step, state)
            assert proxy.heal() == 1, part
        assert ck.steps() == [1, 2, 3, 4, 5, 6, 7]


def test_a_blank_is_no_lease_and_stops_no_collection(s3: S3Server) -> None:
    url, state = s3.url(f"blank-{uuid4().hex[:8]}"), {"x": torch.arange(5.0)}
    with ckpt.Checkpointer(url, storage_options=s3.storage_options) as ck:
        ck.save(1, state)
    store = open_store(url, s3.storage_options)
    store.put("leases/0.json", b"")
    store.put("attempts/a/x/intent.json", b"")
    assert read_leases(store) == []
    with ckpt.Checkpointer(url, keep=ckpt.Keep(last=1, grace=0), storage_options=s3.storage_options) as ck:
        assert ck.load(state).step == 1
        ck.save(2, state)
    with ckpt.Checkpointer(url, read_only=True, storage_options=s3.storage_options) as ck:
        assert ck.steps() == [2]


def test_only_a_blank_is_written_over(s3: S3Server) -> None:
    store = open_store(s3.url(f"blank-{uuid4().hex[:8]}"), s3.storage_options)
    store.put("blank", b"")
    create_same(store, "blank", b"data")
    create_same(store, "blank", b"data")
    assert store.get("blank") == b"data"
    with pytest.raises(CorruptCheckpoint, match="blank: exists with other content"):
        create_same(store, "blank", b"other")
    assert store.get("blank") == b"data"


def test_a_network_that_lets_no_body_through_is_told_before_training(s3: S3Server, proxy: FaultProxy) -> None:
    url, options = s3.url(f"blank-{uuid4().hex[:8]}"), {**s3.storage_options, "endpoint": proxy.endpoint}
    proxy.on(puts("/probe/"), cut_off)
    with pytest.raises(StoreError, match="leaves an object of no bytes, again and again"):
        probe(open_store(url, options))
