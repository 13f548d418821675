"""Older Megatron checkpoints, a file for each rank, as one state with the names that Megatron Core has today.

The weights of the model are put together: over tensor parallelism by the rules of `rank_rules`, over pipeline stages by
numbering the layers anew. What every rank has whole must have the same bits in all files.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ckpt.adapters.foreign.moved import Move, Moved
from ckpt.adapters.foreign.mp_rank_files import RankFiles, raise_expert_parallel
from ckpt.adapters.foreign.rank_rules import NO_RULE, Placer, Rule
from ckpt.adapters.foreign.restricted import SavedTensor
from ckpt.adapters.foreign.same import same_bits
from ckpt.adapters.foreign.slabs import slabs
from ckpt.engine.stream import Content
from ckpt.errors import CorruptCheckpoint, Unsupported
from ckpt.geometry import Box, Layout, TensorSpec
from ckpt.state.names import join
from ckpt.state.values import Json, encode

_EMBEDDING, _OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
_LAYER = re.compile(r"decoder\.layers\.(\d{1,6})\.(.+)")
_EXPERT = re.compile(r"(.*\.experts)\.(?:local_experts\.(\d{1,6})\.(.+)|(linear_fc[12]\.weight)(\d{1,6}))")
_LOCAL_NORMS = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}
_SLAB = 8 << 20


@dataclass(frozen=True)
class _Local:
    """A tensor of one rank's file. name: in `RankFiles`; at: the numbers of its layer and expert, if it has any."""

    name: str
    spec: TensorSpec
    rule: Rule
    tp_rank: int
    at: tuple[int, ...]

    def whole(self, tp: int) -> tuple[int, ...]:
        """The shape of what all tensor ranks have together."""
        cut = {c.axis for c in self.rule.cuts}
        return tuple(size * tp if axis in cut else size for axis, size in enumerate(self.spec.shape))

    def boxes(self, tp: int) -> Iterator[tuple[Box, Box]]:
        """Each box of the local tensor, and where that is in the whole."""
        if not self.rule.cuts:
            yield Box.whole(self.spec.shape), Box.whole(self.spec.shape)
            return
        (cut,) = self.rule.cuts
        start = 0
        for count in cut.blocks or (self.spec.shape[cut.axis],):
            extent = _at(self.spec.shape, cut.axis, count)
            zeros = (0,) * len(extent)
            first = start * tp + self.tp_rank * count
            yield Box(_at(zeros, cut.axis, start), extent), Box(_at(zeros, cut.axis, first), extent)
            start += count


def _at(numbers: tuple[int, ...], axis: int, number: int) -> tuple[int, ...]:
    return (*numbers[:axis], number, *numbers[axis + 1 :])


class MpRankCheckpoint:
    """One iteration of an older Megatron checkpoint. Not safe for threads."""

    def __init__(self, folder: Path, document: Mapping[str, Json] | None = None) -> None:
        """Reads the pickles. document: not used, as ckpt does not write this format. Raises CorruptCheckpoint,
        StoreError or Unsupported naming the file; what is not carried is in `content.left_out`."""
        self.url = str(folder)
        files = RankFiles(folder)
        merged: dict[str, list[_Local]] = defaultdict(list)
        for name, local in _locals(files):
            merged[name].append(local)
        if not merged:
            raise CorruptCheckpoint(f"{folder}: a checkpoint with no tensors of a model")
        if files.pp > 1 and _tied(files, merged):
            merged[_EMBEDDING] += merged.pop(_OUTPUT)
        specs, moves = [], []
        for name, parts in merged.items():
            specs.append(_spec(files, name, parts))
            stack = specs[-1].shape[: specs[-1].stack]
            for part in parts:
                for inner, outer in part.boxes(files.tp):
                    front = part.at[: len(stack)]
                    placed = Box((*front, *outer.offset), (*(1 for _ in front), *outer.extent))
                    moves.append(Move(part.name, inner, name, placed))
        values, left_out = _values(files)
        self._moved = Moved(files, specs, moves, left_out, "merged")
        step: Any = files.ranks[0, 0].rest.get("iteration")
        self.content: Content = replace(
            self._moved.content, values=values, step=step if type(step) is int and step >= 0 else None
        )

    def read(self, name: str, box: Box) -> torch.Tensor:
        """See `ckpt.engine.stream.Source`. Raises CorruptCheckpoint too where two ranks differ in what both have."""
        return self._moved.read(name, box)


def _locals(files: RankFiles) -> Iterator[tuple[str, _Local]]:
    """Every tensor of every file, with the name of what it is a part of."""
    specs = {t.name: t for t in files.content.tensors}
    first_layers = _first_layers(files)
    named: list[tuple[str, tuple[int, ...], _Local]] = []
    for (tp_rank, pp_rank), file in files.ranks.items():
        for chunk in file.models:
            found = {n: specs[files.name((tp_rank, pp_rank), chunk, n)] for n, _ in file.tensors(chunk)}
            if _EMBEDDING in found and (pp_rank or chunk):
                raise_expert_parallel(file.path)  # the second number is not that of a pipeline stage
            _check_names(found, files, chunk, pp_rank, tp_rank)
            rules = _rules(found, files, str(file.path))
            for name, spec in found.items():
                new, at = _canonical(name, first_layers[chunk, pp_rank], _has_local_norms(found))
                named.append((new, at, _Local(spec.name, spec, rules[name], tp_rank, at)))
    layers = {at[0] for _, at, _ in named if at}
    counts: dict[str, set[int]] = defaultdict(set)
    for new, at, _ in named:
        counts[new].update(at[:1])
    alike = all(not numbers or numbers == layers for numbers in counts.values())
    for new, at, local in named:
        if at and not alike:  # layers that differ have names of their own, as Megatron gives them
            new = new.replace("decoder.layers.", f"decoder.layers.{at[0]}.", 1)
            local = replace(local, at=at[1:])
        yield join([new]), local


def _first_layers(files: RankFiles) -> dict[tuple[int, int], int]:
    """The number of the first layer of each (chunk, pipeline rank): chunks go round all ranks, one after the other."""
    first, layer = {}, 0
    for chunk in sorted({c for f in files.ranks.values() for c in f.models}):
        for pp_rank in range(files.pp):
            first[chunk, pp_rank] = layer
            names = files.ranks[0, pp_rank].models.get(chunk, {})
            layer += 1 + max(
                (int(m[1]) for n in names if isinstance(n, str) and (m := _LAYER.fullmatch(n))), default=-1
            )
    return first


def _check_names(found: Mapping[str, object], files: RankFiles, chunk: int, pp_rank: int, tp_rank: int) -> None:
    """Raises CorruptCheckpoint where a tensor rank has not the tensors that the first one has."""
    one, other = files.ranks[0, pp_rank], files.ranks[tp_rank, pp_rank]
    if one.models.keys() != other.models.keys():
        raise CorruptCheckpoint(f"{other.path}: has other chunks of the model than {one.path}; copy all files again")
    odd = found.keys() ^ {name for name, _ in one.tensors(chunk)}
    if odd:
        raise CorruptCheckpoint(f"{other.path}: {min(odd)} is in only one of the two, this and {one.path}")


def _has_local_norms(names: Mapping[str, object]) -> bool:
    """Whether norms are by themselves, as in Megatron's local spec; that of Transformer Engine fuses them."""
    return any(re.fullmatch(r"decoder\.layers\.\d+\.input_layernorm\..+", name) for name in names)


def _canonical(name: str, first: int, local_norms: bool) -> tuple[str, tuple[int, ...]]:
    """The name that `sharded_state_dict` has, and the numbers of the layer and the expert that are axes there."""
    layer = _LAYER.fullmatch(name)
    if layer is None:
        return name, ()
    number, inner = first + int(layer[1]), layer[2]
    if local_norms:
        for old, new in _LOCAL_NORMS.items():
            inner = new + inner.removeprefix(old) if inner.startswith(old) else inner
    expert = _EXPERT.fullmatch(inner)
    if expert is None:
        return f"decoder.layers.{inner}", (number,)
    return f"decoder.layers.{expert[1]}.experts.{expert[3] or expert[4]}", (number, int(expert[2] or expert[5]))


def _rules(found: Mapping[str, TensorSpec], files: RankFiles, where: str) -> Mapping[str, Rule]:
    """How tensor ranks share each tensor: axes and proportions of a local tensor are those of the whole."""
    if files.tp == 1:
        return dict.fromkeys(found, Rule("whole"))
    specs = tuple(sorted(replace(spec, name=name) for name, spec in found.items()))
    rules = Placer(Content(specs, {}, {}, ({},), {}, ""), Layout(tp=files.tp)).rules
    unknown = [name for name in found if rules[name].what == NO_RULE]
    if unknown:
        raise Unsupported(
            f"{where}: how tensor ranks share {', '.join(unknown[:8])} is not known to ckpt; load it with Megatron, "
            "and save it as torch_dist, which is read"
        )
    return {name: replace(rule, cuts=tuple(c for c in rule.cuts if c.group == "tp")) for name, rule in rules.items()}


def _tied(files: RankFiles, merged: Mapping[str, Sequence[_Local]]) -> bool:
    """Whether the last stage's output layer is its copy of the embeddings: then it has their bits."""
    embeddings, outputs = ({p.tp_rank: p for p in merged.get(n, ())} for n in (_EMBEDDING, _OUTPUT))
    if not embeddings or not outputs:
        return False
    for tp_rank, one in embeddings.items():
        other = outputs.get(tp_rank)
        if other is None or (other.spec.shape, other.spec.dtype) != (one.spec.shape, one.spec.dtype):
            return False
        for box in slabs(one.spec.shape, one.spec.itemsize, _SLAB):
            if not same_bits(files.read(one.name, box), files.read(other.name, box)):
                return False
    return True


def _spec(files: RankFiles, name: str, parts: Sequence[_Local]) -> TensorSpec:
    """What the parts make together. Raises CorruptCheckpoint where they do not fit one another."""
    one = parts[0]
    shape, dtype = one.whole(files.tp), one.spec.dtype
    for part in parts:
        if (part.whole(files.tp), part.spec.dtype, len(part.at)) != (shape, dtype, len(one.at)):
            raise CorruptCheckpoint(
                f"{files.url}: {one.name} is {one.spec.dtype} {list(one.spec.shape)}, but {part.name} is "
                f"{part.spec.dtype} {list(part.spec.shape)}, and both are parts of {name}"
            )
    stack = tuple(1 + max(part.at[i] for part in parts) for i in range(len(one.at)))
    return TensorSpec(name, (*stack, *shape), dtype, one.spec.itemsize, len(stack))


def _values(files: RankFiles) -> tuple[dict[str, Json], dict[str, str]]:
    """Plain values that all files have alike, and what is not carried."""
    values: dict[str, Json] = {}
    left_out = {}
    for key in dict.fromkeys(key for file in files.ranks.values() for key in file.rest):
        if key == "optimizer":
            left_out["optimizer"] = (
                "its state is flat for each rank, and does not say which parameter has which element; load it with "
                "Megatron, and save it as torch_dist, or with ckpt"
            )
            continue
        try:
            name = join([key])
            mine = encode(files.ranks[0, 0].rest.get(key), name)
            if any(encode(file.rest.get(key), name) != mine for file in files.ranks.values()):
                left_out[name] = "is not the same in all files"
            else:
                values[name] = mine
        except Unsupported as error:
            left_out[str(key)] = str(error)
    for file in files.ranks.values():
        for chunk, model in file.models.items():
            for name, value in model.items():
                if value is not None and not isinstance(value, SavedTensor):
                    left_out[f"{file.path.parent.name}/{chunk}/{name}"] = f"is a {type(value).__name__}"
        for path in sorted(file.path.parent.iterdir()):
            if path != file.path:
                left_out[f"{file.path.parent.name}/{path.name}"] = "lies beside the model; not read"
    return values, left_out
