"""Exit codes, one line for an error, the trace with --debug; and what changes on a terminal."""

import json
import os
import pty
import re
import select
import subprocess
import sys
from pathlib import Path

import click
import pytest
import torch

import ckpt
from ckpt.cli import errors, ls
from ckpt.cli.main import main
from tests.cli.commands import run
from tests.support.ports import free_ports

COMMAND = [sys.executable, "-c", "from ckpt.cli.main import main; main(prog_name='ckpt')"]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("errors") / "run"
    with ckpt.Checkpointer(folder) as ck:
        for step in range(1, 41):
            ck.save(step, {"x": torch.tensor(float(step))})
    return folder


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ckpt.CorruptCheckpoint("x"), 1),
        (click.UsageError("x"), 2),
        (ckpt.StoreError("x"), 3),
        (ckpt.NothingCommitted("x"), 4),
        (ckpt.Fenced("x"), 5),
        (ckpt.StateMismatch("x"), 6),
        (ckpt.Unsupported("x"), 6),
        (ckpt.CkptError("x"), 6),
        (ValueError("x"), 70),
        (KeyboardInterrupt(), 130),
    ],
)
def test_each_kind_of_error_has_a_code(error: BaseException, code: int) -> None:
    assert errors.exit_code(error) == code


def test_every_document_is_described() -> None:
    text = (Path(__file__).parents[2] / "docs" / "cli.md").read_text()
    made = [name for name, one in main.commands.items() if any(p.name == "as_json" for p in one.params)]
    assert len(made) >= 8 and [name for name in made if f"\n| `{name}` | " not in text] == []


def test_one_line_or_one_document_or_the_trace(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = run("show", f"{root}@99")
    assert plain.exit_code == 4 and plain.stdout == "" and plain.stderr.count("\n") == 1
    assert plain.stderr.startswith("Error: file://") and "no committed step 99; there are 40, the last" in plain.stderr
    as_json = run("show", f"{root}@99", "--json")
    assert as_json.exit_code == 4 and as_json.stderr == ""
    assert json.loads(as_json.stdout)["error"]["message"] == plain.stderr[len("Error: ") : -1]
    debug = run("--debug", "show", f"{root}@99")
    assert debug.exit_code == 4 and "Traceback" in debug.stderr and debug.stderr.endswith(plain.stderr)
    usage = run("show", f"{root}@home", "--json")
    assert usage.exit_code == 2 and json.loads(usage.stdout)["error"]["kind"] == "BadParameter"
    monkeypatch.setattr(ls, "commits", lambda *a, **k: 1 / 0)
    bug = run("ls", root)
    assert bug.exit_code == 70 and "ZeroDivisionError" in bug.stderr and "Traceback" not in bug.stderr


def test_exit_codes_of_the_real_command(root: Path, tmp_path: Path) -> None:
    """In fresh processes, side by side."""
    nobody = f"http://127.0.0.1:{free_ports(1)[0]}"
    keys = {"AWS_ENDPOINT_URL": nobody, "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_REGION": "x"}
    cases = {
        0: ["diff", f"{root}@1", f"{root}@step=1"],
        1: ["diff", f"{root}@1", f"{root}@2"],
        2: ["show"],
        3: ["ls", "s3://bucket/run"],
        4: ["verify", str(tmp_path / "nothing")],
    }
    begun = {
        code: subprocess.Popen(
            [*COMMAND, *arguments], env=os.environ | keys, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        for code, arguments in cases.items()
    }
    for code, process in begun.items():
        out, err = process.communicate(timeout=150)
        assert process.returncode == code, (cases[code], out, err)
        assert b"Traceback" not in err and (code < 2) == (err == b"")


def _on_a_terminal(arguments: list[str], **variables: str) -> str:
    """Standard output of the command on a terminal of 24 lines and 80 columns, whose pager is `cat` with a mark."""
    master, slave = pty.openpty()
    env = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES")}
    env |= {"TERM": "xterm-256color", "PAGER": "sed s/^/PAGED/", "COLUMNS": "80", "LINES": "24", **variables}
    process = subprocess.Popen([*COMMAND, *arguments], stdin=slave, stdout=slave, stderr=subprocess.PIPE, env=env)
    os.close(slave)
    seen = b""
    while select.select([master], [], [], 60)[0]:
        try:
            part = os.read(master, 65536)
        except OSError:  # the other end is closed
            break
        if not part:
            break
        seen += part
    os.close(master)
    assert process.wait(60) == 0, process.stderr and process.stderr.read()
    assert process.stderr is not None
    process.stderr.close()
    return seen.decode()


def test_colours_and_pager_on_a_terminal_only(root: Path) -> None:
    colour = re.compile("\x1b\\[(?:3|9)[0-7]m|\x1b\\[1;3[0-7]m")
    paged = _on_a_terminal(["ls", str(root)])
    assert paged.count("PAGED") == 41
    plain = _on_a_terminal(["ls", str(root), "--no-pager"])
    assert "PAGED" not in plain and plain.count("\n") == 41 and "\x1b[1m" in plain  # bold headings
    short = _on_a_terminal(["verify", str(root)])
    assert "PAGED" not in short and colour.search(short)
    assert not colour.search(_on_a_terminal(["verify", str(root)], NO_COLOR="1"))
    assert "\x1b" not in run("verify", root).output and "PAGED" not in run("ls", root).output


def test_shell_completion(root: Path) -> None:
    env = os.environ | {"_CKPT_COMPLETE": "bash_complete", "COMP_WORDS": "ckpt ver", "COMP_CWORD": "1"}
    done = subprocess.run(COMMAND, env=env, capture_output=True, text=True, timeout=60)
    assert done.stdout == "plain,verify\n"
