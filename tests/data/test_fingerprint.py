"""Dataset fingerprints: the same for the same items, another for another, and never a guess."""

import random
import re
from collections import OrderedDict
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
import torch

import ckpt
from ckpt.data import Permutation, dataset_fingerprint
from ckpt.data.fingerprint import array_fingerprint, sample_of
from tests.data.corpus import Augmented, Numbers

ITEMS: list[Any] = [
    None,
    True,
    False,
    0,
    1,
    -1,
    "1",
    "",
    "ä\ud800",
    b"1",
    b"",
    0.0,
    -0.0,
    1.0,
    float("nan"),
    1j,
    [],
    (),
    {},
    [1],
    (1,),
    [[1]],
    [1, 2],
    [12],
    ["ab", "c"],
    ["a", "bc"],
    {"a": 1},
    {"b": 1},
    {"a": 1, "b": [2]},
    {"a": [1, 2], "b": []},
    torch.tensor(1),
    torch.tensor(1.0),
    torch.tensor([1]),
    torch.tensor([[1]]),
    torch.tensor([1], dtype=torch.int32),
    torch.tensor([0.0]),
    torch.tensor([-0.0]),
    torch.tensor([1.0], dtype=torch.bfloat16),
    torch.tensor([1j]),
    torch.empty(0),
    torch.empty(0, 2),
    np.array([1]),
    np.array([1], np.int32),
    np.array([1], ">i8"),
    np.array([[1]]),
    np.array(["a"]),
    np.float32(1),
    np.float64(1),
    np.array([(1, 2.0)], [("a", "i4"), ("b", "f8")]),
]


def test_different_items_have_different_fingerprints() -> None:
    found = [dataset_fingerprint([item]) for item in ITEMS]
    assert len(set(found)) == len(found)
    assert found == [dataset_fingerprint([item]) for item in ITEMS]


def test_what_is_the_same_data_has_the_same_fingerprint() -> None:
    pairs: list[tuple[Any, Any]] = [
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        ({"a": 1}, OrderedDict(a=1)),
        (torch.arange(6).reshape(2, 3).T, torch.arange(6).reshape(2, 3).T.contiguous()),
        (torch.tensor([1 + 2j]).conj(), torch.tensor([1 - 2j])),
        (torch.tensor([1.0], requires_grad=True), torch.tensor([1.0])),
        (np.arange(6)[::2], np.array([0, 2, 4])),
        (np.float32(1), np.array(1, np.float32)),
        (bytearray(b"x"), b"x"),
    ]
    for one, other in pairs:
        assert dataset_fingerprint([one]) == dataset_fingerprint([other]), one


def test_golden_values() -> None:
    """These must never change: a run that began with an earlier release compares its data set with them."""
    mixed = [{"tokens": [1, 2, 3], "text": "a", "weight": 0.5}, (torch.arange(3), np.arange(3.0), b"x", None, True)]
    assert dataset_fingerprint([]) == "ee40da75d2cdc90616b1e8c6afce5e03c09dec704194a1ec4ed1b0303fff921d"
    assert dataset_fingerprint(mixed) == "601ef3f6f804109b417c89439d10b4042dc66a7e798ccbba14a05591033e9878"
    assert dataset_fingerprint(Numbers(1000)) == "a46fa47a5e91115cf692eb953c8fe2e9c9336c319f2fff1027bce81f7fe23223"


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 66, 1000, 10**12])
def test_which_items_are_looked_at(length: int) -> None:
    sample = sample_of(length).tolist()
    assert sample == sorted(set(sample)) and sample[0] == 0 and sample[-1] == length - 1
    assert len(sample) == length if length <= 64 else 60 <= len(sample) <= 64
    if length > 64:
        assert set(sample) == {0, length - 1, *Permutation(0, 0, length)(np.arange(62)).tolist()}


def test_a_change_in_length_order_or_a_sampled_item_is_seen() -> None:
    class Changed(Numbers):
        def __init__(self, changed: int) -> None:
            super().__init__(1000)
            self.changed = changed

        def __getitem__(self, index: int) -> torch.Tensor:
            return super().__getitem__(index + (index == self.changed))

    class Reversed(Numbers):
        def __getitem__(self, index: int) -> torch.Tensor:
            return super().__getitem__(self.size - 1 - index)

    whole = dataset_fingerprint(Numbers(1000))
    assert dataset_fingerprint(Changed(-1)) == whole
    assert dataset_fingerprint(Numbers(999)) != whole
    assert dataset_fingerprint(Reversed(1000)) != whole
    for changed in (0, 999, int(sample_of(1000)[30])):
        assert dataset_fingerprint(Changed(changed)) != whole
    unseen = next(i for i in range(1000) if i not in set(sample_of(1000).tolist()))
    assert dataset_fingerprint(Changed(unseen)) == whole, "the docs say that other items are not looked at"


def test_only_the_sample_is_fetched() -> None:
    class Huge:
        def __len__(self) -> int:
            return 10**12

        def __getitem__(self, index: int) -> int:
            fetched.append(index)
            return index

    fetched: list[int] = []
    dataset_fingerprint(Huge())
    assert sorted(fetched) == sorted([0, *sample_of(10**12).tolist()])


def test_augmentation_by_the_global_generators_is_the_same_each_time() -> None:
    generators: tuple[Callable[[], Any], ...] = (random.getstate, lambda: str(np.random.get_state()), _torch_state)
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    before = [get() for get in generators]
    first = dataset_fingerprint(Augmented(5))
    assert [get() for get in generators] == before, "fetching items moved a global generator"
    random.random(), np.random.random(), torch.rand(1)
    assert dataset_fingerprint(Augmented(5)) == first != dataset_fingerprint(Numbers(5))


def _torch_state() -> bytes:
    return torch.get_rng_state().numpy().tobytes()


def test_items_that_differ_each_time_are_refused() -> None:
    class Restless(Numbers):
        def __getitem__(self, index: int) -> torch.Tensor:
            return torch.rand(1, generator=generator)

    generator = torch.Generator()
    with pytest.raises(ckpt.Unsupported, match=r"item 0 of .*Restless is not the same when fetched twice; pass fing"):
        dataset_fingerprint(Restless(3))


@pytest.mark.parametrize(
    "item, named",
    [
        (Decimal(1), "item 0 of the data set list is a decimal.Decimal"),
        ({"x": [1, {2}]}, "item 0 of the data set list, entry 'x', entry 1 is a builtins.set"),
        ({1: 2}, "keys that are no str"),
        (np.array([object()]), "a NumPy array of Python objects"),
        (torch.eye(2).to_sparse(), "not a plain dense one"),
        (torch.empty(2, device="meta"), "not a plain dense one"),
    ],
)
def test_what_cannot_be_digested_is_refused_by_name(item: Any, named: str) -> None:
    with pytest.raises(ckpt.Unsupported, match=rf"{re.escape(named)}.*pass fingerprint="):
        dataset_fingerprint([item])


def test_arrays_of_lengths_are_digested_whole() -> None:
    lengths = np.arange(3_000_000)
    whole = array_fingerprint(lengths)
    assert array_fingerprint(lengths.astype(np.int32)) == whole == array_fingerprint(np.repeat(lengths, 2)[::2])
    assert array_fingerprint(lengths[:-1]) != whole
    lengths[2_500_000] += 1
    assert array_fingerprint(lengths) != whole
