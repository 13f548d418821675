"""RNG streams in one process: capture draws nothing, a load puts every stream back, last, and kinds must fit."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ckpt
from tests.support.megatron_cpu import megatron_on_cpu


def _save_and_load(root: Path, saved: dict[str, Any], into: dict[str, Any]) -> None:
    with ckpt.Checkpointer(root) as ck:
        ck.save(1, saved)
        ck.load(into)


def test_a_save_draws_nothing(tmp_path: Path) -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    with ckpt.Checkpointer(tmp_path) as ck:
        ck.save(1, {"rng": ckpt.RngState()})
    assert torch.get_rng_state().equal(before)


def test_streams_are_put_back_after_everything_else(tmp_path: Path) -> None:
    """An object that draws while it is loaded does not move the stream, wherever it stands in the state."""

    class Drawing:
        def state_dict(self) -> dict[str, int]:
            return {"n": 1}

        def load_state_dict(self, state: dict[str, int]) -> None:
            torch.rand(5)

    torch.manual_seed(5)
    state = {"rng": ckpt.RngState(), "z": Drawing()}
    with ckpt.Checkpointer(tmp_path) as ck:
        ck.save(1, state)
        wanted = torch.rand(4).tolist()
        ck.load(state)
    assert torch.rand(4).tolist() == wanted


def test_another_kind_of_generator_is_an_error(tmp_path: Path) -> None:
    pcg, mt = np.random.default_rng(1), np.random.Generator(np.random.MT19937(1))
    with pytest.raises(ckpt.StateInvalid, match=r"rng/generator/g: .*PCG64.*MT19937"):
        _save_and_load(tmp_path, {"rng": ckpt.RngState({"g": pcg})}, {"rng": ckpt.RngState({"g": mt})})


def test_a_stream_that_the_checkpoint_lacks_or_nobody_wants_is_an_error(tmp_path: Path) -> None:
    one, other = ckpt.RngState({"g": torch.Generator()}), ckpt.RngState({"h": torch.Generator()})
    with pytest.raises(ckpt.StateMismatch, match="rng/generator/h"):
        _save_and_load(tmp_path, {"rng": one}, {"rng": other})
    with pytest.raises(ckpt.StateMismatch, match="rng/generator/g"):
        _save_and_load(tmp_path / "other", {"rng": one}, {"rng": ckpt.RngState()})


def test_what_is_no_generator_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ckpt.Unsupported, match="generator 'g' is a RandomState"):
        _save_and_load(tmp_path, {"rng": ckpt.RngState({"g": np.random.RandomState(1)})}, {})  # type: ignore[dict-item]


def test_megatrons_tracker(tmp_path: Path) -> None:
    """Its streams by name, in a process where CUDA's generator is the CPU's."""
    with megatron_on_cpu():
        from megatron.core.tensor_parallel import random as tracked

        tracked.initialize_rng_tracker(force_reset=True)
        tracker = tracked.get_cuda_rng_tracker()
        for number, name in enumerate(["data-parallel-rng", "model-parallel-rng", "expert-parallel-rng"]):
            tracker.add(name, 40 + number)

        def draw() -> list[float]:
            found = []
            for name in sorted(tracker.get_states()):
                with tracker.fork(name):
                    found.append(torch.rand(1).item())
            return found

        draw()
        with ckpt.Checkpointer(tmp_path) as ck:
            ck.save(1, {"rng": ckpt.RngState()})
            wanted = [draw(), draw()]
            assert ck.load({"rng": ckpt.RngState()}) is not None
            assert [draw(), draw()] == wanted
            with tracker.fork("model-parallel-rng"), pytest.raises(ckpt.Unsupported, match="outside of it"):
                ck.save(2, {"rng": ckpt.RngState()})
        tracked._CUDA_RNG_STATE_TRACKER = None
        tracked._CUDA_RNG_STATE_TRACKER_INITIALIZED = False
