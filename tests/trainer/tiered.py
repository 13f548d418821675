"""States and jobs with two roots; for the tests of tiers."""

from pathlib import Path
from typing import Any

import torch

import ckpt
from tests.support.raw import raw


def state(step: int) -> dict[str, Any]:
    return {"x": torch.full((300, 100), float(step)), "small": torch.arange(9) + step, "step": step}


def tiered(durable: Path | str, fast: Path | str, **more: Any) -> ckpt.Checkpointer:
    return ckpt.Checkpointer(durable, fast=fast, **more)


def loaded(ck: ckpt.Checkpointer, step: int | None = None) -> int | None:
    """The step that a load gives, whose bits are compared."""
    live = state(0)
    done = ck.load(live, step)
    if done is None:
        return None
    wanted = state(done.step)
    assert live["step"] == done.step and all(raw(live[n]) == raw(wanted[n]) for n in ("x", "small"))
    return done.step


def steps(root: Path | str, **more: Any) -> list[int]:
    with ckpt.Checkpointer(root, read_only=True, **more) as ck:
        return ck.steps()
