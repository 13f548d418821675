"""The load: phase 1 changes nothing, phase 2 writes in place and verifies from the live tensors.

Each stored byte is read once over the whole job, exchanged, and placed straight into live memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ckpt.engine.comm import Comm
from ckpt.engine.merge import declare_tensors, union_of
from ckpt.engine.mover import Move, Mover, held_parts, part_of, read_moves
from ckpt.engine.opened import OLDER, Opened, check_objects
from ckpt.engine.save import digests_of, parse_held
from ckpt.engine.session import Buffers, Phases, Session
from ckpt.engine.target import Options, Target, apply_casts, match, matches, wanted_by_all
from ckpt.errors import CorruptCheckpoint, RankFailed, StateInvalid, StateMismatch, StoreError
from ckpt.geometry import Catalogue, Plan, Unit, read_plan
from ckpt.state.captured import Captured, LocalTensor
from ckpt.state.dtypes import opaque
from ckpt.state.values import canonical_json, decode, parse_json
from ckpt.store.arrays import Arrays, read_error
from ckpt.store.commit import held_digests

_AGREE_EVERY = 8  # rounds between two looks at whether some rank has failed


@dataclass(frozen=True)
class Loaded:
    """Outcome of a load: bytes of the whole state as stored, tensors and values loaded, seconds, also per phase."""

    bytes: int
    tensors: int
    values: int
    verified: bool
    seconds: float
    phases: dict[str, float]
    plan: str


@dataclass
class _Job:
    """One load on this rank. `fill`: for each tensor of the catalogue, this rank's shards of it."""

    session: Session
    opened: Opened
    target: Target
    plan: Plan
    fill: Mapping[int, Sequence[LocalTensor]]


def load(
    session: Session,
    opened: Opened,
    capture: Callable[[Opened], Captured],
    options: Options,
    *,
    verify: bool,
    atomic: bool,
    layout: dict[str, Any] | None,
) -> Loaded:
    """Collective. Fills every rank's state from an opened commit.

    capture: makes this rank's state with live views, given what the checkpoint holds; called once. atomic: keep a copy
    of the old tensors and put it back when phase 2 fails. Raises StateMismatch, CorruptCheckpoint or StoreError with
    nothing changed, or StateInvalid on every rank once tensors may have changed.
    """
    phases, comm = Phases(), session.comm
    with phases("plan"):
        with comm.phase("load: match"):
            captured = capture(opened)
            target = match(captured, opened, options, comm.rank)
            values = {n: decode(v, n) for n, v in opened.manifest.values.items()}
            values |= _own_values(captured, opened, options, comm, layout)
        job = _plan(session, opened, captured, target, options)
        with comm.phase("load: check objects"):
            check_objects(session, opened)
    session.faults("load.opened")
    backup = _copies(target) if atomic else None
    applying = False
    try:
        with phases("read"):
            _read(job)
        session.faults("load.placed")
        if verify:
            with phases("verify"):
                _verify(job)
        session.faults("load.verified")
        with phases("apply"):
            with comm.phase("load: cast"):
                apply_casts(target)
            with comm.phase("load: apply values"):
                applying = True
                for apply in captured.appliers:
                    apply(values)
    except BaseException as error:
        if backup is not None:
            for view, copy in backup:
                view.copy_(copy)
            if not applying:
                raise
        raise StateInvalid(
            f"loading step {opened.record.step} failed after the state began to change: {error}. This state is a mix: "
            "load again, or an older step, before training or saving"
        ) from error
    return Loaded(
        opened.manifest.nbytes,
        len(job.fill),
        len(captured.values),
        verify,
        phases.total,
        phases.seconds,
        job.plan.summary(),
    )


def _copies(target: Target) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Every live view that a load will write, with a copy of what it holds now."""
    views = [s.view for tensors in target.tensors.values() for t in tensors for s in t.shards]
    views += [s.view for tensor, _ in target.casts for s in tensor.shards]
    return [(v, v.clone()) for v in views]


def _own_values(
    captured: Captured, opened: Opened, options: Options, comm: Comm, layout: dict[str, Any] | None
) -> dict[str, Any]:
    """The plain values that belong to this rank alone: only ever from the same rank of the same layout."""
    everybody = {n for one in opened.ranks for n in one}
    same = opened.run.get("layout") == layout and len(opened.ranks) == comm.world
    mine = opened.ranks[comm.rank] if same else {}
    kept = sorted(n for n in (mine if same else everybody) if not matches(n, options.allow_extra))
    absent = [n for n in captured.per_rank if n not in mine and not matches(n, options.allow_missing)]
    if not same and (kept or any(n in everybody for n in absent)):
        raise StateMismatch(
            f"{(kept or absent)[0]}: kept per rank under layout {opened.run.get('layout')} of {len(opened.ranks)} "
            f"ranks; it has no meaning on layout {layout} of {comm.world} ranks: load on the saved layout, or leave it "
            "out of the state and use allow_extra=[...]"
        )
    if absent:
        raise StateMismatch(
            f"rank {comm.rank}: the checkpoint has no per-rank {absent[0]}; allow_missing=[...] keeps what the state "
            "holds"
        )
    extra = [n for n in kept if n not in captured.per_rank]
    if extra:
        raise StateMismatch(
            f"rank {comm.rank}: the checkpoint holds per-rank {extra[0]}, which the state has not; allow_extra=[...] "
            "leaves it out"
        )
    return {n: decode(mine[n], n) for n in captured.per_rank if n in mine}


def _plan(session: Session, opened: Opened, captured: Captured, target: Target, options: Options) -> _Job:
    comm = session.comm
    kept = Captured()
    stored = {t.name: t for t in opened.manifest.catalogue.tensors}
    with comm.phase("load: declare"):
        for name, tensors in target.tensors.items():
            # Names tied in the checkpoint may be separate here: each place asks for the same stored tensor.
            kept.tensors[name] = LocalTensor(stored[name], [s for t in tensors for s in t.shards])
        mine = canonical_json([list(captured.values), list(captured.aliases)])
    declared = comm.all_gather(declare_tensors(_once(kept)), "load: declare tensors")
    valued = comm.all_gather(mine, "load: declare values")
    with comm.phase("load: plan"):
        union = union_of(declared)
        named = [parse_json(v, f"values of rank {r}") for r, v in enumerate(valued)]
        values, tied = ({name for one in named for name in one[i]} for i in range(2))
        wanted = wanted_by_all(union, opened, values, tied, options)
        plan = read_plan(opened.manifest.catalogue, wanted, comm.world, session.budget)
        digest = plan.digest()
    for rank, other in enumerate(comm.all_gather(digest.encode(), "load: compare plans")):
        if other.decode() != digest:
            raise RankFailed(f"ranks {comm.rank} and {rank} made different read plans; use one version of ckpt")
    index = {t.name: i for i, t in enumerate(opened.manifest.catalogue.tensors)}
    return _Job(session, opened, target, plan, {index[n]: tensors for n, tensors in target.tensors.items()})


def _once(captured: Captured) -> Captured:
    """The same declarations with each box of a tensor named once."""
    out = Captured()
    for name, tensor in captured.tensors.items():
        boxes = {s.box: s for s in tensor.shards}
        out.tensors[name] = LocalTensor(tensor.spec, list(boxes.values()))
    return out


def _read(job: _Job) -> None:
    """Reads, exchanges and places, round by round; the next round's reads run while this one is exchanged. A local
    failure, an interrupt too, is kept until the ranks next agree, so that they stay in step; then all stop."""
    session, catalogue = job.session, job.opened.manifest.catalogue
    arrays = Arrays(session.kvstore, job.opened.prefix + "state/", catalogue, session.context)
    mover = Mover(session.comm, [t.itemsize for t in catalogue.tensors])
    staging = Buffers()
    failure: BaseException | None = None
    ahead: dict[int, Any] = {}
    for number, units in enumerate(job.plan.rounds):
        buffers: dict[int, torch.Tensor] = {}
        if failure is None:
            try:
                begun = ahead if number else _start(job, arrays, units)
                for n, future in begun.items():
                    buffers[n] = _finish(job, arrays, staging, units[n], future)
                if number == 0 and buffers:
                    session.faults("load.read")
                last = number + 1 == len(job.plan.rounds)
                ahead = {} if last else _start(job, arrays, job.plan.rounds[number + 1])
            except BaseException as error:
                failure = error
        moves = read_moves(units)
        if moves:
            give = _outgoing(moves, buffers, units, catalogue, session.comm.rank)
            for move, elements in mover.exchange(moves, give, "load: exchange"):
                _place(job.fill, move.link.tensor, move.link.box, elements)
        if failure is None:
            _place_own(job, units, buffers)
            for buffer in buffers.values():
                staging.give(buffer)
        if number % _AGREE_EVERY == 0 or number + 1 == len(job.plan.rounds):
            with session.comm.phase("load: read"):
                if failure is not None:
                    raise failure


def _place_own(job: _Job, units: Sequence[Unit], buffers: Mapping[int, torch.Tensor]) -> None:
    """Places what this rank has read for itself."""
    catalogue = job.opened.manifest.catalogue
    for n, buffer in buffers.items():
        packed = catalogue.arrays[units[n].array].packed
        for link in units[n].links:
            if job.session.comm.rank in link.ranks:
                _place(job.fill, link.tensor, link.box, part_of(buffer, link, packed))


def _start(job: _Job, arrays: Arrays, units: Sequence[Unit]) -> dict[int, Any]:
    started: dict[int, Any] = {}
    for number, unit in enumerate(units):
        if unit.owner == job.session.comm.rank:
            if _is_whole(job.opened.manifest.catalogue, unit):
                started[number] = arrays.read_object(unit.array, unit.index)
            else:
                where = tuple(slice(o, s) for o, s in zip(unit.box.offset, unit.box.stop, strict=True))
                started[number] = arrays.handle(unit.array)[where].read()
    return started


def _is_whole(catalogue: Catalogue, unit: Unit) -> bool:
    """Whether a unit is all of a stored object, not some of its chunks."""
    return catalogue.arrays[unit.array].grid.cell_box(unit.index) == unit.box


def _finish(job: _Job, arrays: Arrays, staging: Buffers, unit: Unit, begun: Any) -> torch.Tensor:
    """The elements of a unit that was started to be read; those of a whole object lie in a buffer of `staging`."""
    catalogue = job.opened.manifest.catalogue
    array = catalogue.arrays[unit.array]
    where = f"{arrays.describe(unit.array)} {_named(job, unit)}"
    if not _is_whole(catalogue, unit):
        try:
            return _opaque(begun.result(), array.itemsize)
        except Exception as error:
            raise read_error(error, where) from error
    buffer = staging.take(unit.nbytes).view(opaque(array.itemsize)).reshape(unit.box.extent)
    try:
        begun.decode(array.grid, unit.box, buffer.numpy())
    except CorruptCheckpoint as error:
        raise CorruptCheckpoint(f"{where}: a stored chunk is missing or damaged: {error}; {OLDER}") from None
    except StoreError as error:
        raise StoreError(f"{where}: {error}") from error
    return buffer


def _named(job: _Job, unit: Unit) -> str:
    names = [job.opened.manifest.catalogue.tensors[k.tensor].name for k in unit.links]
    return f"(tensor {names[0]}, chunk {'/'.join(map(str, unit.index))})"


def _opaque(found: Any, itemsize: int) -> torch.Tensor:
    kind = {1: "u1", 2: "i2", 4: "i4", 8: "i8", 16: "c16"}[itemsize]
    tensor = torch.from_numpy(found.view(kind))
    assert tensor.dtype == opaque(itemsize)
    return tensor


def _outgoing(
    moves: Sequence[Move],
    buffers: Mapping[int, torch.Tensor],
    units: Sequence[Unit],
    catalogue: Catalogue,
    rank: int,
) -> Iterator[tuple[Move, torch.Tensor]]:
    for move in moves:
        if move.source == rank:
            array = catalogue.arrays[units[move.unit].array]
            if move.unit in buffers:
                yield move, part_of(buffers[move.unit], move.link, array.packed)
            else:  # reading failed: the others get zeros and, right after, the error
                yield move, torch.zeros(move.link.box.extent, dtype=opaque(array.itemsize))


def _place(fill: Mapping[int, Sequence[LocalTensor]], tensor: int, box: Any, elements: torch.Tensor) -> None:
    for local in fill.get(tensor, ()):
        for common, view in held_parts(local.shards, box):
            view.copy_(elements[common.relative_to(box).slices])


def _verify(job: _Job) -> None:
    """Digests every live box, compares replicas, and compares each tensor's sum with the manifest."""
    comm, manifest = job.session.comm, job.opened.manifest
    with comm.phase("load: verify"):
        held = {}
        for index, tensors in job.fill.items():
            name = manifest.catalogue.tensors[index].name
            places = [digests_of(Captured({name: t}))[name] for t in tensors]
            found = dict(places[0])
            for box, digest in (entry for place in places for entry in place):
                if found.setdefault(box, digest) != digest:
                    raise CorruptCheckpoint(f"{name}: two places in memory differ in {box} after loading")
            held[name] = list(found.items())
        document = canonical_json(
            {n: [[list(b.offset), list(b.extent), list(d)] for b, d in x] for n, x in held.items()}
        )
    everybody = comm.all_gather(document, "load: digests")
    with comm.phase("load: compare digests"):
        if comm.rank == 0:
            _compare(manifest, [parse_held(d, r) for r, d in enumerate(everybody)])


def _compare(manifest: Any, everybody: Sequence[Mapping[str, Any]]) -> None:
    held = {name for one in everybody for name in one}
    wanted = Catalogue(tuple(t for t in manifest.catalogue.tensors if t.name in held), ())
    try:
        found = held_digests(wanted, dict(enumerate(everybody)))
    except StateMismatch as error:
        raise CorruptCheckpoint(f"after loading, {error}") from None
    for spec, digest in zip(manifest.catalogue.tensors, manifest.digests, strict=True):
        if spec.name in found and found[spec.name] != digest:
            raise CorruptCheckpoint(
                f"{spec.name}: the fingerprint of the loaded tensor is not the saved one: stored bytes were swapped, "
                "or memory or the exchange is faulty; load again, or an older step"
            )
