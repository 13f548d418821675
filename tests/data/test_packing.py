"""Token packing against a plain oracle, and resumes at every global batch on every number of ranks."""

from collections.abc import Callable
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ckpt
from ckpt.data import GlobalCursor, GlobalLoader, PackedCursor, PackedSequences, Permutation, Piece
from tests.data.corpus import Documents, global_batches

LENGTHS = [7, 0, 3, 12, 1, 1, 25, 4, 0, 9, 2, 6]  # 70 tokens
WORLDS = [1, 2, 3, 4, 6]
STEPS = 6


def _cursor(lengths: Any = LENGTHS, size: int = len(LENGTHS), fingerprint: str = "f", **changed: Any) -> PackedCursor:
    config: dict[str, Any] = {"seq_len": 4, "global_batch": 12, "seed": 3} | changed
    return PackedCursor(size, fingerprint, lengths, **config)


def _oracle(lengths: list[int], seq_len: int, batch: int, end: str, count: int) -> list[list[list[int]]]:
    """The first global batches, as tokens, by materialising every epoch."""
    documents, tokens, epoch = Documents(lengths), list[int](), 0
    while len(tokens) < count * batch * seq_len:
        order = Permutation(3, epoch, len(lengths))(np.arange(len(lengths))).tolist()
        stream = [t for i in order for t in documents[i].tolist()]
        tokens += stream if end == "wrap" else stream[: len(stream) - len(stream) % (batch * seq_len)]
        epoch += 1
    sequences = [tokens[i : i + seq_len] for i in range(0, count * batch * seq_len, seq_len)]
    return [sequences[i : i + batch] for i in range(0, count * batch, batch)]


@given(
    st.data(),
    st.lists(st.integers(0, 30), min_size=1, max_size=20),
    st.integers(1, 9),
    st.integers(1, 6),
    st.booleans(),
)
def test_sequences_are_those_of_the_concatenated_documents(
    data: st.DataObject, lengths: list[int], seq_len: int, batch: int, from_function: bool
) -> None:
    end = data.draw(st.sampled_from(["wrap", "drop"] if sum(lengths) >= batch * seq_len else ["wrap"]))
    if not any(lengths):
        lengths[0] = 1
    source: Any = lengths.__getitem__ if from_function else np.array(lengths, np.uint16)
    cursor = PackedCursor(len(lengths), "", source, seq_len, global_batch=batch, seed=3, epoch_end=end)
    packed = PackedSequences(Documents(lengths))
    first = data.draw(st.integers(0, batch))
    last = data.draw(st.integers(first, batch))
    for expected in _oracle(lengths, seq_len, batch, end, 5):
        keys = next(cursor.batches(first, last))
        assert [packed[key]["tokens"].tolist() for key in keys] == expected[first:last]
        place = cursor.state_dict()
        cursor.load_state_dict(place)
        assert cursor.state_dict() == place
        cursor.advance()


@pytest.mark.parametrize("end", ["wrap", "drop"])
def test_thousands_of_documents(end: str) -> None:
    lengths = [n % 4 for n in range(2600)]
    cursor = _cursor(lengths, 2600, seq_len=7, global_batch=50, epoch_end=end)
    packed = PackedSequences(Documents(lengths))
    for expected in _oracle(lengths, 7, 50, end, 25):  # two epochs and more
        assert [packed[key]["tokens"].tolist() for key in next(cursor.batches(0, 50))] == expected
        place = cursor.state_dict()
        resumed = _cursor(lengths, 2600, seq_len=7, global_batch=50, epoch_end=end)
        resumed.load_state_dict(place)
        resumed.advance()
        cursor.advance()
        assert resumed.state_dict() == cursor.state_dict()


@pytest.mark.parametrize("end", ["wrap", "drop"])
@pytest.mark.parametrize("lengths", [LENGTHS, [*LENGTHS, 26]], ids=["70 tokens", "96 tokens"])
def test_stop_anywhere_and_resume_on_any_number_of_ranks(lengths: list[int], end: str) -> None:
    straight, final = _run(lengths, 1, STEPS, end)
    for n, before in enumerate(WORLDS):
        after = WORLDS[(n + 1) % len(WORLDS)]
        for stop in range(STEPS + 1):
            first, state = _run(lengths, before, stop, end)
            for world in (before, after):
                rest, last = _run(lengths, world, STEPS - stop, end, state)
                assert first + rest == straight and last == final


def _run(lengths: list[int], world: int, steps: int, end: str, state: Any = None) -> Any:
    cursors = [_cursor(np.array(lengths), len(lengths), epoch_end=end) for _ in range(world)]
    batches: list[list[bytes]] = []
    for cursor in cursors:
        if state is not None:
            cursor.load_state_dict(state)
    while len(batches) < steps:
        packed = PackedSequences(Documents(lengths))
        loaders = [GlobalLoader(packed, c, r, world, 12 // world // 2 or 1) for r, c in enumerate(cursors)]
        batches += islice(global_batches(loaders), steps - len(batches))
    states = [cursor.state_dict() for cursor in cursors]
    assert states == states[:1] * world
    return batches, states[0]


def test_drop_ends_each_epoch() -> None:
    cursor = _cursor(epoch_end="drop")
    assert len(list(cursor.batches(0, 12))) == 1
    cursor.advance()
    assert (cursor.epoch, cursor.total) == (1, 12)
    assert len(list(cursor.batches(0, 12))) == 1


def test_an_item_says_where_its_tokens_come_from() -> None:
    packed = PackedSequences(Documents([5, 3]))
    item = packed[(Piece(0, 3, 5, 5), Piece(1, 0, 3, 3), Piece(0, 0, 1, 5))]
    assert {key: value.tolist() for key, value in item.items()} == {
        "tokens": [3, 4, 1000, 1001, 1002, 0],
        "segments": [0, 0, 1, 1, 1, 2],
        "positions": [3, 4, 0, 1, 2, 0],
    }
    assert {value.dtype for value in item.values()} == {torch.int64}


@pytest.mark.parametrize(
    "make", [torch.tensor, np.array, list, tuple, lambda x: np.frombuffer(np.array(x, np.uint16).tobytes(), np.uint16)]
)
def test_documents_may_be_tensors_arrays_or_lists(make: Callable[[list[int]], Any]) -> None:
    documents = [{"ids": make([1, 2, 3])}, {"ids": make([4, 5])}]
    packed = PackedSequences(documents, tokens=lambda item: item["ids"])
    tokens = packed[(Piece(1, 0, 2, 2), Piece(0, 1, 3, 3))]["tokens"]
    assert tokens.tolist() == [4, 5, 2, 3]
    tokens[0] = 9
    assert documents[1]["ids"][0] == 4


def test_the_state_is_plain_and_exact() -> None:
    cursor = _cursor()
    cursor.advance()
    state = cursor.state_dict()
    places = {key: state[key] for key in ("total", "epoch", "document", "offset", "seq_len", "global_batch")}
    order = Permutation(3, 0, 12)(np.arange(12)).tolist()
    ends = np.cumsum([LENGTHS[i] for i in order])
    document = int(np.searchsorted(ends, 48, side="right"))
    offset = 48 - int(ends[document - 1])
    assert places == {
        "total": 12,
        "epoch": 0,
        "document": document,
        "offset": offset,
        "seq_len": 4,
        "global_batch": 12,
    }
    assert cursor.tokens == 48
    assert {type(value) for value in state.values()} == {int, str}


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"seq_len": 5}, "seq_len=4, but this run has seq_len=5.*pass the saved seq_len="),
        ({"lengths": [*LENGTHS[:-1], 7]}, "lengths_fingerprint=.*use the tokenizer that the run began with"),
        ({"lengths": LENGTHS.__getitem__}, "lengths_fingerprint='array .*lengths_fingerprint='function "),
        ({"fingerprint": "g"}, "dataset_fingerprint='f'"),
        ({"global_batch": 6}, "global_batch=12, but this run has global_batch=6"),
        ({"seed": 4}, "seed=3, but this run has seed=4"),
    ],
)
def test_another_order_is_refused(changed: dict[str, Any], message: str) -> None:
    saved, other = _cursor(), _cursor(**changed)
    saved.advance()
    before = other.state_dict()
    with pytest.raises(ckpt.StateMismatch, match=message):
        other.load_state_dict(saved.state_dict())
    assert other.state_dict() == before


@pytest.mark.parametrize(
    "damage, message",
    [
        ({"document": 12}, "an epoch has 12 documents"),
        ({"offset": 99}, r"that document has \d+ tokens"),
        ({"total": 13}, "a global batch has 12 sequences"),
        ({"epoch": -1}, "non-negative ints"),
        ({"cursor": "GlobalCursor"}, "cursor='GlobalCursor'"),
    ],
)
def test_a_place_that_cannot_be_is_refused(damage: dict[str, Any], message: str) -> None:
    with pytest.raises(ckpt.StateMismatch, match=message):
        _cursor().load_state_dict(_cursor().state_dict() | damage)


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"lengths": LENGTHS[:-1]}, "int for each of 12 documents"),
        ({"lengths": [float(n) for n in LENGTHS]}, "float64"),
        ({"lengths": [*LENGTHS[:-1], -6]}, "length of document 11 is -6"),
        ({"lengths": lambda i: -1}, "must not be negative"),
        ({"lengths": [0] * 12}, "have 0 tokens"),
        ({"global_batch": 18, "epoch_end": "drop"}, 'have 70 tokens, which never fill .* use epoch_end="wrap"'),
        ({"seq_len": 0}, "seq_len=0"),
    ],
)
def test_lengths_that_make_no_order_are_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ckpt.CkptError, match=message):
        _cursor(**changed)


def test_lengths_from_a_function_that_fill_nothing_are_refused_when_their_turn_comes() -> None:
    with pytest.raises(ckpt.CkptError, match="all documents are empty"):
        next(_cursor(lambda i: 0).batches(0, 12))
    with pytest.raises(ckpt.CkptError, match=r"documents of epoch 1 do not fill a global batch of 12 sequences"):
        next(_cursor(lambda i: 1, epoch_end="drop").batches(0, 12))


def test_a_document_that_is_not_as_long_as_was_said_is_refused() -> None:
    packed = PackedSequences(Documents([5, 3]))
    with pytest.raises(ckpt.StateMismatch, match=r"document 1 has tokens of shape \[3\].* given as 4"):
        packed[(Piece(1, 0, 2, 4),)]
    with pytest.raises(ckpt.StateMismatch, match="different dtypes"):
        PackedSequences([torch.tensor([1]), torch.tensor([1], dtype=torch.int32)])[
            (Piece(0, 0, 1, 1), Piece(1, 0, 1, 1))
        ]


def test_the_loader_wants_packed_sequences() -> None:
    with pytest.raises(ckpt.StateMismatch, match="goes with a PackedSequences, not with a Documents"):
        GlobalLoader(Documents(LENGTHS), _cursor(), 0, 1)
    with pytest.raises(ckpt.StateMismatch, match="has 11 items, the PackedCursor is for one of 12"):
        GlobalLoader(PackedSequences(Documents(LENGTHS[:-1])), _cursor(), 0, 1)
    with pytest.raises(ckpt.StateMismatch, match="cursor='PackedCursor', but this run has cursor='GlobalCursor'"):
        GlobalCursor(12, "f", global_batch=12, seed=3).load_state_dict(_cursor().state_dict())


def test_over_documents_takes_their_fingerprint() -> None:
    one = PackedCursor.over(Documents(LENGTHS), LENGTHS, 4, global_batch=12)
    other = PackedCursor.over(Documents([*LENGTHS[:-1], 7]), LENGTHS, 4, global_batch=12)
    assert one.fingerprint != other.fingerprint and one.lengths_fingerprint == other.lengths_fingerprint
    assert PackedCursor.over(Documents(LENGTHS), LENGTHS, 4, global_batch=12, fingerprint="x").fingerprint == "x"
