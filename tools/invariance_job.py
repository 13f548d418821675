"""A run of a training job on one layout, for `tools/invariance` and its tests: what each step gave, with its bits."""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

PATIENCE = datetime.timedelta(seconds=90)
"""For each wait of a rank for others, one of which may have been killed before they met."""


@dataclass(frozen=True)
class Case:
    """A layout, and what else may change while a run goes on."""

    dp: int = 1
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    zero: bool = False
    sp: bool = False

    @property
    def world(self) -> int:
        return self.dp * self.tp * self.pp

    def __str__(self) -> str:
        sizes = [f"{name.upper()}{size}" for name in ("dp", "tp", "pp", "vpp") if (size := getattr(self, name)) > 1]
        return " ".join(sizes or ["one rank"]) + (" ZeRO" if self.zero else "") + (" SP" if self.sp else "")


@dataclass(frozen=True)
class Setting:
    """What is trained. It stays as it is while a run goes on. kind: "reference" (`tools/reference_gpt.py`) or
    "megatron" (Megatron Core's GPTModel with the invariant layers)."""

    kind: str = "reference"
    shards: int = 12
    batch: int = 24
    microbatch: int = 2
    leaf: int = 1
    layers: int = 12
    heads: int = 12
    groups: int = 12
    tied: bool = False
    gated: bool = False
    norm: str = "LayerNorm"
    rope: bool = False
    bf16: bool = False
    dropout: float = 0.1
    control: str = ""

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.bf16 else torch.float32


@dataclass(frozen=True)
class Row:
    """A step's loss and norm, as hexadecimal floats, and the state id of what it left; empty where it was not saved."""

    step: int
    loss: str
    norm: str
    state_id: str = ""


@dataclass(frozen=True)
class Place:
    """Where a run keeps its checkpoints. every: steps between them; until: the last step; rows: a file to which rank 0
    appends each step as it is done, in JSON; options: storage options of the root."""

    root: str
    until: int
    every: int = 1
    rows: str | None = None
    options: Mapping[str, Any] | None = None


def job(rank: int, world: int, port: int, case: Case, setting: Setting, place: Place) -> list[Row] | None:
    """A rank of a run that goes on from the newest checkpoint of a root. On ranks beyond the layout nothing."""
    import ckpt
    from tools import invariance_controls

    if rank >= case.world:
        return None
    torch.set_num_threads(1)
    where = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=case.world, timeout=PATIENCE)
    try:
        run = _megatron if setting.kind == "megatron" else _reference
        layout = ckpt.Layout(dp=case.dp, tp=case.tp, pp=case.pp, vpp=case.vpp)
        with invariance_controls.applied(setting.control):
            return list(run(case, setting, place, layout))
    finally:
        dist.destroy_process_group()


def contract(setting: Setting) -> Any:
    from ckpt import invariant as inv

    optimizer = "torch.optim.AdamW" if setting.kind == "megatron" else "ckpt.invariant.AdamW/1"
    return inv.Contract(
        setting.shards, setting.batch, setting.microbatch, setting.leaf, dtype=setting.dtype, optimizer=optimizer
    )


def _reference(case: Case, setting: Setting, place: Place, layout: Any) -> Iterator[Row]:
    import ckpt
    from tools.reference_gpt import Config
    from tools.reference_trainer import Run

    config = Config(
        contract(setting),
        layers=setting.layers,
        heads=setting.heads,
        groups=setting.groups,
        tied=setting.tied,
        gated=setting.gated,
        norm=setting.norm,
        dropout=setting.dropout,
    )
    run = Run(config, layout, zero=case.zero, sequence_parallel=case.sp)
    options = place.options
    with ckpt.Checkpointer(place.root, layout=layout, contract=config.contract, storage_options=options) as ck:
        restored = run.load(ck, level="trajectory-exact")
        first = 1 if restored is None else restored.step + 1
        for step, (loss, norm) in zip(range(first, place.until + 1), run.steps(), strict=False):
            yield _done(ck, place, step, loss, norm, run.state())


def _megatron(case: Case, setting: Setting, place: Place, layout: Any) -> Iterator[Row]:
    import ckpt
    from tests.support.gpt_oracle import GptSize
    from tests.support.invariant_megatron import make_trainer, train_step
    from tests.support.megatron_cpu import megatron_on_cpu
    from tests.support.tiny_gpt import parallel

    size = GptSize(
        layers=setting.layers,
        hidden=8 * setting.heads,
        heads=setting.heads,
        kv_groups=setting.groups,
        ffn=16 * setting.heads,
        vocab=264,
        seq=24,
        gated=setting.gated,
        tied=setting.tied,
        dtype=setting.dtype,
        dropout=setting.dropout,
    )
    with parallel(case.tp, case.pp, case.dp, vpp=case.vpp):
        with megatron_on_cpu():
            how: dict[str, Any] = {"zero": case.zero, "sequence_parallel": case.sp, "vpp": case.vpp}
            trainer = make_trainer(size, contract(setting), rope=setting.rope, norm=setting.norm, **how)
        options = place.options
        with ckpt.Checkpointer(place.root, layout=layout, contract=trainer.contract, storage_options=options) as ck:
            state = trainer.state()
            if ck.load(state, level="trajectory-exact") is not None:
                trainer.number = state["step"]
            while trainer.number < place.until:
                with megatron_on_cpu():
                    loss, norm = train_step(trainer)
                yield _done(ck, place, trainer.number, loss, norm, trainer.state())


def _done(ck: Any, place: Place, step: int, loss: float, norm: float, state: dict[str, Any]) -> Row:
    saved = ck.save(step, state).state_id if step % place.every == 0 or step == place.until else ""
    row = Row(step, loss.hex(), norm.hex(), saved)
    if place.rows is not None and dist.get_rank() == 0:
        with Path(place.rows).open("a") as file:
            file.write(json.dumps(vars(row)) + "\n")
    return row
