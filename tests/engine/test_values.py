"""Plain values come back with exact types, bits and order: in containers, in a TrainState, and declared ones."""

import math
import struct
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ckpt
from tests.engine.states import Pair, module_bits, optimizer_bits, round_trip, tiny_net, train_step, typed_bits
from tests.support.raw import raw

VALUES: dict[str, Any] = {
    "int": -(2**70),
    "zero": 0,
    "bool": True,
    "float": 0.1,
    "minus zero": -0.0,
    "inf": -math.inf,
    "nan": struct.unpack("<d", bytes.fromhex("010000000000f47f"))[0],
    "complex": complex(-0.0, math.inf),
    "str": "naïve\n\0\ud800",
    "bytes": b"\0\xff",
    "none": None,
    "tuple": (1, (2.0, [True, ("x",)]), ()),
    "list": [[], {}, (), "", b""],
    "mixed keys": {(1, 2): "tuple", None: 0, True: 1, 2.5: "float", "s": 3},
    "ordered": [OrderedDict([("b", 1), ("a", 2)])],
    "counter": [Counter("hello")],
    "size": torch.Size([2, 3]),
    "dtype": torch.bfloat16,
    "device": torch.device("cuda", 3),
    "np.float32": np.float32(-0.0),
    "np.int16": np.int16(-5),
    "np.bool": np.True_,
    "np.complex": np.complex64(1 - 2j),
    "np.str": np.str_("ü"),
    "np.str empty": np.str_(""),
    "np.bytes": np.bytes_(b"ab"),
    "np.date": np.datetime64("2020-02-29T01:02:03.004", "ms"),
    "small tensor": {(0,): torch.tensor([1.0, -0.0], dtype=torch.bfloat16)},
}


def test_plain_values_are_replaced_with_exact_types_bits_and_order(tmp_path: Path) -> None:
    saved = {"values": dict(VALUES), "nested": {"deeper": [torch.zeros(2), dict(VALUES), VALUES["tuple"]]}}
    target: dict[str, Any] = {
        "values": dict.fromkeys(VALUES, "before"),
        "nested": {"deeper": [torch.ones(2), dict.fromkeys(VALUES, 0), None]},
    }
    values, deeper = target["values"], target["nested"]["deeper"]
    round_trip(tmp_path, saved, target)
    assert target["values"] is values and target["nested"]["deeper"] is deeper  # replaced inside the dict and list
    assert typed_bits(target) == typed_bits(saved)


def test_a_tuple_with_tensors_and_values_is_made_anew(tmp_path: Path) -> None:
    saved = {"pair": Pair(torch.ones(2), 5), "plain": (1.5, torch.zeros(1), ("x", torch.ones(1)))}
    tensor = torch.zeros(2)
    target: dict[str, Any] = {"pair": Pair(tensor, 0), "plain": (None, torch.ones(1), (0, torch.zeros(1)))}
    round_trip(tmp_path, saved, target)
    assert typed_bits(target) == typed_bits(saved)
    assert target["pair"].left is tensor


def test_train_state_keeps_values_wherever_they_stand(tmp_path: Path) -> None:
    def build(seed: int) -> ckpt.TrainState:
        model = tiny_net(seed)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * seed, momentum=0.9)
        train_step(model, optimizer, seed)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        return ckpt.TrainState(
            model=model,
            optimizer=optimizer,
            scheduler=scheduler,
            data=seed,
            epoch=seed,
            rng={"a": seed},
            ema=tiny_net(seed),
        )

    saved, target = build(1), build(2)
    round_trip(tmp_path / "top", saved, target)
    _same_train_state(saved, target)
    saved, target = build(3), build(4)
    nested = {"run": target, "n": 0}
    round_trip(tmp_path / "nested", {"run": saved, "n": 1}, nested)
    _same_train_state(saved, target)
    assert nested["run"] is target and nested["n"] == 1
    plain = build(5)
    as_dict = {**plain.parts(), **plain.extra}
    with ckpt.Checkpointer(tmp_path / "top") as ck:  # a TrainState is the dict of its parts
        ck.load(as_dict)
    assert as_dict["data"] == as_dict["epoch"] == 1
    assert module_bits(as_dict["model"]) == module_bits(build(1).model)


def _same_train_state(a: ckpt.TrainState, b: ckpt.TrainState) -> None:
    assert module_bits(a.model) == module_bits(b.model)
    assert module_bits(a.extra["ema"]) == module_bits(b.extra["ema"])
    assert optimizer_bits(a.optimizer) == optimizer_bits(b.optimizer)
    assert (a.data, a.extra["epoch"], a.rng) == (b.data, b.extra["epoch"], b.rng)


def test_declared_values_come_back_declared(tmp_path: Path) -> None:
    saved = {"a": ckpt.per_rank((1, 2.0)), "b": ckpt.replicated(7), "c": ckpt.replicated(torch.ones(2))}
    tensor = torch.zeros(2)
    target: dict[str, Any] = {"a": ckpt.per_rank(None), "b": ckpt.replicated(0), "c": ckpt.replicated(tensor)}
    round_trip(tmp_path, saved, target)
    assert target["a"] == ckpt.per_rank((1, 2.0)) and type(target["a"].value) is tuple
    assert target["b"] == ckpt.replicated(7)
    assert target["c"].value is tensor and raw(tensor) == raw(torch.ones(2))


def test_a_state_is_a_dict_or_a_train_state(tmp_path: Path) -> None:
    with ckpt.Checkpointer(tmp_path) as ck:
        for state in ([1], torch.ones(1), None, tiny_net(1)):
            with pytest.raises(ckpt.Unsupported, match=r"pass a dict or a ckpt\.TrainState"):
                ck.save(1, state)  # type: ignore[arg-type]
        receipt = ck.save(1, {})  # nothing at all is a state too
        assert receipt.bytes == 0 and ck.load({}) is not None
