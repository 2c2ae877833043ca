"""Write the files that follow from the registry: type stubs, and tables in the docs.

``python -m tests.generated`` writes them all. Stubs are files of their own. A table stands in a
page after ``<!-- table: NAME -->`` and before ``<!-- end -->``. Its rows follow from the registry;
text about a row is written by hand and stays. A new row begins with text from the docstring.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from replaykit import registry
from replaykit.registry import Entry
from tests.rooms import pages

ROOT = Path(__file__).parents[1]

Rows = list[list[str]]


def generated() -> Iterator[tuple[Path, str]]:
    """Yield the path of every generated file, and the text that it should hold."""
    for package in registry.ROOMS:
        yield ROOT.joinpath(*package.split("."), "__init__.pyi"), stub(package)
    for page in [ROOT / "README.md", *pages()]:
        text = page.read_text("utf-8")
        if "<!-- table:" in text:
            yield page, with_tables(text)


# -- stubs ----------------------------------------------------------------------------------------


def stub(package: str) -> str:
    """Return the stub of a package: imports of all names that it exports."""
    modules: dict[str, list[str]] = {}
    names = registry.exports(package)
    for entry in names.values():
        modules.setdefault(f"replaykit.{entry.module}", []).append(entry.name)
    lines = ["# Written by `python -m tests.generated` from replaykit/registry.py.", ""]
    for module in sorted(modules):
        found = sorted(modules[module], key=lambda name: (_case(name), name.lower()))
        lines += [f"from {module} import (", *(f"    {name}," for name in found), ")"]
    ordered = sorted(names, key=lambda name: (_case(name), name))
    lines += ["", "__all__ = [", *(f'    "{name}",' for name in ordered), "]"]
    return "\n".join(lines) + "\n"


def _case(name: str) -> int:
    """Rank constants before classes, and both before functions, as ruff sorts them."""
    return 0 if name.isupper() else 1 if name[0].isupper() else 2


# -- tables ---------------------------------------------------------------------------------------


def with_tables(page: str) -> str:
    """Return a page with its tables brought up to date."""

    def table(found: re.Match[str]) -> str:
        rows = [[cell.strip() for cell in _cells(line)] for line in found[2].splitlines()]
        lines = [f"| {' | '.join(row)} |" for row in rows[:2]]
        lines[1] = lines[1].replace(" ", "")
        lines += [f"| {' | '.join(row)} |" for row in TABLES[found[1]](rows[2:])]
        return f"<!-- table: {found[1]} -->\n" + "\n".join(lines) + "\n<!-- end -->"

    return re.sub(r"<!-- table: ([\w ]+) -->\n(.*?)\n<!-- end -->", table, page, flags=re.DOTALL)


def _cells(line: str) -> list[str]:
    return line.strip().removeprefix("|").removesuffix("|").split("|")


def _by_name(entries: list[Entry], *more: Callable[[Entry], str]) -> Callable[[Rows], Rows]:
    """Make a table with one row for each entry; ``more`` gives the other cells of a new row."""

    def rows(old: Rows) -> Rows:
        found = []
        for entry in entries:
            begin = re.compile(rf"`{_shown(entry)}\b(?!-)")
            kept = [row for row in old if begin.match(row[0])]
            found += kept or [[f"`{_shown(entry)}`", *(cell(entry) for cell in more)]]
        return found

    return rows


def _shown(entry: Entry) -> str:
    """Return the name under which users know an entry; layouts have one for the command."""
    return str(registry.load(entry).name) if entry.kind == "layout" else entry.name


def _about(entry: Entry) -> str:
    """Return the first line of the docstring."""
    first = (inspect.getdoc(registry.load(entry)) or "").partition("\n")[0]
    return first.replace("``", "`").rstrip(".")


def _parts(old: Rows) -> Rows:
    """Make the table of a buffer's parts; other rows, remarks in brackets and endings stay."""
    found = []
    for kind, cell in old:
        entries = registry.of_kind(kind) if kind in ("storage", "sampler", "writer") else []
        ending = cell
        remarks = {}
        for name, remark in re.findall(r"`(\w+)`((?: \([^()]*\))?)", cell):
            if name in {entry.name for entry in entries}:
                remarks[name] = remark
                ending = cell.rpartition(f"`{name}`{remark}")[2]
        names = (f"`{entry.name}`{remarks.get(entry.name, '')}" for entry in entries)
        found.append([kind, ", ".join(names) + ending])
    return found


TABLES: dict[str, Callable[[Rows], Rows]] = {
    "parts": _parts,
    "transforms": _by_name(registry.of_kind("transform"), _about),
    "laws": _by_name([entry for entry in registry.of_kind("sampler") if entry.law], _about),
    "families": _by_name(registry.of_kind("family"), lambda _: "yes", lambda _: "", _about),
    "layouts": _by_name(
        registry.of_kind("layout"),
        lambda entry: f"`{entry.name}`",
        lambda entry: f"`{type(registry.load(entry).episodes).__name__}`",
    ),
}
"""The tables by name."""


if __name__ == "__main__":
    for path, text in generated():
        path.write_text(text, "utf-8")
