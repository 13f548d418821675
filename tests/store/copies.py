"""Roots to copy, and what a copy is compared with; for the tests of copies."""

from typing import Any

import torch

import ckpt
from ckpt.store.copying import Copied, Side, claim_for_copies, copy_commit
from ckpt.store.log import Log, Record
from ckpt.store.objects import open_store
from tests.support.raw import raw
from tests.support.roots import Root

PINNED = ("manifest.json", "ranks/manifest.json", "run.json")


def state(step: int) -> dict[str, Any]:
    """An array of several objects and chunks, small ones, packed ones of two dtypes, an empty one, and values."""
    return {
        "big": torch.arange(1200 * 1100, dtype=torch.float32).reshape(1200, 1100) + step,
        "small": (torch.arange(300) + step).to(torch.bfloat16),
        "scalar": torch.tensor(step),
        "none": torch.zeros(0, 3),
        "layers": [torch.full((160, 128), float(step + n)) for n in range(6)],
        "step": step,
        "own": ckpt.per_rank([step]),
    }


def save(root: Root, *steps: int) -> None:
    """A job that goes on from the newest commit, saves these steps, and ends."""
    with ckpt.Checkpointer(root.url, storage_options=root.storage_options) as ck:
        ck.load(state(0))
        for step in steps:
            ck.save(step, state(step))


def side(root: Root) -> Side:
    store = open_store(root.url, root.storage_options)
    return Side(store, Log(store))


def commits(root: Root) -> list[Record]:
    return [r for r in side(root).log.read().records if r.kind == "commit"]


def copy(source: Root, step: int, target: Root, **more: Any) -> Copied:
    of, to = side(source), side(target)
    record = of.log.read().newest(step)
    assert record is not None
    return copy_commit(of, record.number, to, claim_for_copies(to), **more)


def steps(root: Root) -> list[int]:
    with ckpt.Checkpointer(root.url, storage_options=root.storage_options, read_only=True) as ck:
        return ck.steps()


def loads(root: Root, step: int) -> None:
    with ckpt.Checkpointer(root.url, storage_options=root.storage_options, read_only=True) as ck:
        live, wanted = state(0), state(step)
        assert ck.load(live, step) is not None
    assert live["step"] == step and live["own"].value == [step]
    assert all(raw(live[name]) == raw(wanted[name]) for name in ("big", "small", "scalar"))
    assert [raw(t) for t in live["layers"]] == [raw(t) for t in wanted["layers"]]


def attempt(root: Root, record: Record) -> dict[str, bytes]:
    """Every object of an attempt, by its name below it."""
    store, prefix = side(root).store, f"attempts/{record.claim}/{record.attempt}/"
    return {key.removeprefix(prefix): store.get(key) for key in store.list(prefix)}
