"""Imports inside the package go downwards."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import replaykit

PACKAGE = Path(replaykit.__file__).parent

ABOVE_ONE_ANOTHER = [
    {"testing"},
    {"cli"},
    {"inspection"},
    {"sharding"},
    {"datasets", "remote"},
    {"ensembles"},
    {"buffer"},
    {"samplers", "writers", "transforms"},
    {"environments", "pace", "priorities", "storages"},
    {"checkpoint", "episodes", "recovery"},
    {"schema"},
    {"transfer"},
    {"assembly", "leafwise", "trajectories"},
    {"structure"},
    {
        "_compat",
        "_ray",
        "errors",
        "filesystem",
        "keywords",
        "interrupts",
        "mapping",
        "native",
        "reductions",
        "ted",
        "_version",
    },
]
"""The rooms, from the top; those of one set do not know each other, but for the lowest."""

LEVEL = {room: level for level, rooms in enumerate(ABOVE_ONE_ANOTHER) for room in rooms}
LOWEST = len(ABOVE_ONE_ANOTHER) - 1
MODULES = sorted(
    path for path in PACKAGE.rglob("*.py") if path.parent != PACKAGE or path.stem[:2] != "__"
)


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported(path: Path) -> set[str]:
    """The rooms that a module imports, inside of functions too, except for type checkers only."""
    tree = ast.parse(path.read_text("utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = [ast.Pass()]
    found = set()
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names = [node.module or ""]
            if node.module == "replaykit":
                names = [f"replaykit.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        for name in names:
            parts = name.split(".")
            if parts[0] == "replaykit":
                found.add(parts[1] if len(parts) > 1 else "")
    return found


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_module_imports_what_lies_below(path: Path) -> None:
    room = room_of(path)
    level = LEVEL[room]
    for other in imported(path) - {room}:
        assert other in LEVEL, f"imports {other or 'the whole package'}"
        assert LEVEL[other] > level or level == LOWEST, f"{room} imports {other}"


def test_every_room_is_in_the_table() -> None:
    assert {room_of(path) for path in MODULES} == set(LEVEL)
