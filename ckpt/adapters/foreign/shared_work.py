"""What processes that share the work on one output agree upon: which it is, what is done, and who does what is left.

The work is in numbered pieces; what is noted of each is in the `WorkFolder` that all use.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence

from ckpt.adapters.foreign.into import conversion_id
from ckpt.adapters.foreign.work_folder import WorkFolder
from ckpt.engine.group import Group
from ckpt.engine.sharing import share
from ckpt.engine.stream import Source
from ckpt.errors import CkptError, RankFailed, StoreError
from ckpt.state.values import Json, canonical_json, parse_json

_VERSION = 1  # of the work folder and of how outputs are cut


def conversion_of(source: Source, told: Json) -> str:
    """Tells one conversion from any other: the same for the same bits, written in the way that `told` says."""
    step = -1 if source.content.step is None else source.content.step
    return hashlib.sha256(canonical_json([_VERSION, conversion_id(source, step), told])).hexdigest()


@contextlib.contextmanager
def discarding(work: WorkFolder, group: Group) -> Iterator[None]:
    """A state that turns out to be damaged leaves nothing; what can be mended outside leaves what is done."""
    try:
        yield
    except CkptError as error:
        if group.rank == 0 and not isinstance(error, (StoreError, RankFailed)):
            work.discard()
        raise


def begin(
    work: WorkFolder,
    about: Mapping[str, Json],
    pieces: int,
    group: Group,
    lay_out: Callable[[], None] = lambda: None,
) -> list[int]:
    """Collective: begins or goes on, and gives the pieces that have a record. One process then calls `lay_out`, before
    any other goes on. Raises what `WorkFolder.begin` does."""
    found: bytes | None = None
    with group.phase("files: begin"):
        if group.rank == 0:
            again = work.begin(about)
            lay_out()
            found = canonical_json(work.recorded(pieces) if again else [])
    numbers: list[int] = parse_json(group.broadcast(found, "files: begin"), "files: begin")
    return numbers


def shared(numbers: Sequence[int], sizes: Sequence[int], group: Group) -> list[int]:
    """Of these pieces, those that this process takes, by bytes. sizes: of all pieces."""
    return [numbers[n] for n in share([sizes[n] for n in numbers], group.world)[group.rank]]


def everyones(records: Mapping[int, Json], group: Group) -> dict[int, Json]:
    """Collective: the records of all processes, by piece."""
    told = canonical_json([[number, record] for number, record in records.items()])
    everyone = group.all_gather(told, "files: records")
    return {n: record for rank, data in enumerate(everyone) for n, record in parse_json(data, f"records of {rank}")}
