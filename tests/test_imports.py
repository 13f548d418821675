"""The rooms import one way, as docs/design.md says; a room that nobody declared fails."""

import tomllib
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).parents[1]

# Which rooms each room may import, besides itself and `errors`, which everybody may import.
_CORE = {"geometry", "native", "fingerprint", "random", "state", "data", "store"}
ROOMS: dict[str, set[str]] = {
    "geometry": set(),
    "native": set(),
    "fingerprint": {"geometry", "native"},
    "random": {"geometry", "native"},
    "state": {"geometry", "fingerprint", "random"},
    "data": {"geometry", "native", "random", "state"},
    "store": {"geometry", "fingerprint", "state"},
    "inspect": {"geometry", "fingerprint", "state", "store"},
    "engine": _CORE,
    "adapters": _CORE | {"engine"},
    "agent": _CORE | {"engine"},
    "trainer": _CORE | {"engine", "adapters", "agent"},
    "invariant": {"geometry", "native", "random"},
    "cli": _CORE | {"inspect", "engine", "adapters", "agent", "trainer", "invariant"},
}


def _folders() -> list[str]:
    return sorted(p.name for p in (ROOT / "ckpt").iterdir() if p.is_dir() and any(p.rglob("*.py")))


@pytest.fixture(scope="module")
def graph() -> grimp.ImportGraph:
    return grimp.build_graph("ckpt", cache_dir=None)


def _room(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def test_every_folder_is_a_declared_room() -> None:
    assert set(_folders()) <= set(ROOMS), "declare the new room here, in pyproject.toml and in docs/design.md"


def test_every_folder_is_a_package() -> None:
    missing = [str(p.parent) for p in (ROOT / "ckpt").rglob("*.py") if not (p.parent / "__init__.py").exists()]
    assert missing == []


def test_the_layers_in_pyproject_name_the_same_rooms() -> None:
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())
    (layers,) = [c["layers"] for c in config["tool"]["importlinter"]["contracts"] if c["type"] == "layers"]
    named = {room.strip().strip("()") for layer in layers for room in layer.split("|")}
    assert named == {*ROOMS, "errors"}


def test_rooms_import_only_what_the_table_allows(graph: grimp.ImportGraph) -> None:
    broken = []
    for module in sorted(graph.modules):
        room = _room(module)
        if not room:
            continue
        allowed = ROOMS.get(room, set()) | {room, "errors"}
        for target in sorted(graph.find_modules_directly_imported_by(module)):
            if _room(target) not in allowed:
                broken.append(f"{module} imports {target}")
    assert broken == []


def test_errors_is_a_leaf(graph: grimp.ImportGraph) -> None:
    assert graph.find_modules_directly_imported_by("ckpt.errors") == set()
