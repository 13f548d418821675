"""`copy_boxes` copies every bit, with the kernels and without, whatever the strides."""

import pytest
import torch

from ckpt.native import copies, library
from tests.support.raw import random_bits, raw

DTYPES = [torch.uint8, torch.int16, torch.float32, torch.int64, torch.complex128]


@pytest.fixture(params=["kernels", "torch"], autouse=True)
def means(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "torch":
        monkeypatch.setattr(copies, "find", lambda: None)
    elif library.find() is None:
        pytest.skip("installed without a compiler")


@pytest.mark.parametrize("dtype", DTYPES)
def test_views_of_many_kinds_in_one_call(dtype: torch.dtype) -> None:
    sources = [random_bits(shape, dtype, 7) for shape in [(5, 9), (), (0, 3), (4, 3, 2)]]
    sources += [sources[0].t(), sources[0][1:4, ::2], sources[3].expand(2, 4, 3, 2)]
    targets = [torch.zeros(s.shape, dtype=dtype) for s in sources]
    targets[0] = torch.zeros(9, 10, dtype=dtype).t()[:5]
    copies.copy_boxes(list(zip(targets, sources, strict=True)))
    assert [raw(t) for t in targets] == [raw(s) for s in sources]


def test_dtypes_of_one_width() -> None:
    bits = random_bits((6,), torch.float32)
    target = torch.zeros(6, dtype=torch.int32)
    copies.copy_boxes([(target, bits)])
    assert raw(target) == raw(bits)


def test_a_target_whose_elements_interleave_without_meeting() -> None:
    """Strides alone do not tell that no two elements share memory, so the kernel refuses it, and torch copies."""
    memory = torch.zeros(11, dtype=torch.int32)
    target, source = memory.as_strided((3, 3), (2, 3)), torch.arange(1, 10, dtype=torch.int32).view(3, 3)
    copies.copy_boxes([(target, source)])
    assert target.tolist() == source.tolist()


@pytest.mark.parametrize("source", [torch.zeros(3, 2), torch.zeros(2, 3, dtype=torch.float64)])
def test_what_does_not_fit_is_refused(source: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="cannot copy"):
        copies.copy_boxes([(torch.zeros(2, 3), source)])
