"""Megatron's own optimizers, saved on one layout and loaded on any other, with and without ZeRO: every rank's part has
the bits that it must have, and training goes on with the bits of the run that never stopped.

Each setup (layout and optimizer) is launched once to train and save, and once in fresh processes to load what all
others of its family saved. What a rank must hold is known from Megatron's own ranges, without ckpt.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ckpt
from ckpt import Layout
from tests.support import megatron_trainer as mt
from tests.support.gpt_oracle import GptSize
from tests.support.layouts import attempts, different, start
from tests.support.megatron_cpu import megatron_on_cpu
from tests.support.roots import Root
from tests.support.tiny_gpt import parallel

pytestmark = [pytest.mark.ranks, pytest.mark.slow, pytest.mark.timeout(600)]

STEPS = 5  # before the save, and again after it


@dataclass(frozen=True)
class Setup:
    """A layout with the kind of optimizer on it. bucket: size of Megatron's buffers' buckets, in elements."""

    layout: Layout
    kind: str
    bucket: int | None = None

    def __str__(self) -> str:
        return f"{self.kind}-{self.layout}"


@dataclass(frozen=True)
class Family:
    """A model on several setups. All but those of one rank train and save what all load."""

    size: GptSize
    setups: tuple[Setup, ...]
    frozen: bool = False

    def trainer(self, setup: Setup, seed: int) -> mt.MegatronTrainer:
        return mt.make_trainer(self.size, setup.kind, seed, bucket_size=setup.bucket, frozen=self.frozen)

    @property
    def sources(self) -> list[Setup]:
        return [setup for setup in self.setups if setup.layout.world > 1]


BF16 = torch.bfloat16
FAMILIES = {
    "dense": Family(
        GptSize(layers=4, hidden=32, heads=4, kv_groups=2, ffn=88, vocab=130, dtype=BF16),
        (
            Setup(Layout(), "zero"),
            Setup(Layout(dp=4), "zero"),
            Setup(Layout(tp=2, dp=2), "zero", bucket=9_000),
            Setup(Layout(pp=2, dp=2), "zero"),
            Setup(Layout(tp=2, pp=2), "whole"),
        ),
    ),
    "experts": Family(
        GptSize(layers=2, hidden=32, heads=4, ffn=40, vocab=128, experts=4, dtype=BF16),
        (
            Setup(Layout(), "zero"),
            Setup(Layout(dp=4, ep=2), "zero", bucket=5_000),
            Setup(Layout(pp=2, dp=2, ep=2), "zero"),
            Setup(Layout(dp=4, ep=4), "whole"),
        ),
    ),
    "tied": Family(  # with pipeline stages, first and last hold a copy of the embedding and its state each
        GptSize(layers=2, hidden=32, heads=4, ffn=48, vocab=130, tied=True, dtype=BF16),
        (Setup(Layout(pp=2, dp=2), "zero"), Setup(Layout(tp=2, dp=2), "zero")),
    ),
    "frozen": Family(  # a part of each stack has no optimizer state
        GptSize(layers=4, hidden=32, heads=4, ffn=48, vocab=128, dtype=BF16),
        (Setup(Layout(dp=4), "zero"), Setup(Layout(tp=2, pp=2), "whole")),
        frozen=True,
    ),
    "float32": Family(
        GptSize(layers=2, hidden=32, heads=4, ffn=48, vocab=128),
        (Setup(Layout(tp=2, dp=2), "zero"), Setup(Layout(pp=2, dp=2), "whole")),
    ),
}
CASES = [(name, setup) for name, family in FAMILIES.items() for setup in family.setups]


@dataclass(frozen=True)
class Source:
    """What a setup trained and saved. options: of the group of each parameter that is not a layer's, by name."""

    root: str
    state_id: str
    options: dict[str, Any]


@dataclass(frozen=True)
class Seen:
    """What one rank saw when it loaded a source: lines for what differed; the id of what it loaded, and of what it then
    saved where it did."""

    wrong: list[str]
    loaded: str
    saved: str | None
    options: dict[str, Any]


Sources = dict[tuple[str, Setup], Source]
Key = tuple[str, Setup]


def _options(trainer: mt.MegatronTrainer) -> dict[str, Any]:
    """Options of every group with a member here, by local parameter name, and the scheduler's state."""
    names = {id(tensor): name for name, _, tensor, _ in mt.stepped(trainer)}
    if trainer.size.tied:
        names = {k: name.replace("output_layer", "embedding.word_embeddings") for k, name in names.items()}
    return {
        names[id(p)]: {k: v for k, v in group.items() if k not in ("params", "is_expert_parallel")}
        for single in mt.singles(trainer.optimizer)
        for group in single.optimizer.param_groups
        for p in group["params"]
        if ".layers." not in names[id(p)]
    } | {"schedule": trainer.scheduler.state_dict()}


# --- On a rank ---


def _train(rank: int, world: int, family: Family, setup: Setup, folder: str) -> dict[str, Any]:
    """Trains, saves, and trains on."""
    layout = setup.layout
    with parallel(layout.tp, layout.pp, layout.dp, layout.ep), megatron_on_cpu():
        trainer = family.trainer(setup, seed=1)
        losses = [mt.train_step(trainer) for _ in range(STEPS)]
        saved, options = mt.collect(trainer), _options(trainer)
        with ckpt.Checkpointer(f"{folder}/trained", layout=layout) as ck:
            state_id = ck.save(STEPS, trainer.state()).state_id
        still = mt.collect(trainer)
        assert [mt.bits(saved[kind][1]) for kind in saved] == [mt.bits(still[kind][1]) for kind in saved]
        losses += [mt.train_step(trainer) for _ in range(STEPS)]
        end = mt.collect(trainer)
    return {"id": state_id, "losses": losses, "saved": saved, "end": end, "options": options}


def _load(rank: int, world: int, family: Family, setup: Setup, folders: list[str]) -> tuple[list[Seen], str]:
    """Loads what each source saved into another random init; saves the first one again, and trains on where the setup
    is the same. Then saves the labelled state, and tells its id."""
    layout, visits = setup.layout, []
    with parallel(layout.tp, layout.pp, layout.dp, layout.ep), megatron_on_cpu():
        for number, (source, folder) in enumerate(zip(family.sources, folders, strict=True)):
            trainer = family.trainer(setup, seed=100 + number)
            if number % 2:  # every other time the optimizer has a state of its own, else it has never stepped
                mt.train_step(trainer)
            try:
                visits.append(_visit(trainer, layout, folder, again=number == 0, go_on=source == setup))
            except Exception as error:
                error.add_note(f"{setup} loads what {source} saved")
                raise
        trainer = family.trainer(setup, seed=1)
        mt.fill(trainer, mt.labelled(family.size))
        with ckpt.Checkpointer(f"{folders[0]}/labelled-{setup}", layout=layout) as ck:
            labelled = ck.save(1, trainer.state()).state_id
    return visits, labelled


def _visit(trainer: mt.MegatronTrainer, layout: Layout, folder: str, again: bool, go_on: bool) -> Seen:
    saved = _vectors(f"{folder}/saved.npz", trainer.size)
    lines = [f"the random init held {name} already" for name in _large(trainer) - set(mt.wrong_model(trainer, saved))]
    state = trainer.state()
    with ckpt.Checkpointer(f"{folder}/trained", layout=layout, read_only=True) as ck:
        restored = ck.load(state)
    assert restored is not None
    lines += mt.wrong(trainer, saved)
    trainer.step = state["step"]
    options = _options(trainer)
    state_id = None
    if again:
        with ckpt.Checkpointer(f"{folder}/again-{trainer.kind}-{layout}", layout=layout) as ck:
            state_id = ck.save(STEPS, trainer.state()).state_id
    if go_on:
        losses = [mt.train_step(trainer) for _ in range(STEPS)]
        end = _vectors(f"{folder}/end.npz", trainer.size)
        lines += [f"{STEPS} steps later: {line}" for line in mt.wrong(trainer, end)]
        expected = np.load(f"{folder}/losses.npy").tolist()[STEPS:]
        lines += [f"losses: {losses}, not {expected}"] if losses != expected else []
    return Seen(lines, restored.state_id, state_id, options)


def _large(trainer: mt.MegatronTrainer) -> set[str]:
    """Names of the parameters that a random init cannot give the same bits twice."""
    return {name for name, parameter in trainer.model.named_parameters() if parameter.dim() > 1}


def _vectors(file: str, size: GptSize) -> dict[str, torch.Tensor]:
    with np.load(file) as found:
        vectors = {kind: torch.from_numpy(found[kind]) for kind in found}
    vectors["model"] = vectors["model"].view(size.dtype)
    return vectors


# --- In the parent ---


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Sources:
    """What the setups trained and saved."""
    base = tmp_path_factory.mktemp("sources")
    found: Sources = {}
    with start(4) as crew:
        for name, family in FAMILIES.items():
            for setup in family.sources:
                folder = base / f"{name}-{setup}"
                folder.mkdir()
                found[name, setup] = _source(family, folder, crew.run(_train, family, setup, str(folder), timeout=120))
    return found


def _source(family: Family, folder: Path, ranks: list[dict[str, Any]]) -> Source:
    assert len({(found["id"], str(found["losses"])) for found in ranks}) == 1
    for moment in ("saved", "end"):
        vectors = mt.whole(family.size, [found[moment] for found in ranks])
        words = {4: torch.int32, 2: torch.int16}
        arrays = {kind: v.view(words[v.element_size()]) if kind == "model" else v for kind, v in vectors.items()}
        np.savez(folder / f"{moment}.npz", **{kind: array.numpy() for kind, array in arrays.items()})
    np.save(folder / "losses.npy", ranks[0]["losses"])
    options = {name: one for found in ranks for name, one in found["options"].items()}
    return Source(str(folder), ranks[0]["id"], options)


@pytest.fixture(scope="module")
def visits(sources: Sources) -> dict[Key, tuple[list[list[Seen]], str]]:
    """What the ranks of each setup, in fresh processes, saw of every source of its family (by source, then by rank),
    and the id of the labelled state that they saved."""
    found = {}
    for world in (1, 4):
        with start(world) as crew:
            for name, setup in CASES:
                if setup.layout.world == world:
                    folders = [sources[name, source].root for source in FAMILIES[name].sources]
                    ranks = crew.run(_load, FAMILIES[name], setup, folders, timeout=180)
                    [labelled] = {labelled for _, labelled in ranks}
                    found[name, setup] = [list(one) for one in zip(*(seen for seen, _ in ranks), strict=True)], labelled
    return found


@pytest.mark.parametrize(("family", "setup"), CASES, ids=str)
def test_a_setup_loads_what_every_setup_saved_and_goes_on(
    visits: dict[Key, tuple[list[list[Seen]], str]], sources: Sources, family: str, setup: Setup
) -> None:
    for number, (other, ranks) in enumerate(zip(FAMILIES[family].sources, visits[family, setup][0], strict=True)):
        source = sources[family, other]
        assert {rank: seen.wrong for rank, seen in enumerate(ranks) if seen.wrong} == {}, other
        assert {seen.loaded for seen in ranks} == {source.state_id}, other
        for seen in ranks:
            assert str(seen.options) == str({name: source.options[name] for name in seen.options}), other
        if number == 0:
            assert {seen.saved for seen in ranks} == {source.state_id}, other
            trained, again = (f"{source.root}/{name}" for name in ("trained", f"again-{setup.kind}-{setup.layout}"))
            assert different(*attempts(Root(trained)), *attempts(Root(again))) == [], other


@pytest.mark.parametrize("family", FAMILIES)
def test_setups_that_hold_one_state_write_the_same_bytes(
    visits: dict[Key, tuple[list[list[Seen]], str]], sources: Sources, family: str
) -> None:
    base = sources[family, FAMILIES[family].sources[0]].root
    first, *others = FAMILIES[family].setups
    [files] = attempts(Root(f"{base}/labelled-{first}"))
    assert "manifest.json" in files and any("/c/" in name for name in files)
    for other in others:
        assert visits[family, other][1] == visits[family, first][1], other
        assert different(*attempts(Root(f"{base}/labelled-{other}")), files) == [], other


def test_trained_states_differ(sources: Sources) -> None:
    """The control: setups do not train with the same bits, so each load had a state of its own to find."""
    assert len({source.state_id for source in sources.values()}) == len(sources)
