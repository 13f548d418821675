"""The rank runner: results, failures, deaths, hangs, and that nobody is left behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

import pytest

from tests.support.ranks import Crew, RankErrors, run_ranks

pytestmark = pytest.mark.ranks


def _sum_of_ranks(rank: int, world: int, start: int) -> tuple[int, Any, str]:
    import torch
    import torch.distributed as dist

    total = torch.tensor([start + rank])
    dist.all_reduce(total)
    return rank, total, f"{os.environ['OMP_NUM_THREADS']} {torch.get_num_threads()} {dist.get_backend()}"


def _facts(rank: int, world: int) -> tuple[bool, str | None, int]:
    import torch.distributed as dist

    return dist.is_initialized(), os.environ.get("CKPT_TEST_ENV"), os.getpid()


def _raise_on(rank: int, world: int, bad: int) -> int:
    if rank == bad:
        raise LookupError(f"no luck on {rank}")
    return rank


def _die_on(rank: int, world: int, bad: int) -> int:
    if rank == bad:
        os.kill(os.getpid(), signal.SIGKILL)
    return rank


def _exit(rank: int, world: int) -> NoReturn:
    raise SystemExit(75)


def _hang_on(rank: int, world: int, bad: int, note: str) -> int:
    if rank == bad:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        Path(note).write_text(str(child.pid))
        time.sleep(600)
    return rank


def _unpicklable(rank: int, world: int) -> Any:
    return lambda: None


def _gone(pid: int) -> bool:
    """True once the process has ended (a zombie nobody has reaped counts as ended)."""
    for _ in range(100):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state == "Z":
            return True
        time.sleep(0.05)
    return False


def test_results_come_back_by_rank() -> None:
    results = run_ranks(2, _sum_of_ranks, 10)
    assert [rank for rank, _, _ in results] == [0, 1]
    assert [total.tolist() for _, total, _ in results] == [[21], [21]]
    assert {facts for _, _, facts in results} == {"1 1 gloo"}


def test_a_crew_is_reused_survives_exceptions_and_breaks_on_death() -> None:
    before = dict(os.environ)
    with Crew(2, env={"CKPT_TEST_ENV": "set"}, init=False) as crew:
        assert dict(os.environ) == before
        assert crew.run(_facts) == [(False, "set", pid) for pid in crew.pids()]
        pids = crew.pids()

        with pytest.raises(RankErrors, match=r"LookupError after .* no luck on 1") as caught:
            crew.run(_raise_on, 1)
        assert list(caught.value.errors) == [1]
        assert "_raise_on" in caught.value.errors[1].traceback

        good, bad = crew.run(_raise_on, 1, expect_failures=True)
        assert (good.ok, good.value) == (True, 0)
        assert (bad.ok, bad.error_type, bad.error_message) == (False, "LookupError", "no luck on 1")
        assert [(o.error_type, o.error_message) for o in crew.run(_exit, expect_failures=True)] == [
            ("SystemExit", "75")
        ] * 2
        with pytest.raises(RankErrors, match="does not pickle"):
            crew.run(_unpicklable)

        alive, dead = crew.run(_die_on, 1, expect_failures=True)
        assert alive.ok
        assert dead.exitcode == -signal.SIGKILL and not dead.hung
        assert "SIGKILL" in dead.summary()
        with pytest.raises(RuntimeError, match="make a new one"):
            crew.run(_facts)
    assert all(_gone(pid) for pid in pids)


def test_a_hang_is_cut_short_with_stacks_and_takes_its_children_along(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    with Crew(2, init=False) as crew:
        pids = crew.pids()
        crew.run(_facts)
        with pytest.raises(RankErrors, match="still running") as caught:
            crew.run(_hang_on, 0, str(note), timeout=3)
        assert caught.value.errors[0].hung
        assert "_hang_on" in caught.value.errors[0].traceback
    assert all(_gone(pid) for pid in [*pids, int(note.read_text())])


def test_ranks_end_when_their_parent_is_killed(tmp_path: Path) -> None:
    script = (
        "import sys, time\n"
        "from tests.support.ranks import Crew\n"
        "if __name__ == '__main__':\n"
        "    crew = Crew(1, init=False)\n"
        "    print(crew.pids()[0], flush=True)\n"
        "    time.sleep(600)\n"
    )
    file = tmp_path / "parent.py"
    file.write_text(script)
    # TMPDIR: what a killed parent cannot tidy up goes with tmp_path.
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "TMPDIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, str(file)], stdout=subprocess.PIPE, env=env) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        parent.kill()
    assert _gone(pid)
