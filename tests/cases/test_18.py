"""Case 18, megatron-bridge-5376: experts of a mixture.

The fault: half of the elements of each expert's fused matrix move after loading, since gate and up are taken apart
twice; uneven cuts of grouped experts over data-parallel ranks break the merge; an expert has no number in its key.
Here every expert keeps its identity and its inner order, in whatever form a layout keeps it: stacked, as rows of one
flat matrix, transposed, in flat pieces that begin and end within an expert, or each as a tensor of its own.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ckpt
from tests.cases.turns import turns
from tests.support.gpt_oracle import EXP_AVG, GptSize, full_tensors
from tests.support.layouts import start
from tests.support.megatron_cpu import megatron_on_cpu
from tests.support.parts import declared
from tests.support.ranks import Crew
from tests.support.raw import attempt_folder, labelled, raw
from tests.support.tiny_gpt import build_model, label_model, parallel, wrong_bits

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

ROWS, WIDTH = 8, 3
SHAPES = {"four": (4, ROWS, WIDTH), "five": (5, ROWS, WIDTH)}
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Cut:
    """How `etp` x `ep` x `dp` ranks, the first running fastest, share matrices of gate and up, one for each expert, and
    the form in which a rank keeps its experts. The forms "rows" and "flat" are cut over DP, the others replicated."""

    ep: int = 1
    etp: int = 1
    dp: int = 1
    form: str = "stacked"

    @property
    def world(self) -> int:
        return self.etp * self.ep * self.dp

    def experts(self, count: int, rank: int) -> range:
        """Numbers of the experts of a rank: as many as torch.chunk gives it, which may be none."""
        each, at = -(-count // self.ep), rank // self.etp % self.ep
        return range(min(count, at * each), min(count, (at + 1) * each))

    def stacked(self, whole: torch.Tensor, rank: int) -> torch.Tensor:
        mine = self.experts(whole.shape[0], rank)
        halves = (half.chunk(self.etp, dim=1)[rank % self.etp] for half in whole.chunk(2, dim=1))
        return torch.cat(list(halves), dim=1)[mine.start : mine.stop]

    def local(self, whole: torch.Tensor, rank: int) -> torch.Tensor:
        """What a rank has of the matrices [experts, rows, columns] of all experts: a copy, in its form."""
        part = self.stacked(whole, rank)
        if self.form == "transposed":  # each expert's matrix lies in memory by columns
            return part.transpose(1, 2).contiguous().transpose(1, 2)
        if self.form in ("rows", "flat"):
            part = part.flatten() if self.form == "flat" else part.flatten(0, 1)
            edges = [n * part.shape[0] // self.dp + (0 < n < self.dp) for n in range(self.dp + 1)]
            at = rank // (self.etp * self.ep)
            part = part[edges[at] : edges[at + 1]]
        return part.clone()


CUTS = [
    Cut(),
    Cut(ep=4, etp=2),
    Cut(ep=2, etp=2, dp=2, form="rows"),
    Cut(dp=3, form="flat"),
    Cut(ep=2, form="transposed"),
    Cut(ep=4, form="single"),
]
SINGLE = len(CUTS) - 1


def _whole(shape: tuple[int, ...], which: int = 0) -> torch.Tensor:
    """Row r and column c of expert e hold 10,000 e + 100 r + c; moments have other 100,000s."""
    e, r, c = (torch.arange(n, dtype=torch.float32) for n in shape)
    return (100_000 * which + 10_000 * e)[:, None, None] + 100 * r[:, None] + c


class Router(nn.Module):
    """16-bit weights with an fp32 bias beside them, and counts that last for one step only."""

    def __init__(self, label: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((5, 4), 1.5 if label else 0.0, dtype=torch.bfloat16))
        bias = torch.full((5,), 1 + 2.0**-20) if label else torch.zeros(5)  # no bfloat16 number
        self.expert_bias: torch.Tensor
        self.register_buffer("expert_bias", bias)
        self.tokens: torch.Tensor
        self.register_buffer("tokens", torch.full((5,), 7.0 if label else 9.0), persistent=False)


def _state(cut: Cut, rank: int, *, label: bool) -> dict[str, Any]:
    """The labelled state; or one that is -1 all over, with an optimizer that has never stepped."""

    def entry(parameter: torch.Tensor, name: str, cut: Cut, stack: int) -> ckpt.ShardedTensor:
        shape = SHAPES[name]
        return declared(parameter, cut.local(labelled(shape, torch.int64), rank), shape, stack)

    def fresh(name: str, cut: Cut, which: int = 0) -> torch.Tensor:
        local = cut.local(_whole(SHAPES[name], which), rank)
        return local if label else local.fill_(-1.0)

    experts: dict[str, Any] = {}
    for name, shape in SHAPES.items():
        experts[name] = entry(fresh(name, cut), name, cut, stack=1)
        if cut.form == "single":
            local, numbers = fresh(name, cut), cut.local(labelled(shape, torch.int64), rank) % (ROWS * WIDTH)
            mine = enumerate(cut.experts(shape[0], rank))
            experts[name] = {e: declared(local[i], numbers[i], shape[1:]) for i, e in mine}
            if not experts[name]:  # an empty dict is a value of its own
                del experts[name]
    trained = {n: entry(nn.Parameter(fresh(n, cut)), n, cut, stack=0) for n in SHAPES}
    optimizer = torch.optim.AdamW([x.local for x in trained.values()])
    for name in SHAPES if label else ():
        moments = {key: fresh(name, cut, 1 + n) for n, key in enumerate(MOMENTS)}
        optimizer.state[trained[name].local] = {"step": torch.tensor(3.0), **moments}
    return {"experts": experts, "trained": trained, "optimizer": optimizer, "router": Router(label)}


def _wrong(state: dict[str, Any], cut: Cut, rank: int) -> list[str]:
    found: list[tuple[str, torch.Tensor, torch.Tensor]] = []
    for name, shape in SHAPES.items():
        wanted = [cut.local(_whole(shape, which), rank) for which in range(3)]
        entry, parameter = state["experts"].get(name, {}), state["trained"][name].local
        if cut.form == "single":
            found += [(name, x.local, wanted[0][i]) for i, x in enumerate(entry.values())]
        else:
            found.append((name, entry.local, wanted[0]))
        tensors = [parameter, *(state["optimizer"].state[parameter][key] for key in MOMENTS)]
        found += [(f"trained {name} {which}", x, wanted[which]) for which, x in enumerate(tensors)]
    router, other = state["router"], Router(label=True)
    found += [("weight", router.weight, other.weight), ("bias", router.expert_bias, other.expert_bias)]
    found.append(("tokens, which are not kept", router.tokens, torch.full((5,), 9.0)))
    return [
        f"{name}: {x.dtype} {x.tolist()}, not {y.tolist()}"
        for name, x, y in found
        if (x.dtype, x.shape, raw(x)) != (y.dtype, y.shape, raw(y))
    ]


def _matrix(rank: int, world: int, folder: str) -> tuple[list[str], list[tuple[int, str]], str]:
    """Every cut in turn on the first ranks of the crew: all save, then all load what each saved."""
    lines, ids, refusal = [], [], ""
    for loading, number, saved, group in turns(rank, [cut.world for cut in CUTS]):
        cut = CUTS[number]
        state = _state(cut, rank, label=not loading)
        with ckpt.Checkpointer(f"{folder}/{saved}", process_group=group, read_only=loading) as ck:
            if not loading:
                ids.append((number, ck.save(1, state).state_id))
                continue
            if number == SINGLE != saved:
                with pytest.raises(ckpt.StateMismatch) as error:
                    ck.load(state)
                refusal = str(error.value)
                continue
            assert ck.load(state) is not None
        lines += [f"{CUTS[saved]} -> {cut}: {line}" for line in _wrong(state, cut, rank)]
    return lines, ids, refusal


@pytest.fixture(scope="module")
def crew() -> Iterator[Crew]:
    with Crew(max(cut.world for cut in CUTS)) as made:
        yield made


def test_every_form_and_cut_loads_what_every_other_saved(crew: Crew, tmp_path: Path) -> None:
    """All forms but one tensor for each expert have one name, and so one id. A checkpoint with a name for each expert
    loads into any form; the way back is refused by name."""
    visits = crew.run(_matrix, str(tmp_path), timeout=180)
    assert [line for lines, _, _ in visits for line in lines] == []
    ids = {pair for _, found, _ in visits for pair in found}
    assert len(ids) == len(CUTS) and len({state_id for number, state_id in ids if number != SINGLE}) == 1
    assert all("the checkpoint has no experts/five/~" in said for _, _, said in visits[:3])
    manifest = (attempt_folder(tmp_path / "0") / "manifest.json").read_text()
    assert "router/expert_bias" in manifest and "tokens" not in manifest


def test_the_cuts_by_hand() -> None:
    whole = _whole(SHAPES["five"])
    part = Cut(ep=4, etp=2).local(whole, 5)  # the third pair of ranks, second half: one expert, rows 2, 3, 6, 7
    assert part[:, :, 0].tolist() == [[40_200, 40_300, 40_600, 40_700]]
    assert Cut(ep=4, etp=2).local(whole, 7).shape == (0, 4, WIDTH)
    rows = Cut(ep=2, etp=2, dp=2, form="rows").local(whole, 2)[:, 0].tolist()  # begins within an expert, and ends so
    assert rows == [30_000, 30_100, 30_400, 30_500, 40_000]


def _stepped(experts: range) -> dict[str, Any]:
    """An optimizer over a stack of three experts, of which this rank has some in one tensor."""
    parameter = nn.Parameter(_whole((3, 2, 2))[experts.start : experts.stop].clone())
    parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.AdamW([parameter])
    optimizer.step()
    box = ((experts.start, 0, 0), tuple(parameter.shape), (0, 0, 0))
    return {"w": ckpt.ShardedTensor(parameter, [box], (3, 2, 2), stack=1), "o": optimizer}


def _with_an_empty_rank(rank: int, world: int, root: str) -> tuple[list[float], str]:
    """Ranks 0 to 2 have an expert each, rank 3 none; each expert has its own number of steps."""
    group = dist.new_group(list(range(4)))
    if rank >= 4:
        return [], ""
    mine = range(min(rank, 3), min(rank + 1, 3))
    saved, target = _stepped(mine), _stepped(mine)
    step = saved["o"].state[saved["w"].local]["step"]
    step.fill_(10.0 + rank)
    with ckpt.Checkpointer(root, process_group=group) as ck:
        ck.save(1, saved)
        ck.load(target)
        kept = target["o"].state[target["w"].local]["step"].item()
        with pytest.raises(ckpt.CkptError) as error:
            ck.save(2, _stepped(range(2) if rank == 0 else range(2, 3) if rank == 1 else range(3, 3)))
    return [kept, *target["w"].local.flatten().tolist()], str(error.value)


def test_a_stack_with_an_optimizer(crew: Crew, tmp_path: Path) -> None:
    found = crew.run(_with_an_empty_rank, str(tmp_path), timeout=60)
    for rank in range(3):
        assert found[rank][0][0] == 10.0 + rank and len(found[rank][0]) == 5
    assert found[3][0] == [1.0]  # no expert, so the saved steps are none of its own
    for _, said in found[:4]:
        assert "o/state/w/step: one number for 2 slices of a stack" in said and "stack=0" in said


# --- Megatron Core's own experts ---

SIZE = GptSize(layers=2, hidden=16, heads=4, ffn=12, vocab=64, seq=8, experts=4, dtype=torch.bfloat16)
LAYOUTS = [ckpt.Layout(dp=4, ep=4), ckpt.Layout(tp=2, dp=2, ep=2), ckpt.Layout(dp=4, ep=2)]
FUSED = "decoder.layers.mlp.experts.experts.linear_fc1.weight"
BIAS: dict[str, Any] = {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"}


def _routers(model: Any) -> list[Any]:
    return [layer.mlp.router for layer in model.decoder.layers]


def _bias(layer: int) -> torch.Tensor:
    return 1 + (torch.arange(4) + 10 * layer) * 2.0**-20


def _megatron(layout: ckpt.Layout, label: bool) -> dict[str, Any]:
    """A real model with sequential experts and a bias for each; the counts of tokens are not kept."""
    model = build_model(SIZE, seed=1 if label else 2, **BIAS)
    optimizer = torch.optim.AdamW(model.parameters())
    if label:
        label_model(model, optimizer)
    for number, router in enumerate(_routers(model)):
        router._maintain_float32_expert_bias()
        router.expert_bias.copy_(_bias(number) if label else torch.zeros(4))
        router.local_tokens_per_expert.fill_(7.0 if label else 9.0)
    return {"model": model, "optimizer": optimizer}


def _wrong_model(state: dict[str, Any]) -> list[str]:
    routers = _routers(state["model"])
    lines = wrong_bits(state["model"], state["optimizer"])
    lines += [f"bias {r.expert_bias}" for n, r in enumerate(routers) if raw(r.expert_bias) != raw(_bias(n))]
    return lines + [f"tokens {r}" for r in routers if r.local_tokens_per_expert.tolist() != [9.0] * 4]


def _by_hand(rank: int, label: bool) -> tuple[dict[str, Any], list[tuple[torch.Tensor, torch.Tensor]]]:
    """The same names without Megatron: the fused matrix of all experts of a layer and its moment flat, cut over four
    ranks beside the borders of experts, all else whole. And pairs of what is found and wanted."""
    model: dict[str, Any] = {}
    optimizer: dict[str, Any] = {}
    pairs = []
    cut = Cut(dp=4, form="flat")
    for which, into, suffix in ((0, model, ""), (EXP_AVG, optimizer, "/exp_avg")):
        for key, whole in full_tensors(SIZE, which).items():
            numbers = labelled(tuple(whole.shape), torch.int64)
            if key == FUSED:
                wanted, numbers = (cut.local(x.flatten(0, 1), rank) for x in (whole, numbers))
            elif suffix:
                continue
            else:
                wanted = whole
            local = wanted.clone() if label else torch.zeros_like(wanted)
            into[key] = declared(local, numbers, tuple(whole.shape), stack=2 if key == FUSED else 0)
            pairs.append((local, wanted))
    return {"model": model, "optimizer": {"state": {"model": {FUSED: {"exp_avg": optimizer[FUSED]}}}}}, pairs


def _experts(rank: int, world: int, folder: str) -> tuple[list[str], list[str], list[str]]:
    lines, ids = [], []
    for number, layout in enumerate(LAYOUTS):
        with parallel(layout.tp, layout.pp, layout.dp, layout.ep), megatron_on_cpu():
            with ckpt.Checkpointer(f"{folder}/{number}", layout) as ck:
                ids.append(ck.save(1, _megatron(layout, label=True)).state_id)
            dist.barrier()
            state, pairs = _by_hand(rank, label=False)
            with ckpt.Checkpointer(f"{folder}/{number}", read_only=True) as ck:
                ck.load(state, allow_extra=["optimizer/*", "model/*expert_bias"])
            lines += [f"{layout} -> by hand: {n}" for n, (x, y) in enumerate(pairs) if raw(x) != raw(y)]
    with ckpt.Checkpointer(f"{folder}/by-hand") as ck:
        ck.save(1, {"model": _by_hand(rank, label=True)[0]["model"]})
    for number, layout in enumerate(LAYOUTS):
        with parallel(layout.tp, layout.pp, layout.dp, layout.ep), megatron_on_cpu():
            state = _megatron(layout, label=False)
            with ckpt.Checkpointer(f"{folder}/{number - 1 if number else 2}", layout, read_only=True) as ck:
                ck.load(state)
            lines += [f"-> {layout}: {line}" for line in _wrong_model(state)]
            model = build_model(SIZE, seed=3)
            with ckpt.Checkpointer(f"{folder}/by-hand", layout, read_only=True) as ck:
                ck.load({"model": model})
            lines += [f"by hand -> {layout}: {line}" for line in wrong_bits(model)]
            said = _refused(f"{folder}/refused", model.config)
    return lines, ids, said


def _refused(root: str, config: Any) -> list[str]:
    """What is said of modules whose factories give pieces that are no parts of the parameter in memory: Megatron's
    legacy one, which keeps its experts transposed in one matrix, and one that copies the halves of a bias."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.module import MegatronModule
    from megatron.core.transformer.moe import experts

    class Copying(MegatronModule):
        def __init__(self) -> None:
            super().__init__(config)
            self.bias = nn.Parameter(torch.arange(8.0))

        def sharded_state_dict(self, prefix: str = "", *args: Any, **kwargs: Any) -> dict[str, Any]:
            def build(key: str, whole: torch.Tensor, *_: Any) -> list[Any]:
                halves = enumerate(whole.chunk(2))
                return [ShardedTensor.from_rank_offsets(key, half.clone(), (0, n, 2)) for n, half in halves]

            return {"bias": ShardedTensorFactory(f"{prefix}bias", self.bias, build, torch.cat)}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(experts.gg, "assert_grouped_gemm_is_available", lambda: None)
        groups = ProcessGroupCollection.use_mpu_process_groups()
        grouped = experts.GroupedMLP(4 // config.expert_model_parallel_size, config, groups)
    said = []
    with ckpt.Checkpointer(root) as ck:
        for module in (grouped, Copying()):
            with pytest.raises(ckpt.Unsupported) as error:
                ck.save(1, {"mlp": module})
            said.append(str(error.value))
        assert ck.latest() is None
    return said


def test_megatrons_experts(tmp_path: Path) -> None:
    """One tensor for each expert on a rank, one stacked name at rest, which a flat form declared by hand shares both
    ways. The bias of the router stays fp32 in a bfloat16 model. What is transposed and copied is refused by name."""
    with start(4) as four:
        visits = four.run(_experts, str(tmp_path), timeout=180)
    for lines, ids, said in visits:
        assert lines == [] and set(ids) == set(visits[0][1][:1])
        for key, words in zip(("experts.linear_fc1.weight", "bias"), said, strict=True):
            assert f"mlp/{key}: a piece that its factory makes is not a plain part" in words
            assert "ckpt.ShardedTensor" in words
    manifest = (attempt_folder(tmp_path / "0") / "manifest.json").read_text()
    assert "mlp.router.expert_bias" in manifest and "tokens_per_expert" not in manifest
