"""Megatron's own position in the data, `consumed_samples`, as a cursor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from ckpt.errors import CkptError, StateMismatch, Unsupported


class MegatronCursor:
    """`consumed_samples` of Megatron's pretraining samplers (megatron/training/datasets/data_samplers.py), with a check
    that the ranks of this run will read the same global batches as those of the run that saved.

    global_batch, micro_batch, dp_size, total_samples: as Megatron has them; micro_batch * dp_size must divide
    global_batch. dataloader_type:

    * "single" reads samples in order. Any dp_size and micro_batch give the same global batches, so both may change.
    * "cyclic" with data_sharding shuffles one bucket for each rank: another dp_size is another order, and refused, and
      so is a micro_batch that makes the buckets larger or smaller.
    * "cyclic" without data_sharding shuffles all samples, and its epochs end at a multiple of micro_batch * dp_size:
      dp_size may change where that divides total_samples. Where it does not, ranks end an epoch at different times
      (NVIDIA/Megatron-LM#7299), and that is refused at once.

    Before the samplers are built, give Megatron the loaded number:
    `args.consumed_train_samples = cursor.consumed_samples`. A ramp-up of the batch size is not known here. Raises
    StateMismatch for sizes that do not divide; Unsupported for what is named above.
    """

    def __init__(
        self,
        global_batch: int,
        micro_batch: int,
        dp_size: int,
        total_samples: int,
        dataloader_type: Literal["single", "cyclic"] = "single",
        data_sharding: bool = True,
    ) -> None:
        if min(global_batch, micro_batch, dp_size, total_samples) < 1:
            raise CkptError("MegatronCursor: global_batch, micro_batch, dp_size and total_samples must be at least 1")
        if dataloader_type not in ("single", "cyclic"):
            raise Unsupported(f'dataloader_type={dataloader_type!r} has no known order; use "single" or "cyclic"')
        step = micro_batch * dp_size
        if global_batch % step:
            raise StateMismatch(
                f"global_batch={global_batch} is no multiple of micro_batch={micro_batch} times dp_size={dp_size}; "
                "change micro_batch or dp_size"
            )
        self.global_batch, self.total_samples = global_batch, total_samples
        self.consumed_samples = 0
        self.order = "sequential"
        if dataloader_type == "cyclic" and data_sharding:
            self.order = f"{dp_size} buckets of {total_samples // step * micro_batch} samples"
        elif dataloader_type == "cyclic":
            if total_samples % step:
                raise Unsupported(
                    f"cyclic without data_sharding: {total_samples} samples are no multiple of "
                    f"micro_batch={micro_batch} times dp_size={dp_size}, so the ranks end an epoch at different times; "
                    "use data_sharding, or ckpt.data.GlobalCursor"
                )
            self.order = "shuffled"

    def advance(self) -> None:
        """Counts one global batch as trained on."""
        self.consumed_samples += self.global_batch

    def state_dict(self) -> dict[str, int | str]:
        """Plain values, equal on every rank."""
        return {
            "cursor": "MegatronCursor",
            "order": self.order,
            "global_batch": self.global_batch,
            "total_samples": self.total_samples,
            "consumed_samples": self.consumed_samples,
        }

    def check_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises StateMismatch, naming both values and the remedy, when `state` cannot be loaded here."""
        remedies = {
            "cursor": "load it into the cursor that saved it",
            "order": "use the saved dataloader_type and data_sharding; where it names buckets, the saved dp_size and "
            'micro_batch too, or begin the next run with "single" or ckpt.data.GlobalCursor',
            "global_batch": "use the saved global batch size",
            "total_samples": "build the data set for as many samples as the run began with",
        }
        for key, remedy in remedies.items():
            if state.get(key) != self.state_dict()[key]:
                raise StateMismatch(
                    f"MegatronCursor: saved with {key}={state.get(key)!r}, but this run has "
                    f"{key}={self.state_dict()[key]!r}, and its global batches would not be the same: {remedy}"
                )
        consumed = state.get("consumed_samples")
        if type(consumed) is not int or consumed < 0 or consumed % self.global_batch:
            raise StateMismatch(
                f"MegatronCursor: consumed_samples={consumed!r} is no multiple of the global batch of "
                f"{self.global_batch}; load another step"
            )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes a saved state. Raises StateMismatch, with nothing changed, when it belongs to another order."""
        self.check_state_dict(state)
        self.consumed_samples = state["consumed_samples"]
