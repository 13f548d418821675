"""Saved on any layout and loaded on any other, every rank's every tensor has the bits that it must have.

Each layout is launched once to save, and once in fresh processes to load what all the others saved. One crew of
ranks for each world size hosts all layouts of that size, because starting processes is what takes the time.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from ckpt import Checkpointer, Layout
from tests.support.gpt_oracle import GptSize
from tests.support.layouts import (
    FAMILIES,
    STEP,
    Stop,
    attempts,
    different,
    faults,
    label,
    run_stops,
    start,
    tour,
    wrong,
)
from tests.support.megatron_cpu import megatron_on_cpu
from tests.support.ranks import Crew
from tests.support.roots import Root
from tests.support.s3 import S3Server
from tests.support.tiny_gpt import build_model, parallel

pytestmark = [pytest.mark.ranks, pytest.mark.slow, pytest.mark.timeout(600)]

CASES = sorted(
    ((name, layout) for name, family in FAMILIES.items() for layout in family.layouts),
    key=lambda case: (-case[1].world, case[0]),
)

CHAINS = [
    (Layout(tp=2, pp=2), Layout(pp=2, dp=2), Layout(tp=4)),
    (Layout(tp=4, pp=2), Layout(tp=2, pp=2, dp=2), Layout(tp=2, pp=4)),
]


@dataclass(frozen=True)
class Saved:
    """What one layout of a family saved."""

    layout: Layout
    root: Root
    state_id: str
    files: dict[str, str]
    """Relative name to SHA-256, of `state/` and the manifest."""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Saved]]:
    """By family: the labelled state as each of its layouts saved it."""
    folder = tmp_path_factory.mktemp("saved")
    stops = {
        case: Stop(case[1], FAMILIES[case[0]].size, Root(str(folder / f"{case[0]}-{case[1]}")), save=True)
        for case in CASES
    }
    visits = dict(zip(stops, tour(list(stops.values())), strict=True))
    assert faults(list(stops.values()), list(visits.values())) == []
    found: dict[str, list[Saved]] = {name: [] for name in FAMILIES}
    for (name, layout), seen in visits.items():
        root, state_id = stops[name, layout].root, seen[0].saved
        assert state_id is not None
        [files] = attempts(root)
        found[name].append(Saved(layout, root, state_id, files))
    return found


@pytest.fixture(scope="module")
def crew_of(saved: dict[str, list[Saved]]) -> Iterator[Callable[[int], Crew]]:
    """Crews for loading; those that saved are gone. One at a time, because a rank takes 400 MiB: the tests are
    in an order in which that starts few."""
    crews: list[Crew] = []

    def crew(world: int) -> Crew:
        if not crews or crews[-1].world != world or crews[-1].broken:
            while crews:
                crews.pop().close()
            crews.append(start(world))
        return crews[-1]

    yield crew
    while crews:
        crews.pop().close()


@pytest.mark.parametrize("family", FAMILIES)
def test_all_layouts_write_the_same_bytes(saved: dict[str, list[Saved]], family: str) -> None:
    first, *others = saved[family]
    assert "manifest.json" in first.files and "state/zarr.json" in first.files
    assert sum("/c/" in name for name in first.files) > (40 if family == "large" else 5)
    for other in others:
        assert other.state_id == first.state_id, other.layout
        assert different(other.files, first.files) == [], other.layout


def test_families_differ(saved: dict[str, list[Saved]]) -> None:
    ids = [of_family[0].state_id for of_family in saved.values()]
    assert len(set(ids)) == len(FAMILIES)


@pytest.mark.s3
def test_saved_to_s3_and_loaded_on_another_layout(
    saved: dict[str, list[Saved]], crew_of: Callable[[int], Crew], s3: S3Server
) -> None:
    size, root = FAMILIES["dense"].size, Root(s3.url("layout-matrix"), s3.storage_options)
    stops = [
        Stop(Layout(tp=2, pp=2), size, root, save=True, seed=300),
        Stop(Layout(tp=4), size, root, load=True, seed=301),
    ]
    visits = run_stops(crew_of(4), stops)
    assert faults(stops, visits) == []
    first = saved["dense"][0]
    assert [visits[0][0].saved, visits[1][0].loaded] == [first.state_id] * 2
    assert [different(files, first.files) for files in attempts(root)] == [[]]


def _save_permuted(rank: int, world: int, root: Root, size: GptSize) -> str:
    """Saves a state in which six things lie where others belong, as after a wrong load."""
    with parallel(dp=world):
        with megatron_on_cpu():
            model = build_model(size, seed=1)
        optimizer = torch.optim.AdamW(model.parameters())
        label(model, optimizer)
        param = dict(model.named_parameters())
        moments = optimizer.state[param["embedding.word_embeddings.weight"]]
        layer = "decoder.layers.{}.{}".format

        def swap(a: torch.Tensor, b: torch.Tensor) -> None:
            kept = a.clone()
            a.copy_(b)
            b.copy_(kept)

        with torch.no_grad():
            swap(*param[layer(0, "self_attention.linear_qkv.weight")].chunk(2))  # the parts of two TP ranks
            swap(param[layer(1, "mlp.linear_fc2.weight")], param[layer(3, "mlp.linear_fc2.weight")])  # layers
            swap(*param[layer(2, "mlp.linear_fc1.weight")].chunk(2))  # gate and up
            swap(*param["decoder.final_layernorm.weight"][:2])  # two neighbours
        swap(moments["exp_avg"], moments["exp_avg_sq"])
        norms = [optimizer.state[param[layer(number, "input_layernorm.weight")]] for number in (0, 2)]
        swap(norms[0]["step"], norms[1]["step"])
        with Checkpointer(root.url) as ck:
            return ck.save(1, {"model": model, "optimizer": optimizer, "step": STEP}).state_id


def _load_permuted(rank: int, world: int, root: Root, size: GptSize) -> list[str]:
    with parallel(tp=2, pp=2):
        with megatron_on_cpu():
            model = build_model(size, seed=2)
        optimizer = torch.optim.AdamW(model.parameters())
        state = {"model": model, "optimizer": optimizer, "step": 0}
        with Checkpointer(root.url, layout=Layout(tp=2, pp=2)) as ck:
            ck.load(state)
        return sorted(line.split(":")[0] for line in wrong(model, optimizer, state["step"]))


def test_the_comparison_would_catch_a_permuted_load(
    saved: dict[str, list[Saved]], crew_of: Callable[[int], Crew], tmp_path: Path
) -> None:
    """The control: a load verifies against what was saved, so the oracle must tell permuted bits from right ones."""
    size, root = FAMILIES["dense"].size, Root(str(tmp_path))
    state_ids = crew_of(4).run(_save_permuted, root, size)
    assert state_ids[0] != saved["dense"][0].state_id
    first_stage = [
        "decoder.layers.0.input_layernorm.weight (step)",
        "decoder.layers.0.self_attention.linear_qkv.weight (param)",
        "decoder.layers.1.mlp.linear_fc2.weight (param)",
        "embedding.word_embeddings.weight (exp_avg)",
        "embedding.word_embeddings.weight (exp_avg_sq)",
    ]
    last_stage = [
        "decoder.final_layernorm.weight (param)",
        "decoder.layers.0.input_layernorm.weight (step)",
        "decoder.layers.0.mlp.linear_fc1.weight (param)",
        "decoder.layers.1.mlp.linear_fc2.weight (param)",
    ]
    found = crew_of(4).run(_load_permuted, root, size)
    assert found == [first_stage, first_stage, last_stage, last_stage]


@pytest.mark.parametrize("chain", CHAINS, ids=lambda chain: "+".join(map(str, chain)))
def test_a_chain_of_layouts_comes_back_to_the_first_state(
    saved: dict[str, list[Saved]], crew_of: Callable[[int], Crew], tmp_path: Path, chain: tuple[Layout, ...]
) -> None:
    size, root = FAMILIES["dense"].size, Root(str(tmp_path))
    stops = [
        Stop(layout, size, root, load=number > 0, save=True, seed=200 + number)
        for number, layout in enumerate([*chain, chain[0]])
    ]
    visits = run_stops(crew_of(chain[0].world), stops)
    assert faults(stops, visits) == []
    first = saved["dense"][0]
    assert [seen[0].saved for seen in visits] == [first.state_id] * len(stops)
    assert [seen[0].loaded for seen in visits] == [None] + [first.state_id] * len(chain)
    assert [seen[0].step for seen in visits] == list(range(1, len(stops) + 1))
    assert [different(files, first.files) for files in attempts(root)] == [[]] * len(stops)


@pytest.mark.parametrize(("family", "layout"), CASES, ids=str)
def test_a_layout_loads_what_every_layout_saved(
    saved: dict[str, list[Saved]], crew_of: Callable[[int], Crew], family: str, layout: Layout
) -> None:
    stops = [
        Stop(layout, FAMILIES[family].size, other.root, load=True, seed=100 + number)
        for number, other in enumerate(saved[family])
    ]
    visits = run_stops(crew_of(layout.world), stops)
    assert faults(stops, visits) == []
    assert {seen[0].loaded for seen in visits} == {saved[family][0].state_id}
