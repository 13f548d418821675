"""What is refused, in which phase, with which promise, and that the message names the culprit and a remedy.

Phase 1 (matching, planning, manifests, sizes): nothing is changed and saving goes on. Phase 2 (bytes): `StateInvalid`
on every rank, no save until a load succeeds.
"""

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from tests.support.ranks import Crew
from tests.support.raw import (
    attempt_folder,
    canonical,
    forge_commit,
    forge_pinned,
    labelled,
    log_records,
    objects_of,
    random_bits,
    raw,
    tree,
)


def _state(seed: int, **more: Any) -> dict[str, Any]:
    """Two tensors with arrays of their own (the first in several objects), two packed ones, and plain values."""
    return {
        "big": random_bits((1300, 1000), torch.float32, seed),
        "own": random_bits((300, 100), torch.float32, seed + 1),
        "small": random_bits((5, 3), torch.float32, seed + 2),
        "count": random_bits((), torch.int64, seed + 3),
        "epoch": seed,
        "note": ["kept", (1, 2.5)],
        **more,
    }


def _bits(state: Mapping[str, Any]) -> dict[str, Any]:
    return {k: raw(v) if isinstance(v, torch.Tensor) else v for k, v in state.items()}


def _refused(
    ck: ckpt.Checkpointer, target: dict[str, Any], kind: type[Exception], words: list[str], **options: Any
) -> str:
    """Loads, expects a refusal of phase 1 with these words, and that no byte of the target has changed."""
    before = _bits(target)
    with pytest.raises(kind) as caught:
        ck.load(target, **options)
    assert type(caught.value) is kind
    assert _bits(target) == before
    for word in words:
        assert word in str(caught.value)
    return str(caught.value)


@pytest.fixture
def ck(tmp_path: Path) -> Iterator[ckpt.Checkpointer]:
    """A checkpointer on a root that holds `_state(10)` as step 1."""
    with ckpt.Checkpointer(tmp_path / "root") as made:
        made.save(1, _state(10))
        yield made


# Phase 1: what is asked for does not fit what is there.


def test_missing_keys(ck: ckpt.Checkpointer) -> None:
    target = _state(20, more=torch.ones(3), other=5)
    _refused(ck, target, ckpt.StateMismatch, ["rank 0: the checkpoint has no more, other", "allow_missing"])
    _refused(ck, target, ckpt.StateMismatch, ["has no other"], allow_missing=["mor?"])
    restored = ck.load(target, allow_missing=["more", "oth*"])
    assert restored is not None and (restored.tensors, target["other"]) == (4, 5)
    assert _bits(target) == _bits(_state(10, more=torch.ones(3), other=5))


def test_extra_keys(ck: ckpt.Checkpointer) -> None:
    target = {"small": torch.zeros(5, 3), "epoch": 0}
    words = ["the checkpoint holds big, count, note, own, which no rank's state has", "allow_extra"]
    _refused(ck, target, ckpt.StateMismatch, words)
    _refused(ck, target, ckpt.StateMismatch, ["holds note"], allow_extra=["big", "own", "count"])
    ck.load(target, allow_extra=["big", "own", "[cn]o*"])
    assert _bits(target) == {k: v for k, v in _bits(_state(10)).items() if k in target}


def test_many_missing_keys_are_counted_not_listed(ck: ckpt.Checkpointer) -> None:
    target = _state(20, **{f"new{i:03}": torch.zeros(1) for i in range(50)})
    message = _refused(ck, target, ckpt.StateMismatch, ["new000", "and 40 more"])
    assert len(message) < 400


DTYPES = [torch.float64, torch.bfloat16, torch.int32, torch.complex64]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_another_dtype(dtype: torch.dtype, ck: ckpt.Checkpointer) -> None:
    target = _state(20) | {"own": torch.ones(300, 100, dtype=dtype)}
    name = str(dtype).removeprefix("torch.")
    words = [f"own: rank 0 has dtype {name}, the checkpoint float32", "use the saved dtype, or ask for cast=['own']"]
    _refused(ck, target, ckpt.StateMismatch, words)
    _refused(ck, target, ckpt.StateMismatch, words, cast=["small"])
    ck.load(target, cast=["o*"])
    assert target["own"].dtype is dtype
    assert raw(target["own"]) == raw(_state(10)["own"].to(dtype))


@pytest.mark.parametrize(
    ("saved", "own"), [(torch.complex64, torch.float32), (torch.float4_e2m1fn_x2, torch.float32)], ids=str
)
def test_a_cast_that_torch_cannot_do_or_that_loses_a_part(saved: torch.dtype, own: torch.dtype, tmp_path: Path) -> None:
    with ckpt.Checkpointer(tmp_path) as ck:
        ck.save(1, {"x": random_bits((6,), saved)})
        _refused(ck, {"x": torch.ones(6, dtype=own)}, ckpt.StateMismatch, ["x: cannot be cast", "float32"], cast=["x"])


@pytest.mark.parametrize("shape", [(100, 300), (300, 101), (300, 100, 1), (30000,), ()], ids=str)
def test_another_shape(shape: tuple[int, ...], ck: ckpt.Checkpointer) -> None:
    words = [f"own: rank 0 has shape {list(shape)}, the checkpoint [300, 100]", "sizes it was saved with"]
    _refused(ck, _state(20) | {"own": torch.ones(shape)}, ckpt.StateMismatch, words)


def test_a_step_that_is_not_there(ck: ckpt.Checkpointer) -> None:
    _refused(ck, _state(20), ckpt.CkptError, ["no committed step 7", "there are [1]", ck.url], step=7)


# (rows, start, stop) of the parts that one rank gives of a [6, 4] tensor, and what is wrong with them.
PARTS: dict[str, tuple[list[tuple[int, int]], list[str]]] = {
    "a gap at the start": ([(1, 6)], ["x", "no rank holds the elements [0:1, 0:4]", "check the layout"]),
    "a gap inside": ([(0, 2), (3, 6)], ["x", "no rank holds the elements [2:3, 0:4]", "check the layout"]),
    "nothing": ([], ["x", "no rank holds the elements [0:6, 0:4]", "check the layout"]),
    "an overlap": ([(0, 4), (3, 6)], ["x", "[0:4, 0:4] and [3:6, 0:4]", "overlap in [3:4, 0:4]", "identical boxes"]),
}


def _in_parts(rows: list[tuple[int, int]], seed: int) -> ckpt.ShardedTensor:
    local = random_bits((sum(b - a for a, b in rows), 4), torch.float32, seed)
    boxes, at = [], 0
    for a, b in rows:
        boxes.append(((a, 0), (b - a, 4), (at, 0)))
        at += b - a
    return ckpt.ShardedTensor(local, boxes, (6, 4))


def test_one_box_twice_is_refused_at_save_and_filled_twice_at_load(tmp_path: Path) -> None:
    twice = [(0, 3), (3, 6), (3, 6)]
    with ckpt.Checkpointer(tmp_path) as ck:
        with pytest.raises(ckpt.StateMismatch, match=r"x: rank 0 gives box \[3:6, 0:4\] twice; give each part .* once"):
            ck.save(1, {"x": _in_parts(twice, 1)})
        ck.save(2, {"x": labelled((6, 4))})
        target = _in_parts(twice, 2)
        assert ck.load({"x": target}) is not None
    assert raw(target.local) == raw(labelled((6, 4))) + raw(labelled((6, 4))[3:])


@pytest.mark.parametrize("kind", PARTS)
def test_coverage_that_is_not_exact(kind: str, tmp_path: Path) -> None:
    rows, words = PARTS[kind]
    with ckpt.Checkpointer(tmp_path) as ck:
        with pytest.raises(ckpt.StateMismatch) as caught:
            ck.save(1, {"x": _in_parts(rows, 1)})
        assert all(word in str(caught.value) for word in words)
        assert not (tmp_path / "attempts").exists() and ck.latest() is None
        ck.save(2, {"x": labelled((6, 4))})
        target = _in_parts(rows, 2)
        before = raw(target.local)
        with pytest.raises(ckpt.StateMismatch) as caught:
            ck.load({"x": target})
        assert all(word in str(caught.value) for word in words)
        assert raw(target.local) == before


@pytest.mark.parametrize(
    ("boxes", "words"),
    [
        ([((0, 0), (7, 4), (0, 0))], ["x: box [0:7, 0:4] leaves the global shape [6, 4]"]),
        ([((0, 0), (6, 4), (1, 0))], ["x: box [1:7, 0:4] leaves the local tensor of shape [6, 4]"]),
        ([((0,), (6,), (0,))], ["x: ", "leaves the global shape [6, 4]"]),
        ([((0, 0), (6,), (0, 0))], ["x: ", "differ in length", "give (global offset, extent, local offset)"]),
        ([((-1, 0), (6, 4), (0, 0))], ["x: ", "negative", "give (global offset, extent, local offset)"]),
        ([((0, 0), (6, 4), (0, 0, 0))], ["x: "]),
    ],
)
def test_boxes_that_fit_nowhere(boxes: list[Any], words: list[str], tmp_path: Path) -> None:
    with ckpt.Checkpointer(tmp_path) as ck, pytest.raises(ckpt.StateMismatch) as caught:
        ck.save(1, {"x": ckpt.ShardedTensor(torch.zeros(6, 4), boxes, (6, 4))})
    assert all(word in str(caught.value) for word in words)


UNSUPPORTED: dict[str, tuple[Callable[[], Any], list[str]]] = {
    "sparse": (lambda: torch.eye(3).to_sparse(), ["x: ", "sparse_coo", "convert"]),
    "quantized": (lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8), ["x: ", "quint8"]),
    "meta": (lambda: torch.empty(3, device="meta"), ["x: ", "meta device", "materialise"]),
    "lazy conjugate": (lambda: torch.ones(3, dtype=torch.complex64).conj(), ["x: ", "resolve_conj"]),
    "lazy negative": (lambda: torch.ones(3, dtype=torch.complex64).conj().imag, ["x: ", "resolve_neg"]),
    "an object": (lambda: object(), ["x: ", "builtins.object", "state_dict"]),
    "a set": (lambda: {1, 2}, ["x: ", "builtins.set", "plain Python data"]),
    "half of a state_dict": (lambda: type("Half", (), {"state_dict": lambda s: {}})(), ["x: ", "Half has only one"]),
    "a key": (lambda: {(1, 2): torch.zeros(2000)}, ["x/(1, 2)", "make it an entry of its own"]),
}


@pytest.mark.parametrize("kind", UNSUPPORTED)
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")  # torch's own, of quantize_per_tensor
def test_what_cannot_be_kept_is_refused_at_save(kind: str, tmp_path: Path) -> None:
    make, words = UNSUPPORTED[kind]
    with ckpt.Checkpointer(tmp_path) as ck, pytest.raises(ckpt.Unsupported) as caught:
        ck.save(1, {"x": make()})
    assert all(word in str(caught.value) for word in words)
    assert not (tmp_path / "attempts").exists()


@pytest.mark.parametrize("step", [-1, 1.0, True, "1", None])
def test_a_step_is_a_non_negative_int(step: Any, tmp_path: Path) -> None:
    with ckpt.Checkpointer(tmp_path) as ck, pytest.raises(ckpt.StateMismatch, match="must be a non-negative int"):
        ck.save(step, {"x": 1})


# Stored bytes that are missing or damaged. The tensors `big` and `own` have arrays of their own, `small` is packed.

FOLDERS = {"big": "tensors/big", "own": "tensors/own", "small": "packed/float32"}


def _truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def _halve(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def _empty(file: Path) -> None:
    file.write_bytes(b"")


def _append(file: Path) -> None:
    file.write_bytes(file.read_bytes() + b"\0")


def _replace_by_a_link(file: Path) -> None:
    other = file.parent / "other"
    shutil.copy(file, other)
    file.unlink()
    file.symlink_to(other)


SIZES: dict[str, Callable[[Path], None]] = {
    "truncated": _truncate,
    "halved": _halve,
    "emptied": _empty,
    "longer": _append,
    "deleted": Path.unlink,
    "a link": _replace_by_a_link,
}


@pytest.mark.parametrize("damage", SIZES)
@pytest.mark.parametrize("tensor", FOLDERS)
def test_a_chunk_of_another_size_is_found_before_anything_changes(
    tensor: str, damage: str, ck: ckpt.Checkpointer, tmp_path: Path
) -> None:
    file = objects_of(tmp_path / "root", FOLDERS[tensor])[-1]
    SIZES[damage](file)
    key = file.relative_to(tmp_path / "root").as_posix()
    _refused(ck, _state(20), ckpt.CorruptCheckpoint, [key, "restore the file, or load an older step"])
    ck.save(2, _state(30))  # phase 1: saving goes on, and what it writes loads
    target = _state(20)
    assert ck.load(target) is not None
    assert _bits(target) == _bits(_state(30))


@pytest.mark.parametrize("key", ["zarr.json", "tensors/zarr.json", "tensors/own/zarr.json", "packed/float32/zarr.json"])
@pytest.mark.parametrize("gone", [True, False], ids=["deleted", "changed"])
def test_array_metadata_must_follow_from_the_manifest(
    key: str, gone: bool, ck: ckpt.Checkpointer, tmp_path: Path
) -> None:
    file = attempt_folder(tmp_path / "root") / "state" / key
    if gone:
        file.unlink()
    else:
        file.write_bytes(file.read_bytes().replace(b'"zarr_format":3', b'"zarr_format": 3'))
    words = [f"state/{key}", "missing" if gone else "does not follow from the manifest", "load an older step"]
    _refused(ck, _state(20), ckpt.CorruptCheckpoint, words)


@pytest.mark.parametrize("name", ["manifest.json", "ranks/manifest.json", "run.json"])
@pytest.mark.parametrize("how", ["changed", "deleted", "emptied", "of another step"])
def test_records_must_be_those_that_the_commit_pins(name: str, how: str, ck: ckpt.Checkpointer, tmp_path: Path) -> None:
    file = attempt_folder(tmp_path / "root") / name
    if how == "deleted":
        file.unlink()
    elif how == "emptied":
        file.write_bytes(b"")
    elif how == "changed":
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
    else:
        kept = file.read_bytes()
        ck.save(2, _state(30, rank=ckpt.per_rank(4)))
        newest = attempt_folder(tmp_path / "root") / name
        assert newest.read_bytes() != kept
        newest.write_bytes(kept)
    words = [name, "load an older step", "missing" if how == "deleted" else "not the bytes that the commit of step"]
    _refused(ck, _state(20), ckpt.CorruptCheckpoint, words)


def _other_fingerprint(d: dict[str, Any]) -> None:
    d["tensors"][0]["fingerprint"] = "0" * 31 + "1"


def _other_shape(d: dict[str, Any]) -> None:
    next(t for t in d["tensors"] if t["name"] == "own")["shape"] = [100, 300]


def _other_value(d: dict[str, Any]) -> None:
    d["values"]["epoch"] = {"int": "99"}


def _other_grid(d: dict[str, Any]) -> None:
    d["arrays"][0]["cell"] = [2 * n for n in d["arrays"][0]["cell"]]


def _escaping_folder(d: dict[str, Any]) -> None:
    d["arrays"][0]["folder"] = "../../../../outside"


def _absolute_folder(d: dict[str, Any]) -> None:
    d["arrays"][0]["folder"] = "/etc"


def _escaping_name(d: dict[str, Any]) -> None:
    d["tensors"][0]["name"] = "../../../../outside"


def _unknown_dtype(d: dict[str, Any]) -> None:
    d["tensors"][0]["dtype"] = "float128"


def _no_aliases(d: dict[str, Any]) -> None:
    d["aliases"] = [1]


def _no_tensors(d: dict[str, Any]) -> None:
    del d["tensors"]


def _foreign_array(d: dict[str, Any]) -> None:
    d["tensors"][0]["array"] = 77


FORGED = [
    _other_fingerprint,
    _other_shape,
    _other_value,
    _other_grid,
    _escaping_folder,
    _absolute_folder,
    _escaping_name,
    _unknown_dtype,
    _no_aliases,
    _no_tensors,
    _foreign_array,
]


@pytest.mark.parametrize("change", FORGED, ids=lambda f: f.__name__.strip("_"))
def test_a_manifest_that_contradicts_itself(
    change: Callable[[dict[str, Any]], None], ck: ckpt.Checkpointer, tmp_path: Path
) -> None:
    """Forged so that the commit pins it: its own state id, and the commit's, still tell."""
    forge_pinned(tmp_path / "root", "manifest.json", change)
    with ckpt.Checkpointer(tmp_path / "root", read_only=True) as fresh:
        message = _refused(fresh, _state(20), ckpt.CorruptCheckpoint, ["manifest"])
    assert "older step" in message or "newer ckpt" in message


@pytest.mark.parametrize("name", ["manifest.json", "ranks/manifest.json", "run.json", "log"])
@pytest.mark.parametrize("version", [2, 0, "1", None, True])
def test_an_unknown_format_version(name: str, version: Any, ck: ckpt.Checkpointer, tmp_path: Path) -> None:
    if name == "log":
        forge_commit(tmp_path / "root", lambda d: d.update(format=version))
    else:
        forge_pinned(tmp_path / "root", name, lambda d: d.update(format=version))
    with ckpt.Checkpointer(tmp_path / "root", read_only=True) as fresh:
        words = [f"format version {version!r}", "reads version 1", "use a newer ckpt", name]
        _refused(fresh, _state(20), ckpt.CkptError, words)


# Attempts that no commit names, and names that try to leave the root.


class _Killed(BaseException):
    """Stands for the death of the process, together with `_forget_the_void`."""


def _forget_the_void(root: Path) -> None:
    """Removes what a process that lives on appends to the log after a failed save, and a dead one does not."""
    number, record = max(log_records(root).items())
    if record["kind"] == "void":
        (root / "log" / f"{number:012d}.json").unlink()


@pytest.mark.parametrize("point", ["save.begin", "save.intent", "save.object", "save.written"])
@pytest.mark.parametrize("older", [False, True], ids=["first save", "after a commit"])
def test_an_attempt_without_its_commit_is_invisible(point: str, older: bool, tmp_path: Path) -> None:
    def die(at: str) -> None:
        if armed and at == point:
            raise _Killed

    armed = False
    with ckpt.Checkpointer(tmp_path, faults=die) as ck:
        if older:
            ck.save(5, _state(10))
        armed = True
        with pytest.raises(_Killed):
            ck.save(6, _state(30))
    _forget_the_void(tmp_path)
    target = _state(20)
    with ckpt.Checkpointer(tmp_path) as ck:
        restored = ck.load(target)
        assert (ck.steps(), ck.latest()) == (([5], 5) if older else ([], None))
        assert (restored.step if restored else None) == (5 if older else None)
        assert _bits(target) == _bits(_state(10 if older else 20))
        with pytest.raises(ckpt.CkptError, match="no committed step 6; there are"):
            ck.load(target, step=6)
        ck.save(6, _state(30))  # the same step again
        ck.load(target)
    assert _bits(target) == _bits(_state(30))


def test_a_whole_attempt_that_nobody_committed_is_invisible(ck: ckpt.Checkpointer, tmp_path: Path) -> None:
    """A copy of a committed attempt, manifests and all, under another name: only the log makes a checkpoint."""
    root = tmp_path / "root"
    attempt = attempt_folder(root)
    shutil.copytree(attempt, attempt.parent / ("f" * 32))
    shutil.copytree(attempt.parent, root / "attempts" / ("e" * 32))
    with ckpt.Checkpointer(root) as fresh:
        assert fresh.steps() == [1]
        target = _state(20)
        assert fresh.load(target) is not None
    commits = [r for r in log_records(root).values() if r["kind"] == "commit"]
    assert [(r["step"], r["attempt"]) for r in commits] == [(1, attempt.name)]


ESCAPES = [
    {"claim": "../../outside", "attempt": "copy"},
    {"claim": "..", "attempt": "../outside/copy"},
    {"claim": "x", "attempt": "../../../outside/copy"},
    {"claim": "/", "attempt": "/outside/copy"},
    {"claim": ".", "attempt": "copy"},
    {"claim": "", "attempt": "copy"},
    {"claim": "a\0b", "attempt": "copy"},
    {"claim": "a", "attempt": ["copy"]},
]


@pytest.mark.parametrize("where", ESCAPES, ids=str)
@pytest.mark.parametrize("read_only", [True, False])
def test_a_log_record_cannot_lead_out_of_the_root(where: dict[str, Any], read_only: bool, tmp_path: Path) -> None:
    """A whole checkpoint lies outside, so that a path that escaped would load."""
    root, outside = tmp_path / "root", tmp_path / "outside"
    with ckpt.Checkpointer(root) as ck:
        ck.save(1, _state(10))
    outside.mkdir()
    attempt_folder(root).rename(outside / "copy")
    forge_commit(root, lambda d: d.update(where))
    before = tree(outside)
    with ckpt.Checkpointer(root, read_only=read_only) as ck:
        target = _state(20)
        with pytest.raises((ckpt.StoreError, ckpt.CorruptCheckpoint)) as caught:
            ck.load(target)
        assert ck.url in str(caught.value)
        assert _bits(target) == _bits(_state(20))
    assert tree(outside) == before


def test_a_commit_record_without_its_fields_is_refused(ck: ckpt.Checkpointer, tmp_path: Path) -> None:
    root = tmp_path / "root"
    kept = {f: f.read_bytes() for f in (root / "log").iterdir()}
    for field in ("attempt", "step", "manifest", "ranks", "run", "state_id"):
        forge_commit(root, lambda d, field=field: d.pop(field))  # type: ignore[misc]
        with ckpt.Checkpointer(root, read_only=True) as fresh:
            _refused(fresh, _state(20), ckpt.CorruptCheckpoint, [fresh.url, "log/"])
        for file, data in kept.items():
            file.write_bytes(data)


@pytest.mark.parametrize("lies", [False, True])
def test_an_intent_that_names_another_attempt_is_never_completed(lies: bool, tmp_path: Path) -> None:
    """A dead job's attempt with all its receipts is completed by the next job, but not one whose intent lies."""

    def die(at: str) -> None:
        if at == "commit.manifest":
            raise _Killed

    root = tmp_path / "root"
    with ckpt.Checkpointer(root, faults=die) as ck, pytest.raises(_Killed):
        ck.save(1, _state(10))
    (attempt,) = (f.parent for f in (root / "attempts").rglob("intent.json"))
    _forget_the_void(root)
    assert [r["kind"] for r in log_records(root).values()] == ["claim"]
    if not lies:
        with ckpt.Checkpointer(root) as ck:
            restored = ck.load(_state(20))
            assert restored is not None and restored.step == 1
        return
    (attempt / "manifest.json").unlink()
    intent = json.loads((attempt / "intent.json").read_bytes()) | {"claim": "../../outside"}
    (attempt / "intent.json").write_bytes(canonical(intent))
    receipt = json.loads((attempt / "receipts" / "000000.json").read_bytes())
    receipt["intent"] = hashlib.sha256(canonical(intent)).hexdigest()
    (attempt / "receipts" / "000000.json").write_bytes(canonical(receipt))
    with ckpt.Checkpointer(root) as ck:
        assert ck.load(_state(20)) is None
        ck.save(2, _state(30))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["root"]


# Phase 2: the bytes turn out wrong while they are placed.


def _flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 3] ^= 4
    file.write_bytes(data)


def _flip_index(file: Path) -> None:
    """In the index of the inner chunks, at the end of the object."""
    data = bytearray(file.read_bytes())
    data[-9] ^= 1
    file.write_bytes(data)


def _zero(file: Path) -> None:
    file.write_bytes(bytes(file.stat().st_size))


BITS: dict[str, Callable[[Path], None]] = {"one bit": _flip, "a bit of the index": _flip_index, "zeros": _zero}


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("damage", BITS)
@pytest.mark.parametrize("tensor", FOLDERS)
def test_flipped_bits_leave_the_state_invalid_until_a_load_heals_it(
    tensor: str, damage: str, verify: bool, ck: ckpt.Checkpointer, tmp_path: Path
) -> None:
    """CRC32C finds them also without verification."""
    ck.save(2, _state(30))
    BITS[damage](objects_of(tmp_path / "root", FOLDERS[tensor])[-1])
    target = _state(20)
    with pytest.raises(ckpt.StateInvalid) as caught:
        ck.load(target, verify=verify)
    for word in ("step 2", FOLDERS[tensor], "missing or damaged", "load an older step"):
        assert word in str(caught.value)
    with pytest.raises(ckpt.StateInvalid, match=r"not saved: loading step 2 failed .* load again, or an older step"):
        ck.save(3, target)
    assert ck.steps() == [1, 2]
    restored = ck.load(target, step=1)
    assert restored is not None and _bits(target) == _bits(_state(10))
    ck.save(3, target)
    assert ck.latest() == 3


def _swap(root: Path) -> None:
    first, second = objects_of(root, "tensors/big")[:2]
    assert first.stat().st_size == second.stat().st_size
    a, b = first.read_bytes(), second.read_bytes()
    first.write_bytes(b)
    second.write_bytes(a)


def test_swapped_chunks_are_found_by_the_fingerprint(ck: ckpt.Checkpointer, tmp_path: Path) -> None:
    """Whole chunks with good checksums in the wrong place: only the verification of the live tensors can tell."""
    _swap(tmp_path / "root")
    target = _state(20)
    with pytest.raises(ckpt.StateInvalid, match="big: the fingerprint of the live tensor is not the saved one"):
        ck.load(target)
    with pytest.raises(ckpt.StateInvalid, match="not saved"):
        ck.save(2, target)
    _swap(tmp_path / "root")
    ck.load(target)
    assert _bits(target) == _bits(_state(10))
    ck.save(2, target)


def test_a_chunk_of_an_older_step_is_found_by_the_fingerprint(ck: ckpt.Checkpointer, tmp_path: Path) -> None:
    old = objects_of(tmp_path / "root", "packed/float32")[0].read_bytes()
    ck.save(2, _state(30))
    objects_of(tmp_path / "root", "packed/float32")[0].write_bytes(old)
    with pytest.raises(ckpt.StateInvalid, match="small: the fingerprint of the live tensor is not the saved one"):
        ck.load(_state(20))


def test_without_verification_the_load_says_so(ck: ckpt.Checkpointer, tmp_path: Path) -> None:
    """verify=False trusts the store: a swap goes unseen, and `verified` is false. Values are applied all the same."""
    _swap(tmp_path / "root")
    target = _state(20)
    restored = ck.load(target, verify=False)
    assert restored is not None and not restored.verified
    assert raw(target["big"]) != raw(_state(10)["big"])
    assert _bits(target) | {"big": b""} == _bits(_state(10)) | {"big": b""}
    assert target["epoch"] == 10


def test_values_are_applied_only_after_verification(ck: ckpt.Checkpointer, tmp_path: Path) -> None:
    _swap(tmp_path / "root")
    target = _state(20)
    with pytest.raises(ckpt.StateInvalid):
        ck.load(target)
    assert (target["epoch"], target["note"]) == (20, _state(20)["note"])


class _Bomb:
    """An object whose load_state_dict fails: the last thing that a load does."""

    def state_dict(self) -> dict[str, Any]:
        return {"fuse": 3}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        raise RuntimeError("bang")


def test_an_object_that_refuses_its_state_leaves_the_state_invalid(tmp_path: Path) -> None:
    with ckpt.Checkpointer(tmp_path) as ck:
        ck.save(1, _state(10, bomb=_Bomb()))
        for atomic in (False, True):  # a half-applied object cannot be undone
            target = _state(20, bomb=_Bomb())
            with pytest.raises(ckpt.StateInvalid, match=r"step 1 failed .*: bang"):
                ck.load(target, atomic=atomic)
            with pytest.raises(ckpt.StateInvalid, match="not saved"):
                ck.save(2, target)


def test_atomic_puts_the_old_tensors_back(ck: ckpt.Checkpointer, tmp_path: Path) -> None:
    """Strided targets and casts too; the error is the cause itself, and saving goes on."""
    strided = random_bits((100, 600), torch.float32, 5).t()[::2]
    target = _state(20) | {"own": strided, "small": torch.ones(5, 3, dtype=torch.float64)}
    before = _bits(target)
    for damage, words in ((_swap, "big: the fingerprint"), (lambda r: _flip(objects_of(r, "tensors/own")[0]), "own")):
        damage(tmp_path / "root")
        with pytest.raises(ckpt.CorruptCheckpoint, match=words):
            ck.load(target, cast=["small"], atomic=True)
        assert _bits(target) == before and target["own"] is strided
        damage(tmp_path / "root")  # the same again undoes it
        ck.save(2, _state(20))
        ck.load(target, cast=["small"], atomic=True)
        assert raw(target["own"]) == raw(_state(20)["own"])
        target = _state(20) | {"own": strided, "small": torch.ones(5, 3, dtype=torch.float64)}
        before = _bits(target)


@pytest.mark.parametrize("point", ["load.read", "load.placed", "load.verified"])
def test_atomic_undoes_a_failure_at_any_point_of_phase_2(point: str, tmp_path: Path) -> None:
    def fail(at: str) -> None:
        if at == point:
            raise ckpt.StoreError("injected")

    with ckpt.Checkpointer(tmp_path) as ck:
        ck.save(1, _state(10))
    with ckpt.Checkpointer(tmp_path, faults=fail) as ck:
        target = _state(20)
        with pytest.raises(ckpt.StoreError, match="injected"):
            ck.load(target, atomic=True)
        assert _bits(target) == _bits(_state(20))
        ck.save(2, target)
        with pytest.raises(ckpt.StateInvalid, match="injected"):
            ck.load(target)


@pytest.mark.parametrize("point", ["load.claimed", "load.opened"])
def test_a_failure_before_phase_2_changes_nothing(point: str, tmp_path: Path) -> None:
    def fail(at: str) -> None:
        if at == point:
            raise ckpt.StoreError("injected")

    with ckpt.Checkpointer(tmp_path, faults=fail) as ck:
        ck.save(1, _state(10))
        _refused(ck, _state(20), ckpt.StoreError, ["injected"])
        ck.save(2, _state(10))


def test_a_reader_cannot_save(ck: ckpt.Checkpointer) -> None:
    with ckpt.Checkpointer(ck.url, read_only=True) as reader:
        target = _state(20)
        assert reader.load(target) is not None and _bits(target) == _bits(_state(10))
        with pytest.raises(ckpt.CkptError, match="read_only=True and cannot save"):
            reader.save(2, target)
    assert ck.latest() == 1


# Two ranks: what one of them gets wrong is an error on both, and nothing has changed on either.


@pytest.fixture(scope="module")
def crew() -> Iterator[Crew]:
    with Crew(2) as made:
        yield made


ranks = pytest.mark.ranks
Failure = tuple[str, str]


def _attempt(call: Callable[[], Any]) -> Failure:
    try:
        call()
    except ckpt.CkptError as error:
        return type(error).__name__, str(error)
    return "", ""


def _try_saves(rank: int, world: int, root: str) -> dict[str, Failure]:
    """Saves that must fail on both ranks, with nothing committed, and one that succeeds in the end."""
    half = torch.full((2, 3), float(rank))
    part = (rank * 2, 0), (2, 3), (0, 0)
    whole = torch.ones(4, 3)
    wrong: dict[str, Callable[[], dict[str, Any]]] = {
        "replicas": lambda: {"good": whole, "w": torch.full((4, 3), float(rank))},
        "one bit": lambda: {"w": torch.full((4, 3), -0.0 if rank else 0.0)},
        "packed bit": lambda: {"w": torch.tensor(1 << 40 if rank else 0)},
        "declared": lambda: {"w": ckpt.replicated(torch.full((40_000,), float(rank)))},
        "values": lambda: {"lr": 0.1 * (rank + 1), "w": whole},
        "zeros": lambda: {"lr": -0.0 if rank else 0.0},
        "types": lambda: {"lr": 1 if rank else 1.0},
        "replicated values": lambda: {"lr": ckpt.replicated([1, rank])},
        "gap": lambda: {"w": ckpt.ShardedTensor(half, [part], (5, 3))},
        "overlap": lambda: {"w": ckpt.ShardedTensor(half, [((rank, 0), (2, 3), (0, 0))], (3, 3))},
        "dtype": lambda: {"w": whole.to(torch.float64 if rank else torch.float32)},
        "shape": lambda: {"w": whole if rank else whole[:2].clone()},
        "kinds": lambda: {"w": whole if rank else 5},
        "tie": lambda: {"a": whole, "b": whole if rank else whole.clone()},
        "capture": lambda: {"w": whole, "x": object() if rank else 5},
    }
    found = {}
    with ckpt.Checkpointer(root, layout=ckpt.Layout(dp=2)) as ck:
        for name, make in wrong.items():
            found[name] = _attempt(lambda make=make: ck.save(1, make()))  # type: ignore[misc]
        found["steps"] = _attempt(lambda: ck.save(rank, {"w": whole}))
        assert ck.latest() is None
        assert ck.save(7, {"w": whole, "s": ckpt.ShardedTensor(half, [part], (4, 3))}).step == 7
    return found


SAVES = {
    "replicas": ("StateMismatch", ["w: ranks 0 and 1 hold different bits of [0:4, 0:3]", "synchronise", "per rank"]),
    "one bit": ("StateMismatch", ["w: ranks 0 and 1 hold different bits", "synchronise"]),
    "packed bit": ("StateMismatch", ["w: ranks 0 and 1 hold different bits", "synchronise"]),
    "declared": ("StateMismatch", ["w: ranks 0 and 1 hold different bits", "synchronise"]),
    "values": ("StateMismatch", ["lr: ranks 0 and 1 have different values", "ckpt.per_rank"]),
    "zeros": ("StateMismatch", ["lr: ranks 0 and 1 have different values", "ckpt.per_rank"]),
    "types": ("StateMismatch", ["lr: ranks 0 and 1 have different values", "ckpt.per_rank"]),
    "replicated values": ("StateMismatch", ["lr: ranks 0 and 1 have different values", "ckpt.per_rank"]),
    "gap": ("StateMismatch", ["w: no rank holds the elements [4:5, 0:3]", "check the layout"]),
    "overlap": ("StateMismatch", ["w: boxes [0:2, 0:3] and [1:3, 0:3] of ranks 0, 1 overlap", "identical boxes"]),
    "dtype": ("StateMismatch", ["w: float32[4, 3] on rank 0, but float64[4, 3] on rank 1"]),
    "shape": ("StateMismatch", ["w: float32[2, 3] on rank 0, but float32[4, 3] on rank 1"]),
    "kinds": ("StateMismatch", ["w: a tensor on one rank and a plain value on another"]),
    "tie": ("StateMismatch", ["b: tied to a on rank 1, but not on rank 0"]),
    "capture": ("Unsupported", ["x: cannot keep a value of type builtins.object"]),
    "steps": ("StateMismatch", ["saves step 0", "saves step 1"]),
}


@ranks
def test_two_ranks_that_disagree_cannot_save(crew: Crew, tmp_path: Path) -> None:
    for rank, found in enumerate(crew.run(_try_saves, str(tmp_path))):
        assert found.keys() == SAVES.keys()
        for name, (kind, words) in SAVES.items():
            assert found[name][0] == kind, (name, rank, found[name])
            assert all(word in found[name][1] for word in words), (name, rank, found[name])
        if rank == 0:
            assert found["capture"][1].startswith("rank 1 failed during save: capture")
    assert [r["kind"] for r in log_records(tmp_path).values()] == ["claim", "commit"]


def _try_loads(rank: int, world: int, root: str) -> dict[str, Failure]:
    """Loads that must fail in phase 1 on both ranks with nothing changed, and one that succeeds in the end."""

    def target() -> dict[str, Any]:
        local = torch.full((2, 3), 9.0)
        return {"w": torch.full((4, 3), 9.0), "s": ckpt.ShardedTensor(local, [((rank * 2, 0), (2, 3), (0, 0))], (4, 3))}

    def part(offset: int) -> ckpt.ShardedTensor:
        return ckpt.ShardedTensor(torch.full((2, 3), 9.0), [((offset, 0), (2, 3), (0, 0))], (4, 3))

    wrong: dict[str, Callable[[], dict[str, Any]]] = {
        "missing": lambda: target() | ({"new": torch.full((2,), 9.0)} if rank else {}),
        "extra": lambda: {"w": torch.full((4, 3), 9.0)},
        "dtype": lambda: target() | ({"w": torch.full((4, 3), 9.0, dtype=torch.float64)} if rank else {}),
        "shape": lambda: target() | ({"w": torch.full((3, 4), 9.0)} if rank else {}),
        "gap": lambda: target() | {"s": part(0)},
        "overlap": lambda: target() | {"s": part(rank)},
        "shared": lambda: (lambda x: {"w": x, "s": x[:2]} if rank else target())(torch.full((4, 3), 9.0)),
    }
    found = {}
    with ckpt.Checkpointer(root) as ck:
        for name, make in wrong.items():
            state = make()
            found[name] = _attempt(lambda state=state: ck.load(state))  # type: ignore[misc]
            for entry in state.values():
                tensor = entry.local if isinstance(entry, ckpt.ShardedTensor) else entry
                assert raw(tensor) == raw(torch.full_like(tensor, 9.0))
        good = target()
        assert ck.load(good) is not None
        assert raw(good["w"]) == raw(torch.ones(4, 3))
        assert raw(good["s"].local) == raw(torch.full((2, 3), float(rank)))
    return found


LOADS = {
    "missing": ["rank 1: the checkpoint has no new", "allow_missing"],
    "extra": ["the checkpoint holds s, which no rank's state has", "allow_extra"],
    "dtype": ["w: rank 1 has dtype float64, the checkpoint float32", "cast=['w']"],
    "shape": ["w: rank 1 has shape [3, 4], the checkpoint [4, 3]", "sizes it was saved with"],
    "gap": ["s: no rank holds the elements [2:4, 0:3]", "check the layout"],
    "overlap": ["s: boxes", "overlap in [1:2, 0:3]", "identical boxes"],
    "shared": ["overlap in memory", "make one of them a copy"],
}


@ranks
def test_two_ranks_of_which_one_does_not_fit_cannot_load(crew: Crew, tmp_path: Path) -> None:
    crew.run(_try_saves, str(tmp_path))
    for rank, found in enumerate(crew.run(_try_loads, str(tmp_path))):
        for name, words in LOADS.items():
            assert found[name][0] == "StateMismatch", (name, rank, found[name])
            assert all(word in found[name][1] for word in words), (name, rank, found[name])


def _damaged_state(rank: int, seed: int) -> dict[str, Any]:
    full = random_bits((1300, 1000), torch.float32, seed)
    rows = full[rank * 650 : (rank + 1) * 650].clone()
    return {"big": ckpt.ShardedTensor(rows, [((rank * 650, 0), (650, 1000), (0, 0))], (1300, 1000)), "epoch": seed}


def _save_two(rank: int, world: int, root: str) -> None:
    with ckpt.Checkpointer(root) as ck:
        ck.save(1, _damaged_state(rank, 1))
        ck.save(2, _damaged_state(rank, 2))


def _load_damaged(rank: int, world: int, root: str) -> list[Failure]:
    target = _damaged_state(rank, 9)
    old = raw(target["big"].local)
    with ckpt.Checkpointer(root) as ck:
        atomic = _attempt(lambda: ck.load(target, atomic=True))
        assert raw(target["big"].local) == old and target["epoch"] == 9
        found = [atomic, _attempt(lambda: ck.load(target)), _attempt(lambda: ck.save(3, target))]
        assert target["epoch"] == 9
        assert ck.load(target, step=1) is not None
        assert raw(target["big"].local) == raw(_damaged_state(rank, 1)["big"].local) and target["epoch"] == 1
        ck.save(3, target)
        assert ck.latest() == 3
    return found


@ranks
@pytest.mark.parametrize("damage", ["a flipped bit", "swapped chunks"])
def test_damage_that_one_rank_reads_makes_the_state_invalid_on_both(damage: str, crew: Crew, tmp_path: Path) -> None:
    crew.run(_save_two, str(tmp_path))
    if damage == "a flipped bit":
        _flip(objects_of(tmp_path, "tensors/big")[0])
    else:
        _swap(tmp_path)
    for atomic, invalid, refused in crew.run(_load_damaged, str(tmp_path)):
        assert atomic[0] == "CorruptCheckpoint" and "big" in atomic[1]
        assert invalid[0] == "StateInvalid" and "big" in invalid[1] and "load again, or an older step" in invalid[1]
        assert refused[0] == "StateInvalid" and refused[1].startswith("not saved: loading step 2 failed")


def _per_rank(rank: int, world: int, root: str) -> dict[str, Failure]:
    def target(**more: Any) -> dict[str, Any]:
        return {"w": torch.zeros(3), **more}

    found = {}
    mine = {"seed": 100 + rank, "pair": (rank, float(rank))}
    with ckpt.Checkpointer(root, layout=ckpt.Layout(dp=2)) as ck:
        ck.save(1, {"w": torch.ones(3), "rng": ckpt.per_rank(mine)})
        same = target(rng=ckpt.per_rank(None))
        assert ck.load(same) is not None
        assert same["rng"].value == mine and type(same["rng"].value["pair"][1]) is float
        found["unwanted"] = _attempt(lambda: ck.load(target()))
        found["new"] = _attempt(lambda: ck.load(target(rng=ckpt.per_rank(0), more=ckpt.per_rank(0))))
        assert ck.load(target(), allow_extra=["rng"]) is not None
        kept = target(rng=ckpt.per_rank(0), more=ckpt.per_rank(7))
        assert ck.load(kept, allow_missing=["more"]) is not None
        assert (kept["rng"].value, kept["more"].value) == (mine, 7)
    with ckpt.Checkpointer(root, layout=ckpt.Layout(tp=2)) as ck:
        found["other layout"] = _attempt(lambda: ck.load(target(rng=ckpt.per_rank(0))))
        found["other layout, unwanted"] = _attempt(lambda: ck.load(target()))
        left = target()
        assert ck.load(left, allow_extra=["rng"]) is not None
        assert raw(left["w"]) == raw(torch.ones(3))
    return found


@ranks
def test_per_rank_values_belong_to_one_layout(crew: Crew, tmp_path: Path) -> None:
    for rank, found in enumerate(crew.run(_per_rank, str(tmp_path))):
        expected = {
            "unwanted": [f"rank {rank}: the checkpoint holds per-rank rng", "allow_extra"],
            "new": [f"rank {rank}: the checkpoint has no per-rank more", "allow_missing"],
            "other layout": ["rng: kept per rank under layout", "'dp': 2", "'tp': 2", "load on the saved layout"],
            "other layout, unwanted": ["rng: kept per rank under layout", "allow_extra"],
        }
        for name, words in expected.items():
            assert found[name][0] == "StateMismatch", (name, found[name])
            assert all(word in found[name][1] for word in words), (name, found[name])
    with ckpt.Checkpointer(tmp_path) as ck:  # one rank: no rank's values may quietly become its own
        for extra in ({}, {"rng": ckpt.per_rank(0)}):
            words = ["rng: kept per rank under layout", "of 2 ranks", "of 1 ranks", "allow_extra"]
            _refused(ck, {"w": torch.zeros(3), **extra}, ckpt.StateMismatch, words)
        assert ck.load({"w": torch.zeros(3)}, allow_extra=["rng"]) is not None
