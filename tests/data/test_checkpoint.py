"""Cursors through a Checkpointer: stop, resume in new objects, and be refused before anything has changed."""

from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt.data import GlobalCursor, GlobalLoader, MegatronCursor, PackedCursor, PackedSequences, TorchdataCursor
from tests.data.corpus import Augmented, Documents, Numbers
from tests.support.ranks import Crew
from tests.support.raw import raw

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # torchdata, with newer torch
LENGTHS = [7, 0, 3, 12, 1, 1, 25, 4, 0, 9, 2, 6]


def _cursor(**changed: Any) -> GlobalCursor:
    return GlobalCursor.over(Augmented(changed.pop("size", 30)), **({"global_batch": 12, "seed": 3} | changed))


class Run:
    """A tiny training run on one rank, whose loss needs every bit of the data."""

    def __init__(self, init: int = 0, micro: int = 4, **changed: Any) -> None:
        torch.manual_seed(init)
        self.model = torch.nn.Linear(4, 3, dtype=torch.float64)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.cursor = _cursor(**changed)
        self.loader = GlobalLoader(Augmented(self.cursor.size), self.cursor, 0, 1, micro)
        self.seen: list[bytes] = []

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "data": self.cursor}

    def train(self, steps: int) -> None:
        for batch in self.loader:
            self.seen.append(raw(batch))
            self.model(batch).square().mean().backward()
            if self.loader.complete:
                self.optimizer.step()
                self.optimizer.zero_grad()
                self.loader.mark_consumed()
                steps -= 1
            if not steps:
                return

    def bits(self) -> list[bytes]:
        return [raw(p) for p in self.model.parameters()]


def test_a_resumed_run_trains_on_to_the_same_bits(tmp_path: Path) -> None:
    straight = Run()
    straight.train(7)
    first = Run()
    with ckpt.Checkpointer(tmp_path) as ck:
        first.train(2)
        ck.save(2, first.state)
        first.train(1)
        list(islice(first.loader, 2))  # amid the accumulation of a step that the checkpoint does not have
        receipt = ck.save(3, first.state)
    for step in (2, 3):
        second = Run(init=9)
        with ckpt.Checkpointer(tmp_path) as ck:
            ck.load(second.state, step=step)
        assert second.cursor.total == 12 * step
        second.train(7 - step)
        assert first.seen[: 3 * step] + second.seen == straight.seen
        assert second.bits() == straight.bits()
    other = Run(micro=12)  # neither the microbatch nor anything else of the loader is part of the state
    other.cursor.load_state_dict({**other.cursor.state_dict(), "epoch": 1, "consumed": 6, "total": 36})
    with ckpt.Checkpointer(tmp_path / "other") as ck:
        ck.save(1, {"data": first.cursor})
        assert ck.save(2, {"data": other.cursor}).state_id == ck.save(3, {"data": first.cursor}).state_id
    assert receipt.step == 3


@pytest.mark.parametrize("changed", [{"seed": 4}, {"size": 29}, {"global_batch": 24}, {"epoch_end": "drop"}], ids=str)
def test_another_order_is_refused_before_a_tensor_changes(changed: dict[str, Any], tmp_path: Path) -> None:
    first = Run()
    first.train(1)
    with ckpt.Checkpointer(tmp_path) as ck:
        ck.save(1, first.state)
        other = Run(init=9, **changed)
        before = other.bits()
        with pytest.raises(ckpt.StateMismatch, match=r"GlobalCursor: saved with \w+=.*, but this run has"):
            ck.load(other.state)
        assert other.bits() == before and other.cursor.total == 0
        assert not other.optimizer.state
        ck.save(2, other.state)  # and the run is as sound as it was


def test_a_changed_data_set_is_refused(tmp_path: Path) -> None:
    with ckpt.Checkpointer(tmp_path) as ck:
        ck.save(1, ckpt.TrainState(data=_cursor()))
        other = GlobalCursor.over(Numbers(30), global_batch=12, seed=3)
        with pytest.raises(
            ckpt.StateMismatch, match=r"dataset_fingerprint=.*open the data set that the run began with"
        ):
            ck.load(ckpt.TrainState(data=other))


def test_a_load_ends_a_running_iteration(tmp_path: Path) -> None:
    run = Run()
    with ckpt.Checkpointer(tmp_path) as ck:
        ck.save(1, {"data": run.cursor})
        iteration = iter(run.loader)
        next(iteration)
        ck.load({"data": run.cursor})
        with pytest.raises(ckpt.CkptError, match="iterate over the loader anew"):
            next(iteration)
        assert raw(next(iter(run.loader))) == raw(next(iter(Run().loader)))


def test_packed_and_megatron_cursors(tmp_path: Path) -> None:
    def make(length: int = 4, micro: int = 2) -> dict[str, Any]:
        packed = PackedCursor.over(Documents(LENGTHS), LENGTHS, length, global_batch=6)
        return {"data": {"train": packed, "valid": MegatronCursor(12, micro, 3, 600)}}

    saved = make()
    loader = GlobalLoader(PackedSequences(Documents(LENGTHS)), saved["data"]["train"], 0, 1)
    for _ in range(4):
        next(iter(loader))
        loader.mark_consumed()
        saved["data"]["valid"].advance()
    with ckpt.Checkpointer(tmp_path) as ck:
        ck.save(4, saved)
        loaded = make(micro=1)
        ck.load(loaded)
        for name in ("train", "valid"):
            assert loaded["data"][name].state_dict() == saved["data"][name].state_dict()
        assert loaded["data"]["valid"].consumed_samples == 48
        resumed = GlobalLoader(PackedSequences(Documents(LENGTHS)), loaded["data"]["train"], 0, 1)
        assert raw(next(iter(resumed))["tokens"]) == raw(next(iter(loader))["tokens"])
        with pytest.raises(ckpt.StateMismatch, match="PackedCursor: saved with seq_len=4, but this run has seq_len=5"):
            ck.load(make(length=5))


def _stateful(rank: int, size: int) -> Any:
    stateful = pytest.importorskip("torchdata.stateful_dataloader")
    samplers = pytest.importorskip("torchdata.stateful_dataloader.sampler")
    data = Numbers(24)
    sampler = samplers.StatefulDistributedSampler(data, size, rank, seed=3)
    return stateful.StatefulDataLoader(data, batch_size=2, sampler=sampler, generator=torch.Generator())


def test_torchdata_is_refused_on_another_number_of_ranks_before_a_tensor_changes(tmp_path: Path) -> None:
    loader, weight = _stateful(0, 2), torch.zeros(3)
    cursor = TorchdataCursor(loader, 0, 2)
    batches = [raw(batch) for batch in islice(loader, 3)]
    with ckpt.Checkpointer(tmp_path) as ck:
        ck.save(1, {"w": torch.ones(3), "data": cursor})
        with pytest.raises(
            ckpt.StateMismatch, match=r"saved by 2 data-parallel ranks, this run has 4, and each rank's"
        ):
            ck.load({"w": weight, "data": TorchdataCursor(_stateful(0, 4), 0, 4)})
        assert raw(weight) == raw(torch.zeros(3))
        again = _stateful(0, 2)
        ck.load({"w": weight, "data": TorchdataCursor(again, 0, 2)})
        assert raw(weight) == raw(torch.ones(3))
    assert batches + [raw(b) for b in again] == [raw(b) for b in _stateful(0, 2)]


# Several processes


def _train(rank: int, world: int, root: str, tensor_parallel: int, steps: int) -> dict[str, Any]:
    """Loads what is there, trains some steps, and saves. Ranks of one data-parallel coordinate read the same data."""
    size, own = world // tensor_parallel, rank // tensor_parallel
    cursor, stateful = _cursor(), _stateful(own, size)
    foreign = TorchdataCursor(stateful, own, size)
    with ckpt.Checkpointer(root, layout=ckpt.Layout(tp=tensor_parallel, dp=size)) as ck:
        state = {"data": cursor, "foreign": foreign}
        refused = ""
        try:
            ck.load(state)
        except ckpt.StateMismatch as error:
            refused = str(error)
            ck.load({"data": cursor}, allow_extra=["foreign/*"])
        loader = GlobalLoader(Augmented(30), cursor, own, size)
        foreign_batches = iter(stateful)
        batches: list[Any] = []
        for batch in islice(loader, steps):
            batches.append((raw(batch), raw(next(foreign_batches))))
            loader.mark_consumed()
        receipt = ck.save(cursor.total, {"data": cursor, "foreign": foreign})
    return {"batches": batches, "refused": refused, "id": receipt.state_id}


@pytest.mark.ranks
@pytest.mark.slow
def test_other_tensor_and_data_parallel_sizes(tmp_path: Path) -> None:
    with Crew(1) as crew:
        straight = [b for b, _ in crew.run(_train, str(tmp_path / "straight"), 1, 5)[0]["batches"]]
    expected = {rank: [raw(b) for b in _stateful(rank, 2)] for rank in range(2)}
    with Crew(4) as crew:
        first = crew.run(_train, str(tmp_path), 2, 2)  # DP 2 x TP 2
    with Crew(2) as crew:
        second = crew.run(_train, str(tmp_path), 1, 2)  # DP 2: the same data-parallel size, half the ranks
        third = crew.run(_train, str(tmp_path), 2, 1)  # DP 1 x TP 2
    assert [f["refused"] for f in first + second] == [""] * 6
    assert all("saved by 2 data-parallel ranks, this run has 1" in f["refused"] for f in third)
    for dp in range(2):
        assert first[2 * dp]["batches"] == first[2 * dp + 1]["batches"]
        seen = [foreign for part in (first[2 * dp], second[dp]) for _, foreign in part["batches"]]
        assert seen == expected[dp][:4]
    joined = [
        b"".join(part["batches"][i][0] for part in parts)
        for parts, steps in ((first[::2], 2), (second, 2), (third[:1], 1))
        for i in range(steps)
    ]
    assert joined == straight
