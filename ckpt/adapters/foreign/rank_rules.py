"""Which part of each tensor a rank of a target layout holds, by the tensor's name.

A checkpoint of ours says nothing of how a model computes, so this comes from names: first what `--shard` says, then the
names of Megatron Core's GPT models (ColumnParallelLinear cuts the rows of a weight, RowParallelLinear its columns; see
megatron/core/tensor_parallel/layers.py), else the tensor is whole on every rank. Optimizer state lies where its
parameter does. Data and context parallel ranks are replicas.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ckpt.adapters.foreign.parts import Part, Run
from ckpt.engine.stream import Content
from ckpt.errors import CkptError, Unsupported
from ckpt.geometry import Coords, Layout, TensorSpec
from ckpt.geometry.placement import ceil_cut, even_cut

GROUPS = ("tp", "cp", "dp", "pp", "ep", "etp")
NO_RULE = "no rule"


@dataclass(frozen=True)
class Cut:
    """An axis that the ranks of a group share. blocks: sizes of what is fused along it, each shared by itself; none:
    the axis is one. uneven: by the rule of torch.chunk, which DTensors follow; else it must divide."""

    axis: int
    group: str
    blocks: tuple[int, ...] = ()
    uneven: bool = False


@dataclass(frozen=True)
class Rule:
    """what: for people. stages: the pipeline stages (of pp x vpp) that hold the tensor; None: all."""

    what: str
    cuts: tuple[Cut, ...] = ()
    stages: frozenset[int] | None = None


@dataclass(frozen=True)
class Given:
    """What `--shard PATTERN=HOW` says of the tensors whose names fit: `replicated`, or `AXIS:GROUP` for each axis that
    is cut, and `first` or `last` for one pipeline stage, with commas between."""

    pattern: str
    how: str

    @staticmethod
    def parse(text: str) -> Given:
        """Raises CkptError."""
        pattern, equals, how = text.rpartition("=")
        words = how.split(",")
        fit = [w in ("first", "last") or re.fullmatch(rf"\d+:({'|'.join(GROUPS)})", w) for w in words]
        if not (equals and pattern and (how == "replicated" or all(fit))):
            raise CkptError(
                f"{text!r}: not PATTERN=HOW; HOW is `replicated`, or AXIS:GROUP, such as 0:tp, with commas between; "
                f"groups are {', '.join(GROUPS)}; `first` and `last` name a pipeline stage"
            )
        return Given(pattern, how)

    def rule(self, spec: TensorSpec, layout: Layout) -> Rule:
        """Raises CkptError where the tensor lacks an axis."""
        stages: set[int] = set()
        cuts = []
        for word in [] if self.how == "replicated" else self.how.split(","):
            if word in ("first", "last"):
                stages.add(0 if word == "first" else _stages(layout) - 1)
                continue
            axis, group = word.split(":")
            if int(axis) >= len(spec.shape):
                raise CkptError(f"{spec.name}: has the shape {list(spec.shape)}, and no axis {axis}: correct --shard")
            cuts.append(Cut(int(axis), group, uneven=True))
        return Rule(f"--shard {self.pattern}={self.how}", tuple(cuts), frozenset(stages) if stages else None)


class Placer:
    """Where everything of one state belongs on the ranks of one layout."""

    def __init__(self, content: Content, layout: Layout, given: Sequence[Given] = ()) -> None:
        """given: the first that fits a name counts. Raises CkptError for one that fits none."""
        self.layout = layout
        specs = {t.name: t for t in content.tensors}
        self.specs: Mapping[str, TensorSpec] = specs | {n: specs[kept] for n, kept in content.aliases.items()}
        self._plain = {_plain(name): spec for name, spec in self.specs.items()}
        self._given = given
        for one in given:
            if not any(fnmatch.fnmatchcase(name, one.pattern) for name in self.specs):
                raise CkptError(f"--shard {one.pattern}={one.how}: no tensor has such a name")
        self._layers = _layer_counts(self._plain)
        self.rules: Mapping[str, Rule] = {name: self._rule(name) for name in sorted(self.specs)}

    def part(self, name: str, rank: int) -> Part | None:
        """What a rank has of a tensor; None for nothing. Raises Unsupported where an axis does not divide."""
        rule, spec, at = self.rules[name], self.specs[name], self.layout.coords(rank)
        if rule.stages is not None and at.pp not in {stage % self.layout.pp for stage in rule.stages}:
            return None
        runs: list[Sequence[Run]] = [((0, size),) for size in spec.shape]
        for cut in rule.cuts:
            try:
                runs[cut.axis] = _shared(runs[cut.axis], cut, self.layout, at)
            except ValueError as error:
                raise Unsupported(
                    f"{name}: axis {cut.axis} cannot be cut over {cut.group} of {self.layout}: {error}; choose another "
                    f"layout, or say what ranks hold with --shard '{name}=…'"
                ) from None
        part = Part.of(runs)
        return part if part.volume or not spec.nbytes else None

    def _rule(self, name: str) -> Rule:
        for one in self._given:
            if fnmatch.fnmatchcase(name, one.pattern):
                return one.rule(self.specs[name], self.layout)
        return self._megatron(_plain(name)) or Rule(NO_RULE)

    def _megatron(self, plain: str) -> Rule | None:
        """By the names of Megatron Core; plain: a name with dots alone."""
        first, last = frozenset({0}), frozenset({_stages(self.layout) - 1})
        if re.search(r"(^|\.)embedding\.word_embeddings\.weight", plain):
            tied = re.sub(r"embedding\.word_embeddings", "output_layer", plain) not in self._plain
            return self._fitting(plain, Rule("vocabulary", (Cut(0, "tp"),), first | last if tied else first))
        if re.search(r"(^|\.)embedding\.\w+\.", plain):
            return Rule("first stage", (), first)
        if re.search(r"(^|\.)output_layer\.(weight|bias)", plain):
            return self._fitting(plain, Rule("vocabulary", (Cut(0, "tp"),), last))
        if re.search(r"(^|\.)decoder\.final_(layer)?norm\.", plain):
            return Rule("last stage", (), last)
        found = re.search(r"(^|\.)decoder\.layers\.(?:(\d+)\.)?(.+)", plain)
        return None if found is None else self._layer(plain, found[2], found[3])

    def _layer(self, plain: str, number: str | None, inner: str) -> Rule:
        """Of a tensor of one layer, or of all layers stacked on axis 0."""
        rule = Rule("layers")
        axis = 0
        if number is None:
            rule = replace(rule, cuts=(Cut(0, "pp"),))
            axis = 1
        else:
            rule = replace(rule, stages=self._stage_of(plain, int(number)))
        expert = ".experts.experts." in f".{inner}"
        if expert:
            rule = Rule("experts", (*rule.cuts, Cut(axis, "ep")), rule.stages)
            axis += 1
        group = "etp" if expert else "tp"
        label = "experts, " if expert else ""
        if re.search(r"(^|\.)linear_qkv\.(weight|bias)", inner):
            return self._with(rule, plain, "QKV", Cut(axis, group))
        if re.search(r"(^|\.)linear_fc1\.(weight|bias)", inner):
            return self._with(rule, plain, *self._gate(plain, axis, group, label))
        if re.search(r"(^|\.)(linear_proj|linear_fc2)\.weight", inner):
            return self._with(rule, plain, f"{label}row-parallel", Cut(axis + 1, group))
        whole = expert or re.search(r"norm|router|linear_(proj|fc2)\.bias", inner)
        return self._fitting(plain, rule if whole else replace(rule, what=NO_RULE))

    def _gate(self, plain: str, axis: int, group: str, label: str) -> tuple[str, Cut]:
        """linear_fc1 gives twice what linear_fc2 takes where gate and up are fused in it."""
        beside = re.sub(r"linear_fc1\.(weight|bias)", "linear_fc2.weight", plain)
        shape, after = self._plain[plain].shape, self._plain.get(beside)
        one = f"{label}column-parallel", Cut(axis, group)
        parts = self.layout.expert_tp if group == "etp" else self.layout.tp
        if parts == 1 or len(shape) <= axis:
            return one
        if after is None:
            raise Unsupported(
                f"{plain}: whether gate and up are fused in it cannot be told without {beside}: keep that too, or say "
                "what ranks hold with --shard"
            )
        width = shape[axis]
        if 2 * after.shape[-1] != width:
            return one
        return f"{label}gate/up", Cut(axis, group, (width // 2, width // 2))

    def _stage_of(self, plain: str, number: int) -> frozenset[int]:
        count, stages = self._layers[_before_layers(plain)], _stages(self.layout)
        if count % stages:
            raise Unsupported(
                f"{plain}: {count} layers cannot be shared evenly by {stages} pipeline stages; choose another layout, "
                "or say what ranks hold with --shard"
            )
        return frozenset({number // (count // stages)})

    def _with(self, rule: Rule, plain: str, what: str, cut: Cut) -> Rule:
        return self._fitting(plain, Rule(what, (*rule.cuts, cut), rule.stages))

    def _fitting(self, plain: str, rule: Rule) -> Rule:
        """Without cuts of axes that the tensor lacks: a step counter has those of the stack alone."""
        ndim = len(self._plain[plain].shape)
        return replace(rule, cuts=tuple(c for c in rule.cuts if c.axis < ndim))


def _stages(layout: Layout) -> int:
    return layout.pp * layout.vpp


def _plain(name: str) -> str:
    return name.replace("/", ".")


def _before_layers(plain: str) -> str:
    return plain[: plain.index("decoder.layers.")]


def _layer_counts(names: Mapping[str, TensorSpec]) -> dict[str, int]:
    """The number of layers of each model that numbers them, by what stands before `decoder.layers`."""
    counts: dict[str, int] = {}
    for plain in names:
        found = re.search(r"(^|\.)decoder\.layers\.(\d+)\.", plain)
        if found:
            before = _before_layers(plain)
            counts[before] = max(counts.get(before, 0), int(found[2]) + 1)
    return counts


def _shared(runs: Sequence[Run], cut: Cut, layout: Layout, at: Coords) -> list[Run]:
    """The runs of an axis that remain to a rank. Several cuts of one axis: each cuts what is left, as one."""
    if len(runs) != 1:
        raise ValueError("it is cut twice")
    ((first, size),) = runs
    divide = ceil_cut if cut.uneven else even_cut
    found = []
    for block in cut.blocks or (size,):
        for parts, index in _shares(cut.group, layout, at):
            offset, count = divide(block, parts, index)
            found.append((first + offset, count))
        first += block
    return found


def _shares(group: str, layout: Layout, at: Coords) -> list[tuple[int, int]]:
    """(number of shares, index) of those that a rank has: with interleaved stages several of pp."""
    if group == "pp":
        return [(_stages(layout), chunk * layout.pp + at.pp) for chunk in range(layout.vpp)]
    size = layout.expert_tp if group == "etp" else getattr(layout, group)
    return [(size, getattr(at, group))]
