"""RNG streams of a rank: read and put back as bytes, each under its own name, kept per rank.

python             `random`
numpy              NumPy's global state
torch              torch's CPU generator
cuda/<n>           the default generator of CUDA device n
generator/<name>   a `torch.Generator` or `numpy.random.Generator` of the user's
megatron/<name>    a stream of Megatron Core's RNG tracker
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ckpt.errors import StateMismatch, Unsupported
from ckpt.state import RngState
from ckpt.state.names import Key, join

if TYPE_CHECKING:
    from ckpt.adapters.capture import Walker

Stream = tuple[Any, Callable[[Any], None]]  # what it holds as plain data, and what puts that back


def capture(walker: Walker, state: RngState, path: tuple[Key, ...]) -> None:
    """Captures every stream of this rank. Draws nothing. Called last, so that the streams are put back last and nothing
    else in a load draws from them."""
    for keys, (value, put) in _streams(state, join(path)):
        name = join((*path, *keys))
        walker.captured.add_value(name, value, per_rank=True)
        walker.captured.appliers.append(_applier(name, value, put))


def _applier(name: str, own: Any, put: Callable[[Any], None]) -> Callable[[dict[str, Any]], None]:
    def apply(values: dict[str, Any]) -> None:
        if name in values:
            if _kind(values[name]) != _kind(own):
                raise StateMismatch(
                    f"{name}: the checkpoint has a stream of kind {_kind(values[name])}, this rank one of "
                    f"{_kind(own)}; use the same kind of generator"
                )
            put(values[name])

    return apply


def _kind(value: Any) -> Any:
    """What must be the same of two states for one to replace the other."""
    if isinstance(value, bytes):
        return f"{len(value)} bytes"
    return value.get("bit_generator") if isinstance(value, dict) else type(value).__name__


def _streams(state: RngState, where: str) -> Iterator[tuple[tuple[str, ...], Stream]]:
    yield ("python",), (random.getstate(), random.setstate)
    yield ("numpy",), (_plain(np.random.get_state(legacy=False)), lambda v: np.random.set_state(_arrays(v)))
    yield ("torch",), (_bytes(torch.get_rng_state()), lambda v: torch.set_rng_state(_tensor(v)))
    if torch.cuda.is_available():
        for number, default in enumerate(torch.cuda.default_generators):
            yield ("cuda", str(number)), _torch_stream(default)
    for name, generator in state.generators.items():
        if isinstance(generator, np.random.Generator):
            yield ("generator", name), _numpy_stream(generator)
        elif isinstance(generator, torch.Generator):
            yield ("generator", name), _torch_stream(generator)
        else:
            raise Unsupported(
                f"{where}: generator {name!r} is a {type(generator).__name__}; pass torch and NumPy generators, and "
                "other state as entries with state_dict and load_state_dict"
            )
    yield from _megatron(where)


def _numpy_stream(generator: np.random.Generator) -> Stream:
    def put(value: Any) -> None:
        generator.bit_generator.state = _arrays(value)

    return _plain(generator.bit_generator.state), put


def _torch_stream(generator: torch.Generator) -> Stream:
    def put(value: bytes) -> None:
        generator.set_state(_tensor(value))

    return _bytes(generator.get_state()), put


def _megatron(where: str) -> Iterator[tuple[tuple[str, ...], Stream]]:
    module = sys.modules.get("megatron.core.tensor_parallel.random")
    tracker = getattr(module, "_CUDA_RNG_STATE_TRACKER", None)
    if tracker is None:
        return
    if getattr(tracker, "_current_state_name", "default-rng") != "default-rng":
        raise Unsupported(f"{where}: inside a fork of Megatron's RNG tracker; save and load outside of it")
    for name, held in tracker.get_states().items():
        yield ("megatron", name), _tracked(tracker, name, held)


def _tracked(tracker: Any, name: str, held: Any) -> Stream:
    """A state that the tracker holds: a generator that a CUDA graph may refer to, or a tensor that is replaced."""
    if isinstance(held, torch.Generator):
        return _torch_stream(held)

    def put(value: bytes) -> None:
        tracker.set_states({**tracker.get_states(), name: _tensor(value)})

    return _bytes(held), put


def _bytes(state: torch.Tensor) -> bytes:
    return state.cpu().numpy().tobytes()


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _plain(state: Any) -> Any:
    """A NumPy state with its arrays as (dtype, bytes)."""
    if isinstance(state, dict):
        return {k: _plain(v) for k, v in state.items()}
    if isinstance(state, np.ndarray):
        return (state.dtype.str, state.tobytes())
    return state.item() if isinstance(state, np.generic) else state


def _arrays(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _arrays(v) for k, v in value.items()}
    return np.frombuffer(value[1], dtype=value[0]).copy() if isinstance(value, tuple) else value
