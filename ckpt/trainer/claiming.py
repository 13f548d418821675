"""How a job becomes the one that writes to its root."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import time

from ckpt.agent import registry
from ckpt.engine.preflight import preflight
from ckpt.engine.session import Session
from ckpt.errors import Fenced
from ckpt.state.values import Json
from ckpt.store.commit import complete_last
from ckpt.trainer.tiers import Tiers


def claim_roots(session: Session, tiers: Tiers | None) -> str:
    """Collective: claims the root of a session, and then the fast one of `tiers`, by one name; returns that. What the
    job before had written whole is committed first, so that it is not lost. Raises StoreError where a rank cannot
    write, Unsupported or CkptError for a fast root that cannot be one, or RankFailed."""
    comm = session.comm
    made: bytes | None = None
    sessions = [session] if tiers is None else [session, tiers.fast]
    with comm.phase("claim: wait for agents"):
        for one in sessions:
            registry.wait_for_others(one.store.url, comm.timeout)
    for one in sessions:
        preflight(one)
    if tiers is not None:
        tiers.check_shared()
    with comm.phase("claim"):
        if comm.rank == 0:
            with contextlib.suppress(Fenced):
                complete_last(session.store, session.log)
            if tiers is not None:
                tiers.check_history()
            made = _append(session, tiers).encode()
    return comm.broadcast(made, "claim").decode()


def _append(session: Session, tiers: Tiers | None) -> str:
    claim = secrets.token_hex(16)
    document: dict[str, Json] = {
        "kind": "claim",
        "claim": claim,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "world": session.comm.world,
    }
    session.log.claim(document)
    if tiers is not None:
        tiers.claim(document)
    return claim
