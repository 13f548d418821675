"""From receipts to a commit: what is refused, what does not matter, and that only one record comes of it. No ranks and
no arrays: receipts are made here."""

import dataclasses
import json
import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt.errors import CkptError, CorruptCheckpoint, Fenced, StateMismatch, StoreError
from ckpt.fingerprint import ZERO
from ckpt.geometry import Box
from ckpt.store.commit import assemble, publish, void
from ckpt.store.log import Log
from ckpt.store.objects import ObjectStore
from ckpt.store.records import Intent, Receipt, sha256
from tests.store.attempts import (
    RUN,
    TENSORS,
    URL,
    change,
    claim,
    digest,
    log_of,
    make_attempt,
    other,
    pinned,
    write,
)
from tests.support.raw import canonical

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
