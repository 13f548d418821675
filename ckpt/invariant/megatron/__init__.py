"""Megatron Core with layout-invariant numerics: a real GPTModel, trained through Megatron's own schedules.

    granules = Granules(contract, parallel_state.get_tensor_model_parallel_group(), sequence_parallel=...)
    model = GPTModel(config, granules, vocab_size=..., max_sequence_length=..., pre_process=..., post_process=...)
    initialise_(model, granules)
    step = Step(granules, clip=1.0)
    config.finalize_model_grads_func = step.finalize

`layers` has what the layer specification names, `model` the GPTModel, `step` the end of a step. Imports Megatron Core;
`ckpt.invariant` itself does not. docs/determinism.md shows a whole training step.
"""

from ckpt.invariant.megatron.layers import block_spec
from ckpt.invariant.megatron.model import GPTModel, initialise_
from ckpt.invariant.megatron.step import Step

__all__ = ["GPTModel", "Step", "block_spec", "initialise_"]
