"""Initial weights: in place, any strides, any cut; and what is refused."""

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from ckpt.errors import CkptError, StateMismatch
from ckpt.geometry import Box
from ckpt.random import LogicalRng, dropout, normal_, trunc_normal_, uniform_
from tests.random.test_streams import raw

STREAM = LogicalRng(5).fixed("init", "layers.0.weight")
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
FILLS: dict[str, Any] = {
    "normal_": lambda t, **where: normal_(t, STREAM, 0.1, 0.02, **where),
    "uniform_": lambda t, **where: uniform_(t, STREAM, -0.3, 0.7, **where),
    "trunc_normal_": lambda t, **where: trunc_normal_(t, STREAM, 0.1, 0.5, -0.4, 1.0, **where),
}


@pytest.mark.parametrize("name", FILLS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_shards_of_any_strides(name: str, dtype: torch.dtype) -> None:
    fill, shape = FILLS[name], (12, 20)
    weight = torch.nn.Parameter(torch.empty(shape, dtype=dtype))
    assert fill(weight) is weight and weight.requires_grad and weight.grad_fn is None
    for box in (Box((0, 5), (12, 5)), Box((3, 0), (4, 20)), Box((1, 2), (3, 4))):
        memory = torch.full((40, 40), 7.0, dtype=dtype)
        views = [torch.empty(box.extent, dtype=dtype), torch.empty(box.extent[::-1], dtype=dtype).t()]
        views.append(memory[1 : 1 + 2 * box.extent[0] : 2, 3 : 3 + box.extent[1]])
        for view in views:
            assert raw(fill(view, shape=shape, at=box)) == raw(weight.detach()[box.slices])
        assert int((memory != 7).sum()) <= box.volume


@pytest.mark.parametrize("name", FILLS)
def test_each_dtype_is_the_rounded_float64(name: str) -> None:
    double = FILLS[name](torch.empty(1000, dtype=torch.float64))
    for dtype in DTYPES[1:]:
        assert raw(FILLS[name](torch.empty(1000, dtype=dtype))) == raw(double.to(torch.float32).to(dtype))


def test_golden_values() -> None:
    stream = LogicalRng(1234, 7).stream("dropout", 3, "mlp")
    assert raw(trunc_normal_(torch.empty(3, dtype=torch.float64), stream)).hex() == (
        "dbd23a0bd3fdffbfb7ec8344439ae2bfd404216ef7f8933f"
    )
    assert raw(uniform_(torch.empty(3), stream, -0.1, 0.1)).hex() == "a6c9ccbde7603cbd12b0d53a"


def test_scales() -> None:
    n = 1 << 17
    x = normal_(torch.empty(n, dtype=torch.float64), STREAM, 3.0, 0.25)
    assert abs(float(x.mean()) - 3) < 5 * 0.25 / math.sqrt(n) and abs(float(x.std()) - 0.25) < 5 * 0.25 / math.sqrt(
        2 * n
    )
    u = uniform_(torch.empty(n, dtype=torch.float64), STREAM, -1.0, 3.0)
    assert (
        abs(float(u.mean()) - 1) < 5 * 4 / math.sqrt(12 * n)
        and -1 <= float(u.min()) < -0.99 < 2.99 < float(u.max()) < 3
    )
    t = trunc_normal_(torch.empty(n, dtype=torch.float64), STREAM, 10.0, 2.0, 9.0, 11.0)
    assert float(t.min()) >= 9 and float(t.max()) <= 11 and abs(float(t.mean()) - 10) < 5 / math.sqrt(n)
    assert torch.equal(normal_(torch.empty(5), STREAM, 2.5, 0.0), torch.full((5,), 2.5))
    assert torch.equal(uniform_(torch.empty(5), STREAM, 2.5, 2.5), torch.full((5,), 2.5))


def test_refusals_change_nothing() -> None:
    x = torch.full((2, 3), 9.0)
    nan, inf = math.nan, math.inf
    bad: list[tuple[Any, type[CkptError], str]] = [
        (lambda: normal_(x, STREAM, std=-1.0), CkptError, "std"),
        (lambda: normal_(x, STREAM, mean=nan), CkptError, "mean"),
        (lambda: uniform_(x, STREAM, 1.0, 0.0), CkptError, "low"),
        (lambda: uniform_(x, STREAM, -inf, 0.0), CkptError, "low"),
        (lambda: uniform_(x, STREAM, -1.7e308, 1.7e308), CkptError, "finite"),
        (lambda: trunc_normal_(x, STREAM, low=1.0, high=1.0), CkptError, "empty"),
        (lambda: trunc_normal_(x, STREAM, low=nan, high=1.0), CkptError, "empty"),
        (lambda: trunc_normal_(x, STREAM, std=0.0), CkptError, "std"),
        (lambda: trunc_normal_(x, STREAM, low=9.0, high=inf), CkptError, "8 standard deviations"),
        (lambda: trunc_normal_(x, STREAM, low=-20.0, high=-8.5), CkptError, "8 standard deviations"),
        (lambda: normal_(x, STREAM, at=(None, None)), CkptError, "without `shape`"),
        (lambda: normal_(x, STREAM, shape=(2, 6)), StateMismatch, r"shape \[2, 3\] for a region of extent \[2, 6\]"),
        (lambda: normal_(x, STREAM, shape=(2, 6), at=Box((0, 4), (2, 3))), StateMismatch, "leave the logical shape"),
        (lambda: normal_(torch.zeros(2, dtype=torch.int32), STREAM), CkptError, "int32"),
        (lambda: normal_(torch.zeros(2, dtype=torch.complex64), STREAM), CkptError, "complex64"),
    ]
    for call, kind, message in bad:
        with pytest.raises(kind, match=message):
            call()
    assert raw(x) == raw(torch.full((2, 3), 9.0))


def test_a_dtensor_is_refused() -> None:
    """Its shape is the global one, so it would pass for a whole tensor."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        x = distribute_tensor(torch.zeros(4, 2), init_device_mesh("cpu", (1,)), [Shard(0)])
        for call in (lambda: normal_(x, STREAM), lambda: dropout(x, 0.5, STREAM)):
            with pytest.raises(CkptError, match="pass its local tensor"):
                call()
        assert raw(x.to_local()) == raw(torch.zeros(4, 2))
    finally:
        dist.destroy_process_group()
