"""Dropout: definition, gradients, and the same bits on every layout."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

from ckpt.errors import CkptError, StateMismatch
from ckpt.geometry import Box
from ckpt.random import LogicalRng, dropout, keep_threshold
from tests.geometry.partitions import partitions
from tests.random.test_streams import raw

RNG = LogicalRng(8, 100)
STREAM = RNG.stream("dropout", 3)
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def sample(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("p", [0.1, 0.5, 0.999])
def test_definition(dtype: torch.dtype, p: float) -> None:
    x = sample((50, 70), dtype)
    keep = STREAM.keep_mask(p, x.shape)
    exact = 2**32 / keep_threshold(p)
    wanted = (x * exact if dtype == torch.float64 else x.float() * torch.tensor(exact, dtype=torch.float32)).to(dtype)
    found = dropout(x, p, STREAM)
    assert found.dtype == dtype
    assert raw(found) == raw(torch.where(keep, wanted, torch.zeros((), dtype=dtype)))
    assert raw(x) == raw(sample((50, 70), dtype))


def test_how_much_is_kept() -> None:
    n = 1 << 20
    for p in (0.1, 0.5, 0.9):
        kept = int((dropout(torch.ones(n), p, STREAM) != 0).sum())
        assert abs(kept - (1 - p) * n) < 5 * math.sqrt(n * p * (1 - p))


def test_the_ends() -> None:
    x = torch.tensor([1.0, math.inf, -math.inf, math.nan, -0.0])
    assert dropout(x, 0.0, STREAM) is x
    assert raw(dropout(x, 1.0, STREAM)) == raw(torch.zeros(5))
    all_of = LogicalRng(0).stream("ends")
    found, keep = dropout(x.repeat(20), 0.5, all_of), all_of.keep_mask(0.5, (100,))
    assert raw(found[~keep]) == raw(torch.zeros(int((~keep).sum())))
    assert raw(found[keep]) == raw(x.repeat(20)[keep] * 2)
    assert dropout(torch.empty(0, 3), 0.5, STREAM).shape == (0, 3)
    assert dropout(torch.tensor(1.0), 0.5, STREAM).shape == ()


def both_ways(x: torch.Tensor, weight: torch.Tensor, **where: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and gradient of x."""
    x = x.detach().requires_grad_()
    y = dropout(x, 0.3, STREAM, **where)
    (gradient,) = torch.autograd.grad(y, x, weight)
    return y.detach(), gradient


@settings(max_examples=60)
@given(data=st.data(), shape=st.lists(st.integers(1, 6), max_size=4).map(tuple), dtype=st.sampled_from(DTYPES))
def test_any_partition_forward_and_backward(data: st.DataObject, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, weight = sample(shape, dtype), sample(shape, dtype, 1)
    whole = both_ways(x, weight)
    for box in data.draw(partitions(shape)):
        order = data.draw(st.permutations(range(len(shape))))
        back = [order.index(i) for i in range(len(shape))]
        part = x[box.slices].permute(order).contiguous().permute(back)  # any strides
        for found, full in zip(both_ways(part, weight[box.slices], shape=shape, at=box), whole, strict=True):
            assert raw(found) == raw(full[box.slices])


def test_gradients() -> None:
    x = sample((3, 4, 5), torch.float64).requires_grad_()

    def f(t: torch.Tensor) -> torch.Tensor:
        return dropout(t, 0.4, STREAM, shape=(9, 4, 10), at=([7, 0, 3], None, range(2, 7)))

    assert torch.autograd.gradcheck(f, x)
    assert torch.autograd.gradgradcheck(f, x)
    assert raw(torch.autograd.grad(f(x), x, torch.ones(3, 4, 5))[0]) == raw(f(torch.ones(3, 4, 5, dtype=torch.float64)))


def test_no_mask_is_kept_for_the_backward_pass() -> None:
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):  # type: ignore[func-returns-value]
        y = dropout(torch.ones(1000, requires_grad=True), 0.5, STREAM)
    assert y.requires_grad and kept == []


def test_recomputed_activations_have_the_same_mask() -> None:
    """With preserve_rng_state=False, torch's own dropout would draw another one."""
    torch.manual_seed(0)
    layer = torch.nn.Linear(16, 16)
    found = []
    for recompute in (False, True):
        rng = LogicalRng(1)
        x = sample((8, 16), torch.float32).requires_grad_()
        stream = rng.stream("dropout", 0)

        def block(t: torch.Tensor, stream: Any = stream) -> torch.Tensor:
            return dropout(torch.relu(layer(t)), 0.5, stream)

        y = checkpoint(block, x, use_reentrant=False, preserve_rng_state=False) if recompute else block(x)
        rng.advance()  # a stream belongs to the step in which it was made
        found.append(torch.autograd.grad(y.square().sum(), x)[0])
    assert raw(found[0]) == raw(found[1])


def test_batches_of_samples_in_any_order_and_split() -> None:
    """Rows keyed by global sample number: in any order, spread over ranks, or doubled, a sample has its own mask."""
    shape = (1000, 6, 8)
    ids = [17, 4, 999, 500, 4, 5]
    batch = sample((6, 6, 8), torch.float32)
    whole = dropout(batch, 0.5, STREAM, shape=shape, at=(ids, None, None))
    for rank in range(3):
        mine = ids[rank::3]
        found = dropout(batch[rank::3], 0.5, STREAM, shape=shape, at=(torch.tensor(mine), None, None))
        assert raw(found) == raw(whole[rank::3])
    one = dropout(batch[3:4], 0.5, STREAM, shape=shape, at=Box((500, 0, 0), (1, 6, 8)))
    assert raw(one) == raw(whole[3:4])
    # the layout of Megatron, [sequence, batch, hidden]: the same logical tensor, seen through other strides
    sbh = batch.transpose(0, 1).contiguous()
    found = dropout(sbh.transpose(0, 1), 0.5, STREAM, shape=shape, at=(ids, None, None))
    assert raw(found) == raw(whole)


def test_streams_of_other_steps_layers_and_seeds_differ() -> None:
    rng = LogicalRng(8, 100)
    base = rng.stream("dropout", 3).keep_mask(0.5, (512,))
    assert raw(base) == raw(STREAM.keep_mask(0.5, (512,)))
    others = [
        rng.stream("dropout", 4),
        LogicalRng(8, 101).stream("dropout", 3),
        LogicalRng(9, 100).stream("dropout", 3),
    ]
    others += [rng.stream("attention", 3), rng.fixed("dropout", 3), rng.stream("dropout", 3, 0)]
    for other in others:
        agreeing = int((other.keep_mask(0.5, (512,)) == base).sum())
        assert 190 < agreeing < 322  # 256, within six standard deviations


def test_threads_do_not_matter() -> None:
    x = sample((700, 1000), torch.float32)
    before = torch.get_num_threads()
    try:
        found = []
        for threads in (1, 2):
            torch.set_num_threads(threads)
            found.append(raw(dropout(x, 0.1, STREAM)))
    finally:
        torch.set_num_threads(before)
    assert found[0] == found[1]


def test_golden_mask() -> None:
    """May never change: a run resumed by a later release must go on with the same masks."""
    keep = LogicalRng(1234, 7).stream("dropout", 3, "mlp").keep_mask(0.25, (4, 16))
    assert np.packbits(keep.numpy()).tobytes().hex() == GOLDEN_MASK


GOLDEN_MASK = "ffbb9efb32edc5ef"


def test_refusals() -> None:
    x = torch.ones(2, 3)
    for p in (-0.1, 1.1, math.nan):
        with pytest.raises(CkptError, match="from 0 to 1"):
            dropout(x, p, STREAM)
    for dtype in (torch.int32, torch.complex64, torch.float8_e4m3fn):
        with pytest.raises(CkptError, match=str(dtype)):
            dropout(torch.zeros(2, dtype=dtype), 0.5, STREAM)
    with pytest.raises(CkptError, match="without `shape`"):
        dropout(x, 0.5, STREAM, at=(None, None))
    with pytest.raises(StateMismatch, match="where this one lies `at`"):
        dropout(x, 0.5, STREAM, shape=(2, 6))
    with pytest.raises(StateMismatch, match="give the shape of the whole tensor"):
        dropout(x, 0.5, STREAM, shape=(2, 6), at=(None, range(4, 7)))
