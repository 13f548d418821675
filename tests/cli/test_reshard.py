"""The command `ckpt-reshard`, in this process and once as its own."""

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import ckpt
from ckpt.adapters.foreign.sidecar import NAME
from ckpt.cli.reshard import reshard
from ckpt.errors import StoreError
from ckpt.inspect import committed as inspected
from ckpt.invariant import Contract
from tests.cli import commands
from tests.support.raw import attempt_folder, log_records, objects_of, random_bits, raw, tree

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


run, document = (partial(one, command=reshard) for one in (commands.run, commands.document))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Steps 3 and 7, which differ."""
    with ckpt.Checkpointer(tmp_path / "src") as ck:
        for step in (3, 7):
            w = random_bits((1300, 1000), torch.float32, step)
            model = {"w": w, "b": random_bits((9,), torch.bfloat16), "tied": w, "n": torch.arange(4)}
            ck.save(step, {"model": model, "epoch": step, "rng": ckpt.per_rank({"seed": 1})})
    return tmp_path / "src"


def ids(root: Path) -> dict[int, str]:
    return {r["step"]: r["state_id"] for r in log_records(root).values() if r["kind"] == "commit"}


@pytest.mark.parametrize("form", ["ckpt", "dcp", "hf", "megatron"])
def test_there_and_back_with_the_same_state_id(root: Path, tmp_path: Path, form: str) -> None:
    there = document(root, tmp_path / "there", "--format", form, "--verify")
    assert there["source"] == {"url": f"file://{root}@7", "format": "ckpt", "state_id": ids(root)[7], "step": 7}
    assert there["destination"]["state_id"] == there["destination"]["read_again"] == ids(root)[7]
    assert there["not_carried"] == {} and there["changes"] is None
    assert (
        set(there["in_sidecar"])
        == {
            "ckpt": set(),
            "dcp": {"model/w", "rng of rank 0"},
            "megatron": {"model/w", "rng of rank 0"},
            "hf": {"model/w", "epoch", "rng of rank 0"},
        }[form]
    )
    back = document(tmp_path / "there", tmp_path / "back", "--verify")
    assert back["source"]["format"] == form and back["source"]["step"] == 7
    assert ids(tmp_path / "back") == {7: ids(root)[7]}
    for part in ("manifest.json", "ranks/manifest.json"):
        assert (attempt_folder(tmp_path / "back") / part).read_bytes() == (attempt_folder(root) / part).read_bytes()


def test_an_older_step_is_named_by_the_address(root: Path, tmp_path: Path) -> None:
    assert document(f"{root}@3", tmp_path / "a")["destination"]["state_id"] == ids(root)[3]
    document(f"{root}@3", tmp_path / "b", "--step", 11)
    assert ids(tmp_path / "b") == {11: ids(root)[3]}
    assert run(f"{root}@5", tmp_path / "c").exit_code == 4


def test_the_plan_writes_nothing(root: Path, tmp_path: Path) -> None:
    before = tree(tmp_path)
    plan = document(root, tmp_path / "a", "--plan", "--format", "hf", "--no-sidecar", "--dtype", "bfloat16")
    assert plan["destination"]["state_id"] is None and plan["bytes"] == 1300 * 1000 * 2 + 9 * 2 + 4 * 8
    assert set(plan["not_carried"]) == {"model/w", "epoch", "rng of rank 0"}
    read = 2 * (1300 * 1000 * 2) + 9 * 2 + 4 * 8  # a tied tensor is read for each of its names
    assert plan["plan"]["processes"] == [{"process": 0, "read": read, "moved": 0}]
    assert plan["plan"]["output"] == {"files": 1, "bytes": read}
    assert "nothing written" in run(root, tmp_path / "a", "--plan").output
    assert tree(tmp_path) == before and not (tmp_path / "a").exists()


def test_a_cast_and_new_names_are_printed(root: Path, tmp_path: Path) -> None:
    options = ["--select", "model/*", "--rename", "^model/", "m/", "--dtype", "bfloat16", "--verify"]
    done = run(root, tmp_path / "a", *options)
    assert done.exit_code == 0, done.output
    lines = [line.split() for line in done.stdout.splitlines()]
    for line in (["model/w", "float32", "m/w", "bfloat16"], ["model/b", "bfloat16", "m/b", "bfloat16"]):
        assert line in lines
    assert ["left", "out:", "epoch"] in lines and ["left", "out:", "rng"] in lines
    m = {"w": torch.zeros(1300, 1000, dtype=torch.bfloat16), "n": torch.zeros(4, dtype=torch.int64)}
    into = {"m": m | {"b": torch.zeros(9, dtype=torch.bfloat16)}}
    into["m"]["tied"] = into["m"]["w"]
    with ckpt.Checkpointer(tmp_path / "a", read_only=True) as ck:
        assert ck.load(into) is not None
    finite = random_bits((1300, 1000), torch.float32, 7)
    where = ~finite.isnan()
    assert raw(into["m"]["w"][where]) == raw(finite.to(torch.bfloat16)[where])
    assert into["m"]["w"][~where].isnan().all() and raw(into["m"]["n"]) == raw(torch.arange(4))


def test_a_run_goes_on_trajectory_exact_after_a_conversion_that_changes_nothing(tmp_path: Path) -> None:
    state = {"model": {"w": torch.arange(9.0)}, "epoch": 3, "rng": ckpt.per_rank({"seed": 1})}
    run_of = partial(ckpt.Checkpointer, contract=Contract(4, 8), layout=ckpt.Layout())
    with run_of(tmp_path / "src") as ck:
        ck.save(7, state)
    changes = {"none": [], "dtype": ["--dtype", "bfloat16"], "parts": ["--select", "[me]*"], "step": ["--step", 8]}
    for what, options in changes.items():
        document(tmp_path / "src", tmp_path / what, *options)
        with run_of(tmp_path / what) as ck:
            restored = ck.load(state, cast=("*",) if what == "dtype" else (), allow_missing=("rng",))
            assert restored is not None and (restored.level == "trajectory-exact") == (what == "none"), what
    runs = [json.loads((attempt_folder(tmp_path / name) / "run.json").read_bytes()) for name in ("src", "none")]
    assert runs[0]["numerics"] == runs[1]["numerics"] and runs[0]["layout"] == runs[1]["layout"]
    with run_of(tmp_path / "none") as ck:
        assert ck.load(state, level="trajectory-exact") is not None
        ck.save(8, state)


def test_a_source_that_cannot_be_written_is_read_without_a_lease(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextlib.contextmanager
    def refuse(*_: object) -> Iterator[None]:
        raise StoreError("read-only")
        yield

    monkeypatch.setattr(inspected, "lease", refuse)
    done = run(root, tmp_path / "a")
    assert done.exit_code == 0 and done.stderr.startswith("no lease: ") and ids(tmp_path / "a") == {7: ids(root)[7]}


def test_a_second_run_finds_the_result_and_another_state_is_refused(root: Path, tmp_path: Path) -> None:
    first = document(root, tmp_path / "a")
    before = tree(tmp_path / "a")
    assert document(root, tmp_path / "a") == first and tree(tmp_path / "a") == before
    assert run(f"{root}@3", tmp_path / "a").exit_code == 6
    assert run(f"{root}@3", tmp_path / "a", "--append").exit_code == 0
    assert ids(tmp_path / "a") == ids(root)
    assert run(root, tmp_path / "a", "--format", "hf").exit_code == 3


@pytest.mark.parametrize("form", ["ckpt", "dcp", "hf"])
def test_a_flipped_bit_of_the_source_is_reported_and_nothing_is_written(root: Path, tmp_path: Path, form: str) -> None:
    file = objects_of(root, "tensors/model/tied")[0]
    data = bytearray(file.read_bytes())
    data[len(data) // 3] ^= 4
    file.write_bytes(data)
    done = run(root, tmp_path / "a", "--format", form)
    assert done.exit_code == 1 and "tensors/model/tied" in done.stderr and "damaged" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "a" / ".metadata").exists() and not list((tmp_path / "a").glob("*.safetensors*"))
    assert not (tmp_path / "a").exists() or not ids(tmp_path / "a")
    error = document(root, tmp_path / "b", "--format", form, code=1)["error"]
    assert error["kind"] == "CorruptCheckpoint" and error["exit_code"] == 1


def test_without_a_sidecar_the_tensors_alone_come_back(root: Path, tmp_path: Path) -> None:
    there = document(root, tmp_path / "hf", "--format", "hf", "--no-sidecar", "--verify")
    assert there["destination"]["read_again"] == ids(root)[7] and not (tmp_path / "hf" / NAME).exists()
    assert set(load_file(tmp_path / "hf" / "model.safetensors")) == {"model.w", "model.b", "model.tied", "model.n"}
    assert run(tmp_path / "hf", tmp_path / "b").exit_code == 2
    assert document(tmp_path / "hf", tmp_path / "b", "--step", 1)["tensors"] == 4


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["nothing", "b"], 3),
        (["empty", "b"], 6),
        (["empty", "b", "--from", "dcp"], 1),
        (["empty", "b", "--from", "hf"], 3),
        (["empty", "b", "--from", "megatron"], 1),
        (["empty", "b", "--from", "ckpt"], 4),
        (["src", "b", "--from", "hf"], 3),
        (["src", "b", "--from", "dcp"], 1),
        (["src", "s3x://b", "--format", "hf"], 6),
        (["src", "b", "--format", "pt"], 2),
        (["src", "b", "--dtype", "int8"], 6),
        (["src", "b", "--select", "zz"], 6),
        (["src", "b", "--rename", "(", ""], 6),
        (["src", "b", "--step", "-1"], 2),
        (["src@x", "b"], 2),
        (["loop", "b"], 3),
        (["loop", "b", "--from", "hf"], 3),
        (["loop", "b", "--from", "dcp"], 3),
        (["src", "loop", "--format", "hf"], 3),
        (["src", "loop", "--format", "dcp"], 3),
        (["src", "loop"], 3),
        (["src", "file/below", "--format", "hf"], 3),
        (["file", "b"], 6),
    ],
)
def test_exit_codes(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], code: int
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    Path("file").write_text("x")
    Path("loop").symlink_to("loop")
    done = run(*arguments)
    assert done.exit_code == code, done.output
    assert done.stdout == "" and "Error: " in done.stderr and "Traceback" not in done.stderr
    assert not Path("b").exists()


def test_as_a_process_of_its_own(root: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", "from ckpt.cli.reshard import reshard; reshard()", str(root), "out", "--json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["destination"]["state_id"] == ids(root)[7] == ids(tmp_path / "out")[7]
