"""What a captured state refuses, and how ties are found."""

import pytest
import torch

from ckpt.errors import StateMismatch
from ckpt.geometry import Box, TensorSpec
from ckpt.state import Captured, Shard


def spec(name: str, *shape: int) -> TensorSpec:
    return TensorSpec(name, shape, "float32", 4)


def test_a_tied_tensor_keeps_the_smaller_name() -> None:
    weight = torch.zeros(4, 3)
    captured = Captured()
    for name in ("head", "emb", "other"):
        view = torch.zeros(4, 3) if name == "other" else weight
        captured.add_tensor(spec(name, 4, 3), [Shard(Box.whole((4, 3)), view)])
    captured.seal()
    assert sorted(captured.tensors) == ["emb", "other"]
    assert captured.aliases == {"head": "emb"}
    assert captured.tensors["emb"].shards[0].view.data_ptr() == weight.data_ptr()


@pytest.mark.parametrize("other", [(3, 4), (12,), (2, 3), (4, 3)], ids=str)
def test_the_same_memory_in_another_form_is_refused(other: tuple[int, ...]) -> None:
    """Another shape, a part, or other strides: no tie, but an overlap."""
    weight = torch.zeros(12)
    view = weight.view(3, 4).t() if other == (4, 3) else weight[: torch.Size(other).numel()].view(other)
    captured = Captured()
    captured.add_tensor(spec("a", 4, 3), [Shard(Box.whole((4, 3)), weight.view(4, 3))])
    captured.add_tensor(spec("b", *other), [Shard(Box.whole(other), view)])
    with pytest.raises(StateMismatch, match=r"(a and b|b and a) overlap"):
        captured.seal()


@pytest.mark.parametrize(
    ("other", "box"),
    [
        (spec("b", 2, 3), Box((1, 0), (1, 3))),
        (spec("b", 4, 3), Box((0, 0), (1, 3))),
        (TensorSpec("b", (2, 3), "int32", 4), Box((0, 0), (1, 3))),
    ],
    ids=["box", "global shape", "dtype"],
)
def test_equal_views_that_mean_something_else_are_no_tie(other: TensorSpec, box: Box) -> None:
    layer = torch.zeros(1, 3)
    captured = Captured()
    captured.add_tensor(spec("a", 2, 3), [Shard(Box((0, 0), (1, 3)), layer)])
    captured.add_tensor(other, [Shard(box, layer)])
    with pytest.raises(StateMismatch, match="a and b overlap"):
        captured.seal()


def test_parts_of_one_tensor_are_joined_and_must_agree() -> None:
    captured = Captured()
    captured.add_tensor(spec("w", 4), [Shard(Box((0,), (2,)), torch.zeros(2)), Shard(Box((4,), (0,)), torch.zeros(0))])
    captured.add_tensor(spec("w", 4), [Shard(Box((2,), (2,)), torch.ones(2))])
    assert [s.box for s in captured.tensors["w"].shards] == [Box((0,), (2,)), Box((2,), (2,))]
    with pytest.raises(StateMismatch, match=r"w: parts of it disagree: float32\[4\] and float32\[5\]"):
        captured.add_tensor(spec("w", 5), [])
    with pytest.raises(StateMismatch, match="w: parts of it disagree"):
        captured.add_tensor(TensorSpec("w", (4,), "int32", 4), [])


@pytest.mark.parametrize("per_rank", [False, True])
def test_a_name_is_used_once(per_rank: bool) -> None:
    captured = Captured()
    captured.add_tensor(spec("w", 1), [])
    captured.add_value("step", 1)
    captured.add_value("seed", 1, per_rank=True)
    for name in ("w", "step", "seed"):
        with pytest.raises(StateMismatch, match=f"{name}: two entries"):
            captured.add_value(name, 2, per_rank=per_rank)
    assert (captured.values, captured.per_rank) == ({"step": 1}, {"seed": 1})


def test_a_view_must_have_the_shape_of_its_box() -> None:
    with pytest.raises(ValueError, match="view of shape"):
        Shard(Box((0,), (3,)), torch.zeros(2))
