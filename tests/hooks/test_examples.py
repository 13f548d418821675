"""The examples of the hooks: killed in mid-epoch and started again, they go on with the bits of the run that never
stopped; told to end, they save and exit with code 75."""

from dataclasses import dataclass
from pathlib import Path

import pytest

import ckpt
from tests.hooks.warm import Call, Warm
from tests.resume.digests import differing

pytestmark = [pytest.mark.ranks, pytest.mark.slow, pytest.mark.timeout(900)]

STEPS = 14


@dataclass(frozen=True)
class Case:
    """An example (or a loop of these tests), a number of ranks, how many batches a rank's model sees in a step, and the
    steps in which it is killed, one after the other; whether another run is told to end. It saves every five steps, and
    an epoch has ten."""

    example: str
    world: int
    batches: int
    killed_in: tuple[int, ...] = (9,)
    told: bool = False


CASES = [
    Case("plain", 1, 4),
    Case("plain", 2, 2, told=True),
    Case("on_megatron", 1, 4),
    Case("on_megatron", 2, 2, told=True),
    Case("bridge_loop", 2, 2, told=True),
    Case("hf_trainer", 1, 4, (9, 13)),
    Case("hf_trainer", 2, 2, told=True),
    Case("lightning_more", 1, 4, (9, 13)),
    Case("on_lightning", 2, 2, told=True),
    Case("lightning_fsdp2", 2, 2),
    Case("fsdp2", 1, 4),
    Case("fsdp2", 2, 2, told=True),
]
TOLD_IN = 7


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.example}-{case.world}")
def test_a_killed_run_goes_on_as_the_straight_one_and_one_told_to_end_saves(
    warm: Warm, case: Case, tmp_path: Path
) -> None:
    straight, killed, told = (str(tmp_path / name) for name in ("straight", "killed", "told"))
    calls, begun, ended = [Call(case.example, straight, STEPS)], 0, []
    for step in case.killed_in:
        kill = Call(case.example, killed, STEPS, kill_at=(step - 1 - begun) * case.batches + 1)
        ended.append(warm.ranks(case.world, [*calls, kill], tmp_path / f"killed in {step}"))
        assert ended[-1].codes == [-9] * case.world, ended[-1].errors
        calls, begun = [], (step - 1) // 5 * 5
    tell = [Call(case.example, told, STEPS, term_at=TOLD_IN * case.batches)] if case.told else []
    last = warm.ranks(case.world, [Call(case.example, killed, STEPS), *tell], tmp_path / "last")
    assert last.codes == [75 if case.told else 0] * case.world, last.errors

    for whole, rest in zip(ended[0].results, last.results, strict=True):
        assert len(whole[0]["batches"]) == STEPS * case.batches
        assert rest[0]["batches"] == whole[0]["batches"][begun * case.batches :]
        assert differing(rest[0]["end"], whole[0]["end"]) == []
    with ckpt.Checkpointer(killed, read_only=True) as ck:
        assert ck.steps() == [5, 10, STEPS]
    if case.told:
        with ckpt.Checkpointer(told, read_only=True) as ck:
            assert ck.steps() in ([5, 7], [5, 8], [5, 9])


@pytest.mark.parametrize(("name", "world"), [("refusals", 1), ("refusals_megatron", 2)])
def test_what_cannot_be_exact_is_refused(warm: Warm, name: str, world: int, tmp_path: Path) -> None:
    ended = warm.ranks(world, [Call(name, str(tmp_path / "root"), 0)], tmp_path / "ranks")
    assert ended.codes == [0] * world, ended.errors
