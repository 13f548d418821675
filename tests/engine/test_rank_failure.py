"""One of four ranks fails. The others must raise within seconds, naming it; what was begun is never visible; and unless
the ranks were left out of step, the same Checkpointers save and load on.

A case says where something goes wrong on one rank, and what each rank must get. All cases that leave the processes
alive run on one crew, each within its own Checkpointers (and so its own process group).
"""

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.support.extent import covering
from tests.support.ranks import Crew, Outcome

pytestmark = [pytest.mark.ranks]

WORLD = 4
SECONDS = 60.0  # of a case, its sound saves and loads included: far below the 600 that a wait between ranks may take

ERRORS: dict[str, Callable[[], BaseException]] = {
    "RuntimeError": lambda: RuntimeError("out of luck"),
    "KeyboardInterrupt": lambda: KeyboardInterrupt("out of luck"),
    "SystemExit": lambda: SystemExit("out of luck"),
    "StoreError": lambda: _ckpt().StoreError("out of luck"),
    "MemoryError": lambda: MemoryError("out of luck"),
}


def _ckpt() -> Any:
    import ckpt

    return ckpt


@dataclass(frozen=True)
class Case:
    """`error` is raised on rank `bad` at `where`: a fault point, or one of the places below. `mine` and `others` are
    the kinds of error that it and the others get; `breaks`: the ranks are left out of step and must say so from then
    on; `invalid`: the tensors are a mix, and no save is accepted until a load succeeds."""

    where: str
    bad: int
    error: str = "RuntimeError"
    mine: str = ""
    others: str = "RankFailed"
    breaks: bool = False
    invalid: bool = False
    loads: bool = False

    def __str__(self) -> str:
        return f"{self.error}-at-{self.where}-on-rank-{self.bad}"


def saving(where: str, bad: int, error: str = "RuntimeError", **more: Any) -> Case:
    return Case(where, bad, error, more.pop("mine", error), more.pop("others", _seen(error)), **more)


def loading(where: str, bad: int, error: str = "RuntimeError", **more: Any) -> Case:
    """Once tensors may have changed, everybody gets StateInvalid."""
    more = {"mine": "StateInvalid", "others": "StateInvalid", "invalid": True, **more}
    return Case(where, bad, error, loads=True, **more)


def _seen(error: str) -> str:
    """What an error of one rank is to the others: of the same kind, if it is one of ours."""
    return error if error == "StoreError" else "RankFailed"


CASES = covering(
    [
        # In capture: the rank cannot keep what it is given, or what it is given raises.
        saving("unsupported", 2, "Unsupported", others="Unsupported"),
        saving("other value", 3, "StateMismatch", others="StateMismatch", mine="StateMismatch"),
        saving("state_dict", 1),
        # Between two phases nobody expects anything: the ranks cannot get back in step.
        saving("save.begin", 2, breaks=True),
        saving("a wait", 1, "KeyboardInterrupt", breaks=True),
        saving("save.intent", 0),
        # In writing, and in the middle of the exchange that the others go on with.
        saving("save.object", 1, "StoreError"),
        saving("save.object", 3, "SystemExit"),
        saving("save.written", 3),
        saving("create receipt", 2, "StoreError"),
        saving("save.receipt", 0, "StoreError"),
        # In the commit, which rank 0 makes.
        saving("commit.manifest", 0, "StoreError"),
        saving("commit.append", 0, "KeyboardInterrupt"),
        # In a load: at first nothing has changed.
        loading("state_dict", 2, mine="RuntimeError", others="RankFailed", invalid=False),
        loading("wrong shape", 1, "StateMismatch", mine="StateMismatch", others="StateMismatch", invalid=False),
        loading("get zarr.json", 3, "StoreError", mine="StoreError", others="StoreError", invalid=False),
        loading("load.claimed", 1, mine="RuntimeError", others="RankFailed", invalid=False, breaks=True),
        # From the first read on, everybody's state counts as a mix.
        loading("load.read", 1, "StoreError"),
        loading("load_state_dict", 2),
        loading("a wait", 2, "KeyboardInterrupt", breaks=True),
        loading("load.placed", 3, breaks=True),
        loading("load.verified", 0, "KeyboardInterrupt", breaks=True),
    ],
    more=[
        saving("unsupported", 0, "Unsupported", others="Unsupported"),
        saving("state_dict", 0, "KeyboardInterrupt"),
        saving("state_dict", 3, "SystemExit"),
        saving("save.begin", 0, "KeyboardInterrupt", breaks=True),
        saving("a wait", 0, "SystemExit", breaks=True),
        saving("save.object", 0, "MemoryError"),
        saving("save.object", 2, "KeyboardInterrupt"),
        saving("create receipt", 0, "KeyboardInterrupt"),
        saving("save.receipt", 1, "SystemExit"),
        loading("wrong shape", 0, "StateMismatch", mine="StateMismatch", others="StateMismatch", invalid=False),
        loading("load.read", 0, "KeyboardInterrupt"),
        loading("load.read", 3, "SystemExit"),
        loading("load_state_dict", 0, "KeyboardInterrupt"),
    ],
)


@pytest.fixture(scope="module")
def crew() -> Iterator[Crew]:
    with Crew(WORLD) as found:
        yield found


@pytest.mark.parametrize("case", CASES, ids=str)
def test_all_ranks_fail_together_and_go_on_together(crew: Crew, root_path: str, case: Case) -> None:
    if crew.broken:
        pytest.skip("a case before this one hung, see there")
    outcomes: list[Outcome] = crew.run(_run_case, root_path, case, timeout=SECONDS, expect_failures=True)
    assert not any(o.hung for o in outcomes), "\n".join(o.traceback for o in outcomes)
    assert all(o.ok for o in outcomes), "\n".join(o.summary() + o.traceback for o in outcomes if not o.ok)
    for rank, outcome in enumerate(outcomes):
        kind, message = outcome.value
        assert kind == (case.mine if rank == case.bad else case.others), f"rank {rank}: {kind}: {message}"
        if rank != case.bad:
            named = f"rank {case.bad} failed during" if case.where != "other value" else f"ranks 0 and {case.bad} have"
            assert named in message, f"rank {rank}: {message}"


@pytest.fixture
def root_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("root"))


DEATHS = [("save.object", 2), ("save.receipt", 0), ("commit.append", 0), ("load.placed", 1)]


@pytest.mark.parametrize(("point", "bad"), DEATHS)
def test_a_rank_that_exits_is_named_and_hangs_nobody(crew: Crew, root_path: str, point: str, bad: int) -> None:
    with Crew(WORLD) as doomed:
        outcomes: list[Outcome] = doomed.run(_run_death, root_path, point, bad, timeout=SECONDS, expect_failures=True)
    assert outcomes[bad].exitcode == 9
    # Which of the survivors commits what was all written is open; that it is committed is not.
    for rank, outcome in enumerate(outcomes):
        if rank != bad:
            assert outcome.ok, outcome.summary() + outcome.traceback
            kind, message = outcome.value
            assert kind == ("StateInvalid" if point.startswith("load.") else "RankFailed"), f"rank {rank}: {message}"
            silent = f"rank {bad} stopped answering" in message
            assert silent or (bad == 0 and "usually rank 0) is gone" in message), f"rank {rank}: {message}"
    found = crew.run(_resume, root_path, timeout=SECONDS)
    wanted = {"save.object": [[1, 3]], "save.receipt": [[1, 3], [1, 2, 3]], "commit.append": [[1, 2, 3]]}
    assert found[0] in wanted.get(point, [[1, 3]]) and found == [found[0]] * WORLD


# --- In the ranks ---


class Part:
    """An object with a state of its own, that raises where it is told to."""

    def __init__(self, number: int, trouble: Callable[[str], None] = lambda where: None) -> None:
        self.number, self._trouble = number, trouble

    def state_dict(self) -> dict[str, Any]:
        self._trouble("state_dict")
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._trouble("load_state_dict")
        self.number = state["number"]


def _state(rank: int, step: int, trouble: Callable[[str], None] = lambda where: None) -> dict[str, Any]:
    """Bits that follow from the step and the place: a tensor cut over the ranks so that the exchange has work to do,
    whole ones for each rank to write, a packed one, a value, a part with a state of its own."""
    import torch

    def words(rows: int, first: int) -> torch.Tensor:
        return ((torch.arange(rows * 128, dtype=torch.int32) + first) * 2654435 + step * 97).reshape(rows, 128)

    cut = _ckpt().ShardedTensor(words(80, rank * 80 * 128), [((rank * 80, 0), (80, 128), (0, 0))], (320, 128))
    whole = {f"whole/{i}": words(200, i << 20) for i in range(WORLD)}
    return {"cut": cut, **whole, "small": torch.full((5,), float(step)), "step": step, "part": Part(step, trouble)}


def _bits(state: dict[str, Any]) -> list[Any]:
    import torch

    tensors = [state["cut"].local, *(v for v in state.values() if isinstance(v, torch.Tensor))]
    whole = [t.contiguous().view(torch.uint8).numpy().tobytes() for t in tensors]
    return [state["step"], state["part"].number, *whole]


class Verbs:
    """A store, of objects or of the rendezvous, in front of which something may go wrong."""

    def __init__(self, store: Any, trouble: Callable[[str], None]) -> None:
        self._store, self._trouble = store, trouble

    def check(self, keys: list[str]) -> bool:
        """Of the rendezvous store: asked again and again while a rank waits for others."""
        self._trouble("a wait")
        return bool(self._store.check(keys))

    def create(self, key: str, data: bytes) -> bool:
        if "/receipts/" in key:
            self._trouble("create receipt")
        return bool(self._store.create(key, data))

    def get(self, key: str) -> bytes:
        if key.endswith("zarr.json"):
            self._trouble("get zarr.json")
        return bytes(self._store.get(key))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def _error_of(act: Callable[[], Any]) -> tuple[str, str]:
    try:
        act()
    except BaseException as error:
        return type(error).__name__, str(error)
    return "", "nothing was raised"


def _run_case(rank: int, world: int, path: str, case: Case) -> tuple[str, str]:
    """A sound save, the operation that fails, and what must hold from then on; returns the error that was raised."""
    ckpt = _ckpt()
    armed: list[str] = []

    def trouble(where: str) -> None:
        if rank == case.bad and armed and where == case.where:
            armed.clear()
            raise ERRORS[case.error]()
        if case.where == "a wait" and rank == (case.bad + 1) % world and where in ("save.object", "load.read"):
            time.sleep(1.0)  # the others wait for this rank, and the bad one is interrupted there

    with ckpt.Checkpointer(path, faults=trouble) as checkpointer:
        checkpointer._session.store = Verbs(checkpointer._store, trouble)
        checkpointer._comm._store = Verbs(checkpointer._comm._store, trouble)
        checkpointer.save(1, _state(rank, 1))
        state = _state(rank, 2, trouble)
        if rank == case.bad:
            armed.append(case.where)
            if case.where == "unsupported":
                state["bad"] = object()
            elif case.where == "other value":
                state["step"] = 22
            elif case.where == "wrong shape":
                state["whole/2"] = state["whole/2"][1:]
        failed = _error_of(lambda: checkpointer.load(state) if case.loads else checkpointer.save(2, state))
        assert not armed or case.where in ("unsupported", "other value", "wrong shape"), "the trouble never came"
        if case.loads and not case.invalid:
            assert _bits(state)[:2] == [2, 2], "values were changed"
            unchanged = _bits(_state(rank, 2))
            assert rank == case.bad or _bits(state) == unchanged, "tensors were changed"
        assert checkpointer.steps() == [1] and checkpointer.latest() == 1
        if case.invalid:
            kind, message = _error_of(lambda: checkpointer.save(3, _state(rank, 3)))
            assert kind == "StateInvalid", message
        if case.breaks:
            kind, message = _error_of(lambda: checkpointer.load(_state(rank, -1)))
            assert kind == "RankFailed" and "out of step" in message, message
            assert _resume(rank, world, path) == [1, 3]
            return failed
        assert "no committed step 2" in _error_of(lambda: checkpointer.load(_state(rank, -1), step=2))[1]
        assert _load_and_save(checkpointer, rank) == [1, 3]
    return failed


def _resume(rank: int, world: int, path: str) -> list[int]:
    with _ckpt().Checkpointer(path) as checkpointer:
        return _load_and_save(checkpointer, rank)


def _load_and_save(checkpointer: Any, rank: int) -> list[int]:
    """Loads the newest step, compares its bits, and saves step 3; returns the committed steps."""
    state = _state(rank, -1)
    restored = checkpointer.load(state)
    assert _bits(state) == _bits(_state(rank, restored.step))
    assert checkpointer.save(3, _state(rank, 3)).step == 3
    state = _state(rank, -1)
    assert checkpointer.load(state).step == 3 and _bits(state) == _bits(_state(rank, 3))
    return list(checkpointer.steps())


def _run_death(rank: int, world: int, path: str, point: str, bad: int) -> tuple[str, str]:
    armed: list[bool] = []

    def die(here: str) -> None:
        if rank == bad and armed and here == point:
            os._exit(9)

    with _ckpt().Checkpointer(path, faults=die) as checkpointer:
        checkpointer.save(1, _state(rank, 1))
        armed.append(True)
        if point.startswith("load."):
            return _error_of(lambda: checkpointer.load(_state(rank, -1)))
        return _error_of(lambda: checkpointer.save(2, _state(rank, 2)))
