"""Runs a function on N fresh ranks, each its own process, joined by torch.distributed over gloo.

    results = run_ranks(4, fn, arg)    # fn(rank, world, arg) on each rank; a list, one result a rank
    outcomes = run_ranks(4, fn, expect_failures=True)    # Outcome objects: a value, an error, or an exit code

    with Crew(4) as crew:    # keeps the ranks alive, because importing torch and Megatron is slow
        crew.run(first)
        crew.run(second, arg)

`fn` is a function at the top level of a module. Ranks come from a fork server that has imported torch and Megatron,
which takes seconds, and never TensorStore, which aborts in a forked child. A rank that dies, hangs or raises cannot
leave others behind: whatever happens, all processes are gone at the end.
"""

import faulthandler
import multiprocessing
import multiprocessing.connection
import multiprocessing.forkserver
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, ForkServerProcess
from multiprocessing.process import parent_process
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.support.ports import free_ports

RankFn = Callable[..., Any]

_GRACE = 15.0  # how long the others may go on after a rank has failed, where no failure was expected
_STOP = 10.0  # how long a rank may take to end when it is told to
_starting = threading.Lock()  # os.environ is changed while the server starts
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
_PRELOAD = [  # never ckpt, which imports TensorStore: that aborts in a forked child
    "torch",
    "torch.distributed.tensor",
    "torch.distributed.fsdp",
    "numpy",
    "ml_dtypes",
    "megatron.core.distributed",
    "megatron.core.models.gpt",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.optimizer",
    "megatron.core.optimizer_param_scheduler",
    "megatron.core.pipeline_parallel",
]


@dataclass(frozen=True)
class Outcome:
    """How one rank ended: with a value, an error, an exit code (it died), or not at all (it hung)."""

    rank: int
    seconds: float
    value: Any = None
    error_type: str | None = None
    error_message: str = ""
    traceback: str = ""  # of the error; the stacks of all threads for a rank that hung or crashed
    exitcode: int | None = None  # set if the process died; -9 is SIGKILL
    hung: bool = False

    @property
    def ok(self) -> bool:
        return self.error_type is None and self.exitcode is None and not self.hung

    def summary(self) -> str:
        if self.hung:
            return f"rank {self.rank}: still running after {self.seconds:.1f} s, killed"
        if self.exitcode is not None:
            how = f"code {self.exitcode}" if self.exitcode >= 0 else signal.Signals(-self.exitcode).name
            return f"rank {self.rank}: died after {self.seconds:.1f} s with {how}"
        if self.error_type is not None:
            return f"rank {self.rank}: {self.error_type} after {self.seconds:.1f} s: {self.error_message}"
        return f"rank {self.rank}: fine after {self.seconds:.1f} s"


class RankErrors(Exception):
    """Some ranks failed. `outcomes` has all ranks; `errors` maps the failed ones to what happened."""

    def __init__(self, outcomes: Sequence[Outcome]) -> None:
        self.outcomes = list(outcomes)
        self.errors = {o.rank: o for o in outcomes if not o.ok}
        # The cause comes first: what raised before what was killed, the earliest before the later.
        ordered = sorted(self.errors.values(), key=lambda o: (o.hung, o.seconds))
        lines = [o.summary() for o in ordered]
        for outcome in ordered[:1] if not ordered[0].hung else ordered:
            if outcome.traceback:
                lines += ["", f"rank {outcome.rank}:", outcome.traceback.rstrip()]
        super().__init__(f"{len(self.errors)} of {len(outcomes)} ranks failed\n" + "\n".join(lines))


def run_ranks(
    world: int,
    fn: RankFn,
    *args: Any,
    timeout: float = 120,
    env: Mapping[str, str] | None = None,
    init: bool = True,
    expect_failures: bool = False,
) -> list[Any]:
    """Runs fn(rank, world, *args) on `world` fresh ranks and returns the results by rank.

    With `expect_failures` it returns an `Outcome` for each rank, else it raises `RankErrors` if any failed.
    `init=False` leaves torch.distributed alone. `timeout` counts the start-up too.
    """
    with Crew(world, env=env, init=init) as crew:
        return crew.run(fn, *args, timeout=timeout, expect_failures=expect_failures)


class Crew:
    """`world` ranks that stay alive between calls. Close it, or use it as a context manager.

    A rank that raised stays usable; once one has died or hung, all are killed and the crew is broken.
    """

    def __init__(self, world: int, *, env: Mapping[str, str] | None = None, init: bool = True) -> None:
        self.world = world
        self.broken = False
        self._scratch = tempfile.TemporaryDirectory(prefix="ckpt-ranks-")
        self._processes: list[ForkServerProcess] = []
        self._pipes: list[Connection] = []
        # Registered before the first start, so that an exit of the interpreter in between ends the ranks too.
        self._cleanup = weakref.finalize(self, _end, self._processes, self._pipes, self._scratch)
        context = _context()
        port = free_ports(1)[0]
        for rank in range(world):
            ours, theirs = context.Pipe()
            rank_env = dict(os.environ) | _rank_env(rank, world, port) | dict(env or {})
            process = context.Process(
                target=_rank_main,
                args=(theirs, rank, world, init, str(self._stacks(rank)), rank_env),
                name=f"rank {rank}",
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def pids(self) -> list[int]:
        return [process.pid or 0 for process in self._processes]

    def run(self, fn: RankFn, *args: Any, timeout: float = 120, expect_failures: bool = False) -> list[Any]:
        """Like `run_ranks`, on the ranks of this crew.

        Where no failure is expected, the other ranks get a short grace after the first one, then are killed.
        """
        if self.broken:
            raise RuntimeError("this crew lost a rank earlier, or is closed; make a new one")
        task = pickle.dumps((fn, args))
        began = time.monotonic()
        for pipe in self._pipes:
            try:
                pipe.send_bytes(task)
            except (BrokenPipeError, ConnectionResetError):
                continue  # it died: _collect reads the end of the pipe
        outcomes = self._collect(began, timeout, _GRACE if not expect_failures else None)
        if any(o.hung or o.exitcode is not None for o in outcomes):
            self.broken = True
            self._cleanup()
        if expect_failures:
            return outcomes
        if not all(o.ok for o in outcomes):
            raise RankErrors(outcomes)
        return [o.value for o in outcomes]

    def _collect(self, began: float, timeout: float, grace: float | None) -> list[Outcome]:
        deadline = began + timeout
        outcomes: dict[int, Outcome] = {}
        waiting = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        while waiting:
            ready = multiprocessing.connection.wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = waiting.pop(pipe)
                outcomes[rank] = self._receive(pipe, rank, began)
                if grace is not None and not outcomes[rank].ok:
                    deadline = min(deadline, time.monotonic() + grace)
        if waiting:
            stacks = self._dump_stacks(list(waiting.values()))
            seconds = time.monotonic() - began
            for rank, text in stacks.items():
                outcomes[rank] = Outcome(rank, seconds, traceback=text, hung=True)
        return [outcomes[rank] for rank in range(self.world)]

    def _receive(self, pipe: Connection, rank: int, began: float) -> Outcome:
        try:
            reply = pipe.recv_bytes()
        except (EOFError, ConnectionResetError):
            process = self._processes[rank]
            seconds = time.monotonic() - began
            process.join(_STOP)
            if process.exitcode is None:  # it closed its pipe and lives on
                return Outcome(rank, seconds, traceback=self._dump_stacks([rank])[rank], hung=True)
            return Outcome(rank, seconds, traceback=self._read_stacks(rank), exitcode=process.exitcode)
        seconds = time.monotonic() - began
        try:
            outcome = pickle.loads(reply)
        except Exception as error:
            return Outcome(rank, seconds, None, type(error).__name__, f"the result does not unpickle: {error}")
        assert isinstance(outcome, Outcome)
        return replace(outcome, seconds=seconds)

    def _stacks(self, rank: int) -> Path:
        return Path(self._scratch.name, f"{rank}.stacks")

    def _read_stacks(self, rank: int) -> str:
        path = self._stacks(rank)
        return path.read_text(errors="replace") if path.exists() else ""

    def _dump_stacks(self, ranks: Sequence[int]) -> dict[int, str]:
        for rank in ranks:
            # A rank without the file has not got as far as to expect the signal, which would kill it.
            if self._stacks(rank).exists() and self._processes[rank].is_alive():
                os.kill(self._processes[rank].pid or 0, signal.SIGUSR1)
        time.sleep(0.5)
        return {rank: self._read_stacks(rank) or "(no stack: it had not started yet)" for rank in ranks}

    def close(self) -> None:
        """Ends all ranks, by force if they do not go by themselves; may be called twice."""
        self.broken = True
        if self._cleanup.alive:
            for pipe in self._pipes:
                try:
                    pipe.send_bytes(b"")
                except OSError:
                    continue
            deadline = time.monotonic() + _STOP
            for process in self._processes:
                process.join(max(0.0, deadline - time.monotonic()))
        self._cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.broken = True
            self._cleanup()


def _end(
    processes: list[ForkServerProcess], pipes: list[Connection], scratch: tempfile.TemporaryDirectory[str]
) -> None:
    """Kills what is still there, with all that it started itself, and tidies up."""
    for process in processes:
        if process.is_alive():
            _kill_group(process)
    for process in processes:
        process.join()
        process.close()
    for pipe in pipes:
        pipe.close()
    processes.clear()
    pipes.clear()
    scratch.cleanup()


def _kill_group(process: ForkServerProcess) -> None:
    pid = process.pid
    assert pid is not None
    try:
        if os.getpgid(pid) == pid:  # it has made its own group (see _rank_main), so the group is ours to end
            os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.kill()


def _context() -> ForkServerContext:
    """Ranks are forked from a server that has imported what takes seconds to import, and has no threads."""
    context = multiprocessing.get_context("forkserver")
    with _starting:
        context.set_forkserver_preload(_PRELOAD)
        before = {name: os.environ.get(name) for name in _ONE_THREAD}
        os.environ.update(_ONE_THREAD)
        try:
            multiprocessing.forkserver.ensure_running()
        finally:
            for name, value in before.items():
                os.environ.pop(name) if value is None else os.environ.update({name: value})
    return context


def _rank_env(rank: int, world: int, port: int) -> dict[str, str]:
    env = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }
    if sys.platform == "linux":
        env["GLOO_SOCKET_IFNAME"] = "lo"
    return env


# From here on: in the rank's process.


def _rank_main(pipe: Connection, rank: int, world: int, init: bool, stacks: str, env: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(env)
    os.setsid()  # its own group: what it starts can be ended with it, and Ctrl-C goes to the parent alone
    threading.Thread(target=_die_with_parent, daemon=True).start()
    dump = open(stacks + ".new", "w")  # noqa: SIM115 (faulthandler writes to it as long as the process lives)
    faulthandler.enable(dump)
    faulthandler.register(signal.SIGUSR1, dump)
    os.rename(stacks + ".new", stacks)  # from now on the signal dumps instead of killing
    failed = _attempt(rank, partial(_initialise, init))
    while True:
        try:
            task = pipe.recv_bytes()
        except EOFError:
            break
        if not task:
            break
        outcome = failed if not failed.ok else _attempt(rank, partial(_call, task, rank, world))
        try:
            reply = pickle.dumps(outcome)
        except Exception as error:
            message = f"the result of rank {rank} does not pickle: {error}"
            reply = pickle.dumps(Outcome(rank, 0.0, None, type(error).__name__, message))
        pipe.send_bytes(reply)
    _finish()


def _die_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    multiprocessing.connection.wait([parent.sentinel])
    os.killpg(0, signal.SIGKILL)


def _initialise(init: bool) -> None:
    import torch

    torch.set_num_threads(1)
    if init:
        import torch.distributed as dist

        dist.init_process_group("gloo", init_method="env://")


def _call(task: bytes, rank: int, world: int) -> Any:
    fn, args = pickle.loads(task)
    return fn(rank, world, *args)


def _attempt(rank: int, action: Callable[[], Any]) -> Outcome:
    try:
        return Outcome(rank, 0.0, action())
    except BaseException as error:  # SystemExit too: what a rank would exit with is a result here
        return Outcome(rank, 0.0, None, type(error).__name__, str(error), traceback.format_exc())


def _finish() -> None:
    """Leaves without the interpreter's slow end, in which the ranks would wait for each other's sockets."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
    for child in multiprocessing.active_children():  # Megatron's manager of queues would outlive everything
        child.kill()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
