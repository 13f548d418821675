"""Roots with real saves of one rank, a collector with a clock of its own, and what is left; for tests of collecting."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

import ckpt
from ckpt.store.collect import Collected, Collector, take_over
from ckpt.store.log import Log, Record
from ckpt.store.objects import ObjectStore
from ckpt.store.retention import Keep
from tests.support.roots import Root

NOW = 2_000_000_000.0  # far from the clock of this machine, so that a forgotten use of that shows

Tree = dict[str, bytes]


def state(step: int, **more: Any) -> dict[str, Any]:
    """An array of its own, a packed one, and a value."""
    return {
        "big": torch.full((160, 128), float(step)),
        "small": torch.arange(3) + step,
        "loss": 1.0 / (step + 1),
        **more,
    }


def save(root: Root, *steps: int, **options: Any) -> None:
    """A job that goes on from the newest commit, saves these steps, and ends."""
    with ckpt.Checkpointer(root.url, storage_options=root.storage_options, **options) as ck:
        ck.load(state(0))
        for step in steps:
            ck.save(step, state(step))


def tree(store: ObjectStore, prefix: str = "") -> Tree:
    with ThreadPoolExecutor(8) as pool:
        keys = list(store.list(prefix))
        return dict(zip(keys, pool.map(store.get, keys), strict=True))


def data_of(store: ObjectStore, *steps: int) -> Tree:
    """Every object of the attempts that commits of these steps name."""
    found: Tree = {}
    for record in Log(store).read().records:
        if record.kind == "commit" and record.step in steps:
            found |= tree(store, f"attempts/{record.claim}/{record.attempt}/")
    return found


def attempts(store: ObjectStore) -> set[str]:
    return {"/".join(key.split("/")[:3]) + "/" for key in store.list("attempts/")}


def records(store: ObjectStore, kind: str) -> list[Record]:
    return [r for r in Log(store).read().records if r.kind == kind]


def collector(store: ObjectStore, keep: Keep, now: float = NOW, **more: Any) -> Collector:
    """One with a new claim; what a clock says may be changed with `now`."""
    log = Log(store)
    return Collector(store, log, take_over(store, log), keep, clock=lambda: now, **more)


def collect(store: ObjectStore, keep: Keep, now: float = NOW, **more: Any) -> Collected:
    return collector(store, keep, now, **more).run()


def steps(root: Root) -> list[int]:
    with ckpt.Checkpointer(root.url, storage_options=root.storage_options, read_only=True) as ck:
        return ck.steps()


def loads(root: Root, step: int) -> None:
    with ckpt.Checkpointer(root.url, storage_options=root.storage_options, read_only=True) as ck:
        live = state(0)
        assert ck.load(live, step) is not None
        wanted = state(step)
        assert live["loss"] == wanted["loss"]
        for name in ("big", "small"):
            assert live[name].numpy().tobytes() == wanted[name].numpy().tobytes()
