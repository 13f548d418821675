"""Case 26, cosmos-rl-742: strides and views.

The fault: byte views of tensors fail or give the wrong order: a size-1 dimension with an odd stride counts as
contiguous; transposed, expanded and offset views; lazily conjugated or negated tensors, whose bits are not in memory.
Here what is stored are the logical elements in row-major order and no more than the view has; targets keep their
strides; what cannot be kept is refused by name, on save and on load. (More shapes: tests/engine/test_bits.py.)
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from tests.support.raw import attempt_folder, labelled, raw


def _over(size: int, shape: tuple[int, ...], strides: tuple[int, ...], offset: int, dtype: torch.dtype) -> torch.Tensor:
    """A view over a base of `size` elements that are all -1."""
    return torch.full((size,), -1, dtype=dtype).as_strided(shape, strides, offset)


VIEWS: dict[str, tuple[int, tuple[int, ...], tuple[int, ...], int]] = {
    "x.t()": (12, (4, 3), (1, 4), 0),
    "x[::2]": (20, (5, 2), (4, 1), 0),
    "x[:, 1]": (20, (5,), (4,), 1),
    "offset 3": (20, (4, 3), (3, 1), 3),
    "channels_last": (120, (2, 3, 4, 5), (60, 1, 15, 3), 0),
    "shape (1,) stride 8": (9, (1,), (8,), 0),
    "shape (1, 3) stride (100, 1)": (3, (1, 3), (100, 1), 0),
    "shape (3, 1) stride (1, 0)": (3, (3, 1), (1, 0), 0),
    "0-dim of a view": (9, (), (), 5),
    "0-size": (9, (0, 3), (5, 2), 4),
    "rows far apart": (400_000, (4, 300), (99_000, 3), 7),
    "large transpose": (210_000, (300, 700), (1, 300), 0),
}
DTYPES = [torch.int64, torch.float32, torch.bfloat16, torch.int8, torch.complex128]


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("kind", VIEWS)
def test_views_are_saved_by_their_elements_and_filled_by_their_strides(
    kind: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    size, shape, strides, offset = VIEWS[kind]
    source, target = (_over(size, shape, strides, offset, dtype) for _ in range(2))
    source.copy_(labelled(shape).to(dtype))
    dense = torch.zeros(shape, dtype=dtype)
    with ckpt.Checkpointer(tmp_path) as ck:
        receipt = ck.save(1, {"x": source})
        ck.load({"x": target})
        ck.load({"x": dense})
    assert receipt.bytes == source.numel() * dtype.itemsize
    assert raw(dense) == raw(labelled(shape).to(dtype))
    assert raw(target) == raw(dense)
    assert (target.shape, target.stride(), target.storage_offset()) == (shape, strides, offset)
    base = _over(size, shape, strides, offset, dtype)
    base.copy_(labelled(shape).to(dtype))
    whole = (size,), (1,), 0
    assert raw(target.as_strided(*whole)) == raw(base.as_strided(*whole))  # and nothing beside the view


def test_a_small_view_of_a_large_storage_is_stored_small(tmp_path: Path) -> None:
    large = torch.zeros(5_000_000)
    with ckpt.Checkpointer(tmp_path) as ck:
        ck.save(1, {"x": large[1000:1010], "y": large.view(1000, 5000)[:, 17]})
    stored = sum(f.stat().st_size for f in (attempt_folder(tmp_path)).rglob("*") if f.is_file())
    assert stored < 20_000


class _Sub(torch.Tensor):
    """A subclass may keep its values elsewhere than in its memory."""


REFUSED: dict[str, tuple[Callable[[], torch.Tensor], str]] = {
    "conj": (lambda: torch.ones(3, dtype=torch.complex64).conj(), r"resolve_conj"),
    "conj of complex128": (lambda: torch.ones(3, dtype=torch.complex128).conj(), r"resolve_conj"),
    "imaginary part of conj": (lambda: torch.ones(3, dtype=torch.complex64).conj().imag, r"resolve_neg"),
    "negative bit": (lambda: torch._neg_view(torch.ones(3)), r"resolve_neg"),
    "expand": (lambda: torch.ones(3, 1).expand(3, 4), r"several of its elements share .* make one of them a copy"),
    "as_strided overlap": (lambda: torch.ones(9).as_strided((3, 4), (2, 1)), r"several of its elements share"),
    "sparse": (lambda: torch.eye(3).to_sparse(), r"sparse_coo.*convert it"),
    "sparse rows": (lambda: torch.eye(3).to_sparse_csr(), r"sparse_csr.*convert it"),
    "quantized": (lambda: torch._empty_affine_quantized([3], scale=1.0, zero_point=0, dtype=torch.qint8), "qint8"),
    "subclass": (lambda: torch.ones(3).as_subclass(_Sub), r"class _Sub; pass the plain tensors"),
    "meta": (lambda: torch.empty(3, device="meta"), r"meta device; materialise"),
}


@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")  # torch's own, of sparse and quantized
def test_what_is_not_in_memory_as_it_seems_is_refused_by_name(kind: str, tmp_path: Path) -> None:
    make, words = REFUSED[kind]
    kinds = (ckpt.Unsupported, ckpt.StateMismatch)
    with ckpt.Checkpointer(tmp_path) as ck:
        with pytest.raises(kinds, match=f"x: .*{words}"):
            ck.save(1, {"x": make(), "y": torch.ones(2)})
        assert not (tmp_path / "attempts").exists()
        target = {"x": make(), "y": torch.full((2,), 5.0)}
        ck.save(1, {"x": torch.ones(3), "y": torch.ones(2)})
        with pytest.raises(kinds, match=f"x: .*{words}"):
            ck.load(target)
        assert raw(target["y"]) == raw(torch.full((2,), 5.0))


def test_lazy_views_can_be_saved_once_they_are_resolved(tmp_path: Path) -> None:
    lazy = torch.complex(labelled((4,)), -labelled((4,))).conj()
    target: dict[str, Any] = {"c": torch.zeros(4, dtype=torch.complex64), "i": torch.zeros(4)}
    with ckpt.Checkpointer(tmp_path) as ck:
        ck.save(1, {"c": lazy.resolve_conj(), "i": lazy.imag.resolve_neg()})
        ck.load(target)
    assert raw(target["c"]) == raw(torch.complex(labelled((4,)), labelled((4,))))
    assert raw(target["i"]) == raw(labelled((4,)))
