"""The rules of retention as properties of any history: branches, repeated steps, retires, and commits in use."""

import math
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from ckpt.errors import CkptError
from ckpt.store.log import History, Record
from ckpt.store.retention import Keep, judge, retirable

Document = dict[str, Any]


def history_of(*documents: Document) -> History:
    return History(tuple(Record(n, d) for n, d in enumerate(documents, 1)))


def commit(step: int, parent: int | None) -> Document:
    return {"kind": "commit", "claim": "c", "attempt": f"{step}-{parent}", "step": step, "parent": parent}


def retire(number: int) -> Document:
    return {"kind": "retire", "claim": "c", "commit": number}


def line(*steps: int) -> History:
    """A claim, then a commit for each step, each following the one before: commit n has number n + 2."""
    return history_of({"kind": "claim", "claim": "c"}, *(commit(s, n + 1 if n else None) for n, s in enumerate(steps)))


@st.composite
def histories(draw: st.DrawFn) -> History:
    """Commits whose parent is any earlier commit or none, claims, and retires of any commit."""
    documents: list[Document] = [{"kind": "claim", "claim": "c"}]
    commits: list[int] = []
    for _ in range(draw(st.integers(0, 24))):
        kind = draw(st.sampled_from(["next", "next", "next", "branch", "claim", "retire"]))
        if kind == "retire" and commits:
            documents.append(retire(draw(st.sampled_from(commits))))
        elif kind == "claim":
            documents.append({"kind": "claim", "claim": "c"})
        else:
            parent = None if not commits else commits[-1] if kind == "next" else draw(st.sampled_from(commits))
            documents.append(commit(draw(st.integers(0, 12)), parent))
            commits.append(len(documents))
    return history_of(*documents)


COUNT = st.none() | st.integers(1, 5)
KEEPS = st.builds(
    Keep, last=COUNT, every=COUNT, steps=st.lists(st.integers(0, 12), max_size=2).map(tuple), branches=st.booleans()
) | st.builds(Keep, last=COUNT, best=st.integers(1, 4), metric=st.just("loss"), highest=st.booleans())
HELD = st.dictionaries(st.integers(1, 25), st.just("reading"), max_size=3)


@st.composite
def cases(draw: st.DrawFn) -> tuple[History, Keep, dict[int, str], dict[int, float | None]]:
    history, keep = draw(histories()), draw(KEEPS)
    values = st.none() | st.floats(-3, 3) | st.just(math.nan)
    return history, keep, draw(HELD), {r.number: draw(values) for r in history.lineage()}


def going(history: History, keep: Keep, held: dict[int, str], metrics: dict[int, float | None]) -> set[int]:
    return {r.number for r in retirable(judge(history, keep, held, metrics))}


@given(cases())
def test_the_newest_and_what_is_in_use_never_go(case: tuple[Any, ...]) -> None:
    history, _, held, _ = case
    gone = going(*case)
    live = {r.number for r in history.records if r.kind == "commit"} - history.retired.keys()
    assert gone <= live - held.keys()
    if live:
        assert max(live) == history.lineage()[0].number and max(live) not in gone


@given(cases())
def test_what_is_offered_afterwards_is_what_the_rules_say(case: tuple[Any, ...]) -> None:
    """Each rule written down once more, over the steps that a loader is offered."""
    history, keep, held, metrics = case
    after = history_of(*(r.document for r in history.records), *(retire(n) for n in sorted(going(*case))))
    offered = [r.step for r in history.lineage()]
    steps = sorted(set(offered), key=offered.index)
    if not keep.retires:
        assert after.records == history.records
        return
    shown = {s: history.newest(s) for s in steps}
    wanted = set(steps[:1]) | set(steps[: keep.last or 0])
    wanted |= {s for s in steps if s in keep.steps or (keep.every and s % keep.every == 0)}
    if keep.best:
        known = {s: metrics[r.number] for s, r in shown.items()}
        wanted |= {s for s, value in known.items() if value is None}
        sign = -1 if keep.highest else 1
        ranked = [
            (math.isnan(v), 0.0 if math.isnan(v) else sign * v, n)
            for n, v in enumerate(known.values())
            if v is not None
        ]
        named = [s for s, v in known.items()]
        wanted |= {named[n] for _, _, n in sorted(ranked)[: keep.best]}
    extra = {r.step for r in history.lineage() if r.number in held}
    assert {r.step for r in after.lineage()} == wanted | extra
    for s in wanted:
        assert after.newest(s) == shown[s]


@given(cases())
def test_a_second_look_finds_nothing_more(case: tuple[Any, ...]) -> None:
    history, keep, held, metrics = case
    after = history_of(*(r.document for r in history.records), *(retire(n) for n in sorted(going(*case))))
    assert going(after, keep, held, metrics) == set()


@given(cases(), st.integers(1, 5))
def test_to_keep_more_lets_fewer_go(case: tuple[Any, ...], more: int) -> None:
    history, keep, held, metrics = case
    wider = Keep((keep.last or 0) + more, keep.every, keep.best, keep.metric, keep.highest, keep.steps, keep.branches)
    if keep.retires:
        assert going(history, wider, held, metrics) <= going(history, keep, held, metrics)


@given(cases())
def test_other_branches_are_left_alone_unless_asked_for(case: tuple[Any, ...]) -> None:
    history, keep, held, _ = case
    ours = {r.number for r in history.lineage()}
    others = {r.number for r in history.records if r.kind == "commit"} - history.retired.keys() - ours
    gone = going(*case)
    if not keep.branches:
        assert not gone & others
    else:
        forever = {n for n in others if history.records[n - 1].step in keep.steps}
        assert gone & others == others - held.keys() - forever


def test_every_reason_is_named() -> None:
    history = line(0, 1, 2, 3, 4, 5, 5)
    keep = Keep(last=2, every=3, best=1, metric="loss", steps=(1,))
    metrics: dict[int, float | None] = {2: 1.0, 3: 1.0, 4: 0.5, 5: 1.0, 6: None, 7: 1.0, 8: 1.0}
    found = [(v.record.step, v.reasons) for v in judge(history, keep, {2: "copy"}, metrics)]
    assert found == [
        (0, ("every 3", "copy")),
        (1, ("for ever",)),
        (2, ("best 1 of loss",)),
        (3, ("every 3",)),
        (4, ("last 2", "has no loss")),
        (5, ()),  # saved again since
        (5, ("the newest", "last 2")),
    ]


def test_without_rules_nothing_goes_and_an_empty_history_is_fine() -> None:
    assert retirable(judge(line(1, 1, 2), Keep(steps=(1,)), {})) == []
    assert judge(history_of(), Keep(last=1), {}) == []


@pytest.mark.parametrize(
    "wrong",
    [{"last": 0}, {"every": -1}, {"best": 2}, {"metric": "loss"}, {"last": True}, {"grace": -1}, {"grace": math.nan}],
)
def test_rules_that_make_no_sense_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(CkptError, match="Keep"):
        Keep(**wrong)
