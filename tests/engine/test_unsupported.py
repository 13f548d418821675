"""What no save accepts: entries that cannot be kept bit for bit, a step that is none, a reader."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from tests.engine.states import sample_state, state_bits

UNSUPPORTED: dict[str, tuple[Callable[[], Any], list[str]]] = {
    "sparse": (lambda: torch.eye(3).to_sparse(), ["x: ", "sparse_coo", "convert"]),
    "quantized": (lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8), ["x: ", "quint8"]),
    "meta": (lambda: torch.empty(3, device="meta"), ["x: ", "meta device", "materialise"]),
    "lazy conjugate": (lambda: torch.ones(3, dtype=torch.complex64).conj(), ["x: ", "resolve_conj"]),
    "lazy negative": (lambda: torch.ones(3, dtype=torch.complex64).conj().imag, ["x: ", "resolve_neg"]),
    "an object": (lambda: object(), ["x: ", "builtins.object", "state_dict"]),
    "a set": (lambda: {1, 2}, ["x: ", "builtins.set", "plain Python data"]),
    "half of a state_dict": (lambda: type("Half", (), {"state_dict": lambda s: {}})(), ["x: ", "Half has only one"]),
    "a key": (lambda: {(1, 2): torch.zeros(2000)}, ["x/(1, 2)", "make it an entry of its own"]),
}


@pytest.mark.parametrize("kind", UNSUPPORTED)
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")  # torch's own, of quantize_per_tensor
def test_what_cannot_be_kept_is_refused_at_save(kind: str, tmp_path: Path) -> None:
    make, words = UNSUPPORTED[kind]
    with ckpt.Checkpointer(tmp_path) as ck, pytest.raises(ckpt.Unsupported) as caught:
        ck.save(1, {"x": make()})
    assert all(word in str(caught.value) for word in words)
    assert not (tmp_path / "attempts").exists()


@pytest.mark.parametrize("step", [-1, 1.0, True, "1", None])
def test_a_step_is_a_non_negative_int(step: Any, tmp_path: Path) -> None:
    with ckpt.Checkpointer(tmp_path) as ck, pytest.raises(ckpt.StateMismatch, match="must be a non-negative int"):
        ck.save(step, {"x": 1})


def test_a_reader_cannot_save(ck: ckpt.Checkpointer) -> None:
    with ckpt.Checkpointer(ck.url, read_only=True) as reader:
        target = sample_state(20)
        assert reader.load(target) is not None and state_bits(target) == state_bits(sample_state(10))
        with pytest.raises(ckpt.CkptError, match="read_only=True and cannot save"):
            reader.save(2, target)
    assert ck.latest() == 1
