"""`ckpt agent` lists what writes asynchronous saves on this machine."""

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

import ckpt
from ckpt.agent import registry
from ckpt.cli.main import main


def test_agents_are_listed_and_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_folder", lambda: tmp_path / "agents")
    assert CliRunner().invoke(main, ["agent"]).output == "no agents are running\n"
    with ckpt.Checkpointer(tmp_path / "root") as ck:
        ck.save_async(1, {"x": torch.zeros(3)}).result(60)
        (found,) = json.loads(CliRunner().invoke(main, ["agent", "--json"]).output)
        assert found["url"] == ck.url and found["writing"] is False
        assert f"{found['pid']:>8}  idle     {ck.url}" in CliRunner().invoke(main, ["agent"]).output
    registry.add(registry.Entry(1, "x", "nobody"))
    for _ in range(200):
        if CliRunner().invoke(main, ["agent"]).output == "no agents are running\n":
            break
    assert not list((tmp_path / "agents").iterdir())
