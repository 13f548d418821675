"""What `ckpt-reshard` would do: files, bytes of each process and rank, and which rank holds which slices."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import click

from ckpt.adapters.foreign.pieces import Plan
from ckpt.adapters.foreign.rank_files import RankFile, file_name
from ckpt.adapters.foreign.rank_rules import NO_RULE, Placer
from ckpt.adapters.foreign.ranks_write import cut
from ckpt.cli import output
from ckpt.engine import stream
from ckpt.engine.rest import CommittedState
from ckpt.engine.session import Session
from ckpt.engine.sharing import share
from ckpt.engine.stream import Content
from ckpt.errors import StateMismatch
from ckpt.geometry import Box, Catalogue, Layout
from ckpt.store.arrays import expected_objects
from ckpt.store.objects import NotFound
from ckpt.store.records import read_receipt

_SHOWN = 16  # ranks that are drawn one by one
_FEW = 4  # drawn at each end where there are more

Held = Mapping[str, Sequence[Box]]  # of one rank, by tensor


class LayoutType(click.ParamType):
    """Sizes such as `tp=2,pp=2,dp=2`, and `order=tp-cp-ep-dp-pp`: a layout as Megatron Core has it."""

    name = "LAYOUT"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Layout:
        if isinstance(value, Layout):
            return value
        sizes: dict[str, Any] = {}
        for word in str(value).split(","):
            axis, _, size = word.partition("=")
            if axis in sizes or axis not in ("tp", "cp", "ep", "etp", "dp", "pp", "vpp", "order"):
                self.fail(
                    f"{word!r} is not one of tp=, cp=, ep=, etp=, dp=, pp=, vpp= and order=, once each", param, ctx
                )
            if axis != "order" and not (size.isascii() and size.isdigit()):
                self.fail(f"{word!r}: not a size", param, ctx)
            sizes[axis] = size if axis == "order" else int(size)
        try:
            return Layout(**sizes)
        except StateMismatch as error:
            self.fail(str(error), param, ctx)


class BytesType(click.ParamType):
    """A number of bytes, such as 2GiB, 512MiB or 1073741824."""

    name = "BYTES"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        text = str(value).strip()
        for power, unit in enumerate(("B", "KiB", "MiB", "GiB", "TiB")):
            number = text.removesuffix(unit)
            if number != text and number.isascii() and number.isdigit():
                return int(number) << 10 * power
        if text.isascii() and text.isdigit():
            return int(text)
        self.fail(f"{value!r}: not a number of bytes, such as 2GiB", param, ctx)


def held_by_source(session: Session, state: CommittedState) -> list[Held] | None:
    """What each rank held that saved a state, from its receipts. None where they do not say: the state was converted,
    so that no job held it, or they were not kept."""
    opened = state.opened
    if "source" in opened.run:
        return None
    found: list[Held] = []
    for rank in range(len(opened.ranks)):
        try:
            receipt = read_receipt(session.store, opened.prefix, rank)
        except NotFound:
            return None
        found.append({name: [box for box, _ in boxes] for name, boxes in receipt.held.items()})
    return found


def written(content: Content, files: Sequence[RankFile] | None, plan: Plan | None) -> dict[str, int]:
    """How many files or objects, of how many bytes, there will be: rank files, those of a plan, or our own objects. A
    plan's bytes are those of the state alone."""
    if files is not None:
        return {"files": sum(len(f.ranks) for f in files), "bytes": sum(f.nbytes for f in files)}
    if plan is not None:
        return {"files": len(plan.files) + len(plan.further), "bytes": sum(piece.reads for piece in plan.pieces)}
    objects = expected_objects(Catalogue.of(content.tensors))
    return {"files": len(objects), "bytes": sum(objects.values())}


def per_process(sizes: Sequence[int], world: int) -> list[dict[str, int]]:
    """Bytes of the state that each process reads, and writes itself: nothing is moved between processes."""
    shares = [sum(sizes[n] for n in of_one) for of_one in share(sizes, world)]
    return [{"process": n, "read": size, "moved": 0} for n, size in enumerate(shares)]


def piece_sizes(content: Content, form: str, band: int) -> list[int]:
    """Bytes of each piece of work that processes share."""
    if form == "ckpt":
        catalogue = Catalogue.of(content.tensors)
        pieces = stream.cut(catalogue)
        return [sum(o.box.volume * catalogue.arrays[o.array].itemsize for o in piece) for piece in pieces]
    return [sum(box.volume * spec.itemsize for spec, box in run) for run in cut(content.tensors, band)]


def plan_rows(plan: Mapping[str, Any] | None, form: str) -> list[tuple[str, object]]:
    """What `--plan` adds to the facts."""
    if plan is None:
        return []
    made, what = plan["output"], "objects" if form == "ckpt" else "files"
    rows: list[tuple[str, object]] = [
        ("writes", f"{made['files']} {what}, {output.size(made['bytes'])}"),
        ("memory", f"at most {output.size(plan['memory'])} more, in each process, with {plan['jobs']} of --jobs"),
    ]
    for of_one in plan["processes"]:
        read, moved = output.size(of_one["read"]), output.size(of_one["moved"])
        rows.append((f"process {of_one['process']}", f"reads {read} of the state, moves {moved} to others"))
    if form == "ckpt":
        rows.append(("layout", "none needed: any layout loads this format; --to only draws one"))
    return rows


def layout_facts(placer: Placer, files: Sequence[RankFile], held: Sequence[Held] | None, was: Any) -> dict[str, Any]:
    """The change of layout as a document: rules with what they place, and each rank's bytes and slices."""
    rules: dict[str, list[str]] = defaultdict(list)
    for name, rule in placer.rules.items():
        rules[rule.what].append(name)
    example = _example(placer)
    of_rank = {rank: file for file in files for rank in file.ranks}
    return {
        "source": was,
        "target": {
            axis: getattr(placer.layout, axis) for axis in ("tp", "cp", "ep", "etp", "dp", "pp", "vpp", "order")
        },
        "rules": [_rule_facts(names, placer) for names in rules.values()],
        "no_rule": [name for name, rule in placer.rules.items() if rule.what == NO_RULE],
        "example": None if example is None else {"name": example, "shape": list(placer.specs[example].shape)},
        "source_ranks": None if held is None else [_slices(h.get(example or "", ())) for h in held],
        "ranks": [_rank_facts(placer, r, of_rank[r], held, example) for r in range(placer.layout.world)],
    }


def show(facts: Mapping[str, Any]) -> list[output.RenderableType]:
    """The document for people."""
    ranks, was = facts["ranks"], facts["source_ranks"]
    target = Layout(**facts["target"])
    source = output.layout_text(facts["source"], None if was is None else len(was))
    parts: list[output.RenderableType] = [f"layout  {source} -> {output.layout_text(facts['target'], None)}", ""]
    table = output.table("how", "tensors", "bytes", "cut", "such as", right=("tensors", "bytes"))
    for rule in facts["rules"]:
        cuts = ", ".join(f"axis {axis} over {group} ({size})" for axis, group, size in rule["cuts"] if size > 1)
        row = (str(rule["tensors"]), output.size(rule["bytes"]), cuts or "whole")
        table.add_row(output.safe(rule["what"]), *row, output.safe(rule["such_as"]))
    parts += [table, ""]
    if facts["no_rule"]:
        parts.append(
            f"no rule: {len(facts['no_rule'])} tensors have no name that is known, and are not cut by tensor parallel "
            "ranks; --shard says more\n"
        )
    if facts["example"]:
        parts.append(output.safe(f"slices of {facts['example']['name']} {facts['example']['shape']}:"))
    table = output.table("rank", "place", "file", "moved", "was", "is", right=("file", "moved"))
    count = max(len(ranks), len(was or ()))
    numbers = list(range(count))
    if count > _SHOWN:
        numbers = [*numbers[:_FEW], -1, *numbers[-_FEW:]]
    for number in numbers:
        if number < 0:
            table.add_row("…", f"{count - 2 * _FEW} more", *[""] * 4)
            continue
        before = "?" if was is None else "" if number >= len(was) else was[number] or "-"
        if number >= len(ranks):
            table.add_row(str(number), "gone", "", "", before, "")
            continue
        rank = ranks[number]
        moved = "?" if rank["moved"] is None else output.size(rank["moved"])
        place = output.place(target, number) or "-"
        table.add_row(str(number), place, output.size(rank["bytes"]), moved, before, rank["is"] or "-")
    return [*parts, table]


def _rule_facts(names: Sequence[str], placer: Placer) -> dict[str, Any]:
    """names: of tensors of one kind; those of few axes, such as step counters, lack some of its cuts."""
    layout = placer.layout
    rule = max((placer.rules[name] for name in names), key=lambda r: len(r.cuts))
    sizes = {"etp": layout.expert_tp, "pp": layout.pp * layout.vpp}
    return {
        "what": rule.what,
        "cuts": [[cut.axis, cut.group, sizes.get(cut.group) or getattr(layout, cut.group)] for cut in rule.cuts],
        "stages": None if rule.stages is None else sorted(rule.stages),
        "tensors": len(names),
        "bytes": sum(placer.specs[name].nbytes for name in names),
        "such_as": names[0],
    }


def _rank_facts(
    placer: Placer, rank: int, file: RankFile, held: Sequence[Held] | None, example: str | None
) -> dict[str, Any]:
    part = None if example is None else placer.part(example, rank)
    return {
        "rank": rank,
        "file": file_name(rank),
        "same_as": file.ranks[0] if rank != file.ranks[0] else None,
        "bytes": file.nbytes,
        "moved": None if held is None else _moved(file, held[rank] if rank < len(held) else {}),
        "is": "" if part is None else _slices([box for box, _ in part.boxes]),
    }


def _moved(file: RankFile, held: Held) -> int:
    """Bytes of a rank's file that the rank of the same number did not hold before."""
    total = 0
    for entry in file.entries:
        boxes = [box for box, _ in entry.part.boxes]
        common = [a.intersect(b) for a in boxes for b in held.get(entry.spec.name, ())]
        total += (entry.part.volume - sum(c.volume for c in common if c is not None)) * entry.spec.itemsize
    return total


def _example(placer: Placer) -> str | None:
    """The tensor that is cut along most axes; of those the largest."""
    names = [n for n, spec in placer.specs.items() if spec.nbytes]
    return max(names, key=lambda n: (len(placer.rules[n].cuts), placer.specs[n].nbytes), default=None)


def _slices(boxes: Sequence[Box]) -> str:
    """Boxes, with those that lie side by side along the first axis as one."""
    found: list[Box] = []
    for box in sorted(boxes, key=lambda b: (b.offset[1:], b.extent[1:], b.offset[:1])):
        last = found[-1] if found else None
        beside = last is not None and box.offset[1:] == last.offset[1:] and box.extent[1:] == last.extent[1:]
        if last is not None and beside and box.offset and last.stop[0] == box.offset[0]:
            found[-1] = Box(last.offset, (last.extent[0] + box.extent[0], *last.extent[1:]))
        else:
            found.append(box)
    return " ".join(map(str, sorted(found)))


def check_asked(form: str, to: Layout | None, shard: Sequence[str], plan_only: bool) -> None:
    """Raises click.UsageError for options that do not go together."""
    if form == "ranks" and to is None:
        raise click.UsageError("--format ranks needs the layout whose ranks read it: --to tp=…,pp=…,dp=…")
    if form != "ranks" and to is not None and not plan_only:
        raise click.UsageError(
            f"--to has no effect on --format {form}, which any layout loads; add --plan to see the layout drawn"
        )
    if shard and to is None:
        raise click.UsageError("--shard goes with --to")
