"""What the hooks share: one run under a Checkpointer, its random streams, and frameworks that may be missing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckpt.adapters.capture import capture
from ckpt.errors import CkptError
from ckpt.state import RngState, State

if TYPE_CHECKING:
    from ckpt.trainer.checkpointer import Checkpointer


@dataclass
class Run:
    """A training run: its Checkpointer and its state. saved: the last step that a save has begun for, or that was
    loaded."""

    ck: Checkpointer
    state: State
    saved: int | None = None

    def resume(self, step: int | None = None) -> int:
        """Collective. Loads the newest committed step, or `step`; gives it, or 0 where nothing is committed. Raises
        what `Checkpointer.load` raises."""
        restored = self.ck.load(self.state, step)
        self.saved = None if restored is None else restored.step
        return self.saved or 0

    def listen(self) -> None:
        """Catches the signals that tell the job to end from now on; else from the first step on."""
        self.ck._notice.install()

    def after(self, step: int) -> None:
        """Collective; see `Checkpointer.after_step`. Raises Preempted once the job was told to end."""
        if self.ck.after_step(step, self.state) is not None:
            self.saved = step

    def finish(self, step: int) -> None:
        """Collective. Commits the last step of training, unless a save of it has begun: closing waits for that."""
        if step != self.saved and step > 0:
            self.ck.save(step, self.state)
            self.saved = step


def hold_streams(rng: RngState) -> Callable[[], None]:
    """Notes every random stream of this rank as it is now; what it gives puts them back. For frameworks that draw
    between a load and the first step."""
    held = capture({"rng": rng})

    def put_back() -> None:
        for apply in held.appliers:
            apply(held.per_rank)

    return put_back


class MissingFramework(CkptError, ImportError):
    """A hook was imported whose framework is not installed."""


@contextlib.contextmanager
def framework(name: str, extra: str) -> Iterator[None]:
    """Around the imports of a framework's top-level packages: raises MissingFramework, which names the extra to
    install, where one is absent."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise MissingFramework(
            f"{name} cannot be imported ({error}); this hook needs it: pip install 'bitexact-ckpt[{extra}]'"
        ) from error
