"""`Checkpointer`: one object through which a job saves and resumes."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from ckpt.adapters import capture, known_from
from ckpt.engine import load as loading
from ckpt.engine import save as saving
from ckpt.engine.comm import Comm
from ckpt.engine.faults import FaultPoint, no_faults
from ckpt.engine.opened import open_commit, pick
from ckpt.engine.session import Session
from ckpt.engine.target import Options
from ckpt.errors import CkptError, Fenced, StateInvalid, StateMismatch
from ckpt.geometry import Layout
from ckpt.state import State
from ckpt.state.values import canonical_json, parse_json
from ckpt.store import arrays
from ckpt.store.commit import complete_last
from ckpt.store.log import Log, Record, check_fence
from ckpt.store.objects import kvstore_spec, open_store, probe


@dataclass(frozen=True)
class Receipt:
    """A committed save. bytes: of the whole state; seconds: of the call on this rank, and `phases` of it by name; plan:
    what moved between ranks, in words."""

    step: int
    state_id: str
    bytes: int
    seconds: float
    phases: Mapping[str, float]
    plan: str


@dataclass(frozen=True)
class Restored:
    """A finished load. state_id: of the committed state, which the loaded tensors were compared with when `verified`;
    tensors, values: how many were loaded; saved_layout: of the job that saved, as it was given, or None."""

    step: int
    state_id: str
    bytes: int
    seconds: float
    phases: Mapping[str, float]
    plan: str
    tensors: int
    values: int
    verified: bool
    saved_layout: Mapping[str, Any] | None


class Checkpointer:
    """Saves and loads one run's state at one root.

    Usable from one thread. `save`, `load` and the constructor are collective over the process group; without
    torch.distributed it is a job of one rank. Works as a context manager.
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        layout: Layout | None = None,
        *,
        timeout: float = 600.0,
        process_group: dist.ProcessGroup | None = None,
        storage_options: Mapping[str, Any] | None = None,
        read_only: bool = False,
        faults: FaultPoint = no_faults,
    ) -> None:
        """url: a path, file:// or s3://bucket/prefix. layout: this job's parallel layout; its world must be the group's
        size. timeout: seconds any wait for other ranks may take. storage_options: for S3 endpoint, region, access_key,
        secret_key and so on (the usual AWS variables serve too). read_only: never claims and cannot save.
        faults: see `ckpt.engine.faults`; for tests.
        """
        where = os.fspath(url)
        self.layout = layout
        self._read_only = read_only
        self._comm = Comm(process_group, timeout)
        with self._comm.operation("open"), self._comm.phase("open"):
            if layout is not None and layout.world != self._comm.world:
                raise StateMismatch(f"layout {layout} has {layout.world} ranks, the job has {self._comm.world}")
            self._store = open_store(where, storage_options)
            kvstore = kvstore_spec(where, storage_options)
            context = arrays.context(threads=max(1, torch.get_num_threads()))
            self._session = Session(self._store, kvstore, Log(self._store), self._comm, context, faults)
        self._cache = saving.PlanCache()
        self._claim: str | None = None
        self._base: int | None = None
        self._seen = 0  # records of the log that were there when the base was set (rank 0)
        self._invalid: str | None = None

    @property
    def url(self) -> str:
        """The root, normalised."""
        return self._store.url

    def save(self, step: int, state: State) -> Receipt:
        """Collective, blocking: saves `state` as `step` and commits it. The state must not change meanwhile.

        Raises StateMismatch or Unsupported before anything is written; CorruptCheckpoint, StoreError, RankFailed or
        Fenced with nothing committed; StateInvalid while a failed load has left the state a mix.
        """
        if self._read_only:
            raise CkptError(f"{self.url}: this Checkpointer was opened with read_only=True and cannot save")
        if self._invalid is not None:
            raise StateInvalid(f"not saved: {self._invalid}")
        begin = time.perf_counter()
        with self._comm.operation("save"):
            with self._comm.phase("save: capture"):
                if type(step) is not int or step < 0:
                    raise StateMismatch(f"step {step!r} must be a non-negative int")
                captured = capture(state)
            claim = self._claimed()
            done = saving.save(
                self._session,
                self._cache,
                captured,
                claim=claim,
                parent=self._parent(claim),
                step=step,
                layout=self.layout,
            )
        self._base = self._seen = done.record.number
        state_id = str(done.record.document["state_id"])
        return Receipt(step, state_id, done.bytes, time.perf_counter() - begin, done.phases, done.plan)

    def load(
        self,
        state: State,
        step: int | None = None,
        *,
        allow_missing: Iterable[str] = (),
        allow_extra: Iterable[str] = (),
        cast: Iterable[str] | None = None,
        verify: bool = True,
        atomic: bool = False,
    ) -> Restored | None:
        """Collective: fills `state` in place from the newest committed step, or from `step`. None if nothing is
        committed and no step was asked for.

        allow_missing: patterns of names that may be absent from the checkpoint (they keep what they hold);
        allow_extra: patterns of names in the checkpoint that no rank wants; cast: patterns of tensors that may be cast
        to the dtype they have here. verify: compare the fingerprints of the live tensors with the saved ones. atomic:
        keep the old tensors until all is verified, at the price of their memory.

        Raises StateMismatch, CorruptCheckpoint, Unsupported or StoreError with nothing changed. Once tensors have begun
        to change, any failure raises StateInvalid on every rank, and saving is refused until a load succeeds.
        """
        begin = time.perf_counter()
        options = Options(tuple(allow_missing), tuple(allow_extra), tuple(cast or ()))
        document = saving.layout_document(self.layout)
        try:
            with self._comm.operation("load"):
                if not self._read_only:
                    self._claimed()
                self._session.faults("load.claimed")
                record = self._pick(step)
                if record is None:
                    return None
                opened = open_commit(self._session, record if self._comm.rank == 0 else None)
                done = loading.load(
                    self._session,
                    opened,
                    lambda found: capture(state, known_from(found)),
                    options,
                    verify=verify,
                    atomic=atomic,
                    layout=document,
                )
        except StateInvalid as error:
            self._invalid = str(error)
            raise
        self._invalid = None
        self._base, self._seen = opened.record.number, self._session.log.last
        return Restored(
            opened.record.step,
            opened.manifest.state_id,
            done.bytes,
            time.perf_counter() - begin,
            done.phases,
            done.plan,
            done.tensors,
            done.values,
            done.verified,
            opened.run.get("layout"),
        )

    def steps(self) -> list[int]:
        """Committed steps of the newest commit's lineage, ascending. Not collective; always asks the store."""
        return sorted({r.step for r in self._session.log.read().lineage()})

    def latest(self) -> int | None:
        """The newest committed step, or None. Not collective; always asks the store."""
        newest = self._session.log.read().newest()
        return None if newest is None else newest.step

    def close(self) -> None:
        """Frees the process group. Safe to call twice."""
        self._comm.close()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _claimed(self) -> str:
        """Collective: this job's claim, made at the first call. What the job before had written whole is committed
        first, so that it is not lost."""
        if self._claim is None:
            made: bytes | None = None
            with self._comm.phase("claim"):
                if self._comm.rank == 0:
                    probe(self._store)
                    with contextlib.suppress(Fenced):
                        complete_last(self._store, self._session.log)
                    made = self._make_claim().encode()
            self._claim = self._comm.broadcast(made, "claim").decode()
        return self._claim

    def _make_claim(self) -> str:
        claim = secrets.token_hex(16)
        self._session.log.claim(
            {
                "kind": "claim",
                "claim": claim,
                "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                "host": socket.gethostname(),
                "pid": os.getpid(),
                "world": self._comm.world,
            }
        )
        return claim

    def _parent(self, claim: str) -> int | None:
        """Collective: the commit that the next one follows: the last that was loaded or saved, or a later one of this
        job that landed although its save raised. Raises Fenced before anything is written."""
        found: bytes | None = None
        with self._comm.phase("save: read the log"):
            if self._comm.rank == 0:
                history = self._session.log.read()
                check_fence(history, claim, self.url)
                landed = [r.number for r in history.records[self._seen :] if r.kind == "commit" and r.claim == claim]
                found = canonical_json(landed[-1] if landed else self._base)
        parent: int | None = parse_json(self._comm.broadcast(found, "save: parent"), "save: parent")
        return parent

    def _pick(self, step: int | None) -> Record | None:
        """Collective: the commit to load, the same on every rank."""
        found: bytes | None = None
        with self._comm.phase("load: pick a step"):
            if self._comm.rank == 0:
                record = pick(self._session.log.read(), step, self.url)
                found = canonical_json(None if record is None else [record.number, record.document])
        document = parse_json(self._comm.broadcast(found, "load: pick a step"), "commit record")
        return None if document is None else Record(*document)
