"""`ckpt verify`: checkpoints from their stored bytes."""

from __future__ import annotations

import os
from typing import Any

import click

from ckpt.cli import output
from ckpt.cli.errors import DIFFERENT
from ckpt.errors import NothingCommitted
from ckpt.inspect.address import Address, find
from ckpt.inspect.committed import in_use
from ckpt.inspect.verify import Verified
from ckpt.inspect.verify import verify as verify_commit
from ckpt.store.log import Log
from ckpt.store.objects import open_store
from ckpt.store.records import attempt_prefix


@click.command()
@click.argument("address", metavar="URL[@STEP]", type=output.AddressType())
@click.option("--all", "everything", is_flag=True, help="Every commit that is not retired, of all branches.")
@click.option("--jobs", "-j", type=click.IntRange(1, 256), default=min(8, os.cpu_count() or 1), show_default=True)
@output.json_option
@output.pager_option
@click.pass_context
def verify(ctx: click.Context, address: Address, everything: bool, jobs: int, as_json: bool, no_pager: bool) -> None:
    """Read a checkpoint (the newest, without @STEP) and check all of it: documents and what pins them, every object's
    size, every chunk's CRC32C, every tensor's fingerprint, and the state id. Each job holds an object of up to 16 MiB
    or two. The last job's claim, and times in the log, are pinned by nothing.

    A lease keeps the checkpoint from being deleted meanwhile, where the store can be written.

    Exit codes: 0 all is well, 1 damage was found, 2 usage, 3 store unreachable, 4 no such checkpoint.
    """
    if everything and address.by != "latest":
        raise click.UsageError("give either --all or @STEP")
    store = open_store(address.url)
    log = Log(store)
    history = log.read()
    find(history, address, store.url)  # whether there is anything
    retired = history.retired
    wanted = [address]
    if everything:
        numbers = [r.number for r in history.records if r.kind == "commit" and r.number not in retired]
        wanted = [Address(address.url, "seq", str(number)) for number in numbers]
    done: list[Verified] = []
    unheld = False
    for one in wanted:
        try:
            with in_use(store, log, one, "verify") as (record, leased):
                unheld |= not leased
                with output.progress(f"step {record.step}") as bar:
                    done.append(verify_commit(store, log.read(), record, jobs=jobs, progress=bar))
        except NothingCommitted:
            if not everything:  # else it was retired meanwhile
                raise
    if unheld:
        click.echo(output.NO_LEASE, err=True)
    if as_json:
        output.write_json({"url": store.url, "leased": not unheld, "checkpoints": [_document(v) for v in done]})
    else:
        output.write([part for v in done for part in _parts(v)], paged=not no_pager)
    if any(v.damage for v in done):
        ctx.exit(DIFFERENT)


def _parts(done: Verified) -> list[output.RenderableType]:
    what = f"{output.count(done.objects, 'object')}, {output.size(done.bytes)}, {done.tensors} tensors"
    if not done.damage:
        return [output.safe(f"step {done.record.step}  ok       {what}, state id {done.state_id}", "green")]
    prefix = attempt_prefix(done.record.claim, done.record.attempt)
    made = output.table("damage", "tensor", "chunk", "elements", "file and fault")
    for d in done.damage:
        names = ", ".join(d.tensors[:5]) + (f" and {len(d.tensors) - 5} more" if len(d.tensors) > 5 else "")
        chunk = "" if d.chunk is None else "/".join(map(str, d.chunk))
        where = output.safe(f"{d.file.removeprefix(prefix)}: {d.problem}")
        made.add_row(d.kind, output.safe(names), chunk, "" if d.box is None else str(d.box), where)
    head = f"step {done.record.step}  DAMAGED  {output.count(len(done.damage), 'fault')}; sound: {done.tensors} tensors"
    return [
        output.safe(head, "bold red"),
        made,
        f"files are below {prefix}; restore them from a copy, or load another step",
    ]


def _document(done: Verified) -> dict[str, Any]:
    return {
        "step": done.record.step,
        "seq": done.record.number,
        "ok": not done.damage,
        "objects": done.objects,
        "bytes": done.bytes,
        "tensors": done.tensors,
        "state_id": done.state_id,
        "damage": [
            {
                "kind": d.kind,
                "file": d.file,
                "problem": d.problem,
                "tensors": list(d.tensors),
                "chunk": None if d.chunk is None else list(d.chunk),
                "box": None if d.box is None else {"offset": list(d.box.offset), "extent": list(d.box.extent)},
            }
            for d in done.damage
        ],
    }
