"""How much memory a conversion takes, and how it keeps within a bound."""

from __future__ import annotations

from ckpt.adapters.foreign.ranks_write import BAND
from ckpt.errors import CkptError

MIB = 1 << 20
_BASE = {"ranks": 160 * MIB}  # what threads, handles and plans take, whatever the state; measured
_BASE_ELSE = 96 * MIB
_OBJECTS = 96 * MIB  # of a thread that writes our format: a few stored objects of at most 16 MiB, and copies of them
_FLIGHT = 8 * MIB  # bytes of objects that such a thread has under way to the store, unless there is room for more
_MOST_FLIGHT = 64 * MIB  # a piece of work
_COPIES = 6  # measured at most 4: buffers, TensorStore's own, and what the C library keeps of both for each thread
_SLABS = 96 * MIB  # of the writers of one process
_BANDS = 3  # times a band is held at once: as it is read, as TensorStore has it, as it is written
_LEAST_BAND = 8 * MIB


def check_memory(form: str, memory: int | None, jobs: int) -> None:
    """Raises CkptError that says how much it takes, where `jobs` threads cannot write `form` within `memory` bytes."""
    least = least_memory(form, jobs)
    if memory is not None and memory < least:
        raise CkptError(f"--memory: {form} with --jobs {jobs} takes {least // MIB} MiB; give that much, or fewer jobs")


def band_for(memory: int | None, jobs: int) -> int:
    """The bytes of a band with which `jobs` threads write `ranks` within the bound."""
    return BAND if memory is None else min(BAND, (memory - _BASE["ranks"]) // (_BANDS * jobs))


def least_memory(form: str, jobs: int) -> int:
    """The smallest bound that holds."""
    each = {"ranks": _BANDS * _LEAST_BAND, "ckpt": _OBJECTS}.get(form, _SLABS)
    return _BASE.get(form, _BASE_ELSE) + each * jobs


def flight_for(memory: int | None, jobs: int) -> int:
    """The bytes of stored objects that each thread may have under way to the store, within the bound."""
    spare = 0 if memory is None else (memory - least_memory("ckpt", jobs)) // (jobs * _COPIES)
    return min(_MOST_FLIGHT, _FLIGHT + max(0, spare))


def taken(form: str, memory: int | None, jobs: int) -> int:
    """The bound that holds."""
    if form == "ckpt":
        return least_memory(form, jobs) + _COPIES * jobs * (flight_for(memory, jobs) - _FLIGHT)
    if form == "ranks":
        return _BASE[form] + _BANDS * band_for(memory, jobs) * jobs
    return least_memory(form, jobs)
