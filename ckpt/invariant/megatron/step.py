"""The end of a training step on Megatron Core: sums over microbatches and ranks, the one division, clipping."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as ps
from megatron.core.utils import get_attr_wrapped_model

from ckpt.errors import CkptError
from ckpt.invariant.clip import SquaredNorm, clip_coefficient
from ckpt.invariant.gradients import Total
from ckpt.invariant.granules import Granules
from ckpt.invariant.reduction import Partition

_EMBEDDING = ("embedding.word_embeddings.weight", "output_layer.weight")


class Step:
    """What stands in for Megatron's `finalize_model_grads`, and for the clipping in its optimizers.

    `microbatches()` at the start of a step says which global microbatches this rank runs; `finalize` is the
    configuration's `finalize_model_grads_func`. Afterwards every `main_grad` is the mean gradient over all tokens of
    the global batch, clipped, the same bits on every data-parallel rank, and `norm` is what it was before clipping.
    The optimizer's own `clip_grad` must be 0.
    """

    def __init__(self, granules: Granules, *, clip: float = 0.0) -> None:
        """clip: the largest norm of all gradients together; 0 does not clip."""
        self.granules, self.clip, self.norm = granules, clip, 0.0

    def microbatches(self) -> range:
        """Begins a step. This rank's run of the step's global microbatches; it is as long on every rank.

        Raises CkptError where leaves do not divide by the data-parallel ranks: Megatron's schedules want that.
        """
        contract, ranks = self.granules.contract, ps.get_data_parallel_world_size()
        if contract.leaves % ranks:
            raise CkptError(f"{contract.leaves} leaves of a global batch do not divide by {ranks} data-parallel ranks")
        first, last = Partition.even(contract.leaves, ranks).bounds[ps.get_data_parallel_rank()]
        mine = range(first * contract.leaf, last * contract.leaf)
        self.granules.gradients.begin(mine)
        return mine

    def finalize(
        self,
        model: Sequence[torch.nn.Module],
        num_tokens: torch.Tensor | None = None,
        pg_collection: Any = None,
        force_all_reduce: bool | None = False,
    ) -> None:
        """Collective over the model's ranks: called by Megatron's schedules after the last microbatch.

        num_tokens: those of this rank, on the last pipeline stage. Raises CkptError without them, and where the norm
        is not finite: no parameter has changed then.
        """
        if num_tokens is None:
            raise CkptError("set calculate_per_token_loss, and let the loss function return (sum, tokens, report)")
        tokens = _all_tokens(num_tokens)
        named = [
            (f"chunk {i}: {name}", parameter)
            for i, chunk in enumerate(model)
            for name, parameter in get_attr_wrapped_model(chunk, "named_parameters")()
            if parameter.requires_grad
        ]
        totals = self._totals(named, get_attr_wrapped_model(model[0], "share_embeddings_and_output_weights"))
        with torch.no_grad():
            for total in totals:
                total.gradient.div_(tokens)
        self.norm = self._norm(totals)
        scale = clip_coefficient(self.norm, self.clip) if self.clip else 1.0
        with torch.no_grad():
            for total in totals:
                total.parameter.main_grad.copy_(total.gradient.mul_(scale))  # type: ignore[attr-defined]

    def _totals(self, named: list[tuple[str, torch.nn.Parameter]], tied: bool) -> list[Total]:
        """One sum for each parameter. A tied embedding has two, which are added last: the embedding's, the head's."""
        found: dict[int, Total] = {}
        ends = ps.get_embedding_group(check_initialized=False) if ps.is_rank_in_embedding_group() else None
        for total in self.granules.reduce(named, ps.get_data_parallel_group(with_context_parallel=True)):
            shared = tied and total.name.endswith(_EMBEDDING)
            if shared and ends is not None and dist.get_world_size(ends) > 1:
                both = [torch.empty_like(total.gradient) for _ in range(2)]
                dist.all_gather(both, total.gradient.contiguous(), group=ends)
                total.gradient = both[0] + both[1]
            if id(total.parameter) in found:
                found[id(total.parameter)].gradient.add_(total.gradient)
            else:
                found[id(total.parameter)] = total
        return list(found.values())

    def _norm(self, totals: list[Total]) -> float:
        """Of all gradients; each element is counted by one rank of a replica of the model."""
        device = totals[0].gradient.device if totals else "cpu"
        exact, first = SquaredNorm(device), ps.get_tensor_model_parallel_rank() == 0
        for total in totals:
            whole = not getattr(total.parameter, "tensor_model_parallel", False)
            copy = getattr(total.parameter, "shared", False)
            if not copy and (first or not whole):
                exact.add([total.gradient])
        exact.all_reduce(ps.get_model_parallel_group())
        return exact.value()


def _all_tokens(num_tokens: torch.Tensor) -> int:
    """Tokens of the global batch: whole numbers, so that any order of adding will do."""
    count = num_tokens.clone().to(torch.int64).reshape(1)
    dist.broadcast(count, ps.get_pipeline_model_parallel_last_rank(), group=ps.get_pipeline_model_parallel_group())
    dist.all_reduce(count, group=ps.get_data_parallel_group(with_context_parallel=True))
    if not int(count):
        raise CkptError("the loss function counted no tokens in the whole global batch")
    return int(count)
