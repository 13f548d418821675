"""Staging: a captured state copied into host memory of its own, which another process can take over.

The memory is anonymous (`memfd_create`, Linux): it has no name that could be left behind, lives as long as a process
has it open, and is used again for the next save, since fresh memory costs a page fault for every 4 KiB. What is copied
is digested from its source.

A part may be copied later, from another thread: what the caller knows to stay as it is until he is told.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from ckpt.engine.digests import Held, held_document, parse_held
from ckpt.engine.merge import encode_values
from ckpt.errors import StateMismatch, Unsupported
from ckpt.fingerprint import ZERO, add, box_digests
from ckpt.geometry import Box, TensorSpec
from ckpt.native.copies import copy_boxes
from ckpt.native.pinned import Pinned
from ckpt.state.captured import Captured, Shard
from ckpt.state.dtypes import STORED, opaque
from ckpt.state.groups import Group, declare
from ckpt.state.values import canonical_json, decode, parse_json

_ALIGN = 64
_PIECE = 16 << 20  # bytes digested and copied by one step of a kernel
_BATCH = 64 << 20  # bytes described at a time
_GROW = 1 << 21

_Piece: TypeAlias = tuple[str, int, Shard, torch.Tensor]  # tensor, which shard of it, a part of that, where it goes to


class SharedMemory:
    """Host memory that grows and can be handed to another process by its file descriptor. Pinned once a tensor on a
    CUDA device is to be copied there."""

    def __init__(self) -> None:
        """Raises Unsupported where the system has no anonymous shared memory."""
        if not hasattr(os, "memfd_create"):
            raise Unsupported("asynchronous saves need memfd_create, which Linux has; use the blocking save here")
        self.fd = os.memfd_create("ckpt-staging", os.MFD_CLOEXEC)
        self.size = 0
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self._pinned: Pinned | None = None

    def take(self, nbytes: int, pinned: bool = False) -> torch.Tensor:
        """This many bytes (uint8) from the start: what earlier calls gave is part of it, with its content.

        pinned: that devices copy there; it stays so for later calls."""
        pinned = pinned or self._pinned is not None
        if nbytes > self.size:
            self._unpin()
            self.size = -(-nbytes // _GROW) * _GROW
            os.ftruncate(self.fd, self.size)
            self._bytes = map_memory(self.fd, self.size)
        if pinned and self._pinned is None and self.size:
            self._pinned = Pinned(self._bytes)
        return self._bytes[:nbytes]

    def close(self) -> None:
        """Frees this process's hold on the memory, once no tensor refers to it."""
        self._unpin()
        self._bytes = torch.empty(0, dtype=torch.uint8)
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def _unpin(self) -> None:
        """Before the memory is unmapped, as CUDA wants it."""
        pinned, self._pinned = self._pinned, None
        if pinned is not None:
            pinned.release()


def map_memory(fd: int, size: int) -> torch.Tensor:
    """The memory behind a descriptor as uint8; mapped for as long as the tensor or a view of it lives."""
    mapped = mmap.mmap(fd, size)
    with contextlib.suppress(OSError, AttributeError):
        mapped.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(mapped, dtype=torch.uint8)


@dataclass(frozen=True)
class Staged:
    """A state in staging memory: `elements` bytes of tensors, and after them the `header`, so many bytes of canonical
    JSON with all the rest. So what is handed over is small, and never waits for the other side to read it."""

    elements: int
    header: int


class Staging:
    """A state that is being staged. What may change at any moment is copied when this is made; `finish` does the rest,
    once, from any thread."""

    def __init__(self, captured: Captured, memory: SharedMemory, later: Callable[[Shard], bool]) -> None:
        """later: which shards are left to `finish`; they must not change until then.

        Raises Unsupported for a value that cannot be kept; the memory has any content then."""
        values, per_rank = encode_values(captured)
        self._captured, self._memory, self._later = captured, memory, later
        self._places, self.nbytes = _places(captured)
        self._held: Held = {name: [(s.box, ZERO) for s in t.shards] for name, t in captured.tensors.items()}
        self._waiting = [
            (n, s.view, _version(s.view)) for n, t in captured.tensors.items() for s in t.shards if later(s)
        ]
        self._events = _events([view for _, view, _ in self._waiting])
        self._header = {
            "tensors": [
                [
                    *(t.spec.name, t.spec.dtype, list(t.spec.shape), t.spec.stack),
                    [
                        [list(s.box.offset), list(s.box.extent), at]
                        for s, at in zip(t.shards, self._places[name], strict=True)
                    ],
                ]
                for name, t in captured.tensors.items()
            ],
            "aliases": captured.aliases,
            "stateless": {name: sorted(map(list, slices)) for name, slices in captured.stateless.items()},
            "groups": declare(captured.groups),
            "left_out": captured.left_out,
            "values": values,
            "per_rank": per_rank,
        }
        on_device = any(s.view.is_cuda for t in captured.tensors.values() for s in t.shards)
        self._target = memory.take(self.nbytes, pinned=on_device)
        self._copy(lambda shard: not later(shard))

    def finish(self) -> Staged:
        """Copies what was left. Afterwards all of the state may be changed, freed or rebound at will.

        Raises StateMismatch naming a tensor that was changed meanwhile, as far as torch counts changes."""
        with _after(self._events):
            self._copy(self._later)
        for name, view, version in self._waiting:
            if _version(view) != version:
                raise StateMismatch(
                    f"{name}: changed while it was copied beside the training, and not in an optimizer's step; this "
                    "save is void: change it after PendingSave.captured(), or do without overlap"
                )
        self._header["digests"] = held_document(self._held).decode()
        document = canonical_json(self._header)
        whole = self._memory.take(self.nbytes + len(document))
        whole[self.nbytes :] = torch.frombuffer(bytearray(document), dtype=torch.uint8)
        return Staged(self.nbytes, len(document))

    def _copy(self, chosen: Callable[[Shard], bool]) -> None:
        batch: list[_Piece] = []
        waiting = 0
        for name, tensor in self._captured.tensors.items():
            for number, (shard, at) in enumerate(zip(tensor.shards, self._places[name], strict=True)):
                if not chosen(shard):
                    continue
                itemsize = tensor.spec.itemsize
                whole = _shard(self._target, shard.box.offset, shard.box.extent, at, itemsize).view
                for piece in _pieces(shard, itemsize):
                    inner = piece.relative_to(shard.box).slices
                    batch.append((name, number, Shard(piece, shard.view[inner]), whole[inner]))
                    waiting += piece.volume * itemsize
                    if waiting >= _BATCH:
                        self._copy_batch(batch)
                        batch, waiting = [], 0
        self._copy_batch(batch)

    def _copy_batch(self, batch: list[_Piece]) -> None:
        tensors = self._captured.tensors
        digests = box_digests([(s.view, s.box, tensors[name].spec.shape) for name, _, s, _ in batch])
        copy_boxes([(target, s.view) for _, _, s, target in batch])
        for (name, number, _, _), digest in zip(batch, digests, strict=True):
            box, known = self._held[name][number]
            self._held[name][number] = (box, add(known, digest))


def _version(view: torch.Tensor) -> tuple[int, int]:
    """What differs once a tensor was changed in place, as torch counts, or has lost its memory."""
    return view._version, view.data_ptr()


def _events(views: Iterable[torch.Tensor]) -> list[torch.cuda.Event]:
    """On each CUDA device of the tensors: the point up to which its work has got that was asked for so far."""
    return [torch.cuda.current_stream(d).record_event() for d in {v.device for v in views if v.is_cuda}]


@contextlib.contextmanager
def _after(events: Sequence[torch.cuda.Event]) -> Iterator[None]:
    """Work of the body on CUDA devices comes after these points, and beside what was asked for since."""
    with contextlib.ExitStack() as streams:
        for event in events:
            stream = torch.cuda.Stream(event.device)
            stream.wait_event(event)
            streams.enter_context(torch.cuda.stream(stream))
        yield
        for event in events:
            torch.cuda.current_stream(event.device).synchronize()


def unstage(staged: Staged, memory: torch.Tensor) -> tuple[Captured, Held]:
    """The state that a `Staging` put into memory, as views of it, and the digests of what was copied."""
    document = memory[staged.elements : staged.elements + staged.header].numpy().tobytes()
    header = parse_json(document, "staged state")
    captured = Captured(aliases=dict(header["aliases"]), left_out=dict(header["left_out"]))
    for name, dtype, shape, stack, shards in header["tensors"]:
        itemsize = STORED[dtype].itemsize
        spec = TensorSpec(name, tuple(shape), dtype, itemsize, stack)
        captured.add_tensor(spec, [_shard(memory, tuple(o), tuple(e), at, itemsize) for o, e, at in shards])
    captured.stateless = {name: set(map(tuple, slices)) for name, slices in header["stateless"].items()}
    for name, groups in header["groups"].items():
        captured.groups[name] = [
            Group(g, {}) if isinstance(g, str) else Group(None, decode(g[0], name)) for g in groups
        ]
    captured.values = {name: decode(value, name) for name, value in header["values"].items()}
    captured.per_rank = {name: decode(value, name) for name, value in header["per_rank"].items()}
    return captured, parse_held(header["digests"].encode(), 0)


def _places(captured: Captured) -> tuple[dict[str, list[int]], int]:
    """First byte of each shard, and bytes in all."""
    places: dict[str, list[int]] = {}
    end = 0
    for name, tensor in captured.tensors.items():
        places[name] = []
        for shard in tensor.shards:
            places[name].append(end)
            end += -(-shard.box.volume * tensor.spec.itemsize // _ALIGN) * _ALIGN
    return places, end


def _pieces(shard: Shard, itemsize: int) -> Iterator[Box]:
    """On the GPU a box is digested and copied at once: the link is what takes time."""
    return iter([shard.box]) if shard.view.is_cuda else shard.box.pieces(_PIECE // itemsize)


def _shard(memory: torch.Tensor, offset: tuple[int, ...], extent: tuple[int, ...], at: int, itemsize: int) -> Shard:
    box = Box(offset, extent)
    flat = memory[at : at + box.volume * itemsize].view(opaque(itemsize))
    return Shard(box, flat.reshape(extent))
