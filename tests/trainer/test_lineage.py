"""Which save of two roots is the newest, and what it descends from, against a model that knows all: jobs on two nodes
that load, save, copy on, retire and are lost, in any order."""

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt.store.log import History, Origin, Record
from ckpt.trainer.tiers import lineage


@dataclass
class Logs:
    """A log in memory."""

    records: list[Record] = field(default_factory=list)

    def add(self, **document: object) -> int:
        self.records.append(Record(len(self.records) + 1, dict(document)))
        return len(self.records)

    @property
    def history(self) -> History:
        return History(tuple(self.records))

    def number(self, origin: Origin) -> int | None:
        found = [r.number for r in self.records if r.kind == "commit" and r.origin == origin]
        return found[-1] if found else None

    def live(self) -> set[Origin]:
        retired = self.history.retired
        return {r.origin for r in self.records if r.kind == "commit" and r.number not in retired}


@dataclass
class Model:
    """saves: every save ever made, in the order of claims and within a job; parents: what each descends from."""

    durable: Logs = field(default_factory=Logs)
    nodes: list[Logs] = field(default_factory=lambda: [Logs(), Logs()])
    saves: list[Origin] = field(default_factory=list)
    parents: dict[Origin, Origin | None] = field(default_factory=dict)
    claim: str = ""
    node: int = 0
    base: Origin | None = None

    @property
    def fast(self) -> Logs:
        return self.nodes[self.node]

    def start(self, node: int) -> None:
        self.claim, self.node, self.base = f"claim {len(self.durable.records)}", node, None
        for log in (self.durable, self.fast):
            log.add(kind="claim", claim=self.claim)

    def expected(self) -> list[Origin]:
        seen = self.fast.live() | self.durable.live()
        at = next((o for o in reversed(self.saves) if o in seen), None)
        chain = []
        while at is not None:
            chain.append(at)
            at = self.parents[at]
        return [o for o in chain if o in seen]

    def load(self, which: int) -> None:
        chain = self.expected()
        if chain:
            self.base = chain[which % len(chain)]
            if self.fast.number(self.base) is None:
                name = {"claim": self.base[0], "attempt": self.base[1]}
                self.fast.add(kind="commit", claim=self.claim, attempt=self.base[1], step=0, origin=name, absent=True)

    def save(self) -> None:
        made = (self.claim, f"attempt {len(self.saves)}")
        parent = None if self.base is None else self.fast.number(self.base)
        self.fast.add(kind="commit", claim=self.claim, attempt=made[1], step=len(self.saves), parent=parent)
        self.saves.append(made)
        self.parents[made], self.base = self.base, made

    def copy(self) -> None:
        """The newest, as a thread of the job would."""
        chain = self.expected()
        if not chain or chain[0] not in self.fast.live() or self.durable.number(chain[0]) is not None:
            return
        at = self.parents[chain[0]]
        while at is not None and self.durable.number(at) is None:
            at = self.parents[at]
        name = {"claim": chain[0][0], "attempt": chain[0][1]}
        parent = None if at is None else self.durable.number(at)
        step = self.saves.index(chain[0])
        self.durable.add(kind="commit", claim=self.claim, attempt="copy", step=step, origin=name, parent=parent)

    def retire(self, log: Logs, which: int) -> None:
        """As a collector does: never the newest of a root."""
        newest = log.history.newest()
        going = [r for r in log.history.lineage() if newest is not None and r.number != newest.number]
        if going:
            log.add(kind="retire", claim=self.claim, commit=going[which % len(going)].number)


@settings(max_examples=300)
@given(st.lists(st.tuples(st.sampled_from("slaaacrdn"), st.integers(0, 5)), max_size=40))
def test_the_newest_by_claim_and_order_and_its_ancestors(acts: list[tuple[str, int]]) -> None:
    model = Model()
    model.start(0)
    model.load(0)
    for act, number in acts:
        if act == "s":  # a new job, which goes on from the newest
            model.start(number % 2)
            model.load(0)
        elif act == "l":
            model.load(number)
        elif act == "a":
            model.save()
        elif act == "c":
            model.copy()
        elif act == "r":
            model.retire(model.fast, number)
        elif act == "d":
            model.retire(model.durable, number)
        else:  # the other node's disk is wiped
            model.nodes[1 - model.node] = Logs()
        found = lineage(model.durable.history, model.fast.history)
        assert [p.record.origin for p in found] == model.expected()
        here, there = model.fast.live(), model.durable.live()
        for place in found:
            origin = place.record.origin
            assert (place.fast is not None, place.durable is not None) == (origin in here, origin in there)


def test_what_the_durable_log_does_not_know_counts_for_nothing() -> None:
    durable, fast = Logs(), Logs()
    for log in (durable, fast):
        log.add(kind="claim", claim="ours")
    fast.add(kind="commit", claim="ours", attempt="a", step=1, parent=None)
    fast.add(kind="claim", claim="theirs")
    fast.add(kind="commit", claim="theirs", attempt="b", step=9, parent=None)
    assert [p.record.step for p in lineage(durable.history, fast.history)] == [1]
    assert lineage(Logs().history, fast.history) == []
