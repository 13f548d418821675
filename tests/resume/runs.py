"""Ten steps straight, and five, a save, and five more in fresh processes, and what all of them leave behind.

A file of this folder builds a `Run` on each rank and passes it to `straight`, `first_half` and, in other processes and
from another seed, `second_half`. `faults` compares what they saw byte for byte; `unmoved` and `unseen` ask whether that
comparison could see a fault.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

import ckpt
from tests.resume.digests import Digests, differing, digests, sections

STEPS = 5  # before the save, and again after it


class Run(Protocol):
    """A training run on one rank. `state` is all of it, as ckpt is told."""

    state: ckpt.TrainState

    def step(self) -> list[float]:
        """One optimizer step; gives the losses that this rank saw."""
        ...

    def everything(self) -> dict[str, Any]:
        """Every piece of state that later steps depend on, without ckpt, for `digests`."""
        ...


@dataclass(frozen=True)
class Trace:
    """What one rank saw: losses of each step as hex, digests of the state after the first half and at the end."""

    losses: list[list[str]]
    middle: Digests
    end: Digests


@dataclass(frozen=True)
class Traces:
    """By rank: the straight run, its halves, and second halves that went wrong on purpose, by name."""

    whole: list[Trace]
    first: list[Trace]
    second: list[Trace]
    controls: list[dict[str, Trace]]

    @classmethod
    def of(cls, before: Sequence[tuple[Trace, Trace]], after: Sequence[tuple[Trace, dict[str, Trace]]]) -> Self:
        """From what each rank saw before and after the save."""
        return cls([a for a, _ in before], [b for _, b in before], [a for a, _ in after], [b for _, b in after])


# --- On a rank ---


def straight(run: Run) -> Trace:
    """Both halves at once."""
    losses = _train(run)
    middle = digests(run.everything())
    losses += _train(run)
    return Trace(losses, middle, digests(run.everything()))


def first_half(run: Run, url: str, layout: ckpt.Layout) -> Trace:
    """The first half and a save. `end` is the state after the save."""
    losses = _train(run)
    middle = digests(run.everything())
    with ckpt.Checkpointer(url, layout) as ck:
        ck.save(STEPS, run.state)
    return Trace(losses, middle, digests(run.everything()))


def second_half(
    run: Run, url: str, layout: ckpt.Layout, *, without: str | None = None, spoil: Callable[[Any], None] | None = None
) -> Trace:
    """A load and the second half. without: a part of the TrainState that is not loaded. spoil: is done to the run after
    the load. `middle` is the state before the first step."""
    if without is not None:
        setattr(run.state, without, None)
    with ckpt.Checkpointer(url, layout, read_only=True) as ck:
        restored = ck.load(run.state, allow_extra=[f"{without}/*"] if without is not None else [])
    assert restored is not None and restored.step == STEPS and restored.verified
    if spoil is not None:
        spoil(run)
    middle = digests(run.everything())
    return Trace(_train(run), middle, digests(run.everything()))


def _train(run: Run) -> list[list[str]]:
    return [[float.hex(loss) for loss in run.step()] for _ in range(STEPS)]


# --- In the parent ---


def faults(traces: Traces) -> list[str]:
    """A line for each leaf of state, and the losses, that is not the straight run's, on any rank."""
    lines = []
    for rank, (whole, first, second) in enumerate(zip(traces.whole, traces.first, traces.second, strict=True)):
        found = {
            "before the save": differing(first.middle, whole.middle),
            "after the save": differing(first.end, whole.middle),
            "after the load": differing(second.middle, whole.middle),
            "at the end": differing(second.end, whole.end),
        }
        lines += [f"rank {rank}: {name} {when}" for when, names in found.items() for name in names]
        if first.losses + second.losses != whole.losses:
            lines.append(f"rank {rank}: losses {first.losses + second.losses}, not {whole.losses}")
    return lines


def unmoved(traces: Traces) -> set[str]:
    """What the second half of a straight run did not change on some rank: leaves, and as wholes random streams, the
    scheduler, and the options of a parameter group."""
    found = set()
    for trace in traces.whole:
        found |= {_unit(name) for name in trace.middle} - {_unit(n) for n in differing(trace.middle, trace.end)}
    return found


def _unit(name: str) -> str:
    if name.startswith("/rng/"):
        return "/".join(name.split("/")[:3])
    return "/scheduler" if name.startswith("/scheduler/") else name.partition("/options/")[0]


def unseen(traces: Traces, spoilt: dict[str, str]) -> list[str]:
    """A line for each control that does not begin apart from the straight run in one part of the state alone, or whose
    losses and model stay the same. spoilt: that part, by control."""
    assert all(controls.keys() == spoilt.keys() for controls in traces.controls)
    lines = []
    for rank, name, whole, control in _controls(traces):
        begun = sections(differing(control.middle, whole.middle))
        if begun != {spoilt[name]}:
            lines.append(f"rank {rank}: {name} begins apart in {sorted(begun)}, not in {spoilt[name]}")
        if control.losses == whole.losses[STEPS:]:
            lines.append(f"rank {rank}: {name} does not change the losses")
        if "model" not in sections(differing(control.end, whole.end)):
            lines.append(f"rank {rank}: {name} does not change the model")
    return lines


def _controls(traces: Traces) -> Iterator[tuple[int, str, Trace, Trace]]:
    for rank, (whole, controls) in enumerate(zip(traces.whole, traces.controls, strict=True)):
        for name, control in controls.items():
            yield rank, name, whole, control
