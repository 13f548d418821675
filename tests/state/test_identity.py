"""The state id: every ingredient counts, and the order of nothing does."""

import hashlib
import itertools
from typing import Any

from ckpt.geometry import TensorSpec
from ckpt.state.identity import state_id
from ckpt.state.values import encode

A = TensorSpec("a", (2, 3), "float32", 4)
B = TensorSpec("b", (), "int64", 8)
TENSORS = [(A, (1, 2)), (B, (3, 2**61 - 2))]
VALUES = {"step": encode(7, "step"), "name": encode("run", "name")}


def test_the_id_is_the_sha_256_of_the_documented_text() -> None:
    text = (
        '{"tensors":[["a","float32",[2,3],"00000000000000010000000000000002"],'
        '["b","int64",[],"00000000000000031ffffffffffffffe"]],"values":{"name":"run","step":{"int":"7"}}}'
    )
    assert state_id(TENSORS, VALUES) == hashlib.sha256(text.encode()).hexdigest()
    assert state_id(TENSORS, VALUES) == "816632ee310fb7ded1068786393f7fc2c9d655681c62fae5f1adcc3a7228d01c"
    assert state_id([], {}) == hashlib.sha256(b'{"tensors":[],"values":{}}').hexdigest()


def test_the_order_of_tensors_and_values_does_not_count() -> None:
    ids = {
        state_id(tensors, dict(values))
        for tensors in itertools.permutations(TENSORS)
        for values in itertools.permutations(VALUES.items())
    }
    assert len(ids) == 1


def test_every_ingredient_counts() -> None:
    rest = TENSORS[1:]
    tensors: list[Any] = [
        TENSORS,
        rest,
        [],
        [*TENSORS, (TensorSpec("c", (0,), "int8", 1), (0, 0))],
        [(TensorSpec("A", (2, 3), "float32", 4), (1, 2)), *rest],
        [(TensorSpec("a", (3, 2), "float32", 4), (1, 2)), *rest],
        [(TensorSpec("a", (6,), "float32", 4), (1, 2)), *rest],
        [(TensorSpec("a", (2, 3), "int32", 4), (1, 2)), *rest],
        [(A, (2, 2)), *rest],
        [(A, (1, 3)), *rest],
        [(A, (2, 1)), *rest],
        [(A, (3, 2**61 - 2)), (B, (1, 2))],
    ]
    values: list[Any] = [
        VALUES,
        {},
        {"step": encode(7, "")},
        VALUES | {"step": encode(8, "")},
        VALUES | {"step": encode(7.0, "")},
        VALUES | {"step": encode("7", "")},
        VALUES | {"more": None},
        {"stop": VALUES["step"], "name": VALUES["name"]},
        {"name": VALUES["step"], "step": VALUES["name"]},
    ]
    ids = [state_id(t, VALUES) for t in tensors] + [state_id(TENSORS, v) for v in values[1:]]
    assert len(set(ids)) == len(ids)


def test_how_a_tensor_is_stacked_and_stored_does_not_count() -> None:
    stacked = TensorSpec("a", (2, 3), "float32", 4, stack=1)
    assert state_id([(stacked, (1, 2)), TENSORS[1]], VALUES) == state_id(TENSORS, VALUES)
