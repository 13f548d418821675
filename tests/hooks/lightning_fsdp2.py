"""The example of Lightning with the strategy for FSDP2 and tensor parallelism."""

from typing import Any

import on_lightning
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard


class Module(on_lightning.Module):
    def configure_model(self) -> None:
        assert self.device_mesh is not None
        fully_shard(self.model, mesh=self.device_mesh["data_parallel"])


def train(root: str, steps: int) -> dict[str, Any]:
    return on_lightning.train(
        root, steps, Module, strategy=ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    )
