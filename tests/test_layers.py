"""Imports inside the package go downwards, those for type checkers and by string too."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import replaykit

PACKAGE = Path(replaykit.__file__).parent

ABOVE_ONE_ANOTHER = [
    {"testing"},
    {"inspection"},
    {"tools"},
    {"adapters"},
    {"remote", "sharding"},
    {"datasets", "distributed"},
    {"mixture", "feeds"},
    {"buffer"},
    {"samplers", "writers", "transforms"},
    {"environments", "pace", "priorities", "storages"},
    {"checkpoint", "episodes", "recovery"},
    {"schema"},
    {"transfer"},
    {"trajectories"},
    {"structure"},
    {
        "_compat",
        "_ray",
        "declared",
        "errors",
        "filesystem",
        "keywords",
        "interrupts",
        "native",
        "reductions",
        "registry",
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


def imported(tree: ast.AST) -> set[str]:
    """Return the rooms that a module imports: inside functions and for type checkers too."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import"
            names = [node.module or ""]
            if node.module == "replaykit":
                names = [f"replaykit.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        found |= {room for room in map(room_named, names) if room is not None}
    return found


def room_named(name: str) -> str | None:
    """Return the room of a dotted name; None for a name of another package."""
    package, _, rest = name.partition(".")
    return rest.partition(".")[0] if package == "replaykit" else None


def in_strings(tree: ast.AST) -> set[str]:
    """Return the rooms that strings name, as arguments of ``importlib`` do; sentences do not."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            match = re.fullmatch(r"replaykit\.(\w+)[\w.:]*", node.value)
            if match:
                found.add(match[1])
    return found


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_modules_import_only_lower_layers(path: Path) -> None:
    room, tree = room_of(path), ast.parse(path.read_text("utf-8"))
    level = LEVEL[room]
    found = imported(tree)
    if room == "registry":
        assert not found, "the registry imports nothing of the package"
    else:  # no other module may name those above it
        found |= in_strings(tree)
    for other in found - {room}:
        assert other in LEVEL, f"imports {other or 'the whole package'}"
        assert LEVEL[other] > level or level == LOWEST, f"{room} imports {other}"


UPWARD = """
from __future__ import annotations
import importlib
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    from replaykit.buffer import ReplayBuffer
def later() -> object:
    "Return replaykit.tools in a sentence."
    from replaykit import datasets
    return importlib.import_module("replaykit.mixture.ensemble")
"""


def test_imports_for_type_checkers_and_by_string_are_counted() -> None:
    tree = ast.parse(UPWARD)
    assert imported(tree) == {"buffer", "datasets"}
    assert in_strings(tree) == {"mixture"}


def test_every_room_is_in_the_table() -> None:
    assert {room_of(path) for path in MODULES} == set(LEVEL)
