"""GlobalLoader: a run that stops and resumes, on any number of ranks, sees the bytes of the run that never stopped."""

import random
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, default_collate

import ckpt
from ckpt.data import GlobalCursor, GlobalLoader, GlobalSampler
from tests.data.corpus import Augmented, Numbers, global_batches, raw

WORLDS = [1, 2, 3, 4, 6]
STEPS = 9


def _cursor(size: int, **options: Any) -> GlobalCursor:
    return GlobalCursor(size, "f", **({"global_batch": 12, "seed": 3} | options))


def _loaders(cursors: list[GlobalCursor], micro: int | None = None, **options: Any) -> list[GlobalLoader]:
    world = len(cursors)
    return [GlobalLoader(Augmented(c.size), c, r, world, micro, **options) for r, c in enumerate(cursors)]


def _run(size: int, world: int, steps: int, state: Any = None, micro: int | None = None, **options: Any) -> Any:
    """Trains for some steps on one set of fresh ranks. Returns the global batches and the state that all ranks have."""
    cursors = [_cursor(size, **options) for _ in range(world)]
    if state is not None:
        for cursor in cursors:
            cursor.load_state_dict(state)
    batches: list[list[bytes]] = []
    while len(batches) < steps:  # with "drop" an iteration ends with its epoch
        batches += islice(global_batches(_loaders(cursors, micro)), steps - len(batches))
    states = [cursor.state_dict() for cursor in cursors]
    assert states == states[:1] * world
    return batches, states[0]


@pytest.mark.parametrize("end", ["wrap", "drop"])
@pytest.mark.parametrize("size", [36, 30])
def test_stop_anywhere_and_resume_on_any_number_of_ranks(size: int, end: str) -> None:
    straight, final = _run(size, 1, STEPS, epoch_end=end)
    assert len({sample for batch in straight for sample in batch}) == STEPS * 12, "augmentation repeats itself"
    for n, before in enumerate(WORLDS):
        after = WORLDS[(n + 1) % len(WORLDS)]
        for stop in range(STEPS + 1):
            first, state = _run(size, before, stop, epoch_end=end)
            for world in (before, after):
                rest, last = _run(size, world, STEPS - stop, state, epoch_end=end)
                assert first + rest == straight and last == final


def test_several_changes_of_ranks_and_microbatches_in_one_run() -> None:
    straight, final = _run(30, 1, 12)
    batches, state = [], None
    for world, micro, steps in [(4, 1, 1), (2, 3, 3), (6, None, 2), (1, 4, 1), (3, 2, 4), (12, 1, 1)]:
        some, state = _run(30, world, steps, state, micro)
        batches += some
    assert batches == straight and state == final


@pytest.mark.parametrize("micro", [1, 2, 3, 6])
def test_accumulation_hands_out_microbatches_and_counts_global_batches(micro: int) -> None:
    cursor = _cursor(30)
    loader = GlobalLoader(Numbers(30), cursor, 0, 2, micro)
    assert loader.micro_batches == 6 // micro
    iteration = iter(loader)
    for step in range(3):
        for n in range(loader.micro_batches):
            assert not loader.complete
            assert len(next(iteration)) == micro
            assert cursor.total == 12 * step, "a batch that was only handed out is counted"
            if n + 1 < loader.micro_batches:
                with pytest.raises(ckpt.CkptError, match=rf"{n + 1} of the {6 // micro} microbatches"):
                    loader.mark_consumed()
        assert loader.complete
        loader.mark_consumed()
        assert not loader.complete and cursor.total == 12 * (step + 1)
        with pytest.raises(ckpt.CkptError, match=r"mark_consumed: 0 of the"):
            loader.mark_consumed()


def test_a_state_taken_amid_accumulation_has_only_what_was_trained_on() -> None:
    straight, _ = _run(30, 2, 4)
    cursors = [_cursor(30) for _ in range(2)]
    batches = global_batches(_loaders(cursors, 2))
    assert [next(batches)] == straight[:1]
    batches.close()
    for handed in range(4):
        loaders = _loaders(cursors, 2)
        for loader in loaders:
            list(islice(loader, handed))
        state = cursors[0].state_dict()
        assert state["total"] == 12
        assert _run(30, 3, 3, state)[0] == straight[1:]


def test_a_forgotten_mark_is_noticed_at_the_next_global_batch() -> None:
    loader = GlobalLoader(Numbers(30), _cursor(30), 0, 2, 3)
    iteration = iter(loader)
    next(iteration), next(iteration)
    with pytest.raises(
        ckpt.CkptError, match=r"2 of 2 microbatches .* samples 0 \(epoch 0\).*call loader.mark_consumed"
    ):
        next(iteration)


def test_a_forgotten_mark_is_noticed_at_the_end_of_an_epoch() -> None:
    loader = GlobalLoader(Numbers(12), _cursor(12, epoch_end="drop"), 0, 1)
    with pytest.raises(ckpt.CkptError, match="not marked as trained on when what follows was asked for"):
        for _ in loader:
            pass


@pytest.mark.parametrize("handed", [1, 2])
def test_a_forgotten_mark_is_noticed_when_iterating_anew(handed: int) -> None:
    cursor = _cursor(30)
    loader = GlobalLoader(Numbers(30), cursor, 0, 2, 3)
    first = [raw(b) for b in islice(loader, handed)]
    with pytest.raises(ckpt.CkptError, match=r"not marked as trained on when a new iteration was begun.*rewind"):
        iter(loader)
    loader.rewind()
    assert [raw(b) for b in islice(loader, handed)] == first and cursor.total == 0


def test_iterating_anew_after_a_mark_goes_on() -> None:
    straight, _ = _run(30, 1, 4)
    cursor, batches = _cursor(30), []
    loader = GlobalLoader(Augmented(30), cursor, 0, 1)
    for _ in range(4):
        batches.append([raw(sample) for sample in next(iter(loader))])
        loader.mark_consumed()
    assert batches == straight


def test_drop_ends_each_epoch_and_begins_the_next() -> None:
    cursor = _cursor(30, epoch_end="drop")
    loader = GlobalLoader(Numbers(30), cursor, 1, 2, 3)
    for epoch in range(3):
        assert cursor.epoch == epoch
        seen = 0
        for _ in loader:
            seen += 1
            if loader.complete:
                loader.mark_consumed()
        assert seen == 4


def test_a_running_iteration_ends_with_a_load_a_rewind_or_another_iteration() -> None:
    cursor = _cursor(30)
    loader = GlobalLoader(Numbers(30), cursor, 0, 1)
    start = cursor.state_dict()

    def running() -> Any:
        iteration = iter(loader)
        first = raw(next(iteration))
        loader.mark_consumed()
        return iteration, first

    iteration, first = running()
    cursor.load_state_dict(start)
    with pytest.raises(ckpt.CkptError, match="iterate over the loader anew"):
        next(iteration)
    iteration, again = running()
    assert again == first
    loader.rewind()
    with pytest.raises(ckpt.CkptError, match="iterate over the loader anew"):
        next(iteration)
    iteration, _ = running()
    newer = iter(loader)
    with pytest.raises(ckpt.CkptError, match="iterate over the loader anew"):
        next(iteration)
    next(newer)
    cursor.load_state_dict(start)  # what was handed out before it means nothing now
    assert not loader.complete
    with pytest.raises(ckpt.CkptError, match="0 of the 1 microbatches"):
        loader.mark_consumed()
    assert raw(next(iter(loader))) == first


def test_global_generators_are_not_touched_and_do_not_matter() -> None:
    def states() -> list[Any]:
        return [random.getstate(), str(np.random.get_state()), torch.get_rng_state().numpy().tobytes()]

    found = []
    for seed in (1, 2):
        random.seed(seed), np.random.seed(seed), torch.manual_seed(seed)
        before = states()
        found.append(_run(30, 2, 3)[0])
        assert states() == before
    assert found[0] == found[1]


def test_seed_items_can_be_left_out_for_batched_fetching() -> None:
    class Batched(Numbers):
        def __getitems__(self, keys: list[int]) -> list[torch.Tensor]:
            calls.append(list(keys))
            return [self[key] for key in keys]

    calls: list[list[int]] = []
    plain = GlobalLoader(Batched(30), _cursor(30), 1, 2, 3, seed_items=False)
    seeded = GlobalLoader(Batched(30), _cursor(30), 1, 2, 3)
    assert [raw(b) for b in islice(plain, 2)] == [raw(b) for b in islice(seeded, 2)]
    assert calls == list(islice(GlobalSampler(_cursor(30), 1, 2, 3), 2))


def test_the_sampler_serves_an_ordinary_dataloader() -> None:
    cursor = _cursor(30)
    loader = DataLoader(Numbers(30), batch_sampler=GlobalSampler(cursor, 1, 2))
    for batch in islice(loader, 2):
        assert batch[:, 0].tolist() == next(cursor.batches(6, 12))
        cursor.advance()


def test_collate_fn_and_other_options_reach_the_dataloader() -> None:
    loader = GlobalLoader(Numbers(30), _cursor(30), 0, 2, collate_fn=_summed)
    assert next(iter(loader)) == sum(_cursor(30).batches(0, 6).__next__())


def _summed(items: list[torch.Tensor]) -> int:
    return int(default_collate(items)[:, 0].sum())


@pytest.mark.parametrize(
    "option",
    [
        {"batch_size": 4},
        {"shuffle": True},
        {"sampler": [0]},
        {"batch_sampler": [[0]]},
        {"drop_last": True},
        {"generator": None},
        {"in_order": False},
    ],
    ids=lambda option: next(iter(option)),
)
def test_options_that_change_the_order_are_refused(option: dict[str, Any]) -> None:
    with pytest.raises(ckpt.CkptError, match=f"{next(iter(option))}.*would change the order"):
        GlobalLoader(Numbers(30), _cursor(30), 0, 1, **option)


def test_a_data_set_of_another_size_is_refused() -> None:
    with pytest.raises(ckpt.StateMismatch, match="has 29 items, the GlobalCursor is for one of 30"):
        GlobalLoader(Numbers(29), _cursor(30), 0, 1)


@pytest.mark.slow
@pytest.mark.parametrize("persistent", [False, True])
def test_prefetching_workers_do_not_move_the_cursor(persistent: bool) -> None:
    """A state is taken while workers hold prefetched batches; the resumed run, on other ranks, gets them all again."""
    straight, final = _run(30, 1, 8)
    options: dict[str, Any] = {"num_workers": 2, "prefetch_factor": 4, "persistent_workers": persistent}
    cursor = _cursor(30)
    loader = GlobalLoader(Augmented(30), cursor, 0, 1, 3, **options)
    context: Any = loader._loader.multiprocessing_context
    assert context.get_start_method() == "spawn"
    iteration = iter(loader)
    for step in range(3):
        handed = [raw(sample) for _ in range(4) for sample in next(iteration)]
        assert cursor.total == 12 * step
        loader.mark_consumed()
        assert handed == straight[step]
    next(iteration)  # handed out, not trained on
    state = cursor.state_dict()
    assert state["total"] == 36
    iteration.close()
    assert _run(30, 6, 5, state) == (straight[3:], final)

    loader.rewind()
    resumed = global_batches([loader])  # the same loader again: what was prefetched before is not handed out
    assert list(islice(resumed, 5)) == straight[3:] and cursor.state_dict() == final
    resumed.close()
