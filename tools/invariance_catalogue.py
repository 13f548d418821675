"""Operations that give the same bits each time, and other bits on another part of the same data: measured here.

    ./tools/invariance --catalogue

Every line computes something on whole data and again on parts, as ranks of another layout would, on one thread; the
share of elements whose bits differ is printed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F

Op = Callable[[torch.Tensor], torch.Tensor]

ELEMENTWISE: dict[str, Op] = {
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "softplus": F.softplus,
    "gelu, tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu, erf": F.gelu,
    "rsqrt": lambda x: (x.abs() + 0.1).rsqrt(),
    "exp": torch.exp,
    "tanh": torch.tanh,
    "log": lambda x: (x.abs() + 0.1).log(),
    "sqrt": lambda x: x.abs().sqrt(),
    "x + x * 0.3, by alpha": lambda x: torch.add(x, x, alpha=0.3),
    "x + x * x": lambda x: torch.addcmul(x, x, x),
}


def differing(a: torch.Tensor, b: torch.Tensor) -> float:
    """The share of elements whose bits differ."""
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return float((a.contiguous().view(integer) != b.contiguous().view(integer)).double().mean())


def measured() -> Iterator[tuple[str, str, float]]:
    """(operation, what the parts are, share that differs) for each line of the table."""
    torch.set_num_threads(1)
    make = torch.Generator().manual_seed(0)
    x = torch.randn(64, 1003, generator=make)
    for dtype in (torch.float32, torch.bfloat16):
        kind, y = str(dtype).removeprefix("torch."), x.to(dtype)
        for name, op in ELEMENTWISE.items():
            parts = torch.cat([op(piece.contiguous()) for piece in y.flatten().split(7)])
            yield f"{name}, {kind}", "pieces of 7 elements", differing(op(y).flatten(), parts)
            yield f"{name}, {kind}", "every third column", differing(op(y)[:, ::3], op(y[:, ::3]))
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        kind = str(dtype).removeprefix("torch.")
        a, b = (torch.randn(*shape, generator=make).to(dtype) for shape in ((96, 512), (512, 96)))
        whole = a @ b
        yield f"matrix product, {kind}", "3 rows of 96", differing(whole[:3], a[:3] @ b)
        yield f"matrix product, {kind}", "5 columns of 96", differing(whole[:, :5], a @ b[:, :5])
        halves = (a[:, :256].contiguous() @ b[:256] + a[:, 256:].contiguous() @ b[256:]).to(dtype)
        yield f"matrix product, {kind}", "two halves of the inner axis, added", differing(whole, halves)
    yield from _sums(make)
    heads = torch.randn(1, 8, 200, 16, generator=make)
    causal = F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
    short = heads[:, :, :128]
    prefix = F.scaled_dot_product_attention(short, short, short, is_causal=True)
    yield "causal attention, float32", "128 tokens of 200", differing(causal[:, :, :128], prefix)


def _sums(make: torch.Generator) -> Iterator[tuple[str, str, float]]:
    leaves = list(torch.randn(16, 1 << 14, generator=make))
    folded, pairs = leaves[0], leaves
    for leaf in leaves[1:]:
        folded = folded + leaf
    while len(pairs) > 1:
        pairs = [a + b for a, b in zip(pairs[::2], pairs[1::2], strict=True)]
    yield "sum of 16 gradients, float32", "one after the other, or in pairs", differing(folded, pairs[0])
    for count in (6, 8):
        after, before = leaves[0], leaves[0] / count
        for leaf in leaves[1:count]:
            after, before = after + leaf, before + leaf / count
        yield f"mean of {count} gradients, float32", "divided before or after", differing(after / count, before)
    x, weight = torch.randn(64, 128, generator=make), torch.ones(128, requires_grad=True)

    def slope(rows: torch.Tensor) -> torch.Tensor:
        (found,) = torch.autograd.grad(F.layer_norm(rows, (128,), weight).square().sum(), weight)
        return found

    halves = slope(x[:32]) + slope(x[32:])
    yield "weight gradient of layer norm, float32", "two halves of the tokens, added", differing(slope(x), halves)


def main() -> None:
    print(f"{'operation':<42}{'on parts':<38}differing")
    for name, parts, share in measured():
        print(f"{name:<42}{parts:<38}{f'{100 * share:.1f} %' if share else '-'}")
