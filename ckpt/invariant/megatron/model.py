"""Megatron's GPTModel with an invariant embedding, output layer and loss, which Megatron has no specification for."""

from __future__ import annotations

import math
from typing import Any

import torch
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.models.gpt import GPTModel as MegatronGPT

from ckpt.errors import Unsupported
from ckpt.invariant.embedding import cross_entropy, embed, embed_positions, split_tokens
from ckpt.invariant.gradients import Parts
from ckpt.invariant.granules import Granules
from ckpt.invariant.megatron.layers import ColumnParallelLinear, Norm, OutputLayer, RowParallelLinear, block_spec
from ckpt.invariant.residual import hidden_dropout
from ckpt.random import Stream, normal_

POSITIONS = ("learned_absolute", "rope", "none")


class Embedding(LanguageModelEmbedding):  # type: ignore[misc]
    """Words and learned positions; int64 [samples, tokens] -> [tokens, samples, features]."""

    granules: Granules

    def parts(self, extent: int) -> list[Parts]:
        """Which of this rank's rows of the table each of its virtual shards has."""
        return self.granules.runs(extent)

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor, tokentype_ids: Any = None) -> torch.Tensor:
        granules = self.granules
        x = embed(input_ids.t().contiguous(), self.word_embeddings.weight, granules)
        if self.add_position_embedding:
            x = x + embed_positions(position_ids.t().contiguous(), self.position_embeddings.weight, granules)
        p = self.config.hidden_dropout if self.training else 0.0
        return hidden_dropout(split_tokens(x, granules), p, granules, "embedding")


class GPTModel(MegatronGPT):  # type: ignore[misc]
    """A GPT of Megatron Core whose gradients go into `granules.gradients`, and whose bits no layout enters.

    Takes Megatron's keyword arguments, but for the layer specification. Its state, and the names in its
    `sharded_state_dict`, are those of the local specification; so a checkpoint of either can be loaded into the other.
    `granules.begin(microbatch)` must be called before each forward pass, which gives the loss of each token.
    """

    def __init__(self, config: Any, granules: Granules, *, vp_stage: int | None = None, **options: Any) -> None:
        """Raises Unsupported for a configuration that has no invariant form, CkptError for one against the contract."""
        kind = options.get("position_embedding_type", POSITIONS[0])
        if kind not in POSITIONS:
            raise Unsupported(f"positions of kind {kind!r} have no invariant form; use one of {', '.join(POSITIONS)}")
        spec = block_spec(config, granules, vp_stage)
        super().__init__(config, spec, vp_stage=vp_stage, **options)
        self.granules = granules
        granules.per_shard(self.vocab_size, "the vocabulary")
        # Megatron has made them already: the same modules and parameters, with another forward.
        if self.pre_process:
            self.embedding.__class__ = type("Embedding", (Embedding,), {"granules": granules})
        if self.post_process:
            self.output_layer.__class__ = type("OutputLayer", (OutputLayer,), {"granules": granules})
            self.output_layer.stride = 1
        for module in self.modules():
            _mark(module)

    def compute_language_model_loss(self, labels: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """labels int64 [samples, tokens], logits of this rank [tokens, samples, words] -> fp32 [samples, tokens]."""
        shards = logits.chunk(len(self.granules.shards), -1)
        return cross_entropy(shards, labels.t().contiguous(), self.granules).t().contiguous()


def _mark(module: torch.nn.Module) -> None:
    """Megatron says which parameters tensor parallelism cuts only where it gives them their first values."""
    if isinstance(module, ColumnParallelLinear | Embedding):
        holder: Any = module.word_embeddings if isinstance(module, Embedding) else module
        axis, cut = 0, [holder.weight, getattr(holder, "bias", None)]
    elif isinstance(module, RowParallelLinear):
        axis, cut = 1, [module.weight]
    else:
        return
    for parameter in cut:
        if parameter is not None:
            parameter.tensor_model_parallel, parameter.partition_dim = True, axis
            parameter.partition_stride = getattr(module, "stride", 1)


@torch.no_grad()
def initialise_(model: GPTModel, granules: Granules) -> None:
    """Gives every parameter its first value: a function of the contract's seed, its name, its layer in the whole model
    and its virtual shard, so that a run begins with the same bits on every layout.

    Weights are normal with the configuration's standard deviation, divided by the root of twice the number of layers
    where they write into the residual stream; biases are 0, weights of norms 1.
    """
    rng, config = granules.rng, model.config
    plain = config.init_method_std
    written = plain / math.sqrt(2 * config.num_layers)
    for name, module in model.named_modules():
        key = _global_name(model, name)
        if isinstance(module, Norm):
            module.weight.fill_(1)
            if module.bias is not None:
                module.bias.zero_()
        elif isinstance(module, ColumnParallelLinear):
            if module.weight is not None:
                tied = isinstance(module, OutputLayer) and model.share_embeddings_and_output_weights
                _fill(module.weight, module, 0, "embedding.word_embeddings" if tied else key, plain, rng)
            if module.bias is not None:
                module.bias.zero_()
        elif isinstance(module, RowParallelLinear):
            _fill(module.weight, module, 1, key, written, rng)
            if module.bias is not None:
                module.bias.zero_()
        elif isinstance(module, Embedding):
            _fill(module.word_embeddings.weight, module, 0, f"{key}.word_embeddings", plain, rng)
            if module.add_position_embedding:
                normal_(module.position_embeddings.weight, rng.fixed("weights", f"{key}.positions"), std=plain)


def _fill(weight: torch.Tensor, module: Any, axis: int, key: str, std: float, rng: Any) -> None:
    """Each virtual shard of a weight from a stream of its own."""
    for shard, runs in zip(module.granules.shards, module.parts(weight.shape[axis]), strict=True):
        for number, run in enumerate(runs):
            stream: Stream = rng.fixed("weights", key, shard, number)
            normal_(weight.narrow(axis, run.start, run.stop - run.start), stream, std=std)


def _global_name(model: Any, name: str) -> str:
    """A module's name with the layer's number in the whole model."""
    fields = name.split(".")
    if fields[:2] == ["decoder", "layers"] and len(fields) > 2:
        fields[2] = str(model.decoder.layers[int(fields[2])].layer_number)
    return ".".join(fields)
