"""What one of two ranks gets wrong is an error on both that names the culprit, and nothing has changed on either."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from tests.engine.states import flip_bit, refused_load, swap_chunks
from tests.support.ranks import Crew
from tests.support.raw import log_records, objects_of, random_bits, raw

pytestmark = pytest.mark.ranks

Failure = tuple[str, str]  # the error's type and message, both empty if there was none


@pytest.fixture(scope="module")
def crew() -> Iterator[Crew]:
    with Crew(2) as made:
        yield made


def _attempt(call: Callable[[], Any]) -> Failure:
    try:
        call()
    except ckpt.CkptError as error:
        return type(error).__name__, str(error)
    return "", ""


def _try_saves(rank: int, world: int, root: str) -> dict[str, Failure]:
    """Saves that must fail on both ranks, with nothing committed, and one that succeeds in the end."""
    half = torch.full((2, 3), float(rank))
    part = (rank * 2, 0), (2, 3), (0, 0)
    whole = torch.ones(4, 3)
    wrong: dict[str, Callable[[], dict[str, Any]]] = {
        "replicas": lambda: {"good": whole, "w": torch.full((4, 3), float(rank))},
        "one bit": lambda: {"w": torch.full((4, 3), -0.0 if rank else 0.0)},
        "packed bit": lambda: {"w": torch.tensor(1 << 40 if rank else 0)},
        "declared": lambda: {"w": ckpt.replicated(torch.full((40_000,), float(rank)))},
        "values": lambda: {"lr": 0.1 * (rank + 1), "w": whole},
        "zeros": lambda: {"lr": -0.0 if rank else 0.0},
        "types": lambda: {"lr": 1 if rank else 1.0},
        "replicated values": lambda: {"lr": ckpt.replicated([1, rank])},
        "gap": lambda: {"w": ckpt.ShardedTensor(half, [part], (5, 3))},
        "overlap": lambda: {"w": ckpt.ShardedTensor(half, [((rank, 0), (2, 3), (0, 0))], (3, 3))},
        "dtype": lambda: {"w": whole.to(torch.float64 if rank else torch.float32)},
        "shape": lambda: {"w": whole if rank else whole[:2].clone()},
        "kinds": lambda: {"w": whole if rank else 5},
        "tie": lambda: {"a": whole, "b": whole if rank else whole.clone()},
        "capture": lambda: {"w": whole, "x": object() if rank else 5},
    }
    found = {}
    with ckpt.Checkpointer(root, layout=ckpt.Layout(dp=2)) as ck:
        for name, make in wrong.items():
            found[name] = _attempt(lambda make=make: ck.save(1, make()))  # type: ignore[misc]
        found["steps"] = _attempt(lambda: ck.save(rank, {"w": whole}))
        assert ck.latest() is None
        assert ck.save(7, {"w": whole, "s": ckpt.ShardedTensor(half, [part], (4, 3))}).step == 7
    return found


SAVES = {
    "replicas": ("StateMismatch", ["w: ranks 0 and 1 hold different bits of [0:4, 0:3]", "synchronise", "per rank"]),
    "one bit": ("StateMismatch", ["w: ranks 0 and 1 hold different bits", "synchronise"]),
    "packed bit": ("StateMismatch", ["w: ranks 0 and 1 hold different bits", "synchronise"]),
    "declared": ("StateMismatch", ["w: ranks 0 and 1 hold different bits", "synchronise"]),
    "values": ("StateMismatch", ["lr: ranks 0 and 1 have different values", "ckpt.per_rank"]),
    "zeros": ("StateMismatch", ["lr: ranks 0 and 1 have different values", "ckpt.per_rank"]),
    "types": ("StateMismatch", ["lr: ranks 0 and 1 have different values", "ckpt.per_rank"]),
    "replicated values": ("StateMismatch", ["lr: ranks 0 and 1 have different values", "ckpt.per_rank"]),
    "gap": ("StateMismatch", ["w: no rank holds the elements [4:5, 0:3]", "check the layout"]),
    "overlap": ("StateMismatch", ["w: boxes [0:2, 0:3] and [1:3, 0:3] of ranks 0, 1 overlap", "identical boxes"]),
    "dtype": ("StateMismatch", ["w: float32[4, 3] on rank 0, but float64[4, 3] on rank 1"]),
    "shape": ("StateMismatch", ["w: float32[2, 3] on rank 0, but float32[4, 3] on rank 1"]),
    "kinds": ("StateMismatch", ["w: a tensor on one rank and a plain value on another"]),
    "tie": ("StateMismatch", ["b: tied to a on rank 1, but not on rank 0"]),
    "capture": ("Unsupported", ["x: cannot keep a value of type builtins.object"]),
    "steps": ("StateMismatch", ["saves step 0", "saves step 1"]),
}


def test_two_ranks_that_disagree_cannot_save(crew: Crew, tmp_path: Path) -> None:
    for rank, found in enumerate(crew.run(_try_saves, str(tmp_path))):
        assert found.keys() == SAVES.keys()
        for name, (kind, words) in SAVES.items():
            assert found[name][0] == kind, (name, rank, found[name])
            assert all(word in found[name][1] for word in words), (name, rank, found[name])
        if rank == 0:
            assert found["capture"][1].startswith("rank 1 failed during save: capture")
    assert [r["kind"] for r in log_records(tmp_path).values()] == ["claim", "commit"]


def _try_loads(rank: int, world: int, root: str) -> dict[str, Failure]:
    """Loads that must fail in phase 1 on both ranks with nothing changed, and one that succeeds in the end."""

    def target() -> dict[str, Any]:
        local = torch.full((2, 3), 9.0)
        return {"w": torch.full((4, 3), 9.0), "s": ckpt.ShardedTensor(local, [((rank * 2, 0), (2, 3), (0, 0))], (4, 3))}

    def part(offset: int) -> ckpt.ShardedTensor:
        return ckpt.ShardedTensor(torch.full((2, 3), 9.0), [((offset, 0), (2, 3), (0, 0))], (4, 3))

    wrong: dict[str, Callable[[], dict[str, Any]]] = {
        "missing": lambda: target() | ({"new": torch.full((2,), 9.0)} if rank else {}),
        "extra": lambda: {"w": torch.full((4, 3), 9.0)},
        "dtype": lambda: target() | ({"w": torch.full((4, 3), 9.0, dtype=torch.float64)} if rank else {}),
        "shape": lambda: target() | ({"w": torch.full((3, 4), 9.0)} if rank else {}),
        "gap": lambda: target() | {"s": part(0)},
        "overlap": lambda: target() | {"s": part(rank)},
        "shared": lambda: (lambda x: {"w": x, "s": x[:2]} if rank else target())(torch.full((4, 3), 9.0)),
    }
    found = {}
    with ckpt.Checkpointer(root) as ck:
        for name, make in wrong.items():
            state = make()
            found[name] = _attempt(lambda state=state: ck.load(state))  # type: ignore[misc]
            for entry in state.values():
                tensor = entry.local if isinstance(entry, ckpt.ShardedTensor) else entry
                assert raw(tensor) == raw(torch.full_like(tensor, 9.0))
        good = target()
        assert ck.load(good) is not None
        assert raw(good["w"]) == raw(torch.ones(4, 3))
        assert raw(good["s"].local) == raw(torch.full((2, 3), float(rank)))
    return found


LOADS = {
    "missing": ["rank 1: the checkpoint has no new", "allow_missing"],
    "extra": ["the checkpoint holds s, which no rank's state has", "allow_extra"],
    "dtype": ["w: rank 1 has dtype float64, the checkpoint float32", "cast=['w']"],
    "shape": ["w: rank 1 has shape [3, 4], the checkpoint [4, 3]", "sizes it was saved with"],
    "gap": ["s: no rank holds the elements [2:4, 0:3]", "check the layout"],
    "overlap": ["s: boxes", "overlap in [1:2, 0:3]", "identical boxes"],
    "shared": ["overlap in memory", "make one of them a copy"],
}


def test_two_ranks_of_which_one_does_not_fit_cannot_load(crew: Crew, tmp_path: Path) -> None:
    crew.run(_try_saves, str(tmp_path))
    for rank, found in enumerate(crew.run(_try_loads, str(tmp_path))):
        for name, words in LOADS.items():
            assert found[name][0] == "StateMismatch", (name, rank, found[name])
            assert all(word in found[name][1] for word in words), (name, rank, found[name])


def _damaged_state(rank: int, seed: int) -> dict[str, Any]:
    full = random_bits((1300, 1000), torch.float32, seed)
    rows = full[rank * 650 : (rank + 1) * 650].clone()
    return {"big": ckpt.ShardedTensor(rows, [((rank * 650, 0), (650, 1000), (0, 0))], (1300, 1000)), "epoch": seed}


def _save_two(rank: int, world: int, root: str) -> None:
    with ckpt.Checkpointer(root) as ck:
        ck.save(1, _damaged_state(rank, 1))
        ck.save(2, _damaged_state(rank, 2))


def _load_damaged(rank: int, world: int, root: str) -> list[Failure]:
    target = _damaged_state(rank, 9)
    old = raw(target["big"].local)
    with ckpt.Checkpointer(root) as ck:
        atomic = _attempt(lambda: ck.load(target, atomic=True))
        assert raw(target["big"].local) == old and target["epoch"] == 9
        found = [atomic, _attempt(lambda: ck.load(target)), _attempt(lambda: ck.save(3, target))]
        assert target["epoch"] == 9
        assert ck.load(target, step=1) is not None
        assert raw(target["big"].local) == raw(_damaged_state(rank, 1)["big"].local) and target["epoch"] == 1
        ck.save(3, target)
        assert ck.latest() == 3
    return found


@pytest.mark.parametrize("damage", ["a flipped bit", "swapped chunks"])
def test_damage_that_one_rank_reads_makes_the_state_invalid_on_both(damage: str, crew: Crew, tmp_path: Path) -> None:
    crew.run(_save_two, str(tmp_path))
    if damage == "a flipped bit":
        flip_bit(objects_of(tmp_path, "tensors/big")[0])
    else:
        swap_chunks(tmp_path)
    for atomic, invalid, refused in crew.run(_load_damaged, str(tmp_path)):
        assert atomic[0] == "CorruptCheckpoint" and "big" in atomic[1]
        assert invalid[0] == "StateInvalid" and "big" in invalid[1] and "load again, or an older step" in invalid[1]
        assert refused[0] == "StateInvalid" and refused[1].startswith("not saved: loading step 2 failed")


def _per_rank(rank: int, world: int, root: str) -> dict[str, Failure]:
    def target(**more: Any) -> dict[str, Any]:
        return {"w": torch.zeros(3), **more}

    found = {}
    mine = {"seed": 100 + rank, "pair": (rank, float(rank))}
    with ckpt.Checkpointer(root, layout=ckpt.Layout(dp=2)) as ck:
        ck.save(1, {"w": torch.ones(3), "rng": ckpt.per_rank(mine)})
        same = target(rng=ckpt.per_rank(None))
        assert ck.load(same) is not None
        assert same["rng"].value == mine and type(same["rng"].value["pair"][1]) is float
        found["unwanted"] = _attempt(lambda: ck.load(target()))
        found["new"] = _attempt(lambda: ck.load(target(rng=ckpt.per_rank(0), more=ckpt.per_rank(0))))
        assert ck.load(target(), allow_extra=["rng"]) is not None
        kept = target(rng=ckpt.per_rank(0), more=ckpt.per_rank(7))
        assert ck.load(kept, allow_missing=["more"]) is not None
        assert (kept["rng"].value, kept["more"].value) == (mine, 7)
    with ckpt.Checkpointer(root, layout=ckpt.Layout(tp=2)) as ck:
        found["other layout"] = _attempt(lambda: ck.load(target(rng=ckpt.per_rank(0))))
        found["other layout, unwanted"] = _attempt(lambda: ck.load(target()))
        left = target()
        assert ck.load(left, allow_extra=["rng"]) is not None
        assert raw(left["w"]) == raw(torch.ones(3))
    return found


def test_per_rank_values_belong_to_one_layout(crew: Crew, tmp_path: Path) -> None:
    for rank, found in enumerate(crew.run(_per_rank, str(tmp_path))):
        expected = {
            "unwanted": [f"rank {rank}: the checkpoint holds per-rank rng", "allow_extra"],
            "new": [f"rank {rank}: the checkpoint has no per-rank more", "allow_missing"],
            "other layout": ["rng: kept per rank under layout", "'dp': 2", "'tp': 2", "load on the saved layout"],
            "other layout, unwanted": ["rng: kept per rank under layout", "allow_extra"],
        }
        for name, words in expected.items():
            assert found[name][0] == "StateMismatch", (name, found[name])
            assert all(word in found[name][1] for word in words), (name, found[name])
    with ckpt.Checkpointer(tmp_path) as ck:  # one rank: no rank's values may quietly become its own
        for extra in ({}, {"rng": ckpt.per_rank(0)}):
            words = ["rng: kept per rank under layout", "of 2 ranks", "of 1 ranks", "allow_extra"]
            refused_load(ck, {"w": torch.zeros(3), **extra}, ckpt.StateMismatch, words)
        assert ck.load({"w": torch.zeros(3)}, allow_extra=["rng"]) is not None
