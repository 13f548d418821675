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
from fnmatch import fnmatchcase
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ckpt.errors import StateMismatch, Unsupported
from ckpt.state import RngState
from ckpt.state.names import Key, join
from ckpt.state.streams import Stream

if TYPE_CHECKING:
    from ckpt.adapters.capture import Walker

Held = tuple[Any, Callable[[Any], None], Callable[[int], Any]]
"""What a stream holds as plain data, what puts that back, and what makes a new one's from a seed."""


def capture(walker: Walker, state: RngState, path: tuple[Key, ...]) -> None:
    """Captures every stream of this rank. Draws nothing. Called last, so that the streams are put back last and nothing
    else in a load draws from them."""
    megatron = _tracker() is not None
    for keys, (value, put, fresh) in _streams(state, join(path)):
        name, label = join((*path, *keys)), join(keys)
        wanted = any(fnmatchcase(label, pattern) for pattern in state.rederive)
        walker.captured.add_value(name, value, per_rank=True)
        walker.captured.streams[name] = Stream(label, **_facts(keys, megatron), rederive=fresh if wanted else None)
        walker.captured.appliers.append(_applier(name, value, put))


def _facts(keys: tuple[str, ...], megatron: bool) -> dict[str, Any]:
    """What is known of a stream over axes on which a layout has one rank. Megatron Core relies on it: where activations
    are the same over tensor parallelism, so is their dropout, and where they are not, it is not
    (`tensor_parallel.random.model_parallel_cuda_manual_seed`)."""
    if keys == ("megatron", "model-parallel-rng"):
        return {"differs": frozenset({"tp"})}
    if keys == ("megatron", "expert-parallel-rng"):
        return {"differs": frozenset({"etp", "ep"}), "expert": True}
    if megatron and keys[0] in ("torch", "cuda", "megatron"):
        return {"same": frozenset({"tp"})}
    return {}


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


def _streams(state: RngState, where: str) -> Iterator[tuple[tuple[str, ...], Held]]:
    yield ("python",), (random.getstate(), random.setstate, lambda seed: random.Random(seed).getstate())
    yield ("numpy",), (_legacy(np.random), lambda v: np.random.set_state(_arrays(v)), _fresh_legacy)
    yield ("torch",), _torch_stream(torch.default_generator)
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


def _legacy(owner: Any) -> Any:
    return _plain(owner.get_state(legacy=False))


def _fresh_legacy(seed: int) -> Any:
    return _legacy(np.random.RandomState(np.random.MT19937(seed)))


def _numpy_stream(generator: np.random.Generator) -> Held:
    def put(value: Any) -> None:
        generator.bit_generator.state = _arrays(value)

    kind: Any = type(generator.bit_generator)
    return _plain(generator.bit_generator.state), put, lambda seed: _plain(kind(seed).state)


def _torch_stream(generator: torch.Generator) -> Held:
    def put(value: bytes) -> None:
        generator.set_state(_tensor(value))

    return _bytes(generator.get_state()), put, partial(_fresh_torch, generator.device)


def _fresh_torch(device: torch.device | str, seed: int) -> bytes:
    return _bytes(torch.Generator(device).manual_seed(seed).get_state())


def _tracker() -> Any:
    """Megatron Core's RNG tracker, or None where it is not in use."""
    module = sys.modules.get("megatron.core.tensor_parallel.random")
    return getattr(module, "_CUDA_RNG_STATE_TRACKER", None)


def _megatron(where: str) -> Iterator[tuple[tuple[str, ...], Held]]:
    tracker = _tracker()
    if tracker is None:
        return
    if getattr(tracker, "_current_state_name", "default-rng") != "default-rng":
        raise Unsupported(f"{where}: inside a fork of Megatron's RNG tracker; save and load outside of it")
    for name, held in tracker.get_states().items():
        yield ("megatron", name), _tracked(tracker, name, held)


def _tracked(tracker: Any, name: str, held: Any) -> Held:
    """A state that the tracker holds: a generator that a CUDA graph may refer to, or a tensor that is replaced."""
    if isinstance(held, torch.Generator):
        return _torch_stream(held)

    def put(value: bytes) -> None:
        tracker.set_states({**tracker.get_states(), name: _tensor(value)})

    on_cpu = held.numel() == torch.get_rng_state().numel()
    return _bytes(held), put, partial(_fresh_torch, "cpu" if on_cpu else "cuda")


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
