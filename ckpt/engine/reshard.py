"""Live resharding: a state goes from the memory of one layout into that of another, without touching storage."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ckpt.engine import fill
from ckpt.engine.digests import digests_of, held_document, parse_held
from ckpt.engine.fill import Filling
from ckpt.engine.group import Group
from ckpt.engine.merge import Union, check_cover, compare_plans, declare_all, union_of
from ckpt.engine.mover import Mover, gather_box
from ckpt.engine.session import Phases
from ckpt.engine.target import Options
from ckpt.errors import Unsupported
from ckpt.geometry import ExchangePlan, Transfer, exchange_plan
from ckpt.native.copies import copy_boxes
from ckpt.state.captured import Captured
from ckpt.state.memory import check_disjoint
from ckpt.state.values import Json
from ckpt.store.commit import held_digests
from ckpt.store.log import Record
from ckpt.store.opened import Opened
from ckpt.store.records import Manifest

_BLAME = "memory or the exchange is faulty; reshard again, and look at the machines of the ranks that hold it"


@dataclass(frozen=True)
class Resharded:
    """A finished live resharding. state_id: of the state, which the filled tensors were compared with when `verified`;
    bytes: of the whole state; moved: bytes that went between ranks; seconds on this rank, and `phases` of it by name.
    """

    state_id: str
    bytes: int
    moved: int
    tensors: int
    verified: bool
    seconds: float
    phases: dict[str, float]


def reshard(
    comm: Group,
    source: Captured,
    capture: Callable[[Opened], Captured],
    options: Options,
    *,
    verify: bool,
    budget: int,
) -> Resharded:
    """Collective. Fills every rank's target state from what all ranks hold in their source states.

    capture: makes this rank's target state with live views, given what there is; called once. budget: bytes a rank may
    send or receive in a round. Raises StateMismatch or Unsupported with nothing changed, StateInvalid once the target
    may have changed; the source is only read.
    """
    phases = Phases()
    with phases("declare"):
        union, values = _declare(comm, source)
    with phases("digest"):
        opened = _open(comm, source, union, values)
    with phases("plan"):
        filling = fill.prepare(comm, opened, capture, options, None, "reshard")
        plan = _plan(comm, source, union, filling, budget)
    remedy = "reshard again, or load a checkpoint, before using it"
    with fill.changing(filling, False, "resharding failed", remedy) as begin_to_apply:
        with phases("exchange"):
            _exchange(comm, source, union, filling, plan)
        if verify:
            with phases("verify"):
                fill.verify(comm, opened.manifest, filling, "reshard", _BLAME)
        with phases("apply"):
            fill.apply(comm, filling, begin_to_apply, "reshard")
    manifest = opened.manifest
    return Resharded(
        manifest.state_id, manifest.nbytes, plan.moved, len(filling.fill), verify, phases.total, phases.seconds
    )


def _declare(comm: Group, source: Captured) -> tuple[Union, dict[str, Json]]:
    with comm.phase("reshard: capture"):
        if source.per_rank:
            raise Unsupported(
                f"{min(source.per_rank)}: kept per rank, which has no meaning on another layout; leave it out of both "
                "states"
            )
    declared = declare_all(comm, source, "reshard")
    with comm.phase("reshard: unite"):
        union = union_of(declared.tensors)
        check_cover(union)
    return union, declared.values


def _open(comm: Group, source: Captured, union: Union, values: dict[str, Json]) -> Opened:
    """The source as a loader sees a checkpoint: a manifest with fingerprints, its replicas compared."""
    with comm.phase("reshard: digest"):
        document = held_document(digests_of(source))
    everybody = comm.all_gather(document, "reshard: digests")
    with comm.phase("reshard: compare replicas"):
        held = {r: parse_held(d, r) for r, d in enumerate(everybody)}
        digests = held_digests(union.catalogue, held)
        manifest = Manifest.of(union.catalogue, digests, union.aliases, values)
    return Opened(Record(0, {}), manifest, [{} for _ in range(comm.world)], {"layout": None})


def _plan(comm: Group, source: Captured, union: Union, filling: Filling, budget: int) -> ExchangePlan:
    with comm.phase("reshard: plan"):
        views = [(name, s.view) for name, t in source.tensors.items() for s in t.shards]
        check_disjoint([(f"source {name}", view) for name, view in views] + _target_views(filling))
        plan = exchange_plan(union.catalogue, union.holdings, filling.wanted, comm.world, budget)
        digest = plan.digest()
    compare_plans(comm, digest, "reshard")
    return plan


def _target_views(filling: Filling) -> list[tuple[str, torch.Tensor]]:
    tensors = filling.target.tensors
    return [(f"target {name}", s.view) for name, places in tensors.items() for t in places for s in t.shards]


def _exchange(comm: Group, source: Captured, union: Union, filling: Filling, plan: ExchangePlan) -> None:
    """What stays on its rank is copied at once, the rest round by round."""
    catalogue = union.catalogue

    def held(transfer: Transfer) -> torch.Tensor:
        return gather_box(source.tensors[catalogue.tensors[transfer.tensor].name], transfer.box)

    def placed(transfers: Iterator[tuple[Transfer, torch.Tensor]]) -> list[Any]:
        return [c for t, elements in transfers for c in filling.places(t.tensor, t.box, elements)]

    with comm.phase("reshard: copy"):
        copy_boxes(placed((t, held(t)) for t in plan.local if t.source == comm.rank))
    mover = Mover(comm, [t.itemsize for t in catalogue.tensors])
    for transfers in plan.rounds:
        give = ((t, held(t)) for t in transfers if t.source == comm.rank)
        copy_boxes(placed(mover.exchange(transfers, give, "reshard: exchange")))
