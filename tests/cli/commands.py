"""What the tests of the command share: running it in this process, and the S3 server by the usual variables."""

import json
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from ckpt.cli.main import main
from tests.support.roots import Root

_NAMES = {"endpoint": "AWS_ENDPOINT_URL", "region": "AWS_REGION", "access_key": "AWS_ACCESS_KEY_ID"}


def run(*arguments: object, command: click.Command = main) -> Result:
    return CliRunner().invoke(command, [str(a) for a in arguments])


def document(*arguments: object, code: int = 0, command: click.Command = main) -> Any:
    """The JSON document that a command prints, which must end with this exit code."""
    done = run(*arguments, "--json", command=command)
    assert done.exit_code == code, done.output
    return json.loads(done.stdout)


def set_variables(monkeypatch: pytest.MonkeyPatch, root: Root) -> None:
    for name, value in (root.storage_options or {}).items():
        monkeypatch.setenv(_NAMES.get(name, "AWS_SECRET_ACCESS_KEY"), value)
