"""Trains the reference GPT under torchrun on any layout, resuming from the newest checkpoint.

    torchrun --nproc-per-node 4 tools/reference_trainer.py RUN --tp 2 --pp 2 --until 20
    torchrun --nproc-per-node 3 tools/reference_trainer.py RUN --dp 3 --until 40      # goes on, with the same bits

Rank 0 prints, for each step, the loss and the gradients' norm in full (as hexadecimal floats), and the state id of
what was saved. The text is the standard library's sources, byte by byte.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import ckpt
from ckpt import invariant as inv

if __name__ == "__main__":
    sys.path.append(str(Path(__file__).resolve().parent.parent))

from tools.reference_gpt import Config, Model, Place, Trainer


class Text(Sequence[torch.Tensor]):
    """Windows of a text, by bytes: item i is int64 [tokens + 1], and overlaps the next one by a byte."""

    def __init__(self, text: bytes, tokens: int) -> None:
        self._bytes, self._tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8), tokens

    def __len__(self) -> int:
        return (len(self._bytes) - 1) // self._tokens

    def __getitem__(self, index: Any) -> Any:
        if not 0 <= index < len(self):
            raise IndexError(index)
        start = int(index) * self._tokens
        return self._bytes[start : start + self._tokens + 1].long()


@functools.cache
def library(limit: int = 1 << 18) -> bytes:
    """The first bytes of the standard library's top-level sources, in order of their names."""
    text = b""
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text += path.read_bytes()
        if len(text) >= limit:
            break
    return text[:limit]


class Run:
    """A trainer with its data, on this rank of a layout. Collective over the job."""

    def __init__(
        self, config: Config, layout: ckpt.Layout, *, zero: bool = False, sequence_parallel: bool = False
    ) -> None:
        place = Place.here(layout)
        self.trainer = Trainer(Model(config, place, sequence_parallel=sequence_parallel), zero)
        self.text = Text(library(), config.tokens)
        contract = config.contract
        self.cursor = ckpt.data.GlobalCursor.over(self.text, global_batch=contract.batch, seed=contract.seed)

    def steps(self) -> Iterator[tuple[float, float]]:
        """Trains without end; after each step its loss and norm."""
        while True:
            keys = next(iter(self.cursor.batches(0, self.cursor.global_batch)))
            result = self.trainer.step(torch.stack([self.text[key] for key in keys]))
            self.cursor.advance()
            yield result.loss, result.norm

    def state(self) -> dict[str, Any]:
        return self.trainer.state() | {"data": self.cursor}

    def load(self, ck: ckpt.Checkpointer, **options: Any) -> ckpt.Restored | None:
        """Goes on from a checkpoint, if there is one."""
        state = self.state()
        restored = ck.load(state, **options)
        if restored is not None:
            self.trainer.resume(state)
        return restored


def main() -> None:
    args = _arguments()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    layout = ckpt.Layout(tp=args.tp, dp=args.dp, pp=args.pp)
    config = Config(inv.Contract(args.shards, args.batch, seed=args.seed))
    run = Run(config, layout, zero=args.zero, sequence_parallel=args.sequence_parallel)
    options: dict[str, Any] = {"every_steps": args.every, "contract": config.contract}
    with ckpt.Checkpointer(args.run, layout=layout, **options) as ck:
        restored = run.load(ck, level="trajectory-exact")
        first = 1 if restored is None else restored.step + 1
        for step, (loss, norm) in zip(range(first, args.until + 1), run.steps(), strict=False):
            if dist.get_rank() == 0:
                print(f"step {step}: loss {loss:.6f} {loss.hex()}, norm {norm.hex()}", flush=True)
            ck.after_step(step, run.state())
        receipt = ck.save(args.until, run.state())
        if dist.get_rank() == 0:
            print(f"saved step {receipt.step}: state {receipt.state_id}")
    dist.destroy_process_group()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="root of the checkpoints: a directory or s3://bucket/prefix")
    for name in ("tp", "dp", "pp"):
        parser.add_argument(f"--{name}", type=int, default=1)
    parser.add_argument("--shards", type=int, default=12, help="virtual tensor shards; never change them in a run")
    parser.add_argument("--batch", type=int, default=24, help="samples in a global batch")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--until", type=int, default=20, help="the last step")
    parser.add_argument("--every", type=int, default=5, help="steps between checkpoints")
    parser.add_argument("--zero", action="store_true", help="shard the optimizer's state over data parallel ranks")
    parser.add_argument("--sequence-parallel", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
