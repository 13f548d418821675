"""AdamW: the values of torch's, and bits that no cut of a tensor changes."""

import pytest
import torch

from ckpt.errors import CkptError
from ckpt.invariant import AdamW
from tests.support.raw import raw

STEPS = 5


def stepped(
    start: torch.Tensor, gradients: list[torch.Tensor], make: type[torch.optim.Optimizer] = AdamW
) -> torch.Tensor:
    parameter = torch.nn.Parameter(start.clone())
    optimizer = make([parameter], lr=3e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)  # type: ignore[call-arg]
    for gradient in gradients:
        parameter.grad = gradient.clone()
        optimizer.step()
    return parameter.detach()


def problem() -> tuple[torch.Tensor, list[torch.Tensor]]:
    make = torch.Generator().manual_seed(7)
    return torch.randn(37, 53, generator=make), [torch.randn(37, 53, generator=make) for _ in range(STEPS)]


def test_it_is_the_adamw_of_torch_to_rounding() -> None:
    start, gradients = problem()
    torch.testing.assert_close(
        stepped(start, gradients), stepped(start, gradients, torch.optim.AdamW), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("rows", [[1] * 37, [36, 1], [5, 32], [3, 4, 30]])
def test_no_cut_changes_a_bit(rows: list[int]) -> None:
    start, gradients = problem()
    parts = zip(start.split(rows), *(g.split(rows) for g in gradients), strict=True)
    pieces = [stepped(first, list(others)) for first, *others in parts]
    assert raw(torch.cat(pieces)) == raw(stepped(start, gradients))
    flat = [
        stepped(first, list(others))
        for first, *others in zip(start.flatten().split(7), *(g.flatten().split(7) for g in gradients), strict=True)
    ]
    assert raw(torch.cat(flat)) == raw(stepped(start, gradients))


def test_a_parameter_without_a_gradient_is_left_alone() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = AdamW([parameter])
    optimizer.step()
    assert raw(parameter) == raw(torch.ones(3)) and not optimizer.state[parameter]


def test_what_makes_no_step_is_refused() -> None:
    with pytest.raises(CkptError, match="fp32 masters"):
        AdamW([torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))])
    for bad in ({"lr": -1.0}, {"betas": (1.0, 0.9)}, {"eps": 0.0}):
        with pytest.raises(CkptError, match="out of range"):
            AdamW([torch.nn.Parameter(torch.ones(3))], **bad)  # type: ignore[arg-type]
