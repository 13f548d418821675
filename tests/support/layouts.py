"""The labelled tiny GPT saved on one layout and loaded on others, with every bit compared.

    stops = [Stop(Layout(tp=4), size, root, load=True)]
    with start(4) as crew:
        assert faults(stops, run_stops(crew, stops)) == []

A state is the model, a torch AdamW with labelled moments and a step counter for each parameter, and a step. What
each of them must be on a rank is known without ckpt, from the oracle of `tiny_gpt`.
"""

import hashlib
import json
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import torch

import ckpt
from ckpt import Layout
from tests.support.extent import covering
from tests.support.gpt_oracle import GptSize, Place
from tests.support.megatron_cpu import megatron_on_cpu
from tests.support.ranks import Crew
from tests.support.roots import Root
from tests.support.tiny_gpt import build_model, label_model, parallel, place, raw_bytes, wrong_bits

STEP = 41  # the step inside a labelled state
LR = 3e-4  # its learning rate; a fresh optimizer has AdamW's default


@dataclass(frozen=True)
class Family:
    """A model and layouts that it can be saved and loaded on."""

    size: GptSize
    layouts: tuple[Layout, ...]


SMALL = tuple(Layout(tp=tp, pp=pp, dp=dp) for tp in (1, 2, 4) for pp in (1, 2, 4) for dp in (1, 2) if tp * pp * dp <= 8)
"""Every layout of TP {1,2,4} x PP {1,2,4} x DP {1,2} that 8 ranks can hold."""

ALONE = (Layout(), Layout(dp=2), Layout(pp=4), Layout(tp=4))
MIXED = (Layout(tp=2, pp=2), Layout(pp=2, dp=2), Layout(tp=2, dp=2), Layout(tp=4, pp=2), Layout(tp=2, pp=2, dp=2))
SOME = (*ALONE, *MIXED)
"""Each axis alone, each two together, and all three."""

FAMILIES = {
    "dense": Family(GptSize(), covering(SOME, more=[layout for layout in SMALL if layout not in SOME])),
    "experts": Family(
        GptSize(experts=4),
        covering(
            (
                Layout(),
                Layout(dp=2, ep=2, pp=2),
                Layout(tp=4, ep=2, etp=2),
                Layout(tp=2, pp=2, dp=2, ep=2, etp=1),
            ),
            more=(Layout(tp=2, pp=2), Layout(tp=2, dp=2, ep=2)),
        ),
    ),
    "grouped": Family(  # fewer key and value groups than heads, and no gate
        GptSize(heads=8, kv_groups=4, ffn=96, vocab=64, gated=False),
        covering((Layout(), Layout(tp=4), Layout(tp=4, pp=2)), more=(Layout(tp=2, pp=2),)),
    ),
    "tied": Family(  # with pipeline stages, first and last hold a copy of the embedding each
        GptSize(tied=True),
        covering((Layout(), Layout(tp=2, pp=2), Layout(pp=4)), more=(Layout(pp=2), Layout(tp=4))),
    ),
    "bfloat16": Family(
        GptSize(dtype=torch.bfloat16, kv_groups=2),
        covering((Layout(), Layout(tp=2, pp=2), Layout(pp=2, dp=2)), more=(Layout(tp=2, pp=2, dp=2),)),
    ),
    "large": Family(  # tensors of several stored objects each, cut elsewhere than TP cuts them
        GptSize(layers=6, hidden=192, heads=6, kv_groups=2, vocab=12_012),
        (Layout(tp=2), Layout(tp=2, pp=2), Layout(pp=2, dp=2)),
    ),
}


@dataclass(frozen=True)
class Stop:
    """What ranks do on one layout: make a state (a random init, from which a load must recover every bit, else the
    labelled one), and save it or not. The root is the same for both; the newest checkpoint is loaded."""

    layout: Layout
    size: GptSize
    root: Root
    load: bool = False
    save: bool = False
    seed: int = 1

    def __str__(self) -> str:
        verbs = " and ".join(["load"] * self.load + ["save"] * self.save)
        return f"{verbs} on {self.layout} at {self.root.url}"


@dataclass(frozen=True)
class Visit:
    """What one rank saw at a stop. wrong: a line for each tensor or value that differs from the oracle."""

    wrong: tuple[str, ...] = ()
    loaded: str | None = None  # the state id
    saved: str | None = None  # the state id
    step: int | None = None  # of the newest checkpoint: the one that was loaded, or the one that was saved
    seconds: float = 0.0  # of the load and the save


Visits = list[Visit]
"""Of one stop, by rank."""


def start(world: int) -> Crew:
    """A crew for stops. It imports Megatron without torch's compiler, which is a second less for each rank."""
    return Crew(world, env={"TORCHDYNAMO_DISABLE": "1"})


def run_stops(crew: Crew, stops: Sequence[Stop]) -> list[Visits]:
    """The stops in their order on the ranks of a crew, which must be as many as each layout has."""
    per_rank = crew.run(_visit, list(stops), timeout=60 + 30 * len(stops))
    return [list(visits) for visits in zip(*per_rank, strict=True)]


def tour(stops: Sequence[Stop]) -> list[Visits]:
    """The stops, in any order, on as few fresh processes as can be: one crew for each world size."""
    found: dict[int, Visits] = {}
    for world in sorted({stop.layout.world for stop in stops}, reverse=True):
        here = [number for number, stop in enumerate(stops) if stop.layout.world == world]
        with start(world) as crew:
            found.update(zip(here, run_stops(crew, [stops[number] for number in here]), strict=True))
    return [found[number] for number in range(len(stops))]


def faults(stops: Sequence[Stop], visits: Sequence[Visits]) -> list[str]:
    """A line for each rank that found wrong bits at a stop, and each stop where ranks were told different ids."""
    found = []
    for stop, seen in zip(stops, visits, strict=True):
        for rank, mine in enumerate(seen):
            if mine.wrong:
                found.append(f"{stop}: rank {rank}, {len(mine.wrong)} wrong: {'; '.join(mine.wrong[:3])}")
        if len({(mine.loaded, mine.saved, mine.step) for mine in seen}) != 1:
            found.append(f"{stop}: ranks were told different state ids or steps")
    return found


# --- On a rank ---


def _visit(rank: int, world: int, stops: Sequence[Stop]) -> Visits:
    visits = []
    for layout, here in groupby(stops, lambda stop: stop.layout):
        with parallel(layout.tp, layout.pp, layout.dp, layout.ep, etp=layout.etp):
            for stop in here:
                try:
                    visits.append(_at(stop))
                except Exception as error:
                    error.add_note(str(stop))
                    raise
    return visits


def label(model: Any, optimizer: torch.optim.Optimizer) -> None:
    """Gives every parameter, moment and step counter its label."""
    label_model(model, optimizer)
    for name, param in model.named_parameters():
        optimizer.state[param]["step"] = _counter(name, model.gpt_size, place())
    for group in optimizer.param_groups:
        group["lr"] = LR


def wrong(model: Any, optimizer: torch.optim.Optimizer, step: Any) -> list[str]:
    """A line for each tensor whose bits, or value, are not those of the labelled state."""
    lines = wrong_bits(model, optimizer)
    for name, param in model.named_parameters():
        found, wanted = optimizer.state[param]["step"], _counter(name, model.gpt_size, place())
        if (found.dtype, found.shape, raw_bytes(found)) != (wanted.dtype, wanted.shape, raw_bytes(wanted)):
            lines.append(f"{name} (step): {found}, not {wanted}")
    if type(step) is not int or step != STEP:
        lines.append(f"step: {step!r}, not {STEP}")
    lines += [f"lr: {group['lr']!r}, not {LR}" for group in optimizer.param_groups if group["lr"] != LR]
    return lines


def _counter(name: str, size: GptSize, here: Place) -> torch.Tensor:
    """Adam's step for a parameter: a number of its own for each layer and expert, whichever rank has it."""
    first = {"layers": here.pp_rank * (size.layers // here.pp)}
    first["local_experts"] = here.ep_rank * ((size.experts or 0) // here.ep)
    name = re.sub(r"(layers|local_experts)\.(\d+)", lambda m: f"{m[1]}.{int(m[2]) + first[m[1]]}", name)
    if size.tied and name == "output_layer.weight":
        name = "embedding.word_embeddings.weight"
    return torch.tensor(float(zlib.crc32(name.encode()) % (1 << 20)))


def _at(stop: Stop) -> Visit:
    with megatron_on_cpu():
        model = build_model(stop.size, stop.seed)
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"model": model, "optimizer": optimizer, "step": 0}
    if not stop.load:
        label(model, optimizer)
        state["step"] = STEP
    else:
        fresh = wrong_bits(model)
        if len(fresh) != len(list(model.parameters())):
            return Visit(("the random init held some of the labels already",))
        if stop.seed % 2:  # every other time the optimizer has moments of its own, else it has none
            _take_a_step(model, optimizer)
    visit = Visit()
    with ckpt.Checkpointer(stop.root.url, layout=stop.layout, storage_options=stop.root.storage_options) as ck:
        if stop.load:
            restored = ck.load(state)
            if restored is None or not restored.verified:
                return Visit(("nothing was loaded and verified",))
            visit = replace(visit, loaded=restored.state_id, step=restored.step, seconds=restored.seconds)
        visit = replace(visit, wrong=tuple(wrong(model, optimizer, state["step"])))
        if stop.save:
            receipt = ck.save((visit.step or 0) + 1, state)
            seconds = visit.seconds + receipt.seconds
            visit = replace(visit, saved=receipt.state_id, step=receipt.step, seconds=seconds)
        if ck.latest() != visit.step:
            visit = replace(visit, wrong=(*visit.wrong, f"the newest step is {ck.latest()}, not {visit.step}"))
    return visit


def _take_a_step(model: Any, optimizer: torch.optim.Optimizer) -> None:
    for param in model.parameters():
        param.grad = torch.randn_like(param)
    optimizer.step()
    optimizer.zero_grad()


# --- What lies in a root, seen through fsspec alone ---


def attempts(root: Root) -> list[dict[str, str]]:
    """For each commit of the log, in order: relative name to SHA-256 of all that the state determines."""
    fs, base = _filesystem(root)
    log = sorted(path for path in fs.find(f"{base}/log") if path.endswith(".json"))
    records = [json.loads(fs.cat_file(path)) for path in log]
    found = []
    for record in records:
        if record["kind"] == "commit":
            attempt = f"{base}/attempts/{record['claim']}/{record['attempt']}"
            names = [*fs.find(f"{attempt}/state"), f"{attempt}/manifest.json"]
            found.append({name[len(attempt) + 1 :]: _sha256(fs, name) for name in names})
    return found


def different(files: dict[str, str], others: dict[str, str]) -> list[str]:
    """Names that only one of two trees has, or that have other bytes."""
    return sorted(name for name in files.keys() | others.keys() if files.get(name) != others.get(name))


def _sha256(fs: Any, name: str) -> str:
    return hashlib.sha256(fs.cat_file(name)).hexdigest()


def _filesystem(root: Root) -> tuple[Any, str]:
    import fsspec

    options: dict[str, Any] = {}
    if root.storage_options:
        given = root.storage_options
        options = {
            "key": given["access_key"],
            "secret": given["secret_key"],
            "client_kwargs": {"endpoint_url": given["endpoint"], "region_name": given["region"]},
            "use_listings_cache": False,
        }
    return fsspec.core.url_to_fs(root.url, **options)
