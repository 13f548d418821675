"""Case 25: no pickle on the way back, planted code never runs, and what a stream keeps for later comes back."""

import contextlib
import io
import os
import pickle
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

import ckpt
from tests.engine.states import tiny_net, train_step
from tests.support.ranks import run_ranks


class Streams:
    """Every kind of stream, each left in the middle: with a second normal number, or half of a word, kept for later."""

    def __init__(self, seed: int) -> None:
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        self.torch = torch.Generator().manual_seed(seed)
        kinds = (np.random.PCG64, np.random.PCG64DXSM, np.random.Philox, np.random.SFC64, np.random.MT19937)
        self.numpy = {kind.__name__: np.random.Generator(kind(seed)) for kind in kinds}

    @property
    def state(self) -> ckpt.RngState:
        return ckpt.RngState({"torch": self.torch, **self.numpy})

    def leave_in_the_middle(self) -> None:
        """An odd number of normal numbers, and of half words."""
        random.gauss(0, 1)
        np.random.standard_normal()
        torch.randn(3)
        torch.randn(1, generator=self.torch, dtype=torch.float64)
        for generator in self.numpy.values():
            generator.integers(1 << 32, dtype=np.uint32)
        assert random.getstate()[2] is not None and np.random.get_state(legacy=False)["has_gauss"] == 1
        assert self.numpy["PCG64"].bit_generator.state["has_uint32"] == 1

    def draw(self) -> list[Any]:
        """What each stream gives next, normal numbers first."""
        found: list[Any] = [random.gauss(0, 1), np.random.standard_normal(), torch.randn(3).tolist()]
        found += torch.randn(3, generator=self.torch).tolist()
        for generator in self.numpy.values():
            found += [int(generator.integers(1 << 32, dtype=np.uint32)), generator.standard_normal()]
        return [*found, random.random(), np.random.random(), torch.rand(1).item()]


def _state(seed: int, streams: Streams | None) -> dict[str, Any]:
    """A state with everything that is not a tensor: streams, plain values, a warm optimizer, a schedule."""
    with torch.random.fork_rng():
        model = tiny_net(seed)
    optimizer = torch.optim.Adam(model.parameters())
    train_step(model, optimizer, seed)
    state: dict[str, Any] = {
        "model": model,
        "opt": optimizer,
        "sched": torch.optim.lr_scheduler.StepLR(optimizer, 2),
        "plain": [(1, 2.5), {"a": b"\xff", 3: None}, np.float32(seed), torch.float16],
        "own": ckpt.per_rank({"pair": (seed, np.int64(3))}),
    }
    return state if streams is None else state | {"rng": streams.state}


@contextlib.contextmanager
def _no_pickle() -> Iterator[None]:
    """Every way into pickle and torch.load raises, also those that were looked up before; NumPy's too."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("something was unpickled")

    watching = [True]
    sys.addaudithook(lambda event, _: refuse() if watching[0] and event == "pickle.find_class" else None)
    targets: list[tuple[Any, str]] = [
        (pickle, "load"),
        (pickle, "loads"),
        (torch, "load"),
        (torch.serialization, "load"),
        (np, "load"),
        (np.lib.format, "read_array"),
    ]
    with contextlib.ExitStack() as stack:
        for owner, name in targets:
            stack.enter_context(patch.object(owner, name, refuse))
        for name in ("Unpickler", "_Unpickler"):  # classes still, since modules derive from them when imported
            kind: Any = getattr(pickle, name)
            stack.enter_context(patch.object(pickle, name, type(name, (kind,), {"__init__": refuse})))
        try:
            yield
        finally:
            watching[0] = False


_early = pickle.loads


def _save(rank: int, world: int, root: str) -> list[Any]:
    streams = Streams(40 + rank)
    streams.leave_in_the_middle()
    with ckpt.Checkpointer(root) as ck:
        ck.save(1, _state(3, streams))
    return streams.draw()


def _load(rank: int, world: int, root: str) -> tuple[list[Any], Any, Any]:
    streams = Streams(7)
    state = _state(5, streams)
    ways = [
        lambda: pickle.Unpickler(io.BytesIO(b"N.")),
        lambda: torch.load("x"),
        lambda: _early(pickle.dumps(os.mkdir)),
    ]
    with _no_pickle():
        for way in ways:  # the control: each is watched
            with pytest.raises(AssertionError, match="something was unpickled"):
                way()
        with ckpt.Checkpointer(root) as ck:
            assert ck.load(state) is not None
            found = streams.draw()
            ck.save(2, state)
            assert ck.load(state, step=1) is not None
            assert streams.draw() == found
    return found, state["plain"], state["own"].value


class _Planted:
    """Makes a file where it is unpickled."""

    def __init__(self, marker: str) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (self.marker,)


@pytest.mark.ranks
def test_two_ranks_load_in_processes_where_pickle_raises(tmp_path: Path) -> None:
    root = str(tmp_path)
    straight = run_ranks(2, _save, root, timeout=60)
    loaded = run_ranks(2, _load, root, timeout=60)
    assert [streams for streams, _, _ in loaded] == straight and straight[0] != straight[1]
    for _, plain, own in loaded:
        assert plain == _state(3, None)["plain"] and type(plain[0]) is tuple and type(plain[2]) is np.float32
        assert own == {"pair": (3, 3)} and type(own["pair"][1]) is np.int64


def test_planted_pickles_never_run(tmp_path: Path) -> None:
    """One in the place of any file that a load reads is refused; one beside them is refused or not looked at."""
    root, marker = tmp_path / "root", str(tmp_path / "ran")
    with ckpt.Checkpointer(root) as ck:
        ck.save(1, _state(3, Streams(3)))
    planted = pickle.dumps(_Planted(marker))
    accepted = set()
    for file in [f for f in sorted(root.rglob("*")) if f.is_file()]:
        kept = file.read_bytes()
        file.write_bytes(planted)
        if _loads(root):
            accepted.add(file.name)
        file.write_bytes(kept)
        assert not os.path.exists(marker), file
    assert accepted <= {"intent.json", "000000.json"}, "the intent and receipts of a committed attempt are not read"
    for folder in [f for f in (root, *sorted(root.rglob("*"))) if f.is_dir()]:
        for name in ("rng.pkl", "rng_state_0.pth", ".metadata", "state.pt"):
            (folder / name).write_bytes(planted)
            assert _loads(root) == (folder.name != "log" or name == ".metadata"), folder / name
            (folder / name).unlink()
            assert not os.path.exists(marker), folder / name
    pickle.loads(planted)
    assert os.path.exists(marker), "the control: it does run where it is unpickled"


def _loads(root: Path) -> bool:
    """Whether a load succeeds with the saved streams; another outcome than a refusal is an error."""
    streams = Streams(7)
    try:
        with ckpt.Checkpointer(root, read_only=True) as ck:
            ck.load(_state(5, streams))
    except ckpt.CkptError:
        return False
    assert streams.draw() == Streams(3).draw()
    return True


def test_streams_that_are_asked_for_and_not_there_are_an_error(tmp_path: Path) -> None:
    streams = Streams(3)
    saved, unsaved = tmp_path / "with", tmp_path / "without"
    with ckpt.Checkpointer(saved) as ck:
        ck.save(1, _state(3, streams))
    with ckpt.Checkpointer(unsaved) as ck:
        ck.save(1, _state(3, None))
    straight = streams.draw()
    streams = Streams(7)
    fresh = Streams(7).draw()

    def refused(root: Path, target: Streams | None, name: str) -> None:
        Streams(7)  # the global streams anew
        with ckpt.Checkpointer(root, read_only=True) as ck, pytest.raises(ckpt.StateMismatch, match=name):
            ck.load(_state(5, target))

    refused(unsaved, streams, r"the checkpoint has no per-rank rng/python; allow_missing")
    assert streams.draw() == fresh
    refused(saved, None, r"the checkpoint holds per-rank rng/.*allow_extra")
    streams = Streams(7)
    with ckpt.Checkpointer(unsaved, read_only=True) as ck:
        ck.load(_state(5, streams), allow_missing=["rng/*"])
    assert streams.draw() == fresh
    streams = Streams(7)
    with ckpt.Checkpointer(saved, read_only=True) as ck:
        ck.load(_state(5, None), allow_extra=["rng/*"])
        assert streams.draw() == fresh
        ck.load(_state(5, streams))
    assert streams.draw() == straight == Streams(3).draw()


def test_the_numbers_that_streams_keep_matter() -> None:
    """The control: a stream without the number that it keeps gives another one next."""
    streams = Streams(3)
    streams.leave_in_the_middle()
    version, words, _ = random.getstate()
    legacy = np.random.get_state(legacy=False)
    pcg = streams.numpy["PCG64"].bit_generator
    halved = pcg.state
    straight = streams.draw()
    random.setstate((version, words, None))
    np.random.set_state({**legacy, "has_gauss": 0})
    pcg.state = {**halved, "has_uint32": 0}
    changed = streams.draw()
    assert straight[0] != changed[0] and straight[1] != changed[1]
    assert straight[6] != changed[6]
