"""One run of an example of docs/examples on a rank, seen from outside: what the model was given, and every byte that it
left. Nothing of ckpt is asked."""

import contextlib
import functools
import hashlib
import importlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from tests.hooks.warm import ROOT, Call
from tests.resume import digests

EXAMPLES = ROOT / "docs" / "examples"


class Watched:
    """Counts the batches that a model is given, and notes each by a digest. At a given one the process is killed, or
    told to end (rank 0 alone)."""

    def __init__(self, rank: int, call: Call) -> None:
        self.rank, self.call, self.batches = rank, call, list[str]()

    @contextlib.contextmanager
    def models(self, *kinds: Any) -> Iterator[None]:
        """Within it, the first argument of each forward pass of these classes in training is seen."""
        plain = [kind.forward for kind in kinds]
        for kind, forward in zip(kinds, plain, strict=True):
            kind.forward = self._seeing(forward)
        try:
            yield
        finally:
            for kind, forward in zip(kinds, plain, strict=True):
                kind.forward = forward

    def _seeing(self, forward: Any) -> Any:
        @functools.wraps(forward)
        def seeing(model: Any, tokens: torch.Tensor, *others: Any, **named: Any) -> Any:
            if model.training:
                self.see(tokens)
            return forward(model, tokens, *others, **named)

        return seeing

    def see(self, tokens: torch.Tensor) -> None:
        self.batches.append(hashlib.sha256(tokens.contiguous().numpy().tobytes()).hexdigest()[:16])
        if len(self.batches) == self.call.kill_at:
            _committed(self.call.root)
            os.kill(os.getpid(), signal.SIGKILL)
        if len(self.batches) == self.call.term_at and self.rank == 0:
            os.kill(os.getpid(), signal.SIGTERM)


def _committed(root: str) -> None:
    """Waits until something is committed, so that there is something to resume from."""
    end = time.monotonic() + 120
    while not any(b'"commit"' in p.read_bytes() for p in Path(root, "log").glob("*.json")):
        assert time.monotonic() < end, "nothing was committed"
        time.sleep(0.01)


def play(rank: int, call: Call) -> dict[str, Any]:
    """Runs an example to its end, unless it is killed or told to end on the way; then what it saw is not given."""
    if str(EXAMPLES) not in sys.path:
        sys.path[:0] = [str(EXAMPLES), str(Path(__file__).parent)]
    tiny: Any = importlib.import_module("tiny")
    from megatron.core.models.gpt import GPTModel

    watched = Watched(rank, call)
    with watched.models(tiny.ByteModel, GPTModel):
        left = importlib.import_module(call.example).train(call.root, call.steps)
    everything = {
        "model": digests.module(left["model"]),
        "optimizers": [digests.optimizer(optimizer) for optimizer in left["optimizers"]],
        "schedulers": [scheduler.state_dict() for scheduler in left["schedulers"]],
        "rng": digests.streams(),
        **left.get("more", {}),
    }
    return {"batches": watched.batches, "end": digests.digests(everything)}
