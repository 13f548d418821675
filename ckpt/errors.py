"""Every error that ckpt raises on purpose.

A message says what failed (tensor, rank, file), why, and what to do about it. The kinds are those that a
caller would treat differently; all of them are `CkptError`.
"""


class CkptError(Exception):
    """Base of all errors raised by ckpt."""


class NothingCommitted(CkptError):
    """There is no committed checkpoint of that step, number or state at that root."""


class StateMismatch(CkptError):
    """What the caller holds and what a plan or checkpoint says do not fit; nothing has been changed."""


class CorruptCheckpoint(CkptError):
    """Stored bytes are missing, damaged or contradict each other."""


class StateInvalid(CkptError):
    """A load failed after it began to write into live tensors: they hold a mix until a load succeeds."""


class Fenced(CkptError):
    """A newer job has claimed this checkpoint root; this one must stop writing."""


class StoreError(CkptError):
    """The store could not be reached, refused an operation, or lacks a property that safety needs."""


class RankFailed(CkptError):
    """Another rank failed or died during a collective operation."""


class Unsupported(CkptError):
    """Something that ckpt knows it cannot carry exactly, and therefore refuses."""
