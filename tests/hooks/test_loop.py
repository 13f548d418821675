"""`steps_of` in one process: what it counts, marks, saves and refuses."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torchdata.stateful_dataloader import StatefulDataLoader

import ckpt
from ckpt.data import GlobalCursor, GlobalLoader, TorchdataCursor
from tests.support.raw import raw

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # torchdata, with newer torch


def made(micro: int = 2) -> tuple[GlobalLoader, dict[str, Any]]:
    numbers = torch.arange(10, dtype=torch.float32)
    cursor = GlobalCursor.over(numbers, global_batch=4, shuffle=False)
    loader = GlobalLoader(numbers, cursor, rank=0, world=1, micro_batch=micro)
    return loader, {"data": cursor, "sum": torch.zeros(1)}


def run(root: Path, until: int | None, every: int | None = None) -> tuple[list[tuple[int, list[float]]], bytes]:
    loader, state = made()
    seen = []
    with ckpt.Checkpointer(root, every_steps=every) as ck:
        for step, batch in ck.steps_of(loader, state, until=until):
            state["sum"] += batch.sum()
            seen.append((step, batch.tolist()))
    return seen, raw(state["sum"])


def test_each_microbatch_comes_with_its_step_and_a_second_run_goes_on(tmp_path: Path) -> None:
    whole, end = run(tmp_path / "whole", 4)
    assert whole[:4] == [(1, [0.0, 1.0]), (1, [2.0, 3.0]), (2, [4.0, 5.0]), (2, [6.0, 7.0])]
    first, _ = run(tmp_path / "parts", 3)
    second, same = run(tmp_path / "parts", 4)
    assert first + second == whole and same == end
    assert run(tmp_path / "parts", 4) == ([], end)
    with ckpt.Checkpointer(tmp_path / "parts", read_only=True) as ck:
        assert ck.steps() == [3, 4]


def test_the_last_step_is_saved_once(tmp_path: Path) -> None:
    run(tmp_path / "root", 4, every=2)
    with ckpt.Checkpointer(tmp_path / "root", read_only=True) as ck:
        assert ck.steps() == [2, 4]
    assert len(list((tmp_path / "root" / "attempts").glob("*/*"))) == 2


def test_a_step_that_was_left_by_break_is_not_saved(tmp_path: Path) -> None:
    loader, state = made(4)
    with ckpt.Checkpointer(tmp_path / "root", every_steps=1) as ck:
        for step, _ in ck.steps_of(loader, state):
            if step == 3:
                break
    with ckpt.Checkpointer(tmp_path / "root", read_only=True) as ck:
        assert ck.steps() == [1, 2]


def test_passes_follow_each_other_until_the_last_step(tmp_path: Path) -> None:
    data = torch.arange(6)
    loader = StatefulDataLoader(data, batch_size=2, generator=torch.Generator())
    state = {"data": TorchdataCursor(loader, 0, 1), "n": 0}
    with ckpt.Checkpointer(tmp_path / "root") as ck:
        seen = [(step, batch.tolist()) for step, batch in ck.steps_of(loader, state, until=5)]
    assert seen == [(1, [0, 1]), (2, [2, 3]), (3, [4, 5]), (4, [0, 1]), (5, [2, 3])]
    loader = StatefulDataLoader(data, batch_size=2, generator=torch.Generator())
    state = {"data": TorchdataCursor(loader, 0, 1), "n": 0}
    with ckpt.Checkpointer(tmp_path / "root") as ck:
        assert [batch.tolist() for _, batch in ck.steps_of(loader, state, until=7)] == [[4, 5], [0, 1]]


@pytest.mark.parametrize(
    "state", [{"n": 0}, {"data": made()[0].cursor}, ckpt.TrainState(n=0)], ids=["none", "other", "train"]
)
def test_a_loader_whose_place_is_not_in_the_state_is_refused(state: Any, tmp_path: Path) -> None:
    loader, own = made()
    with ckpt.Checkpointer(tmp_path / "root") as ck:
        with pytest.raises(ckpt.StateMismatch, match="place in a GlobalLoader is no part of the state"):
            next(ck.steps_of(loader, state, until=1))
        with pytest.raises(ckpt.StateMismatch, match="place in a list"):
            next(ck.steps_of([1, 2], own, until=1))
        assert ck.steps() == []
        next(ck.steps_of(loader, ckpt.TrainState(data=own["data"]), until=1))


def test_a_pass_without_a_batch_ends_with_an_error(tmp_path: Path) -> None:
    class Empty:
        def __iter__(self) -> Any:
            return iter(())

        def state_dict(self) -> dict[str, int]:
            return {"at": 0}

        def load_state_dict(self, state: dict[str, int]) -> None: ...

    loader = Empty()
    with ckpt.Checkpointer(tmp_path / "root") as ck:
        with pytest.raises(ckpt.CkptError, match="no batch after step 0, of 2"):
            list(ck.steps_of(loader, {"data": loader}, until=2))


def test_a_loader_that_runs_ahead_counts_what_is_marked(tmp_path: Path) -> None:
    numbers = torch.arange(10, dtype=torch.float32)
    cursor = GlobalCursor.over(numbers, global_batch=4, shuffle=False)
    loader = GlobalLoader(numbers, cursor, rank=0, world=1, micro_batch=2, ahead=True)
    batches = iter(loader)
    seen = [next(batches).tolist() for _ in range(3)]
    loader.mark_consumed()
    assert cursor.total == 4 and not loader.complete
    with pytest.raises(ckpt.CkptError, match="1 of the 2 microbatches"):
        loader.mark_consumed()
    seen.append(next(batches).tolist())
    assert seen == [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0], [6.0, 7.0]]
    assert next(iter(loader)).tolist() == [4.0, 5.0]  # a new iteration begins where it was marked
