"""What a resumed run may promise about its later bits: its numerics contract, beside that of the checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Protocol, TypeAlias

from ckpt.engine.comm import Comm
from ckpt.errors import CkptError, StateMismatch
from ckpt.state.values import canonical_json, parse_json

Level: TypeAlias = Literal["trajectory-exact", "state-exact"]
LEVELS: tuple[Level, ...] = ("trajectory-exact", "state-exact")


class Numerics(Protocol):
    """A numerics contract, such as `ckpt.invariant.Contract`."""

    def document(self) -> dict[str, Any]:
        """All of it, as plain values."""

    def differences(self, document: Mapping[str, Any] | None) -> list[str]:
        """What of a saved document is not as here and now, a line each."""


def agreed(comm: Comm, contract: Numerics | None) -> dict[str, Any] | None:
    """Collective. The document of the contract, which must be the same on all ranks. Raises StateMismatch if not."""
    own = canonical_json(None if contract is None else contract.document())
    everybody = comm.all_gather(own, "open: numerics contract")
    with comm.phase("open: numerics contract"):
        for rank, other in enumerate(everybody):
            if other != everybody[0]:
                raise StateMismatch(
                    f"ranks 0 and {rank} have different numerics contracts: {everybody[0].decode()} and "
                    f"{other.decode()}; give every rank the same, with the same threads, libraries and settings"
                )
    found: dict[str, Any] | None = parse_json(own, "numerics contract")
    return found


def compared(
    comm: Comm, contract: Numerics | None, saved: Mapping[str, Any] | None, wanted: Level | None, step: int
) -> tuple[str, ...]:
    """Collective. What of the saved contract does not hold here, on any rank; nothing means trajectory-exact.

    Raises StateMismatch, naming it, where trajectory-exact is wanted and cannot be had.
    """
    if contract is None:
        mine = ["numerics contract: none was given to this Checkpointer"]
        if wanted is None:
            return tuple(mine)
    else:
        mine = contract.differences(saved)
    everybody = comm.all_gather(canonical_json(mine), "load: numerics contract")
    found = tuple(dict.fromkeys(line for lines in everybody for line in parse_json(lines, "differences")))
    with comm.phase("load: numerics contract"):
        if wanted is not None and wanted not in LEVELS:
            raise CkptError(f"level={wanted!r} must be {' or '.join(map(repr, LEVELS))}")
        if wanted == "trajectory-exact" and found:
            raise StateMismatch(
                f"step {step} cannot be continued trajectory-exact: {'; '.join(found)}. Make it as it was, or load "
                'with level="state-exact": the state has the same bits then, but training that goes on from it may not'
            )
    return found
