"""From receipts to a commit: what is refused, what does not matter, what a later job completes; and that no field of a
record can be changed unseen. No ranks and no arrays: receipts are made here."""

import copy
import dataclasses
import functools
import json
import random
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt.errors import CkptError, CorruptCheckpoint, Fenced, StateMismatch, StoreError
from ckpt.fingerprint import ZERO, Digest, add, box_digest
from ckpt.geometry import Box, Catalogue, TensorSpec
from ckpt.state.values import encode
from ckpt.store.commit import Sealed, assemble, complete_last, publish, void
from ckpt.store.log import Log, Record
from ckpt.store.objects import ObjectStore, open_store
from ckpt.store.records import Intent, Manifest, Receipt, attempt_prefix, sha256
from tests.support.raw import canonical, random_bits
from tests.support.roots import Root

URL = "memory://root"
RUN = canonical({"format": 1, "layout": None, "world": 2})

SHAPES = {
    "big": ((320, 128), torch.float32),  # an array of its own
    "deep": ((8, 64, 128), torch.bfloat16),  # another one, stacked
    "small/a": ((6, 4), torch.float32),  # these two share a packed array
    "small/b": ((3,), torch.float32),
    "empty": ((0, 5), torch.float32),
    "scalar": ((), torch.int64),
}
TENSORS = {n: random_bits(shape, dtype, seed) for seed, (n, (shape, dtype)) in enumerate(SHAPES.items())}
SPECS = tuple(
    TensorSpec(n, tuple(t.shape), str(t.dtype).removeprefix("torch."), t.element_size(), int(n == "deep"))
    for n, t in sorted(TENSORS.items())
)
ALIASES = {"tied": "big"}
VALUES = {"step": encode(7, ""), "options": encode({"lr": 1e-3, "betas": (0.9, 0.95)}, "")}


@functools.cache
def digest(name: str, box: Box) -> Digest:
    return box_digest(TENSORS[name][box.slices], box, tuple(TENSORS[name].shape))


def boxes_of(name: str, rank: int, world: int) -> list[Box]:
    """`big` is cut by rows; all else is replicated."""
    shape = tuple(TENSORS[name].shape)
    if name != "big":
        return [Box.whole(shape)]
    rows = shape[0] // world
    last = shape[0] - rows * (world - 1)
    return [Box((rows * rank, 0), (rows if rank + 1 < world else last, shape[1]))]


def make_attempt(
    world: int = 2, claim: str = "claim", attempt: str = "attempt", step: int = 7, parent: int | None = None
) -> tuple[Intent, list[Receipt]]:
    """What a faultless save of TENSORS leaves: objects dealt out in turn, digests of the bits themselves."""
    intent = Intent(claim, attempt, step, parent, world, f"plan of {world}", SPECS, ALIASES, VALUES)
    catalogue = Catalogue.of(SPECS)
    written: list[dict[str, Digest]] = [{} for _ in range(world)]
    objects: list[list[tuple[int, tuple[int, ...]]]] = [[] for _ in range(world)]
    for number, stored in enumerate(catalogue.objects()):
        rank = number % world
        objects[rank].append((stored.array, stored.index))
        for tensor, box, _ in stored.pieces:
            name = catalogue.tensors[tensor].name
            written[rank][name] = add(written[rank].get(name, ZERO), digest(name, box))
    return intent, [
        Receipt(
            attempt,
            rank,
            sha256(intent.document()),
            {n: [(b, digest(n, b)) for b in boxes_of(n, rank, world)] for n in TENSORS},
            written[rank],
            objects[rank],
            {"seed": encode(rank, "")},
        )
        for rank in range(world)
    ]


def change(receipts: list[Receipt], rank: int, **fields: Any) -> list[Receipt]:
    return [dataclasses.replace(r, **fields) if r.rank == rank else r for r in receipts]


def other(found: Digest) -> Digest:
    return add(found, (1, 0))


# --- assemble ---


def test_a_whole_attempt_gives_the_three_records_that_the_commit_pins() -> None:
    intent, receipts = make_attempt()
    sealed = assemble(intent, receipts, RUN, URL)
    manifest = sealed.manifest
    assert [t.name for t in manifest.catalogue.tensors] == sorted(TENSORS)
    whole = {n: digest(n, Box.whole(tuple(t.shape))) for n, t in TENSORS.items()}
    assert dict(zip(sorted(TENSORS), manifest.digests, strict=True)) == whole
    assert json.loads(sealed.ranks) == {"format": 1, "world": 2, "ranks": [r.per_rank for r in receipts]}
    assert sealed.document == {
        "kind": "commit",
        "claim": "claim",
        "attempt": "attempt",
        "step": 7,
        "parent": None,
        "state_id": manifest.state_id,
        "bytes": sum(t.numel() * t.element_size() for t in TENSORS.values()),
        "manifest": sha256(manifest.document()),
        "ranks": sha256(sealed.ranks),
        "run": sha256(RUN),
    }


@settings(max_examples=40)
@given(st.permutations(range(4)), st.randoms(use_true_random=False))
def test_what_comes_out_depends_neither_on_the_order_of_receipts_nor_of_what_is_in_them(
    order: list[int], chance: random.Random
) -> None:
    intent, receipts = make_attempt(world=4)
    expected = assemble(intent, receipts, RUN, URL)
    shuffled = []
    for r in (receipts[i] for i in order):
        held = list(r.held.items())
        objects = list(r.objects)
        chance.shuffle(held)
        chance.shuffle(objects)
        again = Receipt.parse(dataclasses.replace(r, held=dict(held), objects=objects).document(), URL)
        shuffled.append(again)
    sealed = assemble(Intent.parse(intent.document(), URL), shuffled, RUN, "another place")
    assert sealed == expected
    assert sealed.manifest.document() == expected.manifest.document()
    assert canonical(sealed.document) == canonical(expected.document)


def test_two_layouts_of_one_state_give_the_same_manifest_bytes() -> None:
    made = [assemble(*make_attempt(world, claim=f"job {world}"), RUN, URL).manifest for world in (1, 2, 3, 5)]
    assert len({m.document() for m in made}) == 1


def _lacks_one(intent: Intent, receipts: list[Receipt]) -> list[Receipt]:
    return receipts[:1]


def _has_one_twice(intent: Intent, receipts: list[Receipt]) -> list[Receipt]:
    return [receipts[0], receipts[0]]


def _has_one_too_many(intent: Intent, receipts: list[Receipt]) -> list[Receipt]:
    return [*receipts, dataclasses.replace(receipts[1], rank=2)]


def _of_another_intent(intent: Intent, receipts: list[Receipt]) -> list[Receipt]:
    plan = dataclasses.replace(intent, plan="another plan")
    return change(receipts, 1, intent=sha256(plan.document()))


def _of_another_attempt(intent: Intent, receipts: list[Receipt]) -> list[Receipt]:
    return change(receipts, 1, attempt="another")


def _replicas_differ(intent: Intent, receipts: list[Receipt]) -> list[Receipt]:
    box, found = receipts[1].held["small/a"][0]
    return change(receipts, 1, held={**receipts[1].held, "small/a": [(box, other(found))]})


def _written_is_not_held(intent: Intent, receipts: list[Receipt]) -> list[Receipt]:
    writer = next(r for r in receipts if "deep" in r.written)
    return change(receipts, writer.rank, written={**writer.written, "deep": other(writer.written["deep"])})


def _held_changed_after_writing(intent: Intent, receipts: list[Receipt]) -> list[Receipt]:
    box, found = receipts[0].held["big"][0]
    return change(receipts, 0, held={**receipts[0].held, "big": [(box, other(found))]})


def _nobody_wrote_it(intent: Intent, receipts: list[Receipt]) -> list[Receipt]:
    return [dataclasses.replace(r, written={n: d for n, d in r.written.items() if n != "big"}) for r in receipts]


def _an_object_is_missing(intent: Intent, receipts: list[Receipt]) -> list[Receipt]:
    return change(receipts, 1, objects=receipts[1].objects[1:])


def _an_object_is_named_twice(intent: Intent, receipts: list[Receipt]) -> list[Receipt]:
    return change(receipts, 1, objects=[*receipts[1].objects, receipts[0].objects[0]])


def _an_object_is_not_of_this_state(intent: Intent, receipts: list[Receipt]) -> list[Receipt]:
    return change(receipts, 1, objects=[*receipts[1].objects, (99, (0, 0))])


def _a_gap(intent: Intent, receipts: list[Receipt]) -> list[Receipt]:
    box, found = receipts[1].held["big"][0]
    less = Box((box.offset[0] + 1, 0), (box.extent[0] - 1, box.extent[1]))
    return change(receipts, 1, held={**receipts[1].held, "big": [(less, found)]})


def _an_overlap(intent: Intent, receipts: list[Receipt]) -> list[Receipt]:
    box, found = receipts[1].held["big"][0]
    more = Box((box.offset[0] - 1, 0), (box.extent[0] + 1, box.extent[1]))
    return change(receipts, 1, held={**receipts[1].held, "big": [(more, found)]})


def _a_box_outside(intent: Intent, receipts: list[Receipt]) -> list[Receipt]:
    return change(receipts, 1, held={**receipts[1].held, "big": [(Box((320, 0), (1, 128)), ZERO)]})


def _a_tensor_of_nobody(intent: Intent, receipts: list[Receipt]) -> list[Receipt]:
    return [dataclasses.replace(r, held={n: b for n, b in r.held.items() if n != "scalar"}) for r in receipts]


def _a_tensor_too_many(intent: Intent, receipts: list[Receipt]) -> list[Receipt]:
    return change(receipts, 0, held={**receipts[0].held, "stray": [(Box((), ()), ZERO)]})


REFUSED: list[tuple[Callable[[Intent, list[Receipt]], list[Receipt]], type[CkptError], str]] = [
    (_lacks_one, CorruptCheckpoint, "attempt attempt lacks receipts of some ranks"),
    (_has_one_twice, CorruptCheckpoint, "lacks receipts of some ranks"),
    (_has_one_too_many, CorruptCheckpoint, "receipts of some ranks"),
    (_of_another_intent, CorruptCheckpoint, "the receipt of rank 1 belongs to another intent"),
    (_of_another_attempt, CorruptCheckpoint, "the receipt of rank 1 belongs to another intent"),
    (_replicas_differ, StateMismatch, r"small/a: ranks 0 and 1 hold different bits"),
    (_written_is_not_held, CorruptCheckpoint, "deep: what was written is not what was held"),
    (_held_changed_after_writing, CorruptCheckpoint, "big: what was written is not what was held"),
    (_nobody_wrote_it, CorruptCheckpoint, "big: what was written is not what was held"),
    (_an_object_is_missing, CorruptCheckpoint, "do not name every stored object exactly once"),
    (_an_object_is_named_twice, CorruptCheckpoint, "do not name every stored object exactly once"),
    (_an_object_is_not_of_this_state, CorruptCheckpoint, "do not name every stored object exactly once"),
    (_a_gap, StateMismatch, r"big: no rank holds the elements \[160:161"),
    (_an_overlap, StateMismatch, r"big: boxes .* of ranks 0, 1 overlap"),
    (_a_box_outside, StateMismatch, r"big: rank 1 gives box \[320:321.*outside of shape"),
    (_a_tensor_of_nobody, StateMismatch, "scalar: no rank holds the elements"),
    (_a_tensor_too_many, StateMismatch, "stray: held by a rank but not part of the intent"),
]


@pytest.mark.parametrize(("fault", "kind", "why"), REFUSED, ids=lambda x: getattr(x, "__name__", ""))
def test_an_attempt_that_is_not_whole_is_refused_by_name(
    fault: Callable[[Intent, list[Receipt]], list[Receipt]], kind: type[CkptError], why: str
) -> None:
    intent, receipts = make_attempt()
    with pytest.raises(kind, match=why) as caught:
        assemble(intent, fault(intent, receipts), RUN, URL)
    assert type(caught.value) is kind


# --- publish ---


@pytest.fixture
def store(root: Root) -> ObjectStore:
    return open_store(root.url, root.storage_options)


class Before:
    """A store that does something once, before it creates a certain key."""

    def __init__(self, store: ObjectStore, key: str, act: Callable[[], Any]) -> None:
        self._store, self._key, self._act = store, key, act
        self.url = store.url

    def create(self, key: str, data: bytes) -> bool:
        if self._key in key:
            self._key = "\0"
            self._act()
        return self._store.create(key, data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def claim(store: ObjectStore, name: str) -> Record:
    return Log(store).claim({"kind": "claim", "claim": name, "host": "here"})


def write(store: ObjectStore, intent: Intent, receipts: list[Receipt], *, run: bytes | None = RUN) -> str:
    """Puts an attempt into the store, as the ranks of a job would; returns its prefix."""
    prefix = attempt_prefix(intent.claim, intent.attempt)
    assert store.create(prefix + "intent.json", intent.document())
    if run is not None:
        assert store.create(prefix + "run.json", run)
    for r in receipts:
        assert store.create(f"{prefix}receipts/{r.rank:06d}.json", r.document())
    return prefix


def log_of(store: ObjectStore) -> list[tuple[str, str, str]]:
    return [(r.kind, r.claim, r.attempt) for r in Log(store).read().records]


def pinned(store: ObjectStore, record: Record) -> Sealed:
    """What a commit pins, as it lies in the store; the hashes are checked."""
    prefix = attempt_prefix(record.claim, record.attempt)
    files = {k: store.get(prefix + f) for k, f in [("manifest", "manifest.json"), ("ranks", "ranks/manifest.json")]}
    assert {k: sha256(d) for k, d in files.items()} == {k: record.document[k] for k in files}
    assert sha256(store.get(prefix + "run.json")) == record.document["run"]
    return Sealed(Manifest.parse(files["manifest"], URL), files["ranks"], record.document)


def test_whoever_commits_leaves_the_same_and_only_one_record(store: ObjectStore) -> None:
    claim(store, "claim")
    intent, receipts = make_attempt()
    write(store, intent, receipts)
    sealed = assemble(intent, receipts, RUN, URL)
    points: list[str] = []
    first = publish(store, Log(store), intent, sealed, points.append)
    assert points == ["commit.manifest", "commit.append", "commit.done"]
    assert [publish(store, Log(store), intent, sealed) for _ in range(2)] == [first] * 2
    assert log_of(store) == [("claim", "claim", ""), ("commit", "claim", "attempt")]
    found = pinned(store, first)
    assert (found.manifest, found.ranks) == (sealed.manifest, sealed.ranks)


def test_a_commit_after_a_newer_claim_is_fenced_and_leaves_no_record(store: ObjectStore) -> None:
    claim(store, "claim")
    intent, receipts = make_attempt()
    write(store, intent, receipts)
    sealed = assemble(intent, receipts, RUN, URL)

    def point(name: str) -> None:
        if name == "commit.append":
            claim(store, "newer")

    with pytest.raises(Fenced, match="newer"):
        publish(store, Log(store), intent, sealed, point)
    assert log_of(store) == [("claim", "claim", ""), ("claim", "newer", "")]


def test_a_voided_attempt_is_never_committed_and_a_committed_one_never_voided(store: ObjectStore) -> None:
    claim(store, "claim")
    intent, receipts = make_attempt()
    sealed = assemble(intent, receipts, RUN, URL)
    write(store, intent, receipts)
    assert void(Log(store), "claim", "attempt", "x" * 1000).kind == "void"
    with pytest.raises(StoreError, match="attempt attempt was voided"):
        publish(store, Log(store), intent, sealed)

    intent, receipts = make_attempt(attempt="second")
    write(store, intent, receipts)
    done = publish(store, Log(store), intent, assemble(intent, receipts, RUN, URL))
    assert void(Log(store), "claim", "second", "too late") == done
    assert log_of(store) == [("claim", "claim", ""), ("void", "claim", "attempt"), ("commit", "claim", "second")]


def test_a_manifest_that_is_already_there_must_be_the_same(store: ObjectStore) -> None:
    claim(store, "claim")
    intent, receipts = make_attempt()
    prefix = write(store, intent, receipts)
    sealed = assemble(intent, receipts, RUN, URL)
    store.create(prefix + "manifest.json", b"{}")
    with pytest.raises(CorruptCheckpoint, match=r"manifest\.json: exists with other content"):
        publish(store, Log(store), intent, sealed)
    assert log_of(store) == [("claim", "claim", "")]


# --- complete_last ---


def test_a_later_job_commits_what_a_dead_one_had_finished(store: ObjectStore) -> None:
    claim(store, "claim")
    intent, receipts = make_attempt()
    write(store, intent, receipts)
    record = complete_last(store, Log(store))
    assert record is not None and (record.number, record.step) == (2, 7)
    found = pinned(store, record)
    assert (found.manifest, found.ranks) == (
        (sealed := assemble(intent, receipts, RUN, URL)).manifest,
        sealed.ranks,
    )
    assert complete_last(store, Log(store)) is None
    assert log_of(store) == [("claim", "claim", ""), ("commit", "claim", "attempt")]


def test_nothing_is_completed_in_an_empty_root(store: ObjectStore) -> None:
    assert complete_last(store, Log(store)) is None
    claim(store, "claim")
    assert complete_last(store, Log(store)) is None


@pytest.mark.parametrize("there", [["manifest.json"], ["manifest.json", "ranks/manifest.json"]])
def test_a_committer_that_died_between_its_writes_is_taken_over(store: ObjectStore, there: list[str]) -> None:
    claim(store, "claim")
    intent, receipts = make_attempt()
    prefix = write(store, intent, receipts)
    sealed = assemble(intent, receipts, RUN, URL)
    for name in there:
        store.create(prefix + name, sealed.manifest.document() if name == "manifest.json" else sealed.ranks)
    assert complete_last(store, Log(store)) is not None


UNFINISHED: dict[str, Callable[[ObjectStore, str], None]] = {
    "a receipt is missing": lambda s, p: s.delete([p + "receipts/000001.json"]),
    "all receipts are missing": lambda s, p: s.delete([p + f"receipts/{r:06d}.json" for r in range(2)]),
    "no intent": lambda s, p: s.delete([p + "intent.json"]),
    "no run": lambda s, p: s.delete([p + "run.json"]),
    "intent damaged": lambda s, p: s.put(p + "intent.json", s.get(p + "intent.json")[:-9]),
    "receipt damaged": lambda s, p: s.put(p + "receipts/000001.json", b"{}"),
    "receipt foreign": lambda s, p: s.put(p + "receipts/000001.json", s.get(p + "receipts/000000.json")),
    "one receipt too many": lambda s, p: s.put(p + "receipts/000002.json", s.get(p + "receipts/000001.json")),
    "manifest of another": lambda s, p: s.put(p + "manifest.json", b"{}"),
    "voided": lambda s, p: _void_it(s),
    "in the folder of another": lambda s, p: _put_another(s, p),
}


def _void_it(store: ObjectStore) -> None:
    assert void(Log(store), "claim", "attempt", "test").kind == "void"


def _put_another(store: ObjectStore, prefix: str) -> None:
    intent, receipts = make_attempt(attempt="x")
    store.put(prefix + "intent.json", intent.document())
    for r in receipts:
        store.put(f"{prefix}receipts/{r.rank:06d}.json", r.document())


@pytest.mark.parametrize("name", UNFINISHED)
def test_an_attempt_that_is_not_whole_is_left_alone_and_stops_nobody(store: ObjectStore, name: str) -> None:
    claim(store, "claim")
    prefix = write(store, *make_attempt())
    UNFINISHED[name](store, prefix)
    before = log_of(store)
    assert complete_last(store, Log(store)) is None
    assert log_of(store) == before
    write(store, *make_attempt(attempt="sound", step=6))  # an older one beside it is found all the same
    record = complete_last(store, Log(store))
    assert record is not None and record.attempt == "sound"


def test_only_attempts_of_the_last_claim_are_completed(store: ObjectStore) -> None:
    claim(store, "claim")
    write(store, *make_attempt())
    claim(store, "newer")
    assert complete_last(store, Log(store)) is None
    assert log_of(store) == [("claim", "claim", ""), ("claim", "newer", "")]


def test_of_several_finished_attempts_one_is_committed_the_furthest(store: ObjectStore) -> None:
    claim(store, "claim")
    for attempt, step in (("x", 8), ("y", 10), ("z", 9)):
        write(store, *make_attempt(attempt=attempt, step=step))
    record = complete_last(store, Log(store))
    assert record is not None and record.attempt == "y"
    assert complete_last(store, Log(store)) is None  # the others do not follow it


def test_an_attempt_that_its_job_gave_up_does_not_come_back_over_a_newer_commit(store: ObjectStore) -> None:
    """An interrupted save left all receipts, but neither commit nor void; the job went on and committed a later one."""
    claim(store, "claim")
    write(store, *make_attempt(attempt="given up", step=10))
    intent, receipts = make_attempt(attempt="later", step=20)
    write(store, intent, receipts)
    publish(store, Log(store), intent, assemble(intent, receipts, RUN, URL))
    assert complete_last(store, Log(store)) is None
    write(store, *make_attempt(attempt="next", step=30, parent=2))
    record = complete_last(store, Log(store))
    assert record is not None and (record.attempt, record.parent) == ("next", 2)
    assert [r.step for r in Log(store).read().lineage()] == [30, 20]


def test_the_first_save_after_a_load_is_completed_on_the_commit_that_was_loaded(store: ObjectStore) -> None:
    claim(store, "claim")
    intent, receipts = make_attempt(attempt="old")
    write(store, intent, receipts)
    publish(store, Log(store), intent, assemble(intent, receipts, RUN, URL))
    claim(store, "newer")
    write(store, *make_attempt(claim="newer", attempt="new", step=9, parent=2))
    record = complete_last(store, Log(store))
    assert record is not None and (record.claim, record.parent, record.number) == ("newer", 2, 4)


def test_a_claim_or_void_that_comes_in_between_is_respected(store: ObjectStore) -> None:
    claim(store, "claim")
    write(store, *make_attempt())
    racing: Any = Before(store, "log/", lambda: claim(store, "newer"))
    with pytest.raises(Fenced, match="newer"):
        complete_last(racing, Log(racing))
    assert log_of(store) == [("claim", "claim", ""), ("claim", "newer", "")]

    write(store, *make_attempt(claim="newer"))
    racing = Before(store, "log/", lambda: void(Log(store), "newer", "attempt", "by its own job"))
    assert complete_last(racing, Log(racing)) is None
    assert log_of(store)[2:] == [("void", "newer", "attempt")]


def test_a_commit_by_its_own_job_that_comes_in_between_is_the_one(store: ObjectStore) -> None:
    claim(store, "claim")
    intent, receipts = make_attempt()
    write(store, intent, receipts)
    sealed = assemble(intent, receipts, RUN, URL)
    racing: Any = Before(store, "log/", lambda: publish(store, Log(store), intent, sealed))
    record = complete_last(racing, Log(racing))
    assert record is not None and record.number == 2
    assert len(log_of(store)) == 2


# --- The records as bytes ---

INTENT, RECEIPTS = make_attempt()
MANIFEST = assemble(INTENT, RECEIPTS, RUN, URL).manifest


@pytest.mark.parametrize("record", [INTENT, *RECEIPTS, MANIFEST], ids=lambda r: type(r).__name__)
def test_records_come_back_from_their_bytes(record: Any) -> None:
    data = record.document()
    assert canonical(json.loads(data)) == data
    again = type(record).parse(data, URL)
    assert again == record
    assert again.document() == data


def forgeries(document: Any) -> Iterator[tuple[str, Any]]:
    """Copies of a JSON document with one thing changed: each leaf replaced, each entry dropped, one added."""
    for path in paths(document):
        here = at(document, path)
        where = "/".join(map(str, path))
        for value in replacements(here):
            yield f"{where} = {value!r}", with_change(document, path, value)
        if path:
            copied = copy.deepcopy(document)
            del at(copied, path[:-1])[path[-1]]
            yield f"{where} dropped", copied
        if isinstance(here, dict):
            yield f"{where} gains a field", with_change(document, path, {**here, "more": 1})
        if isinstance(here, list) and here:
            yield f"{where} repeats", with_change(document, path, [*here, here[-1]])
            if len(here) > 1 and here[0] != here[-1]:
                yield f"{where} turned around", with_change(document, path, here[::-1])


def replacements(value: Any) -> list[Any]:
    if isinstance(value, bool):
        return [not value, int(value)]
    if isinstance(value, int):
        return [value + 1, value - 1, value * 2 + 1, 0.5, str(value), None, True]
    if isinstance(value, str):
        flipped = value[:-1] + ("0" if value[-1:] != "0" else "1")
        return [flipped, value + "0", "", None, 7, [value], {}]
    return [None, [], {}, 7, "text"]


def paths(document: Any, start: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield start
    entries = document.items() if isinstance(document, dict) else enumerate(document) if _is_list(document) else ()
    for key, value in entries:
        yield from paths(value, (*start, key))


def _is_list(value: Any) -> bool:
    return isinstance(value, list)


def at(document: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        document = document[key]
    return document


def with_change(document: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    copied = copy.deepcopy(document)
    at(copied, path[:-1])[path[-1]] = value
    return copied


def accepted(record: Any, use: Callable[[Any], object]) -> list[str]:
    """The forgeries of a record that pass for one; every other must be refused by an error of ours."""
    data = record.document()
    found = []
    for what, forged in forgeries(json.loads(data)):
        if canonical(forged) != data:
            try:
                again = type(record).parse(canonical(forged), URL)
                assert again.document() == canonical(forged) and again != record, what
                use(again)
                found.append(what)
            except CkptError:
                continue
    return found


def test_a_manifest_with_any_field_changed_is_refused() -> None:
    """By itself, but for how a tensor was cut into objects: other cuts would do, and the commit pins the one."""
    free = re.compile(r"arrays/\d/cell/\d = |tensors/\d/stack = ")
    found = accepted(MANIFEST, lambda _: None)
    assert [what for what in found if not free.match(what)] == []
    assert len(found) < 20


def test_an_intent_with_any_field_changed_leads_to_no_commit() -> None:
    assert accepted(INTENT, lambda forged: assemble(forged, RECEIPTS, RUN, URL)) == []


def test_a_receipt_with_any_field_changed_leads_to_no_commit() -> None:
    """But for what is its rank's word alone: its own plain values, the order of its objects, whether it holds what
    another holds as well, or a part of nothing."""
    free = re.compile(r"per_rank|objects turned around|held/empty|held/[^ ]* (dropped|= \[\])$")
    found = accepted(RECEIPTS[1], lambda forged: assemble(INTENT, [RECEIPTS[0], forged], RUN, URL))
    assert [what for what in found if not free.match(what)] == []
    assert "held/big dropped" not in found  # nobody else holds that


@pytest.mark.parametrize("kind", [Intent, Receipt, Manifest])
@pytest.mark.parametrize("data", [b"", b"null", b"[]", b"{}", b'{"format":1}', b'"text"', b"\x00", b"{" * 100_000])
def test_documents_that_are_no_records_are_refused(kind: Any, data: bytes) -> None:
    with pytest.raises(CkptError, match=URL):
        kind.parse(data, URL)


def test_another_format_version_asks_for_another_ckpt() -> None:
    for record in (INTENT, RECEIPTS[0], MANIFEST):
        forged = canonical({**json.loads(record.document()), "format": 2})
        with pytest.raises(CkptError, match=r"format version 2.*use a newer ckpt"):
            type(record).parse(forged, URL)


def test_a_manifest_whose_state_was_changed_with_its_state_id_still_contradicts_the_commit() -> None:
    """The state id covers names, dtypes, shapes, fingerprints and values: each change gives another id."""
    ids = {MANIFEST.state_id}
    digests: Mapping[str, Digest] = dict(
        zip((t.name for t in MANIFEST.catalogue.tensors), MANIFEST.digests, strict=True)
    )
    first = SPECS[0]
    for specs in (
        (dataclasses.replace(first, name="another"), *SPECS[1:]),
        (dataclasses.replace(first, dtype="int32"), *SPECS[1:]),
        (dataclasses.replace(first, shape=(*first.shape, 1)), *SPECS[1:]),
        SPECS[1:],
    ):
        own = {s.name: digests.get(s.name, digests[first.name]) for s in specs}
        aliases = {n: k for n, k in ALIASES.items() if k in own}
        ids.add(Manifest.of(Catalogue.of(specs), own, aliases, VALUES).state_id)
    for name in digests:
        ids.add(Manifest.of(MANIFEST.catalogue, {**digests, name: other(digests[name])}, ALIASES, VALUES).state_id)
    for values in ({}, {**VALUES, "step": encode(8, "")}, {**VALUES, "step": encode(7.0, "")}):
        ids.add(Manifest.of(MANIFEST.catalogue, digests, ALIASES, values).state_id)
    ids.add(Manifest.of(MANIFEST.catalogue, digests, {}, VALUES).state_id)
    ids.add(Manifest.of(MANIFEST.catalogue, digests, {"tied": "deep"}, VALUES).state_id)
    assert len(ids) == 1 + 4 + len(digests) + 3 + 2
