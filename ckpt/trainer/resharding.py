"""`reshard_`: a live state from one parallel layout into another."""

from __future__ import annotations

from collections.abc import Iterable

import torch.distributed as dist

from ckpt.adapters import capture, known_from
from ckpt.engine.comm import Comm
from ckpt.engine.reshard import Resharded, reshard
from ckpt.engine.session import MIB
from ckpt.engine.target import Options
from ckpt.state import State


def reshard_(
    target: State,
    source: State,
    *,
    allow_missing: Iterable[str] = (),
    allow_extra: Iterable[str] = (),
    cast: Iterable[str] | None = None,
    verify: bool = True,
    process_group: dist.ProcessGroup | None = None,
    timeout: float = 600.0,
    round_bytes: int = 64 * MIB,
) -> Resharded:
    """Collective: fills `target` in place, cut by one layout, with the bits of `source`, cut by another, without
    touching storage.

    Both are states as `Checkpointer.save` takes them (modules, optimizers, DTensors, ShardedTensors, plain values),
    under the same names. A rank that holds nothing of one of them passes an empty dict. The source is only read; the
    two must not share memory. The other arguments are those of `Checkpointer.load`; round_bytes: bytes a rank may send,
    and receive, at a time, which bounds the memory for the exchange. It goes through host memory, over a gloo group of
    its own.

    Raises StateMismatch or Unsupported with nothing changed; StateInvalid on every rank once the target may have
    changed, also where the fingerprints of source and target differ; RankFailed where a rank is lost.
    """
    options = Options(tuple(allow_missing), tuple(allow_extra), tuple(cast or ()))
    comm = Comm(process_group, timeout)
    try:
        with comm.operation("reshard"):
            with comm.phase("reshard: capture"):
                held = capture(source)
            return reshard(
                comm,
                held,
                lambda found: capture(target, known_from(found)),
                options,
                verify=verify,
                budget=round_bytes,
            )
    finally:
        comm.close()
