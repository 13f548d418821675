"""A GPT whose training keeps its bits on any layout, to be read: every layer in `ckpt.invariant`, and nothing else.

`Place` is where a rank stands, `Model` the part of the GPT that it has, `Trainer` one optimizer step and what a
checkpoint holds. `tools/reference_trainer.py` runs it from a command line.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

import ckpt
from ckpt import invariant as inv


@dataclass(frozen=True)
class Config:
    """What is trained, whatever the layout. The contract's shards divide heads, groups, ffn, vocab and tokens."""

    contract: inv.Contract
    layers: int = 4
    hidden: int = 48
    heads: int = 12
    groups: int = 12
    ffn: int = 96
    vocab: int = 264
    tokens: int = 24
    dropout: float = 0.1
    tied: bool = False
    gated: bool = False
    norm: str = "LayerNorm"
    lr: float = 1e-2
    weight_decay: float = 0.01
    clip: float = 1.0


@dataclass(frozen=True)
class Place:
    """A rank's coordinates, and its groups; ranks count tensor first, then data, then pipeline."""

    layout: ckpt.Layout
    tp: int = 0
    dp: int = 0
    pp: int = 0
    tensor: dist.ProcessGroup | None = None
    data: dist.ProcessGroup | None = None
    ends: dist.ProcessGroup | None = None  # the first and the last stage, where they are two

    @classmethod
    def here(cls, layout: ckpt.Layout) -> Place:
        """Collective over the job: makes the groups."""
        if layout.world == 1:
            return cls(layout)
        rank = dist.get_rank()
        at = cls(layout, rank % layout.tp, rank // layout.tp % layout.dp, rank // (layout.tp * layout.dp))
        groups = {}
        for name, members in at._groups():
            group = dist.new_group(members)
            if rank in members:
                groups[name] = group
        return replace(at, **groups)

    def rank(self, tp: int, dp: int, pp: int) -> int:
        return (pp * self.layout.dp + dp) * self.layout.tp + tp

    @property
    def first(self) -> bool:
        return self.pp == 0

    @property
    def last(self) -> bool:
        return self.pp == self.layout.pp - 1

    def _groups(self) -> Iterator[tuple[str, list[int]]]:
        tps, dps, pps = range(self.layout.tp), range(self.layout.dp), range(self.layout.pp)
        yield from (("tensor", [self.rank(t, d, p) for t in tps]) for p in pps for d in dps)
        yield from (("data", [self.rank(t, d, p) for d in dps]) for p in pps for t in tps)
        if len(pps) > 1:
            yield from (("ends", [self.rank(t, d, 0), self.rank(t, d, pps[-1])]) for d in dps for t in tps)


@dataclass(frozen=True)
class Entry:
    """A parameter: its whole shape, which axis the virtual shards cut (None: none), and how it begins."""

    name: str
    shape: tuple[int, ...]
    axis: int | None
    begin: str = "normal"


def entries(config: Config, place: Place) -> Iterator[Entry]:
    """The parameters of a rank's stage. The rows of `qkv` and of a gated `fc1` are in the order of virtual shards."""
    h, f, size = config.hidden, config.ffn * (2 if config.gated else 1), config.hidden // config.heads
    if place.first or (place.last and config.tied):
        yield Entry("embedding", (config.vocab, h), 0)
    if place.first:
        yield Entry("positions", (config.tokens, h), None)
    for layer in stage_layers(config, place):
        yield from _norm_entries(config, f"{layer}.norm1")
        yield Entry(f"{layer}.qkv", (size * (config.heads + 2 * config.groups), h), 0)
        yield Entry(f"{layer}.qkv.bias", (size * (config.heads + 2 * config.groups),), 0, "zero")
        yield Entry(f"{layer}.proj", (h, h), 1)
        yield Entry(f"{layer}.proj.bias", (h,), None, "zero")
        yield from _norm_entries(config, f"{layer}.norm2")
        yield Entry(f"{layer}.fc1", (f, h), 0)
        yield Entry(f"{layer}.fc2", (h, config.ffn), 1)
    if place.last:
        yield from _norm_entries(config, "norm")
        if not config.tied:
            yield Entry("head", (config.vocab, h), 0)


def _norm_entries(config: Config, name: str) -> Iterator[Entry]:
    yield Entry(name, (config.hidden,), None, "one")
    if config.norm == "LayerNorm":
        yield Entry(f"{name}.bias", (config.hidden,), None, "zero")


def stage_layers(config: Config, place: Place) -> range:
    return range(*inv.Partition.even(config.layers, place.layout.pp).bounds[place.pp])


class Model:
    """This rank's part of the GPT. `parameters`: by name, in an order that ranks of one stage share."""

    def __init__(self, config: Config, place: Place, *, sequence_parallel: bool = False) -> None:
        self.config, self.place = config, place
        self.granules = inv.Granules(config.contract, place.tensor, sequence_parallel=sequence_parallel)
        for name in ("heads", "groups", "ffn", "vocab", "tokens"):
            self.granules.per_shard(getattr(config, name), name)
        self.entries = {entry.name: entry for entry in entries(config, place)}
        self.parameters = {name: self._begun(entry) for name, entry in self.entries.items()}

    def _begun(self, entry: Entry) -> torch.nn.Parameter:
        local = torch.empty(self.local_shape(entry), dtype=torch.float32)
        at = [range(offset, offset + n) for offset, n in zip(self.offset(entry), local.shape, strict=True)]
        if entry.begin == "normal":
            stream = self.granules.rng.fixed("weights", entry.name)
            ckpt.random.normal_(local, stream, std=0.05, shape=entry.shape, at=at)
        else:
            local.fill_(entry.begin == "one")
        return torch.nn.Parameter(local.to(self.config.contract.dtype))

    def local_shape(self, entry: Entry) -> tuple[int, ...]:
        shape = list(entry.shape)
        if entry.axis is not None:
            shape[entry.axis] = self.granules.per_shard(shape[entry.axis], entry.name) * len(self.granules.shards)
        return tuple(shape)

    def offset(self, entry: Entry) -> tuple[int, ...]:
        start = [0] * len(entry.shape)
        if entry.axis is not None:
            start[entry.axis] = entry.shape[entry.axis] // self.config.contract.shards * self.granules.shards.start
        return tuple(start)

    def forward(self, number: int, given: torch.Tensor | None, batch: torch.Tensor) -> torch.Tensor:
        """Microbatch `number` through this stage: activations, or on the last stage the sum of all tokens' losses.

        given: what the stage before made; batch: int64 [samples, tokens + 1], this microbatch.
        """
        granules, config = self.granules, self.config
        granules.begin(number)
        x = self._embedded(batch[:, :-1].t().contiguous()) if given is None else given
        for layer in stage_layers(config, self.place):
            x = self._layer(x, layer)
        if not self.place.last:
            return x
        x = self._norm(x, "norm")
        head = self.parameters["embedding" if config.tied else "head"]
        logits = inv.column(x, head, None, granules, granules.runs(head.shape[0]), use="head")
        return inv.cross_entropy(logits, batch[:, 1:].t().contiguous(), granules).sum()

    def _embedded(self, words: torch.Tensor) -> torch.Tensor:
        granules = self.granules
        positions = torch.arange(words.shape[0])[:, None].expand_as(words).contiguous()
        x = inv.embed(words, self.parameters["embedding"], granules)
        x = x + inv.embed_positions(positions, self.parameters["positions"], granules)
        return inv.hidden_dropout(inv.split_tokens(x, granules), self.config.dropout, granules, "embedding")

    def _layer(self, x: torch.Tensor, layer: int) -> torch.Tensor:
        p, granules, rate = self.parameters, self.granules, self.config.dropout
        x, residual = inv.fork(x)
        x = self._attention(self._norm(x, f"{layer}.norm1"), layer)
        x = inv.bias_dropout_add(x, p[f"{layer}.proj.bias"], residual, rate, granules, "attention output", layer)
        x, residual = inv.fork(x)
        x = self._feed_forward(self._norm(x, f"{layer}.norm2"), layer)
        return inv.bias_dropout_add(x, None, residual, rate, granules, "feed-forward output", layer)

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        p = self.parameters
        kind: Any = self.config.norm
        return inv.norm(x, p[name], p.get(f"{name}.bias"), self.granules, kind=kind)

    def _attention(self, x: torch.Tensor, layer: int) -> torch.Tensor:
        p, c, granules = self.parameters, self.config, self.granules
        heads, groups = c.heads // c.contract.shards, c.groups // c.contract.shards
        qkv = p[f"{layer}.qkv"]
        outputs = inv.column(x, qkv, p[f"{layer}.qkv.bias"], granules, granules.runs(qkv.shape[0]))
        found = []
        for shard, out in zip(granules.shards, outputs, strict=True):
            q, k, v = out.view(*out.shape[:2], -1, c.hidden // c.heads).split([heads, groups, groups], 2)
            attended = inv.attend(q, k, v, shard, granules, layer=layer, p=c.dropout)
            found.append(attended.view(*out.shape[:2], -1))
        proj = p[f"{layer}.proj"]
        return inv.row(found, proj, granules, granules.runs(proj.shape[1]))

    def _feed_forward(self, x: torch.Tensor, layer: int) -> torch.Tensor:
        fc1, fc2 = self.parameters[f"{layer}.fc1"], self.parameters[f"{layer}.fc2"]
        granules = self.granules
        outputs = inv.column(x, fc1, None, granules, granules.runs(fc1.shape[0]))
        return inv.row([self._active(out) for out in outputs], fc2, granules, granules.runs(fc2.shape[1]))

    def _active(self, x: torch.Tensor) -> torch.Tensor:
        if not self.config.gated:
            return F.gelu(x, approximate="tanh")
        gate, up = (part.contiguous() for part in x.chunk(2, -1))
        return F.silu(gate) * up


@dataclass
class Result:
    """What one step gave: equal bits on every layout, and on every rank."""

    loss: float
    norm: float


@dataclass
class Trainer:
    """A model in training. zero: each data-parallel rank keeps masters and moments of its rows of every parameter."""

    model: Model
    zero: bool = False
    masters: dict[str, torch.nn.Parameter] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, parameter in self.model.parameters.items():
            rows = self.rows(parameter)
            self.masters[name] = torch.nn.Parameter(parameter.detach()[rows.start : rows.stop].float().clone())
        c = self.model.config
        self.optimizer = inv.AdamW(self.masters.values(), lr=c.lr, weight_decay=c.weight_decay)

    def rows(self, parameter: torch.Tensor, dp: int | None = None, *, cut: bool | None = None) -> range:
        """Which rows of a parameter of this rank a data-parallel rank steps."""
        place, size = self.model.place, parameter.shape[0]
        if not (self.zero if cut is None else cut):
            return range(size)
        dp, ranks = place.dp if dp is None else dp, place.layout.dp
        return range(size * dp // ranks, size * (dp + 1) // ranks)

    def step(self, batch: torch.Tensor) -> Result:
        """One global batch, int64 [samples, tokens + 1], the same on every rank. Collective over the job."""
        model, contract = self.model, self.model.config.contract
        place, size = model.place, contract.microbatch
        leaves = inv.Partition.even(contract.leaves, place.layout.dp).bounds[place.dp]
        mine = range(leaves[0] * contract.leaf, leaves[1] * contract.leaf)
        model.granules.gradients.begin(mine)

        def forward(number: int, given: torch.Tensor | None) -> torch.Tensor:
            return model.forward(number, given, batch[number * size : (number + 1) * size])

        losses = inv.one_forward_one_backward(self._stage(), mine, forward)
        tokens = batch.shape[0] * model.config.tokens
        totals = self._gradients(tokens)
        norm = self._norm(totals)
        scale = inv.clip_coefficient(norm, model.config.clip)
        for name, master in self.masters.items():
            rows = self.rows(totals[name])
            master.grad = totals[name][rows.start : rows.stop].mul(scale)
        self.optimizer.step()
        self._publish()
        model.granules.rng.advance()
        return Result(self._loss(losses, mine, tokens), norm)

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds, in parts that say where they lie in the whole. Plain values stay in this dict."""
        model, found = self.model, dict[str, Any](rng=self.model.granules.rng)
        for kind in ("model", "master", "exp_avg", "exp_avg_sq"):
            found[kind] = {name: self._part(kind, name) for name in model.parameters}
        steps = {int(self.optimizer.state[m].get("step", 0)) for m in self.masters.values() if m.numel()}
        return found | {"steps": max(steps, default=0)}

    def resume(self, state: dict[str, Any]) -> None:
        """After a load into `state`: what is not a tensor goes back into the optimizer."""
        for master in self.masters.values():
            self.optimizer.state[master]["step"].fill_(state["steps"])

    def _part(self, kind: str, name: str) -> ckpt.ShardedTensor:
        model, entry = self.model, self.model.entries[name]
        parameter, master = model.parameters[name], self.masters[name]
        local: torch.Tensor = parameter.detach() if kind == "model" else master.detach()
        offset = list(model.offset(entry))
        if kind != "model":
            offset[0] += self.rows(parameter).start
            self.optimizer.prepare(master)
            local = local if kind == "master" else self.optimizer.state[master][kind]
        boxes = [(offset, list(local.shape), [0] * local.dim())] if local.numel() else []
        return ckpt.ShardedTensor(local, boxes, entry.shape)

    def _stage(self) -> inv.Stage:
        place, c = self.model.place, self.model.config
        tokens = c.tokens // (place.layout.tp if self.model.granules.sequence_parallel else 1)
        before = None if place.first else place.rank(place.tp, place.dp, place.pp - 1)
        after = None if place.last else place.rank(place.tp, place.dp, place.pp + 1)
        shape = (tokens, c.contract.microbatch, c.hidden)
        return inv.Stage(place.pp, place.layout.pp, before, after, shape, c.contract.dtype)

    def _gradients(self, tokens: int) -> dict[str, torch.Tensor]:
        """The mean gradient over all tokens of the step, fp32; one division, after the last sum."""
        place, found = self.model.place, dict[str, dict[str, torch.Tensor]]()
        for total in self.model.granules.reduce(list(self.model.parameters.items()), place.data):
            found.setdefault(total.name, {})[total.use] = total.gradient
        if self.model.config.tied and place.ends is not None and (place.first or place.last):
            found["embedding"] = self._from_both_ends(found["embedding"])
        return {name: sum_in_order(uses).div_(tokens) for name, uses in found.items()}

    def _from_both_ends(self, mine: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        ((_, own),) = mine.items()
        both = [torch.empty_like(own), torch.empty_like(own)]
        dist.all_gather(both, own.contiguous(), group=self.model.place.ends)
        return {"embedding": both[0], "head": both[1]}

    def _norm(self, totals: dict[str, torch.Tensor]) -> float:
        """Of all gradients; each element is counted by one rank of the job."""
        place, exact = self.model.place, inv.SquaredNorm()
        for name, gradient in totals.items():
            again = name == "embedding" and not place.first
            if not again and (place.tp == 0 or self.model.entries[name].axis is not None):
                rows = self.rows(gradient, cut=True)
                exact.add([gradient[rows.start : rows.stop]])
        if place.layout.world > 1:
            exact.all_reduce()
        return exact.value()

    @torch.no_grad()
    def _publish(self) -> None:
        """The model's copies of the masters, rounded to its dtype; from the rank that has stepped them."""
        place, data = self.model.place, self.model.place.data
        for name, parameter in self.model.parameters.items():
            if not self.zero or data is None or place.layout.dp == 1:
                parameter.copy_(self.masters[name])
                continue
            for dp in range(place.layout.dp):
                rows = self.rows(parameter, dp)
                part = parameter[rows.start : rows.stop]
                if dp == place.dp:
                    part.copy_(self.masters[name])
                if len(rows):
                    dist.broadcast(part, place.rank(place.tp, dp, place.pp), group=data)

    def _loss(self, losses: Sequence[torch.Tensor], mine: range, tokens: int) -> float:
        place, contract = self.model.place, self.model.config.contract
        mean = torch.zeros(1)
        if place.last:
            leaves = inv.Accumulator(mine.start, contract.microbatches)
            for loss in losses:
                leaves.add(loss.float().reshape(1))
            alone = place.data is None or place.layout.dp == 1
            mean = (leaves.sum() if alone else inv.canonical_all_reduce(leaves, place.data)).div_(tokens)
        if place.layout.world > 1:
            dist.broadcast(mean, place.rank(0, 0, place.layout.pp - 1))
        return float(mean)


def sum_in_order(uses: dict[str, torch.Tensor]) -> torch.Tensor:
    """The sums of a parameter's gradients from the places that use it, added by their names' order."""
    first, *others = (uses[name] for name in sorted(uses))
    total = first.clone()
    for other in others:
        total.add_(other)
    return total
