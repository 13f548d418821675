"""A process that has imported the frameworks, which takes long, and forks ranks that play the examples.

    with Warm() as warm:
        ended = warm.ranks(2, [call, call], folder)    # each rank makes the calls, in order

Each rank is a process of its own, which imports ckpt after the fork (TensorStore aborts in a forked child) and ends as
the calls let it: it may be killed, or exit with a code. Run as a module it is the process itself: it reads jobs, a line
of JSON each, and answers with the exit codes of all ranks.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.support.ports import free_ports

ROOT = Path(__file__).resolve().parents[2]
_LIMIT = 240.0  # seconds that the ranks of one job may take


@dataclass(frozen=True)
class Call:
    """One run of an example: its name, and arguments of `tests.hooks.playing.play`."""

    example: str
    root: str
    steps: int
    kill_at: int | None = None
    term_at: int | None = None


@dataclass(frozen=True)
class Ended:
    """How the ranks of a job ended: exit codes (negative: the signal), and what each call of each rank gave."""

    codes: list[int]
    results: list[list[dict[str, Any]]]
    errors: str


class Warm:
    """The process that forks. Ends, with all ranks, when it is closed."""

    def __init__(self) -> None:
        env = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "TRANSFORMERS_OFFLINE": "1"}
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            env.pop(name, None)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.hooks.warm"],
            cwd=ROOT,
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def ranks(self, world: int, calls: list[Call], folder: Path) -> Ended:
        """Has fresh ranks make the calls one after the other. folder: an empty one, for what they leave."""
        folder.mkdir(parents=True)
        job = {"world": world, "calls": [asdict(call) for call in calls], "folder": str(folder)}
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps({**job, "port": free_ports(1)[0]}) + "\n")
        self._process.stdin.flush()
        codes = json.loads(self._process.stdout.readline())
        results = [[json.loads(p.read_text()) for p in _numbered(folder, rank)] for rank in range(world)]
        return Ended(codes, results, "\n".join(p.read_text() for p in sorted(folder.glob("*.err"))))

    def close(self) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _numbered(folder: Path, rank: int) -> list[Path]:
    return sorted(folder.glob(f"{rank}-*.json"))


# --- In the process that forks ---


def _serve() -> None:
    answers, sys.stdout = sys.stdout, sys.stderr
    _import_frameworks()
    for line in sys.stdin:
        job = json.loads(line)
        pids = [_fork(job, rank) for rank in range(job["world"])]
        print(json.dumps(_wait(pids)), file=answers, flush=True)


def _import_frameworks() -> None:
    import warnings

    warnings.simplefilter("ignore")
    import lightning
    import megatron.core.distributed
    import megatron.core.models.gpt.gpt_layer_specs
    import megatron.core.optimizer
    import megatron.core.optimizer_param_scheduler
    import megatron.core.pipeline_parallel
    import torch.distributed.fsdp
    from transformers import Trainer

    torch.set_num_threads(1)
    _ = lightning, megatron, Trainer
    assert "ckpt" not in sys.modules and "tensorstore" not in sys.modules


def _fork(job: dict[str, Any], rank: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    os.setsid()
    threading.Thread(target=_die_with, args=(os.getppid(),), daemon=True).start()
    code = 70
    try:
        error = os.open(f"{job['folder']}/{rank}.err", os.O_WRONLY | os.O_CREAT)
        for number in (1, 2):
            os.dup2(error, number)
        world, env = job["world"], dict[str, str]()
        own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
        if world > 1:
            place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": job["port"], "GLOO_SOCKET_IFNAME": "lo"}
            env = {k: str(v) for k, v in {**own, **place}.items()}
        os.environ.update(env)
        from tests.hooks.playing import play

        for number, call in enumerate(job["calls"]):
            os.environ.update(env)  # Lightning takes some of it away when it is done
            result = play(rank, Call(**call))
            Path(f"{job['folder']}/{rank}-{number}.json").write_text(json.dumps(result))
        code = 0
    except SystemExit as ended:  # as the interpreter does it
        code = ended.code if isinstance(ended.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _die_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os.killpg(0, signal.SIGKILL)


def _wait(pids: list[int]) -> list[int]:
    """Exit codes by rank. Those that take too long are killed."""
    codes: dict[int, int] = {}
    end = time.monotonic() + _LIMIT
    while len(codes) < len(pids):
        for pid in pids:
            if pid not in codes:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    codes[pid] = os.waitstatus_to_exitcode(status)
                elif time.monotonic() > end:
                    os.killpg(pid, signal.SIGKILL)
        time.sleep(0.02)
    return [codes[pid] for pid in pids]


if __name__ == "__main__":
    _serve()
