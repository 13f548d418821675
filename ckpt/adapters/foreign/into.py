"""Any state at rest as a step of one of our roots."""

from __future__ import annotations

import hashlib
import os
import platform
import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ckpt.engine.comm import Comm
from ckpt.engine.faults import FaultPoint, no_faults
from ckpt.engine.session import MIB, Session
from ckpt.engine.stream import Advance, Source, write_stream
from ckpt.errors import CkptError, CorruptCheckpoint
from ckpt.state.values import Json, canonical_json, parse_json
from ckpt.store import arrays
from ckpt.store.commit import complete_last
from ckpt.store.log import FORMAT, History, Log, Record
from ckpt.store.objects import create_same, kvstore_spec, open_store, probe
from ckpt.store.records import Intent, attempt_prefix


@dataclass(frozen=True)
class Imported:
    """record: the commit; fresh: whether this call made it, or found it there."""

    record: Record
    fresh: bool


def open_session(
    url: str,
    storage_options: Mapping[str, Any] | None = None,
    *,
    timeout: float = 86400.0,
    budget: int = 16 * MIB,
    faults: FaultPoint = no_faults,
) -> Session:
    """Collective over torch.distributed where that is initialised. timeout: seconds that one process waits for another,
    which may have far more to do."""
    store = open_store(url, storage_options)
    context = arrays.context(threads=max(1, torch.get_num_threads()))
    kvstore = kvstore_spec(url, storage_options)
    return Session(store, kvstore, Log(store), Comm(timeout=timeout), context, faults, budget)


def save_from(
    session: Session,
    source: Source,
    step: int,
    *,
    layout: Json = None,
    numerics: Json = None,
    append: bool = False,
    more: Sequence[Source] = (),
    advance: Advance = lambda nbytes: None,
) -> Imported:
    """Collective. Commits the state of `source`, which every process has opened, as `step`; goes on where an earlier
    call for the same state was killed; does nothing where the step is there. The outcome does not depend on the number
    of processes. layout, numerics: of the job that saved the state, as they stand in its provenance; numerics only if
    the state is as that job saved it, since a run may go on trajectory-exact by it. more: the same state opened again,
    once for each further thread that is to work in this process; `advance` is called from all of them.

    append: the root may hold steps of other jobs, which is the way to fence a training job off: without it that is
    refused. Raises what `write_stream` raises, and CkptError for a root that is in use.
    """
    comm = session.comm
    name = conversion_id(source, step)
    told: bytes | None = None
    with comm.phase("import: begin"):
        if comm.rank == 0:
            history = session.log.read()
            record = history.outcome(name)
            job: dict[str, Json] = {"layout": layout} | ({} if numerics is None else {"numerics": numerics})
            begun = None if record is not None else _begin(session, history, source, step, name, append, job)
            told = canonical_json([None if record is None else record.number, begun])
    number, begun = parse_json(comm.broadcast(told, "import: begin"), "import: begin")
    if number is not None:
        return Imported(session.log.read().records[number - 1], False)
    intent = Intent.parse(bytes.fromhex(begun["intent"]), f"{session.store.url}: intent.json of {name}")
    return Imported(write_stream(session, [source, *more], intent, bytes.fromhex(begun["run"]), advance), True)


def conversion_id(source: Source, step: int) -> str:
    """Names the attempt that imports this state: the same for the same bits and step."""
    content = source.content
    told = [
        step,
        content.identity,
        [[t.name, t.dtype, list(t.shape), t.stack] for t in content.tensors],
        dict(content.aliases),
        dict(content.values),
        [dict(r) for r in content.ranks],
    ]
    return hashlib.sha256(canonical_json(told)).hexdigest()[:32]


def _begun(session: Session, prefix: str, claim: str, name: str, step: int) -> dict[str, str]:
    """The intent and provenance of an attempt that was killed. Raises CorruptCheckpoint where they are not of it."""
    found = {key: session.store.get(f"{prefix}{key}.json") for key in ("intent", "run")}
    for key, data in found.items():
        where = f"{session.store.url}/{prefix}{key}.json"
        document = parse_json(data, where)
        told = [document.get(k) for k in ("claim", "attempt", "step")] if isinstance(document, dict) else None
        if told != [claim, name, step]:
            raise CorruptCheckpoint(
                f"{where}: not of this attempt; delete {session.store.url}/{prefix} and run it again"
            )
    return {key: data.hex() for key, data in found.items()}


def _begin(
    session: Session, history: History, source: Source, step: int, name: str, append: bool, job: Mapping[str, Json]
) -> dict[str, str]:
    """On rank 0: the attempt's intent and provenance, new or as they were. job: what the provenance says of the one
    that saved the state."""
    store, last = session.store, history.last_claim
    if last is not None:
        prefix = attempt_prefix(last.claim, name)
        there = store.list(prefix)
        if there.get(f"{prefix}run.json"):
            return _begun(session, prefix, last.claim, name, step)
        if history.newest(step) is not None and not append:
            raise CkptError(f"{store.url}: step {step} is there, and is another state; choose another place or step")
        if not append and any(r.kind == "commit" for r in history.records):
            raise CkptError(
                f"{store.url}: holds steps of other jobs, and a job that still writes there would be fenced off; "
                "choose an empty place, or append"
            )
    probe(store)
    complete_last(store, session.log)
    claim = secrets.token_hex(16)
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    who: dict[str, Json] = {"time": now, "host": socket.gethostname(), "pid": os.getpid()}
    session.log.claim({"kind": "claim", "claim": claim, "world": 0, **who})
    newest = session.log.read().newest()
    content = source.content
    intent = Intent(
        claim,
        name,
        step,
        None if newest is None else newest.number,
        len(content.ranks),
        "stream",
        content.tensors,
        content.aliases,
        content.values,
    )
    run = {
        "format": FORMAT,
        "step": step,
        "claim": claim,
        "attempt": name,
        "world": len(content.ranks),
        "source": {"url": source.url, "identity": content.identity},
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        **who,
        **job,
    }
    prefix = attempt_prefix(claim, name)
    data = canonical_json(run)
    create_same(store, f"{prefix}intent.json", intent.document())
    create_same(store, f"{prefix}run.json", data)
    return {"intent": intent.document().hex(), "run": data.hex()}
