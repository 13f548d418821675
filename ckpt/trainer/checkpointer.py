"""`Checkpointer`: one object through which a job saves and resumes."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist

from ckpt.adapters import capture, known_from
from ckpt.engine import load as loading
from ckpt.engine import save as saving
from ckpt.engine.comm import Comm
from ckpt.engine.faults import FaultPoint, no_faults
from ckpt.engine.opened import open_commit, pick
from ckpt.engine.session import Session
from ckpt.engine.surviving import load_surviving
from ckpt.engine.target import Options
from ckpt.errors import CkptError, StateInvalid, StateMismatch
from ckpt.geometry import Layout
from ckpt.state import State, Vocabulary
from ckpt.state.captured import Captured
from ckpt.store import arrays
from ckpt.store.log import Log, Record
from ckpt.store.objects import kvstore_spec, open_store
from ckpt.store.opened import Opened
from ckpt.store.retention import Keep
from ckpt.trainer.background import Background, PendingSave, metrics_address
from ckpt.trainer.claiming import claim_roots
from ckpt.trainer.collecting import Collecting
from ckpt.trainer.hooks.loop import Batch, steps_of
from ckpt.trainer.levels import Level, Numerics, agreed, compared
from ckpt.trainer.preemption import Notice, Preempted
from ckpt.trainer.results import Receipt, Restored
from ckpt.trainer.steps import Schedule, Steps
from ckpt.trainer.tiers import Tiers
from ckpt.trainer.watch import Watch

Done: TypeAlias = tuple[Opened, loading.Loaded]


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
        every_steps: int | None = None,
        every_seconds: float | None = None,
        grace: float = 60.0,
        signals: Sequence[signal.Signals] = (signal.SIGTERM, signal.SIGUSR1),
        poll: Callable[[], bool] | None = None,
        when_busy: Literal["wait", "refuse"] = "wait",
        overlap: bool = False,
        keep: Keep | None = None,
        fast: str | os.PathLike[str] | None = None,
        keep_fast: Keep | None = Keep(last=2, grace=0),  # noqa: B008 (it is frozen)
        events: str | os.PathLike[str] | None = None,
        progress: bool = False,
        metrics_port: int | None = None,
        metrics_host: str = "127.0.0.1",
        contract: Numerics | None = None,
        faults: FaultPoint = no_faults,
    ) -> None:
        """url: a path, file:// or s3://bucket/prefix. layout: this job's parallel layout; its world must be the group's
        size. timeout: seconds any wait for other ranks may take. storage_options: for S3 endpoint, region, access_key,
        secret_key and so on (the usual AWS variables serve too). read_only: never claims and cannot save.

        every_steps, every_seconds: when `after_step` saves. signals, poll: what tells it that the job must end within
        `grace` seconds; poll is asked after every step, and the signals are caught from the first step on. when_busy:
        what `save_async` does while the one before is still being written. overlap: it copies parameters and optimizer
        state beside the next forward and backward pass, for whose end the optimizers wait (`docs/preemption.md`). keep:
        what to keep of the run, seen to by rank 0 beside the training after each commit; None keeps everything.

        fast: a directory that all ranks see, such as one on the node's own disk: saves are committed there, and copied
        on to `url` beside the training (`docs/tiers.md`). keep_fast: what to keep there.

        events: a file to which rank 0 appends a line of JSON for each event. progress: rank 0 shows how far a blocking
        save or load is, as a bar where standard error is a terminal, and in lines of logging elsewhere. metrics_port:
        where the agent of each node serves metrics for Prometheus, at metrics_host (`docs/operations.md`).
        contract: of the run's numerics (`ckpt.invariant.Contract`), the same on all ranks; kept with every checkpoint.
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
            threads = max(1, torch.get_num_threads())
            context = arrays.context(threads=threads)
            self._session = Session(self._store, kvstore, Log(self._store), self._comm, context, faults)
            self._watch = Watch(self._comm.rank, events, progress)
            self._tiers = None if fast is None else self._two_tiers(os.fspath(fast), keep_fast, storage_options)
            metrics = None if metrics_port is None else metrics_address(metrics_host, metrics_port)
            schedule = Schedule(every_steps, every_seconds, grace)
        with self._comm.operation("open"):
            self._numerics = agreed(self._comm, contract)
        self._contract = contract
        self._saves = self._session if self._tiers is None else self._tiers.fast
        self._session.progress = self._saves.progress = self._watch.progress
        self._when_busy, self._overlap = when_busy, overlap
        options = storage_options if self._tiers is None else None
        self._background = Background(self._comm, self._saves.store.url, options, threads, metrics)
        self._notice = Notice(signals, poll)
        background, told = self._background, self._watch.preempted
        failed, saved = lambda: background.failed, lambda step: step in (self._last, background.step)
        self._steps = Steps(self._comm, schedule, self._notice, self.save_async, self._settled, failed, told, saved)
        self._collecting = Collecting(self._comm, keep, self._store.url, storage_options, self._watch.collected)
        self._cache = saving.PlanCache()
        self._claim: str | None = None
        self._base: int | None = None
        self._seen = 0  # records of the log that were there when the base was set (rank 0)
        self._invalid: str | None = None
        self._last: int | None = None  # the step committed last, unless something was loaded since

    def _two_tiers(self, fast: str, keep: Keep | None, storage_options: Mapping[str, Any] | None) -> Tiers:
        if self._read_only:
            raise CkptError(f"{self.url}: a reader has one root; give it the durable one, or the fast one, as url")
        return Tiers(self._session, fast, keep, storage_options, self._watch.copied)

    @property
    def url(self) -> str:
        """The (durable) root, normalised."""
        return self._store.url

    def save(self, step: int, state: State) -> Receipt:
        """Collective, blocking: saves `state` as `step` and commits it. The state must not change meanwhile.

        Raises StateMismatch or Unsupported before anything is written; CorruptCheckpoint, StoreError, RankFailed or
        Fenced with nothing committed; StateInvalid while a failed load has left the state a mix.
        """
        self._check_may_save()
        begin = time.perf_counter()
        with self._watch.saving(step, blocking=True), self._comm.operation("save"):
            self._settle()
            captured = self._capture(step, state)
            claim = self._claimed()
            done = saving.save(
                self._saves,
                self._cache,
                captured,
                claim=claim,
                parent=saving.parent_of(self._saves, claim, self._base, self._seen),
                step=step,
                layout=saving.layout_document(self.layout),
                numerics=self._numerics,
            )
            self._committed(done.record)
        state_id = str(done.record.document["state_id"])
        seconds = time.perf_counter() - begin
        lines = done.contents.lines
        return self._watch.saved(Receipt(step, state_id, done.bytes, seconds, done.phases, done.plan, lines))

    def save_async(self, step: int, state: State) -> PendingSave:
        """Collective: copies `state` into staging memory and returns; a process beside this one writes and commits it.

        Once it has returned on every rank (with overlap: `captured` of what it gives), the state may change, and the
        step is committed even if the trainers are killed. The save before must be finished first: this waits for it, or
        raises CkptError where when_busy is "refuse"; its error, if nobody has asked for it, is raised here. Raises what
        `save` raises up to the copy; what goes wrong later is raised by the result, or by the next save, load or close.
        """
        self._check_may_save()
        begin = time.perf_counter()
        with self._watch.saving(step, blocking=False), self._comm.operation("save"):
            if self._when_busy == "refuse":
                with self._comm.phase("save: is one under way"):
                    if self._background.busy:
                        raise CkptError(f"step {step} not saved: the save before is still being written")
            self._settle()
            captured = self._capture(step, state)
            message = {
                "step": step,
                "claim": self._claimed(),
                "base": self._base,
                "seen": self._seen,
                "layout": saving.layout_document(self.layout),
                "numerics": self._numerics,
            }
            pending = self._background.submit(captured, begin, message, self._overlap)
            if self._tiers is not None:
                self._tiers.follow(pending.record, self._claimed())
            return self._watch.staged(pending)

    def _check_may_save(self) -> None:
        """Not collective: all ranks know the same."""
        if self._read_only:
            raise CkptError(f"{self.url}: this Checkpointer was opened with read_only=True and cannot save")
        if self._invalid is not None:
            raise StateInvalid(f"not saved: {self._invalid}")

    def _capture(self, step: int, state: State) -> Captured:
        """Collective."""
        with self._comm.phase("save: capture"):
            if type(step) is not int or step < 0:
                raise StateMismatch(f"step {step!r} must be a non-negative int")
            return capture(state)

    def after_step(self, step: int, state: State) -> PendingSave | None:
        """Collective: call it on every rank after every step. Saves by the schedule, asynchronously, and gives the save
        that it began. A step that has just been saved by another call is not saved again.

        Once any rank has been told to end (a signal, or `poll`), all ranks save the same step, one or two after that,
        wait for its commit, and raise Preempted, which ends the process with code 75. Raises the error of an earlier
        save that nobody has asked for, and what `save_async` raises.
        """
        try:
            return self._steps.after(step, state)
        except Preempted as end:
            if self._tiers is not None:
                self._tiers.finish(end.step, self._steps.schedule.grace - self._notice.elapsed())
            raise

    def steps_of(self, loader: Iterable[Batch], state: State, until: int | None = None) -> Iterator[tuple[int, Batch]]:
        """Collective: `load`, then (step, batch) for each batch, and `after_step`; see `ckpt.trainer.hooks.loop`."""
        return steps_of(self, loader, state, until)

    def _settled(self, collecting: bool) -> Receipt | None:
        with self._comm.operation("save"):
            return self._settle(collecting=collecting)

    def _settle(self, *, collecting: bool = True) -> Receipt | None:
        """Collective: waits for an asynchronous save under way, and raises its error. collecting: whether what it makes
        superfluous goes."""
        done = self._background.settle()
        if done is None:
            return None
        record, receipt = done
        self._committed(record, collecting=collecting)
        return receipt

    def _committed(self, record: Record, *, collecting: bool = True) -> None:
        """Collective: what follows a commit of this job."""
        self._base = self._seen = record.number
        self._last = record.step
        claim = self._claimed()
        if self._tiers is not None:
            self._tiers.committed(record, claim, raising=collecting)
        if collecting:
            self._collecting.collect(claim)

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
        vocabulary: Vocabulary | None = None,
        level: Level | None = None,
    ) -> Restored | None:
        """Collective: fills `state` in place from the newest committed step, or from `step`. None if nothing is
        committed and no step was asked for.

        allow_missing: patterns of names that may be absent from the checkpoint (they keep what they hold);
        allow_extra: patterns of names in the checkpoint that no rank wants; cast: patterns of tensors that may be cast
        to the dtype they have here. verify: compare the fingerprints of the live tensors with the saved ones. atomic:
        keep the old tensors until all is verified, at the price of their memory. vocabulary: whose padding may be left
        behind where the padded size is another here. level: "trajectory-exact" refuses a checkpoint whose numerics
        contract is not this one's; `Restored.level` says which it was.

        Raises StateMismatch, CorruptCheckpoint, Unsupported or StoreError with nothing changed. Once tensors have begun
        to change, any failure raises StateInvalid on every rank, and saving is refused until a load succeeds.
        """
        begin = time.perf_counter()
        options = Options(tuple(allow_missing), tuple(allow_extra), tuple(cast or ()), vocabulary)
        document = saving.layout_document(self.layout)
        differences: tuple[str, ...] = ()

        def one(session: Session, record: Record) -> Done:
            opened = open_commit(session, record)
            nonlocal differences
            differences = compared(self._comm, self._contract, opened.run.get("numerics"), level, opened.record.step)
            done = loading.load(
                session,
                opened,
                lambda found: capture(state, known_from(found, vocabulary)),
                options,
                verify=verify,
                atomic=atomic,
                layout=document,
            )
            return opened, done

        try:
            with self._watch.loading(step), self._comm.operation("load"):
                self._settle()
                self._last = None
                if not self._read_only:
                    self._claimed()
                self._session.faults("load.claimed")
                self._collecting.wait()
                loaded = self._load(step, one)
                if loaded is None:
                    return self._watch.loaded(None)
                opened, done = loaded
        except StateInvalid as error:
            self._invalid = str(error)
            raise
        self._invalid = None
        restored = Restored(
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
            done.rederived,
            differences,
        )
        return self._watch.loaded(restored)

    def _load(self, step: int | None, one: Callable[[Session, Record], Done]) -> Done | None:
        """Collective: loads by `one` what there is, and remembers what the next commit follows."""
        done: Done | None
        if self._tiers is not None:
            done, self._base = self._tiers.load(step, self._claimed(), one) or (None, self._base)
        else:
            session = self._session
            done = load_surviving(
                session, lambda: pick(session, step), lambda record: one(session, record), leased=self._read_only
            )
            self._base = self._base if done is None else done[0].record.number
        if done is not None:
            self._seen = self._saves.log.last
        return done

    def steps(self) -> list[int]:
        """Committed steps of the newest commit's lineage, ascending. Not collective; always asks the store."""
        return sorted({r.step for r in self._lineage()})

    def latest(self) -> int | None:
        """The newest committed step, or None. Not collective; always asks the store."""
        return next((r.step for r in self._lineage()), None)

    def _lineage(self) -> list[Record]:
        """Live commits, newest first."""
        if self._tiers is None:
            return self._session.log.read().lineage()
        return [place.record for place in self._tiers.lineage()]

    def close(self) -> None:
        """Waits for an asynchronous save under way and, unless this job was told to end, for its copy to the durable
        root and for what `keep` lets go; then frees the process group. Not collective; safe to call twice. Raises what
        went wrong there if nobody here has met it."""
        told = self._notice.elapsed() > 0
        self._notice.restore()
        failed = self._background.close()
        errors: list[Exception | None] = [failed]
        claim = None if told or failed is not None else self._claim
        if self._tiers is not None:
            errors += self._tiers.close(claim, in_haste=told)
        errors.append(self._collecting.close(claim))
        self._watch.close()
        self._comm.close()
        for error in errors:
            if error is not None:
                raise error

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except CkptError as closing:
            if error is None:
                raise
            error.add_note(f"and while closing the Checkpointer: {closing}")

    def _claimed(self) -> str:
        """Collective: this job's claim, made at the first call."""
        if self._claim is None:
            self._claim = claim_roots(self._session, self._tiers)
        return self._claim
