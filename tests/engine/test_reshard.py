"""A live state goes from one layout into another, every bit, without a store."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckpt
from tests.support.ranks import Crew
from tests.support.raw import labelled, random_bits, raw

pytestmark = [pytest.mark.ranks]

WORLD = 4
SHAPES = {"w": (37, 24), "long": (130_001,), "cube": (5, 6, 7), "scalar": (), "none": (0, 3)}
DTYPES = [torch.float32, torch.bfloat16, torch.complex128, torch.float8_e4m3fn, torch.bool]


@pytest.fixture(scope="module")
def crew() -> Iterator[Crew]:
    with Crew(WORLD) as crew:
        yield crew


def full(name: str, dtype: torch.dtype) -> torch.Tensor:
    return random_bits(SHAPES[name], dtype, seed=len(name))


def cut(name: str, dtype: torch.dtype, axis: int | None, ranks: range, rank: int) -> Any:
    """This rank's part of a tensor cut unevenly along an axis over some ranks (None: whole on each), or nothing."""
    whole = full(name, dtype)
    if rank not in ranks:
        return ckpt.ShardedTensor(torch.empty(0, dtype=dtype), [], whole.shape)
    if axis is None or whole.dim() == 0:
        local, offset = whole, [0] * whole.dim()
    else:
        axis %= whole.dim()
        at = [round(whole.shape[axis] * (i / len(ranks)) ** 1.5) for i in range(len(ranks) + 1)]
        number = ranks.index(rank)
        offset = [0] * whole.dim()
        offset[axis] = at[number]
        local = whole.narrow(axis, at[number], at[number + 1] - at[number])
    local = local.transpose(0, -1).contiguous().transpose(0, -1) if local.dim() > 1 else local.clone()
    return ckpt.ShardedTensor(local, [(offset, list(local.shape), [0] * whole.dim())], whole.shape)


def tensors_of(rank: int, axis: int | None, ranks: range) -> dict[str, Any]:
    return {f"{name}/{dtype}": cut(name, dtype, axis, ranks, rank) for name in SHAPES for dtype in DTYPES}


LAYOUTS = [(0, range(4)), (1, range(4)), (-1, range(1, 3)), (None, range(4)), (None, range(3, 4)), (0, range(0, 1))]


def _all_pairs(rank: int, world: int, root: str) -> list[str]:
    faults, ids = [], set()
    for source_layout in LAYOUTS:
        for target_layout in LAYOUTS:
            source, target = tensors_of(rank, *source_layout), tensors_of(rank, *target_layout)
            wanted = {n: raw(t.local) for n, t in target.items()}
            before = {n: raw(t.local) for n, t in source.items()}
            for t in target.values():
                t.local.copy_(torch.zeros_like(t.local))
            done = ckpt.reshard_({"x": target}, {"x": source}, round_bytes=20_000)
            ids.add(done.state_id)
            faults += [f"{source_layout} to {target_layout}: {n}" for n in wanted if raw(target[n].local) != wanted[n]]
            faults += [f"source {n} changed" for n in before if raw(source[n].local) != before[n]]
            if source_layout == target_layout and done.moved:
                faults.append(f"{source_layout}: {done.moved} bytes moved for nothing")
    with ckpt.Checkpointer(root) as ck:
        ids.add(ck.save(1, {"x": tensors_of(rank, 0, range(4))}).state_id)
    return faults + ([] if len(ids) == 1 else [f"state ids differ: {ids}"])


def test_every_bit_from_any_layout_to_any_other_with_the_state_id_of_a_save(crew: Crew, tmp_path: Path) -> None:
    assert crew.run(_all_pairs, str(tmp_path / "root"), timeout=200) == [[]] * WORLD


def _optimizer(rank: int, world: int) -> list[str]:
    """An AdamW that has stepped, and one that never has: states, counters and options go across by name."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_module, distribute_tensor

    def build(axis: int, seed: int, lr: float) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        mesh = init_device_mesh("cpu", (world,))
        model = nn.Linear(16, 12)

        def place(_: str, module: nn.Module, mesh: Any) -> None:
            for name, p in list(module.named_parameters(recurse=False)):
                where = [Shard(min(axis, p.dim() - 1))]
                module.register_parameter(name, nn.Parameter(distribute_tensor(p.data, mesh, where)))

        distribute_module(model, mesh, place)
        return model, torch.optim.AdamW(model.parameters(), lr=lr)

    model, optimizer = build(0, 1, 0.1)
    for step in range(3):
        for p in model.parameters():
            p.grad = torch.zeros_like(p) + step
        optimizer.step()
    other, its = build(1, 2, 0.2)
    ckpt.reshard_({"m": other, "o": its, "n": 0}, {"m": model, "o": optimizer, "n": 7})
    faults = []
    for name, p in model.named_parameters():
        q = dict(other.named_parameters())[name]
        pairs = {"": (p, q)} | {k: (optimizer.state[p][k], its.state[q][k]) for k in ("exp_avg", "exp_avg_sq", "step")}
        for key, (a, b) in pairs.items():
            whole = [x.full_tensor() if hasattr(x, "full_tensor") else x for x in (a.detach(), b.detach())]
            if raw(whole[0]) != raw(whole[1]):
                faults.append(f"{name} {key}")
    return faults + ([] if its.param_groups[0]["lr"] == 0.1 else ["lr"])


def test_optimizer_state_and_options_go_across_into_one_that_never_stepped(crew: Crew) -> None:
    assert crew.run(_optimizer, timeout=100) == [[]] * WORLD


def _rows(rank: int, n: int, start: float = 0.0, dtype: torch.dtype = torch.float32) -> Any:
    whole = labelled((8, n), dtype) + start
    return ckpt.ShardedTensor(whole[2 * rank : 2 * rank + 2].clone(), [([2 * rank, 0], [2, n], [0, 0])], (8, n))


def _outcome(target: dict[str, Any], source: dict[str, Any]) -> tuple[str, str, bool]:
    """The error's kind and text, and whether the target still holds what it held."""
    held = {n: raw(t.local) for n, t in target.items() if isinstance(t, ckpt.ShardedTensor)}
    try:
        ckpt.reshard_(target, source)
        return "", "", False
    except Exception as error:
        return type(error).__name__, str(error), held == {n: raw(target[n].local) for n in held}


def _missing(rank: int) -> Any:
    return {"a": _rows(rank, 3, 9), "b": _rows(rank, 3, 9)}, {"a": _rows(rank, 3)}


def _extra(rank: int) -> Any:
    return {"a": _rows(rank, 3, 9)}, {"a": _rows(rank, 3), "b": _rows(rank, 3)}


def _dtype(rank: int) -> Any:
    return {"a": _rows(rank, 3, 9, torch.float64)}, {"a": _rows(rank, 3)}


def _shared(rank: int) -> Any:
    mine = _rows(rank, 3)
    return {"a": mine}, {"a": mine}


def _gap(rank: int) -> Any:
    return {"a": _rows(rank, 3, 9)}, {"a": _rows(rank, 3)} if rank != 2 else {}


def _replicas(rank: int) -> Any:
    target = ckpt.ShardedTensor(torch.zeros(3), [([0], [3], [0])], (3,))
    return {"a": target}, {"a": torch.full((3,), float(rank == 3))}


def _per_rank(rank: int) -> Any:
    return {"a": _rows(rank, 3, 9)}, {"a": _rows(rank, 3), "r": ckpt.per_rank(rank)}


REFUSED: list[tuple[Callable[[int], Any], str, str]] = [
    (_missing, "StateMismatch", "has no b"),
    (_extra, "StateMismatch", "holds b"),
    (_dtype, "StateMismatch", "a: rank . has dtype float64"),
    (_shared, "StateMismatch", "source a.*target a|target a.*source a"),
    (_gap, "StateMismatch", "a: no rank holds the elements"),
    (_replicas, "StateMismatch", "a: ranks 0 and 3 hold different bits"),
    (_per_rank, "Unsupported", "r: kept per rank"),
]


def _refused(rank: int, world: int) -> list[tuple[str, str, bool]]:
    return [_outcome(*make(rank)) for make, _, _ in REFUSED]


def test_what_does_not_fit_is_refused_with_nothing_changed(crew: Crew) -> None:
    for found in crew.run(_refused, timeout=100):
        for (make, kind, text), (name, said, unchanged) in zip(REFUSED, found, strict=True):
            assert name == kind and unchanged and re.search(text, said), (make, name, said)


def _damaged(rank: int, world: int) -> tuple[str, str, bool]:
    """One bit flips between the packing on rank 1 and the arrival elsewhere."""
    from ckpt.engine.comm import Comm

    honest = Comm.exchange

    def flipping(self: Comm, send: torch.Tensor, *rest: Any) -> None:
        if rank == 1 and send.numel():
            send[0] ^= 1
        honest(self, send, *rest)

    Comm.exchange = flipping  # type: ignore[method-assign]
    try:
        target = ckpt.ShardedTensor(torch.zeros(8, 3), [([0, 0], [8, 3], [0, 0])], (8, 3))
        return _outcome({"a": target}, {"a": _rows(rank, 3, 1)})
    finally:
        Comm.exchange = honest  # type: ignore[method-assign]


def test_a_bit_that_flips_on_the_way_is_found(crew: Crew) -> None:
    for kind, said, _ in crew.run(_damaged, timeout=60):
        assert kind == "StateInvalid" and "a:" in said and "reshard again" in said


def test_one_rank_without_torch_distributed() -> None:
    target = {"w": torch.zeros(3, 4), "n": 0}
    done = ckpt.reshard_(target, {"w": labelled((3, 4)), "n": 5})
    assert raw(target["w"]) == raw(labelled((3, 4))) and target["n"] == 5 and done.moved == 0
