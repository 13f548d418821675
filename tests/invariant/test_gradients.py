"""Gradients by leaves: the bits of the tree in whatever pieces they come, and errors that name what is missing."""

from __future__ import annotations

import pytest
import torch

from ckpt.errors import CkptError
from ckpt.invariant import Accumulator, Contract, Granules
from ckpt.invariant.gradients import Gradients
from tests.support.raw import raw


def started(contract: Contract) -> Granules:
    granules = Granules(contract)
    granules.gradients.begin(range(contract.microbatches))
    return granules


def leaves(count: int, shape: tuple[int, ...] = (6, 4)) -> list[torch.Tensor]:
    make = torch.Generator().manual_seed(3)
    return [torch.randn(shape, generator=make) for _ in range(count)]


def total(granules: Granules, parameter: torch.nn.Parameter) -> torch.Tensor:
    (found,) = granules.reduce([("w", parameter)], None)
    return found.gradient


@pytest.mark.parametrize("pieces", ["whole", "rows", "columns"])
def test_pieces_of_a_microbatch_are_put_together(pieces: str) -> None:
    parameter, given = torch.nn.Parameter(torch.zeros(6, 4)), leaves(5)
    granules, wanted = started(Contract(1, 5)), Accumulator(0, 5)
    for number, leaf in enumerate(given):
        wanted.add(leaf)
        if pieces == "whole":
            granules.gradients.deliver(parameter, leaf.clone(), number)
        elif pieces == "rows":  # a granule may have several runs of rows
            first = (slice(0, 2), slice(4, 5))
            granules.gradients.deliver(parameter, torch.cat([leaf[:2], leaf[4:5]]), number, rows=first)
            rest = (slice(5, 6), slice(2, 4))
            granules.gradients.deliver(parameter, torch.cat([leaf[5:], leaf[2:4]]), number, rows=rest)
        else:
            granules.gradients.deliver(parameter, leaf[:, 1:], number, columns=(slice(1, 4),))
            granules.gradients.deliver(parameter, leaf[:, :1], number, columns=(slice(0, 1),))
    assert raw(total(granules, parameter)) == raw(wanted.sum())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_microbatches_of_a_leaf_are_added_in_order_in_fp32(dtype: torch.dtype) -> None:
    parameter, given = torch.nn.Parameter(torch.zeros(6, 4, dtype=dtype)), [x.to(dtype) for x in leaves(6)]
    granules, wanted = started(Contract(1, 6, leaf=2)), Accumulator(0, 3)
    for a, b in zip(given[::2], given[1::2], strict=True):
        wanted.add(a.float() + b.float())
    for number, leaf in enumerate(given):
        granules.gradients.deliver(parameter, leaf.clone(), number)
    assert raw(total(granules, parameter)) == raw(wanted.sum())


def test_runs_of_tokens_are_summed_after_the_microbatches() -> None:
    parameter, given = torch.nn.Parameter(torch.zeros(4)), leaves(5, (3, 4))
    granules = started(Contract(3, 5))
    wanted = Accumulator(0, 3)
    for run in range(3):
        over = Accumulator(0, 5)
        for leaf in given:
            over.add(leaf[run])
        wanted.add(over.sum())
    for number, leaf in enumerate(given):
        granules.gradients.deliver(parameter, leaf.clone(), number, tokens=range(3))
    assert raw(total(granules, parameter)) == raw(wanted.sum())


def test_buckets_do_not_change_bits() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(n, 3)) for n in (1, 5, 2, 7)]
    found = []
    for bucket in (1, 40, 1 << 20):
        granules = started(Contract(1, 3))
        for number in range(3):
            for parameter in parameters:
                make = torch.Generator().manual_seed(100 * number + len(parameter))
                granules.gradients.deliver(parameter, torch.randn(parameter.shape, generator=make), number)
        named = [(f"w{i}", parameter) for i, parameter in enumerate(parameters)]
        made = granules.gradients.reduce(named, None, None, granules.partition, bucket_bytes=bucket)
        found.append([(one.name, raw(one.gradient)) for one in made])
    assert found[0] == found[1] == found[2]


def test_a_rank_keeps_about_log2_of_its_leaves() -> None:
    """While 64 leaves come, at most 7 sums are held: of 1, 2, 4, ..., 32 and the one that came last."""
    run, most = Accumulator(0, 64), 0
    for leaf in leaves(64, (2,)):
        run.add(leaf)
        most = max(most, len(run.nodes))
    assert most <= 6 and len(run.nodes) == 1


def test_places_that_use_a_parameter_are_kept_apart() -> None:
    parameter, (a, b) = torch.nn.Parameter(torch.zeros(6, 4)), leaves(2)
    granules = started(Contract(1, 1))
    granules.gradients.deliver(parameter, b.clone(), 0, use="head")
    granules.gradients.deliver(parameter, a.clone(), 0, use="embedding")
    found = granules.reduce([("w", parameter)], None)
    assert [(one.use, raw(one.gradient)) for one in found] == [("embedding", raw(a)), ("head", raw(b))]


def test_what_is_missing_or_out_of_order_is_told() -> None:
    parameter, other = (torch.nn.Parameter(torch.zeros(6, 4)) for _ in range(2))
    granules = started(Contract(1, 3))
    with pytest.raises(CkptError, match="gradient of microbatch 1 comes where that of 0 is due"):
        granules.gradients.deliver(parameter, torch.zeros(6, 4), 1)
    with pytest.raises(CkptError, match="other got no gradient"):
        granules.reduce([("other", other)], None)
    granules.gradients.deliver(parameter, torch.zeros(6, 4), 0)
    with pytest.raises(CkptError, match="w got gradients from 1 of this rank's 3 microbatches"):
        granules.reduce([("w", parameter)], None)
    for number in (1, 2):
        granules.gradients.deliver(parameter, torch.zeros(6, 4), number)
    with pytest.raises(CkptError, match="are not among those to reduce"):
        granules.reduce([], None)


@pytest.mark.parametrize("run", [range(0, 0), range(2, 9), range(0, 6, 2), range(1, 4), range(0, 3)])
def test_a_run_of_microbatches_is_whole_leaves_of_the_step(run: range) -> None:
    with pytest.raises(CkptError, match="microbatches"):
        Gradients(Contract(1, 6, leaf=2)).begin(run)
