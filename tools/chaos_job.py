"""One rank of a job that chaos kills: loads the newest step, checks its bits, and saves step after step for ever.

Everything follows from the step: what a rank holds at step n, and so the state id of step n, is the same in every
launch. What it sees goes into a file of notes, a line of JSON each.
"""

from __future__ import annotations

import datetime
import faulthandler
import json
import os
import random
import signal
from collections.abc import Callable
from typing import Any

ROWS, COLUMNS = 192, 256

EXPECTED = {"RankFailed", "Fenced", "StateInvalid"}
"""What a rank may raise when others are killed (in the middle of a load too), or when another job takes over."""


MEET = datetime.timedelta(seconds=20)
"""In which the ranks of a job must have met."""

LAST, EVERY, FAST_LAST = 3, 10, 2
"""Which steps retention keeps, where it is on; and the last of a fast root."""


def stacks_of(notes: str) -> str:
    """Where a rank writes what its threads are doing, at SIGUSR2."""
    return f"{notes}.stacks"


def main(
    rank: int,
    world: int,
    port: int,
    url: str,
    options: dict[str, str] | None,
    fast: str | None,
    keeping: bool,
    seed: str,
    notes: str,
) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(world)}
    os.environ |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TORCH_CPP_LOG_LEVEL": "FATAL"}
    os.environ["CKPT_NODE"] = f"{seed} node {rank * 2 // world}"
    with open(notes, "w", buffering=1) as file, open(stacks_of(notes), "w") as stacks:
        faulthandler.register(signal.SIGUSR2, stacks)

        def note(**facts: Any) -> None:
            file.write(json.dumps(facts) + "\n")

        try:
            _live(rank, world, url, options, fast, keeping, random.Random(seed), note)
        except BaseException as error:
            note(raised=type(error).__name__, message=str(error))
            os._exit(3)
    os._exit(0)


def _live(
    rank: int,
    world: int,
    url: str,
    options: dict[str, str] | None,
    fast: str | None,
    keeping: bool,
    chance: random.Random,
    note: Callable[..., None],
) -> None:
    import torch
    import torch.distributed as dist

    import ckpt
    from ckpt.engine import comm

    comm._GRACE = 1.0
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", init_method="env://", timeout=MEET)
    except RuntimeError as error:  # torch's own: a rank was killed before it came
        raise ckpt.RankFailed(f"the ranks have not met: {error}") from error
    keep = ckpt.Keep(last=LAST, every=EVERY, grace=0) if keeping else None
    keep_fast = ckpt.Keep(last=FAST_LAST, grace=0)
    with ckpt.Checkpointer(
        url, ckpt.Layout(dp=world), storage_options=options, keep=keep, fast=fast, keep_fast=keep_fast, timeout=30
    ) as ck:
        held = state(rank, world, 0)
        restored = ck.load(held)
        step = 0 if restored is None else restored.step
        if restored is not None:
            check(held, state(rank, world, step), step)
            note(loaded=step, id=restored.state_id)
        pending: ckpt.PendingSave | None = None
        while True:
            step += 1
            held = state(rank, world, step)
            if chance.random() < 0.5:
                receipt = ck.save(step, held)
                note(committed=step, id=receipt.state_id)
            else:
                pending = ck.save_async(step, held)
                spoil(held)
                note(staged=step)
                if chance.random() < 0.5:
                    note(committed=step, id=pending.result(60).state_id)
            if chance.random() < 0.2:
                held = state(rank, world, 0)
                again = ck.load(held)
                assert again is not None
                check(held, state(rank, world, again.step), again.step)
                note(loaded=again.step, id=again.state_id)


def state(rank: int, world: int, step: int) -> dict[str, Any]:
    """Rows that are cut over the ranks, in blocks that no object is cut by, a replica, and values."""
    import torch

    import ckpt

    def words(rows: int, first: int) -> torch.Tensor:
        return (torch.arange(rows * COLUMNS, dtype=torch.int32) + first) * 2654435 + step * 97

    rows = ROWS // world
    own = words(rows, rank * rows * COLUMNS).reshape(rows, COLUMNS)
    cut = ckpt.ShardedTensor(own, [((rank * rows, 0), (rows, COLUMNS), (0, 0))], (ROWS, COLUMNS))
    return {"cut": cut, "whole": words(300, 7), "small": torch.full((5,), float(step)), "step": step}


def spoil(held: dict[str, Any]) -> None:
    held["cut"].local.fill_(-1)
    held["whole"].fill_(-1)
    held["step"] = -1


def check(held: dict[str, Any], expected: dict[str, Any], step: int) -> None:
    for name in ("whole", "small"):
        if held[name].numpy().tobytes() != expected[name].numpy().tobytes():
            raise AssertionError(f"step {step}: {name} has other bits")
    if held["cut"].local.numpy().tobytes() != expected["cut"].local.numpy().tobytes():
        raise AssertionError(f"step {step}: cut has other bits")
    if held["step"] != step:
        raise AssertionError(f"step {step}: the value says {held['step']}")
