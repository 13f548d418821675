"""A save that copies beside Megatron's next step: the optimizers inside of Megatron's wait for it."""

import threading
import time
from pathlib import Path
from typing import Any

import pytest

import ckpt
from ckpt.engine import staging
from tests.resume.digests import differing, digests
from tests.resume.test_megatron import SETUPS, MegatronRun, _quiet
from tests.support.layouts import start
from tests.support.megatron_cpu import megatron_on_cpu
from tests.support.tiny_gpt import parallel


def beside(rank: int, world: int, name: str, url: str) -> tuple[list[str], list[str], bool]:
    """What a load has other than the state of the moment of the call, what a step has changed meanwhile, and whether
    all was copied when that step was done."""
    _quiet()
    setup = SETUPS[name]
    layout = setup.layout
    real, here = staging.copy_boxes, threading.current_thread()

    def slow(pairs: Any) -> None:
        if threading.current_thread() is not here:
            time.sleep(2.0)
        real(pairs)

    with parallel(layout.tp, layout.pp, layout.dp, layout.ep), megatron_on_cpu():
        run, other = MegatronRun(setup, 1), MegatronRun(setup, 2)
        for _ in range(2):
            run.step()
        wanted = digests(run.everything())
        staging.copy_boxes = slow  # type: ignore[assignment]
        try:
            with ckpt.Checkpointer(url, layout, overlap=True, timeout=120) as ck:
                ck._background.start()
                pending = ck.save_async(2, run.state)
                run.step()
                copied = pending._overlap._over.is_set()  # type: ignore[union-attr]
                after = digests(run.everything())
                assert pending.result(60).step == 2
                assert ck.load(other.state, 2) is not None
        finally:
            staging.copy_boxes = real
        return differing(digests(other.everything()), wanted), differing(after, wanted), copied


@pytest.mark.ranks
@pytest.mark.slow
def test_the_step_inside_of_megatrons_optimizer_waits(tmp_path: Path) -> None:
    with start(4) as crew:
        for wrong, moved, copied in crew.run(beside, "dense, pp=2 dp=2", str(tmp_path / "root"), timeout=120):
            assert wrong == [] and copied
            assert any("optimizer" in name for name in moved) and any("model" in name for name in moved)
