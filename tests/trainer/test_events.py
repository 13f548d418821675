"""What is told about saves and loads: the event log, progress, and metrics of the agent."""

import contextlib
import json
import logging
import multiprocessing
import os
import pty
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

import ckpt
from ckpt.agent import wire
from ckpt.trainer import progress
from ckpt.trainer.events import EventLog, read_events
from tests.support.fault_proxy import Exchange, FaultProxy, puts
from tests.support.ports import free_ports
from tests.support.raw import raw
from tests.support.s3 import S3Server

ROOT = Path(__file__).resolve().parents[2]


def state(seed: int) -> dict[str, Any]:
    return {"x": torch.arange(300_000) * seed, "seed": seed}


def told(path: Path) -> list[dict[str, Any]]:
    events = [json.loads(line) for line in path.read_text().splitlines()]
    assert all(e["time"].endswith("Z") and len(e["time"]) == 24 for e in events)
    assert [e["time"] for e in events] == sorted(e["time"] for e in events)
    return events


def test_each_thing_that_happens_is_a_line(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "events.jsonl"
    with ckpt.Checkpointer(tmp_path / "root", keep=ckpt.Keep(last=1, grace=0), events=path) as ck:
        assert ck.load(state(0)) is None
        first = ck.save(1, state(1))
        pending = ck.save_async(2, state(2))
        second = pending.result(60)
        with pytest.raises(ckpt.Unsupported):
            ck.save(3, {"x": object()})
        assert ck.load(state(0)) is not None
        with pytest.raises(ckpt.CkptError):
            ck.load(state(0), step=77)
    events = told(path)
    kinds = [(e["event"], e["step"]) for e in events if not e["event"].startswith("collect")]
    assert kinds == [
        ("load.empty", None),
        ("save.begun", 1),
        ("save.committed", 1),
        ("save.begun", 2),
        ("save.staged", 2),
        ("save.committed", 2),
        ("save.begun", 3),
        ("save.failed", 3),
        ("load.finished", 2),
        ("load.failed", 77),
    ]
    by = {(e["event"], e["step"]): e for e in events}
    for receipt in (first, second):
        committed = by["save.committed", receipt.step]
        assert committed["state_id"] == receipt.state_id and committed["bytes"] == receipt.bytes
        assert committed["phases"].keys() == {"plan", "digest", "intent", "write", "receipt", "commit"}
        assert committed["stall"] > 0 and committed["seconds"] > 0
    assert by["save.begun", 1]["blocking"] and not by["save.begun", 2]["blocking"]
    assert by["save.staged", 2]["bytes"] == pending.staged >= 300_000 * 8
    assert by["save.failed", 3]["error"]["kind"] == "Unsupported" and "x" in by["save.failed", 3]["error"]["message"]
    assert by["load.finished", 2]["state_id"] == second.state_id and by["load.finished", 2]["verified"]
    assert "77" in by["load.failed", 77]["error"]["message"]
    collects = [e for e in events if e["event"] == "collect.finished"]
    assert [step for e in collects for step in e["retired"]] == [1] and sum(e["removed"] for e in collects) == 1


def test_a_job_that_must_end_says_so(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with pytest.raises(ckpt.Preempted), ckpt.Checkpointer(tmp_path / "root", events=path, poll=lambda: True) as ck:
        for step in range(1, 9):
            ck.after_step(step, state(step))
    events = told(path)
    assert [e["event"] for e in events] == ["preemption", "save.begun", "save.staged", "save.committed"]
    assert len({e["step"] for e in events}) == 1 and 0 < events[0]["seconds_left"] <= 60


def test_an_error_in_the_background_is_told_of_once_and_raised_all_the_same(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    ck = ckpt.Checkpointer(tmp_path / "root", events=path)
    ck.save_async(1, state(1)).result(60)
    (tmp_path / "root").rename(tmp_path / "away")
    (tmp_path / "root").write_text("no folder")
    pending = ck.save_async(2, state(2))
    with pytest.raises(ckpt.StoreError, match="step 2 in the background failed"):
        ck.close()
    failed = told(path)[-1]
    assert (failed["event"], failed["step"]) == ("save.failed", 2) and failed["error"]["kind"] == "StoreError"
    assert pending.progress < 1.0


def _append_for_ever(path: str) -> None:
    log = EventLog(path)
    step = 0
    while True:
        step += 1
        log.write("save.begun", step, blocking=True, filler="x" * (step % 997))


def test_a_kill_leaves_no_more_than_one_cut_line(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    for _ in range(2):
        process = multiprocessing.get_context("spawn").Process(target=_append_for_ever, args=(str(path),))
        before = path.stat().st_size if path.exists() else 0
        process.start()
        while not path.exists() or path.stat().st_size < before + 10_000:
            assert process.is_alive()
        os.kill(process.pid or 0, signal.SIGKILL)
        process.join()
        with open(path, "ab") as file:  # as the worst kill leaves it
            file.write(b'{"time": "2026')
    EventLog(path).write("load.empty", None)
    lines = path.read_bytes().splitlines()
    events = list(read_events(path))
    assert len(lines) - len(events) == 2 and events[-1]["event"] == "load.empty"
    assert len({e["step"] for e in events}) > 10


def test_a_log_that_cannot_be_opened_is_refused_and_one_that_fails_later_is_not_the_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ckpt.CkptError, match=r"cannot append to .*give a path"):
        ckpt.Checkpointer(tmp_path / "root", events=tmp_path / "file" / "events.jsonl")
    with ckpt.Checkpointer(tmp_path / "root", events="/dev/full") as ck, caplog.at_level(logging.ERROR, "ckpt"):
        ck.save(1, state(1))
    assert "the event save.committed of step 1 could not be logged: No space left on device" in caplog.messages


# --- Progress ---


def test_lines_where_there_is_no_terminal(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "EVERY", 0.0)
    with ckpt.Checkpointer(tmp_path / "root", progress=True) as ck, caplog.at_level(logging.INFO, "ckpt"):
        ck.save(1, state(1))
        held = state(0)
        ck.load(held)
    assert raw(held["x"]) == raw(state(1)["x"])
    for what in ("save step 1", "load"):
        lines = [m for m in caplog.messages if m.startswith(f"{what}: ")]
        assert lines[0].startswith(f"{what}: 0 %") and lines[-1].startswith(f"{what}: 100 % of 2.3 MiB on rank 0 after")
    caplog.clear()
    with ckpt.Checkpointer(tmp_path / "root") as ck, caplog.at_level(logging.INFO, "ckpt"):
        ck.save(2, state(2))
    assert caplog.messages == []


JOB = """
import sys, torch, ckpt
with ckpt.Checkpointer(sys.argv[1], progress=True) as ck:
    ck.save(1, {"x": torch.arange(300_000)})
"""


def test_a_bar_on_a_terminal(tmp_path: Path) -> None:
    terminal, stderr = pty.openpty()
    job = subprocess.Popen(
        [sys.executable, "-c", JOB, str(tmp_path / "root")],
        stderr=stderr,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(ROOT), "TERM": "xterm"},
    )
    os.close(stderr)
    shown = b""
    with contextlib.suppress(OSError):  # how a terminal says that nobody has it open any more
        while piece := os.read(terminal, 1 << 16):
            shown += piece
    os.close(terminal)
    assert job.communicate(timeout=60)[0] == b"" and job.returncode == 0, shown
    assert b"save step 1" in shown and "━".encode() in shown


@pytest.mark.s3
def test_progress_of_a_save_in_the_background(s3: S3Server) -> None:
    """A slow server takes two objects at a time."""
    large = {f"x{number}": torch.arange(1 << 19) + number for number in range(8)}
    with FaultProxy(s3.endpoint) as proxy:
        options = {**s3.storage_options, "endpoint": proxy.endpoint}
        with ckpt.Checkpointer(s3.url(f"progress-{uuid4().hex[:8]}"), storage_options=options) as ck:
            proxy.on(puts("/state/tensors/.*/c/"), late)
            pending = ck.save_async(1, large)
            seen = []
            while not pending.done():
                seen.append(pending.progress)
                time.sleep(0.01)
            assert seen == sorted(seen) and any(0.0 < fraction < 1.0 for fraction in seen)
            assert pending.result(60).step == 1 and pending.progress == 1.0


def late(exchange: Exchange) -> None:
    time.sleep(0.3)
    exchange.reply(exchange.ask())


def test_a_trainer_that_does_not_read_stops_nobody() -> None:
    """What an agent offers is dropped, whole, once the buffer fills; what it sends after that arrives."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        sent = 0
        while wire.offer(ours, {"progress": sent}):
            sent += 1
            assert sent < 1_000_000
        assert sent > 10
        found = [wire.receive(theirs)[0]["progress"] for _ in range(sent)]
        assert found == list(range(sent))
        wire.send(ours, {"record": 1})
        assert wire.receive(theirs)[0] == {"record": 1}


# --- Metrics ---


def scrape(port: int) -> dict[str, float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20) as answer:
        families = text_string_to_metric_families(answer.read().decode())
    return {s.name + "".join(s.labels.values()): s.value for f in families for s in f.samples}


def test_metrics_of_an_agent(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    with ckpt.Checkpointer(tmp_path / "root", metrics_port=port) as ck:
        for step in (5, 9):
            receipt = ck.save_async(step, state(step)).result(60)
        found = scrape(port)
        assert found["ckpt_saves_committed_total"] == 2 and found["ckpt_saves_failed_total"] == 0
        assert found["ckpt_last_committed_step"] == 9 and found["ckpt_staged_bytes"] == 0
        assert found["ckpt_written_bytes_total"] >= 2 * 300_000 * 8
        assert found["ckpt_save_phase_seconds_countwrite"] == 2
        assert 0 < found["ckpt_save_phase_seconds_sumwrite"] <= 2 * 60
        assert found[f"ckpt_agent_info{ck.url}"] == 1 and receipt.step == 9
        (tmp_path / "root").rename(tmp_path / "away")
        (tmp_path / "root").write_text("no folder")
        assert ck.save_async(10, state(10)).exception(60) is not None
        assert scrape(port)["ckpt_saves_failed_total"] == 1


@pytest.mark.parametrize("port", [0, 65536, "9100", True])
def test_what_is_no_port_is_refused(tmp_path: Path, port: Any) -> None:
    with pytest.raises(ckpt.CkptError, match="is no port"):
        ckpt.Checkpointer(tmp_path / "root", metrics_port=port)
