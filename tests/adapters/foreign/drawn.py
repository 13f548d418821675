"""States that tests of several formats draw."""

from collections.abc import Iterable
from typing import Any

import torch
from hypothesis import strategies as st

import ckpt
from tests.support.raw import random_bits

SHAPES = st.lists(st.integers(0, 40), max_size=3).map(tuple) | st.sampled_from([(700, 130), (3, 200, 90), (70000,)])
PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | st.text("aé/~") | st.binary()


@st.composite
def states(draw: st.DrawFn, dtypes: Iterable[str]) -> dict[str, Any]:
    """Tensors of these dtypes, nested ones, a tied one, plain values, and one of the rank's own."""
    keys = draw(st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=6), unique=True, max_size=6))
    names = st.sampled_from(sorted(dtypes))
    tensors = {key: random_bits(draw(SHAPES), getattr(torch, draw(names)), number) for number, key in enumerate(keys)}
    state: dict[str, Any] = {"m": tensors, "list": [torch.ones(3), {1: torch.zeros((), dtype=torch.int64)}]}
    if tensors:
        state["tied"] = next(iter(tensors.values()))
    state["values"] = draw(st.recursive(PLAIN, st.lists))
    state["rank"] = ckpt.per_rank({"seed": draw(st.integers())})
    return state
