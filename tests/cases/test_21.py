"""Case 21: a vocabulary's padding is state while its size stays; another size is refused, or real rows go on alone."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ckpt
from tests.support import megatron_trainer as mt
from tests.support.gpt_oracle import GptSize
from tests.support.megatron_cpu import megatron_on_cpu
from tests.support.ranks import Crew
from tests.support.raw import raw
from tests.support.tiny_gpt import parallel

pytestmark = [pytest.mark.ranks]

WORDS, HIDDEN = 13, 3
POISON = 9e9
SHAPES = {"word_embeddings.weight": (HIDDEN,), "output_layer.weight": (HIDDEN,), "output_layer.bias": ()}
MASKED = ckpt.Vocabulary(WORDS, "masked")


@pytest.fixture(scope="module")
def crew() -> Iterator[Crew]:
    with Crew(4) as crew:
        yield crew


def padded(tp: int) -> int:
    return -(-WORDS // (3 * tp)) * 3 * tp  # 15, 18 and 24 rows for TP 1, 2 and 4


def whole(tp: int, padding: float) -> dict[str, torch.Tensor]:
    """Weights, masters and moments: all rows labelled, but those of padding."""
    made = {}
    for number, (name, shape) in enumerate(SHAPES.items()):
        for kind, dtype in (("", torch.bfloat16), ("/exp_avg", torch.float32), ("/exp_avg_sq", torch.float32)):
            values = torch.arange(WORDS * (HIDDEN if shape else 1), dtype=torch.float32).reshape(WORDS, *shape)
            full = torch.full((padded(tp), *shape), padding, dtype=dtype)
            full[:WORDS] = (values + 100 * (len(made) + 1) + number).to(dtype)
            made[name + kind] = full
    return made


def state_of(full: dict[str, torch.Tensor], tp: int, rank: int, fill: bool) -> dict[str, Any]:
    state = {}
    for name, tensor in full.items():
        rows = tensor.shape[0] // tp
        local = tensor[rank * rows : (rank + 1) * rows].clone()
        if not fill:
            local.fill_(-7)
        box = ((rank * rows, *(0 for _ in tensor.shape[1:])), tuple(local.shape), (0,) * local.dim())
        state[name] = ckpt.ShardedTensor(local, [box], tuple(tensor.shape))
    return state


def test_real_rows_are_the_same_after_any_chain_of_sizes(crew: Crew, tmp_path: Path) -> None:
    found = crew.run(_chain_on_all, str(tmp_path / "root"), timeout=90)
    assert found == [[]] * 4


def _chain_on_all(rank: int, world: int, root: str) -> list[str]:
    wrong: list[str] = []
    before: int | None = None
    for step, tp in enumerate((1, 2, 4, 1)):
        group = dist.new_group(list(range(tp)))
        if rank < tp:
            wrong += _one_size(rank, root, tp, step, before, group)
        before = padded(tp)
        dist.barrier()
    return wrong


def _one_size(rank: int, root: str, tp: int, step: int, before: int | None, group: Any) -> list[str]:
    with ckpt.Checkpointer(root, ckpt.Layout(tp=tp), process_group=group) as ck:
        state = state_of(whole(tp, POISON), tp, rank, fill=before is None)
        wrong = []
        if before is not None:
            with pytest.raises(ckpt.StateMismatch, match=r"vocabulary=ckpt\.Vocabulary.*'masked'.*'drop'") as error:
                ck.load(state)
            assert f"[{padded(tp)}" in str(error.value) and f"[{before}" in str(error.value)
            restored = ck.load(state, vocabulary=MASKED)
            assert restored is not None and restored.verified
            expected = state_of(whole(tp, 0.0), tp, rank, fill=True)
            wrong = [f"tp{tp} {name}" for name in state if raw(state[name].local) != raw(expected[name].local)]
        ck.save(step, state)
    return wrong


def test_padding_of_the_same_size_is_loaded_bit_for_bit(tmp_path: Path) -> None:
    with ckpt.Checkpointer(tmp_path) as ck:
        ck.save(1, state_of(whole(1, POISON), 1, 0, fill=True))
        for vocabulary in (None, MASKED):
            state = state_of(whole(1, 0.0), 1, 0, fill=False)
            ck.load(state, vocabulary=vocabulary)
            assert {n: raw(t.local) for n, t in state.items()} == {n: raw(t) for n, t in whole(1, POISON).items()}


def test_all_is_verified_though_padding_is_dropped(tmp_path: Path) -> None:
    """A wrong bit in a real row is found, and what was there is put back, padding too, if asked."""
    with ckpt.Checkpointer(tmp_path) as ck:
        ck.save(1, state_of(whole(1, POISON), 1, 0, fill=True))
        state = state_of(whole(2, 5.0), 1, 0, fill=False)

        def flip(point: str) -> None:
            if point == "load.placed":
                state["word_embeddings.weight"].local[0, 0] = 1.5

        ck._session.faults = flip
        with pytest.raises(ckpt.CorruptCheckpoint, match=r"word_embeddings\.weight"):
            ck.load(state, vocabulary=MASKED, atomic=True)
    assert all(set(t.local.flatten().tolist()) == {-7.0} for t in state.values())


@pytest.mark.parametrize(
    ("vocabulary", "said"),
    [(ckpt.Vocabulary(16, "drop"), "vocabulary is said to have 16"), (ckpt.Vocabulary(13, "drop", ["other"]), "shape")],
)
def test_a_wrong_vocabulary_is_refused_with_nothing_changed(
    tmp_path: Path, vocabulary: ckpt.Vocabulary, said: str
) -> None:
    with ckpt.Checkpointer(tmp_path) as ck:
        ck.save(1, state_of(whole(1, POISON), 1, 0, fill=True))
        state = state_of(whole(2, 5.0), 1, 0, fill=False)
        with pytest.raises(ckpt.StateMismatch, match=said):
            ck.load(state, vocabulary=vocabulary)
    assert all(set(t.local.flatten().tolist()) == {-7.0} for t in state.values())


def test_other_shapes_have_no_such_remedy(tmp_path: Path) -> None:
    with ckpt.Checkpointer(tmp_path) as ck:
        ck.save(1, {"output_layer.weight": torch.zeros(4, 3), "w": torch.zeros(4, 3)})
        for state in ({"output_layer.weight": torch.zeros(4, 2)}, {"w": torch.zeros(5, 3)}):
            with pytest.raises(ckpt.StateMismatch, match="sizes it was saved with"):
                ck.load(state, allow_extra=["*"], vocabulary=ckpt.Vocabulary(3, "drop"))
    for size, padding in ((0, "drop"), (True, "drop"), (5, "keep")):
        with pytest.raises(ckpt.StateMismatch, match="positive int"):
            ckpt.Vocabulary(size, padding)  # type: ignore[arg-type]


class Words(nn.Module):
    def __init__(self, rows: int, tied: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(rows, HIDDEN)
        self.head = nn.Linear(HIDDEN, rows, bias=not tied)
        if tied:
            self.head.weight = self.embed.weight


@pytest.mark.parametrize("tied", [False, True])
def test_a_fresh_optimizer_gets_the_moments_of_real_rows(tmp_path: Path, tied: bool) -> None:
    torch.manual_seed(1)
    model = Words(15, tied)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        model.head(model.embed(torch.arange(15))).square().sum().backward()
        optimizer.step()
    other = Words(24, tied)
    cold = torch.optim.AdamW(other.parameters())
    names = ckpt.Vocabulary(WORDS, "drop", ("*embed.weight*", "*head.weight*", "*head.bias*"))
    with ckpt.Checkpointer(tmp_path) as ck:
        ck.save(1, {"model": model, "optimizer": optimizer})
        ck.load({"model": other, "optimizer": cold}, vocabulary=names)
    for before, after in zip(model.parameters(), other.parameters(), strict=True):
        pairs = [(before, after)]
        pairs += [(optimizer.state[before][k], cold.state[after][k]) for k in ("exp_avg", "exp_avg_sq")]
        assert float(cold.state[after]["step"]) == 3
        for saved, loaded in pairs:
            assert loaded.shape[0] == 24 and raw(loaded[:WORDS]) == raw(saved[:WORDS])
            assert not loaded[WORDS:].any()
    assert (other.head.weight is other.embed.weight) == tied


SAVED, LOADED = (GptSize(layers=2, hidden=32, heads=4, ffn=48, vocab=rows, dtype=torch.bfloat16) for rows in (136, 144))
REAL = 130


def _train_and_save(rank: int, world: int, root: str) -> dict[str, Any]:
    with parallel(tp=2, dp=2), megatron_on_cpu():
        trainer = mt.make_trainer(SAVED, "zero", seed=1)
        mt.train_step(trainer)
        with ckpt.Checkpointer(root, ckpt.Layout(tp=2, dp=2)) as ck:
            ck.save(1, trainer.state())
        return mt.collect(trainer)


def _load_other_size(rank: int, world: int, root: str) -> dict[str, Any]:
    with parallel(tp=4), megatron_on_cpu():
        trainer = mt.make_trainer(LOADED, "zero", seed=2)
        with ckpt.Checkpointer(root, ckpt.Layout(tp=4)) as ck:
            with pytest.raises(ckpt.StateMismatch, match="Vocabulary"):
                ck.load(trainer.state())
            assert ck.load(trainer.state(), vocabulary=ckpt.Vocabulary(REAL, "drop")) is not None
        return mt.collect(trainer)


@pytest.mark.slow
def test_megatron_with_its_distributed_optimizer(crew: Crew, tmp_path: Path) -> None:
    root = str(tmp_path / "root")
    saved = mt.whole(SAVED, crew.run(_train_and_save, root, timeout=120))
    loaded = mt.whole(LOADED, crew.run(_load_other_size, root, timeout=120))
    shapes = [{k: t.shape for k, t in mt.full_tensors(size).items()} for size in (SAVED, LOADED)]
    for kind in saved:
        parts = [saved[kind].split([s.numel() for s in shapes[0].values()])]
        parts += [loaded[kind].split([s.numel() for s in shapes[1].values()])]
        for (name, shape), before, after in zip(shapes[1].items(), *parts, strict=True):
            if before.numel() == after.numel():
                assert mt.bits(before) == mt.bits(after), (kind, name)
            else:
                rows = REAL * shape[1]
                assert mt.bits(before[:rows]) == mt.bits(after[:rows]), (kind, name)
                assert kind == "step" or not after[rows:].any(), (kind, name)
