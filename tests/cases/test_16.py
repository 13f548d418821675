"""Case 16: a save that ends in the middle of an object publishes nothing, on a real S3 server."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

import ckpt
from ckpt.engine.faults import POINTS
from ckpt.store import log
from ckpt.store.objects import ObjectStore, open_store
from tests.engine.states import refused_load, sample_state, state_bits
from tests.support.fault_proxy import Exchange, Fault, FaultProxy, puts
from tests.support.raw import random_bits
from tests.support.roots import Root
from tests.support.s3 import BUCKET, S3Server

pytestmark = pytest.mark.s3


@pytest.fixture
def root(s3: S3Server) -> Root:
    return Root(s3.url(f"partial-{uuid4().hex[:8]}"), s3.storage_options)


@pytest.fixture
def store(root: Root) -> ObjectStore:
    return open_store(root.url, root.storage_options)


@pytest.fixture
def proxy(s3: S3Server) -> Iterator[FaultProxy]:
    with FaultProxy(s3.endpoint) as proxy:
        yield proxy


def state_of(step: int) -> dict[str, Any]:
    """With a tensor of 11 MiB."""
    import torch

    return sample_state(step, large=random_bits((11 << 8, 1024), torch.float32, step))


def cut_short(share: float) -> Fault:
    """The server gets a part of the body, then the end of the connection; the client is reset. Of no body at all this
    server makes an object of no bytes, which stays."""

    def fault(exchange: Exchange) -> None:
        exchange.cut_to_server(share)
        exchange.reset()

    return fault


class Died(BaseException):
    """What a process sees last."""


def nothing_pending(s3: S3Server) -> None:
    client = s3.client()
    assert not client.list_multipart_uploads(Bucket=BUCKET).get("Uploads")
    client.close()


def newest_is(root: Root, steps: list[int]) -> None:
    state = state_of(99)
    with ckpt.Checkpointer(root.url, storage_options=root.storage_options, read_only=True) as ck:
        assert ck.steps() == steps
        restored = ck.load(state)
    assert restored is not None and restored.step == steps[-1]
    assert state_bits(state) == state_bits(state_of(steps[-1]))


@pytest.mark.parametrize("point", [p for p in POINTS if p.startswith(("save.", "commit.m", "commit.a"))])
def test_an_exception_in_a_save_publishes_nothing(root: Root, s3: S3Server, point: str) -> None:
    armed = False

    def fault(at: str) -> None:
        if armed and at == point:
            raise Died

    with ckpt.Checkpointer(root.url, storage_options=root.storage_options, faults=fault) as ck:
        ck.save(1, state_of(1))
        armed = True
        with pytest.raises(Died):
            ck.save(2, state_of(2))
        armed = False
        newest_is(root, [1])
        nothing_pending(s3)
        ck.save(2, state_of(2))
    newest_is(root, [1, 2])


@pytest.mark.parametrize("share", [0.5, 0.0])
@pytest.mark.parametrize("part", ["intent.json", "/state/.*/c/", "receipts/", "/manifest.json", "/log/"])
def test_a_part_of_an_object_is_never_taken_for_it(
    root: Root, s3: S3Server, proxy: FaultProxy, part: str, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log, "_TRIES", 3)
    options = {**s3.storage_options, "endpoint": proxy.endpoint}
    with ckpt.Checkpointer(root.url, storage_options=options) as ck:
        ck._session.kvstore["s3_request_retries"] = {"max_retries": 3, "initial_delay": "50ms"}  # type: ignore[index]
        ck.save(1, state_of(1))
        proxy.on(puts(part), cut_short(share), times=2)
        ck.save(2, state_of(2))
        assert proxy.heal() == 2
        newest_is(root, [1, 2])
        proxy.on(puts(part), cut_short(share))
        with pytest.raises(ckpt.StoreError):
            ck.save(3, state_of(3))
        assert proxy.heal() > 2
        newest_is(root, [1, 2])
        nothing_pending(s3)
        ck.save(3, state_of(3))
    newest_is(root, [1, 2, 3])


_VICTIM = """
import json, sys
sys.path.insert(0, sys.argv[1])
import ckpt
from tests.cases.test_16 import state_of
with ckpt.Checkpointer(sys.argv[2], storage_options=json.loads(sys.argv[3])) as ck:
    ck.load(state_of(99))
    ck.save(2, state_of(2))
"""


def test_killed_in_the_middle_of_a_put(root: Root, s3: S3Server, proxy: FaultProxy, store: ObjectStore) -> None:
    """The process dies when the server has half of an object of 11 MiB; the server's connection stays a while."""
    with ckpt.Checkpointer(root.url, storage_options=root.storage_options) as ck:
        ck.save(1, state_of(1))
    options = json.dumps({**s3.storage_options, "endpoint": proxy.endpoint})
    repository = str(Path(__file__).parents[2])
    victims: list[subprocess.Popen[bytes]] = []

    def kill(exchange: Exchange) -> None:
        exchange.body(0.5)
        os.kill(victims[0].pid, signal.SIGKILL)
        exchange.cut_to_server(0.5)

    proxy.on(puts("/state/.*large.*/c/"), kill, times=1)
    victims.append(
        subprocess.Popen(
            [sys.executable, "-c", _VICTIM, repository, root.url, options], env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
    )
    assert victims[0].wait(120) == -signal.SIGKILL
    newest_is(root, [1])
    nothing_pending(s3)
    with ckpt.Checkpointer(root.url, storage_options=root.storage_options) as ck:
        state = state_of(99)
        restored = ck.load(state)
        assert restored is not None and restored.step == 1
        ck.save(2, state_of(2))
    newest_is(root, [1, 2])


def test_a_short_but_valid_object_is_refused(root: Root, store: ObjectStore) -> None:
    """What a client that publishes on close would leave, at each object of a committed step."""
    with ckpt.Checkpointer(root.url, storage_options=root.storage_options) as ck:
        ck.save(1, sample_state(1))
        (manifest,) = [k for k in store.list("attempts/") if k.endswith("manifest.json") and "/ranks/" not in k]
        keys = [manifest, *store.list(manifest.replace("manifest.json", "state/"))]
        assert len(keys) > 8
        for key in keys:
            whole = store.get(key)
            for short in (b"", whole[: len(whole) // 2], whole[:-1]):
                store.put(key, short)
                refused_load(ck, sample_state(9), ckpt.CorruptCheckpoint, [key])
            store.put(key, whole)
        assert ck.load(sample_state(9)) is not None
