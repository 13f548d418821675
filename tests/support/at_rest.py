"""A committed state as the conversions read it."""

from pathlib import Path

from ckpt.adapters.foreign.into import open_session
from ckpt.engine.rest import CommittedState


def committed(root: Path) -> CommittedState:
    """The newest commit of a root."""
    session = open_session(str(root))
    record = session.log.read().newest()
    assert record is not None
    return CommittedState(session, record)
