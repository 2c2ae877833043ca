"""Find names that stand in several places of the package.

``python -m tests.names`` prints them with their places and takes from the list of exceptions what
is no longer there. It never adds to the list.
"""

from __future__ import annotations

import ast
import functools
import json
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.rooms import PACKAGE, modules

EXCEPTIONS = Path(__file__).with_name("duplicate_names.json")
BatchParts = dict[str, list[str]]


def duplicate_classes() -> BatchParts:
    """Return the public module-level classes that several files define, with these files."""
    places: BatchParts = {}
    for paths in modules().values():
        for path in paths:
            for name in sorted({*_classes(ast.parse(path.read_text("utf-8")))}):
                places.setdefault(name, []).append(_name(path))
    return _repeated(places)


def duplicate_files() -> BatchParts:
    """Return the file names that stand in several rooms, with their files."""
    rooms: dict[str, dict[str, list[str]]] = {}
    for room, paths in modules().items():
        for path in paths:
            if path.stem[:2] != "__":
                rooms.setdefault(path.stem, {}).setdefault(room, []).append(_name(path))
    return {
        stem: sorted(path for paths in places.values() for path in paths)
        for stem, places in sorted(rooms.items())
        if len(places) > 1
    }


@functools.cache
def found() -> dict[str, BatchParts]:
    """Return all duplicates by their kind."""
    return {"classes": duplicate_classes(), "files": duplicate_files()}


def exceptions() -> dict[str, dict[str, int]]:
    """Return the duplicates that are let pass, and in how many places."""
    allowed: dict[str, dict[str, int]] = json.loads(EXCEPTIONS.read_text("utf-8"))
    return allowed


def raised(kind: str) -> BatchParts:
    """Return the duplicates of a kind that stand in more places than their exception says."""
    allowed = exceptions()[kind]
    return {name: at for name, at in found()[kind].items() if len(at) > allowed.get(name, 1)}


def lowered(kind: str) -> list[str]:
    """Return the exceptions of a kind that say more than there is."""
    places = found()[kind]
    return [name for name, most in exceptions()[kind].items() if len(places.get(name, [])) < most]


def _classes(tree: ast.Module) -> Iterator[str]:
    """Yield the public classes of a module, also those defined under a condition."""
    pending: list[ast.AST] = [tree]
    for node in pending:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef):
                if not child.name.startswith("_"):
                    yield child.name
            elif not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.expr)):
                pending.append(child)


def _repeated(places: BatchParts) -> BatchParts:
    return {name: at for name, at in sorted(places.items()) if len(at) > 1}


def _name(path: Path) -> str:
    return str(path.relative_to(PACKAGE.parent))


def main() -> int:
    """Print all duplicates, and lower the exceptions to what there is."""
    now = found()
    allowed = exceptions() if EXCEPTIONS.exists() else None
    for kind, places in now.items():
        print(f"{kind}: {len(places)}")
        for name, at in places.items():
            print(f"  {name}: {', '.join(at)}")
    counts = {kind: {name: len(at) for name, at in places.items()} for kind, places in now.items()}
    if allowed is not None:
        counts = {
            kind: {
                name: min(most, len(now[kind][name]))
                for name, most in allowed[kind].items()
                if name in now[kind]
            }
            for kind in now
        }
    EXCEPTIONS.write_text(json.dumps(counts, indent=1) + "\n", "utf-8")
    more = [f"{kind}: {name}" for kind in now for name in raised(kind)]
    if more:
        print("more places than the exceptions allow:", *more, sep="\n  ", file=sys.stderr)
    return bool(more)


if __name__ == "__main__":
    sys.exit(main())
