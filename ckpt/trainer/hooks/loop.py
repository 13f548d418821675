"""A plain training loop: what follows each step, around the loop's own lines."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from ckpt.data import GlobalLoader, TorchdataCursor
from ckpt.errors import CkptError, StateMismatch
from ckpt.state import State, TrainState
from ckpt.trainer.hooks.run import Run

if TYPE_CHECKING:
    from ckpt.trainer.checkpointer import Checkpointer

Batch = TypeVar("Batch")


def steps_of(
    ck: Checkpointer, loader: Iterable[Batch], state: State, until: int | None = None
) -> Iterator[tuple[int, Batch]]:
    """Collective. Loads the newest committed step into `state`, then gives (number of the step, batch) for each batch
    of `loader`, and does after each step what `after_step` does. Steps count from 1, since the run began.

    loader: its place must be in the state: the cursor of a `GlobalLoader`, the `TorchdataCursor` of a torchdata loader,
    or the loader itself where it has a state_dict that is the same on all ranks. Of a `GlobalLoader` each microbatch is
    given; step the optimizer where `loader.complete`. It is marked as trained on here.

    until: the last step; passes over the loader follow each other until then. None ends with the loader's own
    iteration. The last step is saved at the end. After a `break` nothing is: the step it left was not finished.

    Raises StateMismatch where the state lacks the loader's place, with nothing loaded; CkptError for a pass without a
    batch; and what `load`, `after_step` and `save` raise.
    """
    if not _has_place(loader, state):
        raise StateMismatch(
            f"steps_of: the place in a {type(loader).__name__} is no part of the state, so a resumed run would begin "
            "its data anew; put the cursor of a ckpt.data.GlobalLoader, or a ckpt.data.TorchdataCursor of a torchdata "
            "loader, into the state"
        )
    run = Run(ck, state)
    step = run.resume()
    while until is None or step < until:
        before = step
        for batch in loader:
            yield step + 1, batch
            if isinstance(loader, GlobalLoader):
                if not loader.complete:
                    continue
                loader.mark_consumed()
            step += 1
            run.after(step)
            if step == until:
                break
        if until is None:
            break
        if step == before:
            raise CkptError(f"steps_of: the loader gave no batch after step {step}, of {until}")
    run.finish(step)


def _has_place(loader: Any, state: State) -> bool:
    """Whether an entry of the state is the loader's place."""
    entries = [*state.parts().values(), *state.extra.values()] if isinstance(state, TrainState) else state.values()
    return any(_is_place(loader, entry) for entry in entries)


def _is_place(loader: Any, entry: Any) -> bool:
    if isinstance(entry, Mapping | TrainState):
        return _has_place(loader, entry)
    if isinstance(loader, GlobalLoader):
        return entry is loader.cursor
    if isinstance(entry, TorchdataCursor):
        return entry.loader is loader
    return entry is loader and hasattr(loader, "state_dict")
