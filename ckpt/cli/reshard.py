"""The command `ckpt-reshard`: checkpoints from one format into another, with every bit accounted for."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch.distributed as dist

from ckpt.adapters.foreign import sidecar as sidecars
from ckpt.adapters.foreign.changes import Changed, Changes
from ckpt.adapters.foreign.formats import OUTPUTS, READERS, detect
from ckpt.adapters.foreign.into import open_session, save_from
from ckpt.adapters.foreign.memory import band_for, check_memory, flight_for, taken
from ckpt.adapters.foreign.naming import AUTO, Named
from ckpt.adapters.foreign.naming_families import FAMILIES
from ckpt.adapters.foreign.pieces import Output, write_pieces
from ckpt.adapters.foreign.rank_files import RankFile, plan_files
from ckpt.adapters.foreign.rank_rules import Given, Placer
from ckpt.adapters.foreign.ranks_write import write_ranks
from ckpt.adapters.foreign.witness import state_id_of
from ckpt.cli import layout_plan, naming, output
from ckpt.cli.errors import Command
from ckpt.engine.comm import Comm
from ckpt.engine.rest import CommittedState
from ckpt.engine.session import Session
from ckpt.engine.stream import Advance, Source
from ckpt.errors import CkptError, CorruptCheckpoint
from ckpt.geometry import Layout
from ckpt.inspect.address import Address, find
from ckpt.inspect.committed import in_use
from ckpt.store.objects import split_url

_THREADED = ("ckpt", "ranks")  # formats whose writing the threads of a process share

_UNCHECKED = ("hf", "ranks")
"""Formats without checksums: their sidecar alone tells that a bit was flipped."""


@dataclass
class _Input:
    """What is read: its format, the state as it lies there, and the state as it is wanted, with names and changes."""

    format: str
    source: Source
    wanted: Source
    changed: Changed | None
    named: Named | None
    run: Mapping[str, Any]  # its provenance, if it is one of ours
    committed: tuple[Session, CommittedState] | None

    @property
    def changed_at_all(self) -> bool:
        return self.wanted is not self.source

    @property
    def step(self) -> int | None:
        return self.source.content.step

    def numerics(self, step: int) -> Any:
        """The contract of the job that saved it, if what is written as this step is all that it saved, and only that:
        steps may seed random numbers."""
        return None if self.changed_at_all or step != self.step else self.run.get("numerics")


@dataclass(frozen=True)
class _Target:
    """What is to be written. step: None where SRC does not say it and the format need not."""

    url: str
    format: str
    step: int | None
    sidecar: bool
    append: bool
    memory: int | None
    jobs: int


@click.command(cls=Command, context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("src", metavar="SRC[@STEP]", type=output.AddressType())
@click.argument("dst", metavar="DST")
@click.option("--from", "given", type=click.Choice(["ckpt", *READERS]), help="Format of SRC; found out if left out.")
@click.option("--format", "wanted", type=click.Choice(["ckpt", *OUTPUTS, "ranks"]), default="ckpt", show_default=True)
@click.option("--to", type=layout_plan.LayoutType(), help="For ranks, or to be drawn by --plan: tp=2,pp=2,dp=2.")
@click.option(
    "--shard", multiple=True, metavar="PATTERN=HOW", help="What ranks hold: `replicated`, or AXIS:GROUP such as 0:tp."
)
@click.option("--select", multiple=True, metavar="PATTERN", help="Only entries whose names fit; may be repeated.")
@click.option("--rename", nargs=2, multiple=True, metavar="REGEX NEW", help="Rename entries; may be repeated.")
@click.option(
    "--names",
    type=click.Choice([AUTO, *FAMILIES]),
    help="A model of this family: from hf into Megatron's names, from all else into Hugging Face's.",
)
@click.option("--config", type=click.Path(path_type=Path), help="config.json for --names; that beside SRC if left out.")
@click.option("--dtype", metavar="DTYPE", help="Cast floating-point tensors, rounding to nearest even.")
@click.option("--step", type=click.IntRange(0), help="Step of the result in a ckpt root; that of SRC if left out.")
@click.option("--append", is_flag=True, help="DST may hold steps of other jobs, whose writing jobs are fenced off.")
@click.option("--sidecar/--no-sidecar", default=True, help="Whether what the format lacks is kept beside it.")
@click.option("--memory", type=layout_plan.BytesType(), help="Grow by at most so much: 2GiB. Of each process.")
@click.option("-j", "--jobs", type=click.IntRange(1), default=1, help="Threads of each process that work on it.")
@click.option("--plan", "plan_only", is_flag=True, help="Only say what would be done.")
@click.option("--verify", is_flag=True, help="Read the result once more, and compare its state id.")
@click.option("--debug", is_flag=True, help="Show the trace of an error.")
@output.json_option
@click.pass_context
def reshard(
    ctx: click.Context,
    src: Address,
    dst: str,
    given: str | None,
    wanted: str,
    to: Layout | None,
    shard: tuple[str, ...],
    select: tuple[str, ...],
    rename: tuple[tuple[str, str], ...],
    names: str | None,
    config: Path | None,
    dtype: str | None,
    step: int | None,
    append: bool,
    sidecar: bool,
    memory: int | None,
    jobs: int,
    plan_only: bool,
    verify: bool,
    debug: bool,
    as_json: bool,
) -> None:
    """Write the checkpoint SRC to DST in another format, or in ours with fewer entries, other names or another dtype.

    Formats: ckpt (a root of ours; a path or s3://); dcp (torch.distributed.checkpoint), megatron (torch_dist of
    Megatron Core), hf (safetensors) and ranks (a safetensors file for each rank of the layout --to), in folders;
    mp_rank (a file for each rank, of an older Megatron) is read. Ours needs no target layout: any layout loads it.

    Called again after a kill it goes on where it was. Under torchrun processes share the work.

    Exit codes: as those of ckpt.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not dist.is_initialized():
        dist.init_process_group("gloo")
        ctx.call_on_close(dist.destroy_process_group)
    layout_plan.check_asked(wanted, to, shard, plan_only)
    if jobs > 1 and wanted not in _THREADED:
        raise click.UsageError(f"--format {wanted} is written by one thread; leave --jobs out")
    check_memory(wanted, memory, jobs)
    opening = partial(_open, ctx, given, Changes(select, rename, dtype), names, config)
    found = opening(src, leased=not plan_only)
    content = found.wanted.content
    number = step if step is not None else found.step
    if wanted == "ckpt" and number is None:
        raise click.UsageError(f"{found.source.url} does not say its step; give --step")
    target = _Target(dst, wanted, number, sidecar, append, memory, jobs)
    beyond = {} if wanted == "ckpt" else sidecars.beyond(content, wanted)
    lost = dict(content.left_out) | ({} if sidecar else beyond)
    facts = _facts(found, target, lost, beyond if sidecar else {})
    placer = None if to is None else Placer(content, to, [Given.parse(text) for text in shard])
    files = None if placer is None else plan_files(content, placer)
    facts["layout"] = _layout_facts(found, placer, files)
    if plan_only:
        facts["plan"] = _plan_facts(found, target, files if wanted == "ranks" else None)
        _show(facts, as_json)
        return
    if found.committed is not None:  # that one again, though there may be a newer one by now
        src = Address(src.url, "seq", str(found.committed[1].opened.record.number))
    more = [opening(src, leased=False).wanted for _ in range(jobs - 1)]
    with output.counting("writing", content.nbytes) as advance:
        result = facts["destination"]["state_id"] = _write(found, more, target, files, advance)
    if verify:
        again = state_id_of(_result(target, sidecars.sidecar(content, result)))
        if again != result:
            raise CorruptCheckpoint(f"{dst}: reads as state {again}, but {result} was written; do not use it")
        facts["destination"]["read_again"] = again
    _show(facts, as_json)


def _open(
    ctx: click.Context,
    given: str | None,
    changes: Changes,
    names: str | None,
    config: Path | None,
    src: Address,
    leased: bool,
) -> _Input:
    local = split_url(src.url)[0] in ("", "file")
    form = given or (detect(_folder(src.url)) if local else "ckpt")
    run: Mapping[str, Any] = {}
    committed = None
    source: Source
    if form == "ckpt":
        session = open_session(src.url)
        src = _agreed(session, src)
        if leased:
            record, held = ctx.with_resource(in_use(session.store, session.log, src, "ckpt-reshard"))
            if not held:
                click.echo(output.NO_LEASE, err=True)
        else:
            record = find(session.log.read(), src, session.store.url)
        source = state = CommittedState(session, record)
        committed = session, state
        run = state.opened.run
    else:
        if src.by != "latest":
            raise click.UsageError(f"{src.url} is a {form} checkpoint, which has one step; leave @{src.value} out")
        source = READERS[form](_folder(src.url))
    model = naming.model_of(names, config, form, source.url)
    found = _Input(form, source, *naming.changed_and_named(source, form, changes, model), run, committed)
    if leased and form in _UNCHECKED and found.changed_at_all and source.content.state_id is not None:
        state_id_of(source)  # what is made of it has another id, which could not tell that a bit was flipped here
    return found


def _agreed(session: Session, src: Address) -> Address:
    """Collective: the commit that the first process finds, by its number: who looks later may find a newer one."""
    found: bytes | None = None
    with session.comm.phase("source: find"):
        if session.comm.rank == 0:
            found = str(find(session.log.read(), src, session.store.url).number).encode()
    return Address(src.url, "seq", session.comm.broadcast(found, "source: find").decode())


def _folder(url: str) -> Path:
    scheme, rest = split_url(url)
    if scheme not in ("", "file"):
        raise CkptError(f"{url}: checkpoints of other libraries are read and written in local folders only; copy it")
    return Path(rest)


def _write(
    found: _Input, more: Sequence[Source], target: _Target, files: Sequence[RankFile] | None, advance: Advance
) -> str:
    """Gives the state id of what was written. more: the same state, for further threads."""
    source = found.wanted
    if target.format == "ckpt":
        assert target.step is not None
        session = open_session(target.url, budget=2 * flight_for(target.memory, target.jobs))
        made = save_from(
            session,
            source,
            target.step,
            layout=found.run.get("layout"),
            numerics=found.numerics(target.step),
            append=target.append,
            more=more,
            advance=advance,
        )
        return str(made.record.document["state_id"])
    folder = _folder(target.url)
    if target.format != "ranks":
        return write_pieces(_output(found, target), source, folder, advance=advance)
    assert files is not None
    band = band_for(target.memory, target.jobs)
    group = Comm(timeout=86400.0)
    return write_ranks([source, *more], folder, files, group, with_sidecar=target.sidecar, band=band, advance=advance)


def _output(found: _Input, target: _Target) -> Output:
    options: dict[str, Any] = {"beside": naming.beside(found.named)} if target.format == "hf" else {}
    return OUTPUTS[target.format](found.wanted.content, target.sidecar, **options)


def _result(target: _Target, document: bytes) -> Source:
    if target.format != "ckpt":
        return READERS[target.format](_folder(target.url), sidecars.parse_sidecar(document, target.url))
    session = open_session(target.url)
    return CommittedState(session, find(session.log.read(), Address(target.url, "step", str(target.step)), target.url))


def _facts(found: _Input, target: _Target, lost: Mapping[str, str], in_sidecar: Mapping[str, str]) -> dict[str, Any]:
    content, source = found.wanted.content, found.source
    return {
        "source": {
            "url": source.url,
            "format": found.format,
            "state_id": source.content.state_id,
            "step": found.step,
        },
        "destination": {"url": target.url, "format": target.format, "state_id": None, "read_again": None},
        "tensors": len(content.tensors),
        "bytes": content.nbytes,
        "values": len(content.values),
        "ranks_with_values": sum(1 for r in content.ranks if r),
        "not_carried": dict(lost),
        "in_sidecar": dict(in_sidecar),
        "changes": None if found.changed is None else found.changed.map,
        "names": None if found.named is None else found.named.record,
    }


def _layout_facts(found: _Input, placer: Placer | None, files: list[RankFile] | None) -> dict[str, Any] | None:
    if placer is None or files is None:
        return None
    held = layout_plan.held_by_source(*found.committed) if found.committed and not found.changed_at_all else None
    return layout_plan.layout_facts(placer, files, held, found.run.get("layout"))


def _plan_facts(found: _Input, target: _Target, files: list[RankFile] | None) -> dict[str, Any]:
    content = found.wanted.content
    world = dist.get_world_size() if dist.is_initialized() else 1
    plan = _output(found, target).plan if target.format in OUTPUTS else None
    if plan is not None:
        sizes = [piece.reads for piece in plan.pieces]
    else:
        sizes = layout_plan.piece_sizes(content, target.format, band_for(target.memory, target.jobs))
    return {
        "output": layout_plan.written(content, files, plan),
        "processes": layout_plan.per_process(sizes, world),
        "memory": taken(target.format, target.memory, target.jobs),
        "jobs": target.jobs,
    }


def _show(facts: dict[str, Any], as_json: bool) -> None:
    if dist.is_initialized() and dist.get_rank():
        return
    if as_json:
        output.write_json(facts)
        return
    source, destination = facts["source"], facts["destination"]
    rows: list[tuple[str, object]] = [
        ("from", f"{source['url']} ({source['format']})"),
        ("state id", source["state_id"] or "not known to the format"),
        ("to", f"{destination['url']} ({destination['format']})"),
        ("state id", destination["state_id"] or "nothing written: --plan"),
        ("tensors", f"{facts['tensors']}, {output.size(facts['bytes'])}"),
        ("values", f"{facts['values']}, and those of {facts['ranks_with_values']} ranks"),
    ]
    if destination["read_again"]:
        rows.append(("read again", "the same state id"))
    if facts["in_sidecar"]:
        rows.append((sidecars.NAME, f"{len(facts['in_sidecar'])} entries that the format cannot hold"))
    rows += layout_plan.plan_rows(facts.get("plan"), destination["format"])
    parts: list[output.RenderableType] = [output.facts(rows)]
    if facts["not_carried"]:
        parts.append("not carried:")
        parts += [output.safe(f"  {name}: {why}") for name, why in facts["not_carried"].items()]
    changes = facts["changes"]
    if changes:
        table = output.table("was", "dtype", "is", "dtype")
        for row in changes["changed"] + [[old, "", new, ""] for old, new in changes["values"]]:
            table.add_row(*map(output.safe, row))
        parts.append(table)
        parts += [output.safe(f"left out: {name}") for name in changes["left_out"]]
    parts += naming.show(facts["names"])
    if facts["layout"] and facts.get("plan"):
        parts += layout_plan.show(facts["layout"])
    output.write(parts)
