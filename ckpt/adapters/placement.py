"""Where a rank's local tensor lies in its logical tensor: shared by a parameter and its optimizer state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ckpt.errors import StateMismatch, Unsupported
from ckpt.geometry import Box
from ckpt.state.captured import Shard
from ckpt.state.dtypes import bits, dtype_name


@dataclass(frozen=True)
class Placement:
    """shape: of the logical tensor; stack: its leading axes that stack layers or experts; parts: (box of the logical
    tensor, box of the local tensor). A local box may lack leading axes in which the global one has extent 1."""

    shape: tuple[int, ...]
    stack: int
    parts: tuple[tuple[Box, Box], ...]

    @staticmethod
    def whole(shape: Sequence[int]) -> Placement:
        """The local tensor is the logical tensor."""
        box = Box.whole(tuple(shape))
        return Placement(box.extent, 0, ((box, box),))

    def shards(self, local: torch.Tensor, where: str) -> list[Shard]:
        """The parts of a local tensor as views of its live memory.

        Raises Unsupported for tensors whose memory is not plain, StateMismatch where the parts do not fit."""
        view = plain_bits(local, where)
        found = []
        for box, inner in self.parts:
            if len(inner.extent) != view.dim() or any(s > n for s, n in zip(inner.stop, view.shape, strict=True)):
                raise StateMismatch(f"{where}: box {inner} leaves the local tensor of shape {list(local.shape)}")
            part = view[inner.slices] if view.dim() else view
            lead = len(box.extent) - len(inner.extent)
            if lead < 0 or (1,) * lead + inner.extent != box.extent:
                raise StateMismatch(f"{where}: local box {inner} does not have the extent of {box}")
            found.append(Shard(box, part[(None,) * lead] if lead else part))
        return found

    @property
    def stacked_at(self) -> tuple[int, ...]:
        """Index along the stacking axes: where a quantity that each layer has one of belongs."""
        return self.parts[0][0].offset[: self.stack] if self.parts else ()

    def per_layer(self, where: str) -> Placement:
        """Placement of a 0-dim tensor that each stacked layer has one of (an optimizer's step counter, say): nowhere
        for a local tensor without any part of a stack.

        Raises Unsupported for a local tensor with parts of several layers, each of which would need one of its own."""
        leads = [Box(box.offset[: self.stack], box.extent[: self.stack]) for box, _ in self.parts]
        layers = {at for lead in leads for at in lead.indices()} if self.stack else {()}
        if len(layers) > 1:
            raise Unsupported(
                f"{where}: one number for {len(layers)} slices of a stack; make each slice a parameter of its own, or "
                "declare the tensor with stack=0 on every layout"
            )
        parts = tuple((Box(at, (1,) * len(at)), Box((), ())) for at in layers)
        return Placement(self.shape[: self.stack], self.stack, parts)


def plain_bits(tensor: torch.Tensor, where: str) -> torch.Tensor:
    """The tensor's memory with an opaque dtype. Raises Unsupported for memory that is not the tensor's values."""
    dtype_name(tensor.dtype, where)
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
        raise Unsupported(f"{where}: a tensor of class {type(tensor).__name__}; pass the plain tensors it is made of")
    if tensor.layout is not torch.strided:
        raise Unsupported(f"{where}: layout {tensor.layout}; only strided tensors are carried, convert it")
    if tensor.is_conj() or tensor.is_neg():
        raise Unsupported(f"{where}: a lazy conj() or negative view; call resolve_conj() and resolve_neg() first")
    if tensor.device.type == "meta":
        raise Unsupported(f"{where}: on the meta device; materialise it first")
    return bits(tensor.detach())
