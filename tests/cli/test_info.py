"""`ckpt info` says what is installed and which kernels are in use."""

import json
import shutil
from importlib.metadata import entry_points

import torch
from click.testing import CliRunner

from ckpt.cli.main import main
from ckpt.native import library


def test_both_forms_say_the_same() -> None:
    plain, document = CliRunner().invoke(main, ["info"]), CliRunner().invoke(main, ["info", "--json"])
    assert plain.exit_code == document.exit_code == 0
    found = json.loads(document.output)
    assert found["versions"]["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert found["kernels"] == library.describe()
    assert all(value in plain.output for value in found["versions"].values() if value)
    assert found["kernels"]["kernels"] in plain.output


def test_where_there_is_a_compiler_the_kernels_are_compiled() -> None:
    """Else the whole suite would run on the reference twins and nobody would know."""
    if shutil.which("c++") or shutil.which("g++") or shutil.which("clang++"):
        assert library.describe()["kernels"] == "native"


def test_the_command_is_installed() -> None:
    (command,) = entry_points(name="ckpt", group="console_scripts")
    assert command.load() is main


def test_an_unknown_command_is_a_usage_error() -> None:
    assert CliRunner().invoke(main, ["nonsense"]).exit_code == 2
