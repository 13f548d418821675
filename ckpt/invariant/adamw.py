"""AdamW in elementary operations, each rounded once, so that no cut of a tensor can change a bit."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, overload

import torch

from ckpt.errors import CkptError


class AdamW(torch.optim.Optimizer):
    """Decoupled weight decay (Loshchilov and Hutter, ICLR 2019) with bias correction, on fp32 parameters.

    Each operation is one addition, multiplication, division or square root of IEEE 754: nothing that a vector body
    could fuse and a scalar tail not. Elements do not see each other, so shards of any shape have the same bits.
    A parameter without a gradient is left alone, and its step is not counted.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
    ) -> None:
        """Raises CkptError for parameters that are not fp32, or numbers out of range."""
        if not (lr >= 0 and eps > 0 and weight_decay >= 0 and all(0 <= beta < 1 for beta in betas)):
            raise CkptError(f"AdamW with lr {lr}, betas {betas}, eps {eps}, weight decay {weight_decay}: out of range")
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.dtype != torch.float32:
                    raise CkptError(f"AdamW steps fp32 masters, not {parameter.dtype}: give it their fp32 copies")

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)
        return loss

    def prepare(self, parameter: torch.Tensor) -> None:
        """Makes the moments of a parameter that has not been stepped yet, all zero: a place to load them into."""
        if not self.state[parameter]:
            self.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32),
                "exp_avg": torch.zeros_like(parameter, requires_grad=False),
                "exp_avg_sq": torch.zeros_like(parameter, requires_grad=False),
            }

    def _update(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        self.prepare(parameter)
        state, gradient = self.state[parameter], parameter.grad
        assert gradient is not None
        state["step"] += 1
        step, (beta1, beta2), lr = int(state["step"]), group["betas"], group["lr"]
        mean, square = state["exp_avg"], state["exp_avg_sq"]
        mean.mul_(beta1).add_(gradient.mul(1 - beta1))
        square.mul_(beta2).add_(gradient.square().mul_(1 - beta2))
        root = square.sqrt().div_(math.sqrt(1 - beta2**step)).add_(group["eps"])
        parameter.mul_(1 - lr * group["weight_decay"])
        parameter.sub_(mean.div(root).mul_(lr / (1 - beta1**step)))
