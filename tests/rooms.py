"""The rooms of the package and their modules, as the tests of size, names and prose divide them."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "replaykit"
CORE = "csrc"
COMMAND = "replaykit_command"

SITE_FOLDERS = {"_build", "benchmarks", "datasets", "figures", "reference"}
"""Folders of ``docs`` that ``make docs`` writes; git ignores them."""

APART = ("datasets/engine", "datasets/families")
"""Folders inside a room that count as rooms."""


def room_of(path: Path) -> str:
    """Return the room of a module: a folder or a module directly below the package."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    inner = "/".join(parts[:2])
    return inner if inner in APART and len(parts) > 2 else parts[0]


def modules() -> dict[str, list[Path]]:
    """Return the modules of every room, sorted; the command's own package is a room too."""
    found: dict[str, list[Path]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        found.setdefault(room_of(path), []).append(path)
    found[COMMAND] = sorted((ROOT / COMMAND).rglob("*.py"))
    return dict(sorted(found.items()))


def core_files() -> list[Path]:
    """Return the sources of the compiled core, sorted."""
    folder = ROOT / CORE
    return sorted(path for path in folder.rglob("*") if path.suffix in (".h", ".cpp"))


def pages() -> list[Path]:
    """Return the pages of the documentation that are written by hand, sorted."""
    docs = ROOT / "docs"
    return sorted(
        page for page in docs.rglob("*.md") if page.relative_to(docs).parts[0] not in SITE_FOLDERS
    )


def load_script(name: str) -> ModuleType:
    """Import a script of ``docs``, which is no package."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look up their module
    spec.loader.exec_module(module)
    return module
