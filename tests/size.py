"""Count code lines, files and classes of each room, and hold them to written bounds.

``python -m tests.size`` prints the counts with their bounds and writes the bounds into
``docs/rooms/sizes.md``. With ``--write-bounds`` it first sets every bound to the present count,
lines rounded up to the next ten.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import tokenize
from pathlib import Path
from typing import NamedTuple

from tests.rooms import CORE, ROOT, core_files, modules

BOUNDS = Path(__file__).with_name("size_bounds.txt")
PAGE = ROOT / "docs" / "rooms" / "sizes.md"
BLOCK = re.compile(r"(?<=<!-- size -->\n).*?(?=<!-- end -->)", re.DOTALL)
STEP = 10
"""Bounds of code lines are multiples of this."""

_LAYOUT = {tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
_CPP_TOKEN = re.compile(r"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\])*\"|'(?:\\.|[^'\\])*'", re.DOTALL)
_CPP_CLASS = re.compile(r"(?<!enum )\b(?:class|struct)\s+\w+[^;{}()]*\{")


class Size(NamedTuple):
    """Counts of one room."""

    lines: int
    files: int
    classes: int

    def within(self, bound: Size) -> bool:
        """Return whether no count is above its bound."""
        return all(count <= most for count, most in zip(self, bound, strict=True))

    def rounded(self) -> Size:
        """Return the bound that this count gets when bounds are written."""
        return self._replace(lines=(self.lines // STEP + 1) * STEP)


def code_lines(source: str) -> int:
    """Return the number of lines with code: no docstrings, comments, or blank lines.

    >>> code_lines('"Doc."\\n\\nx = 1  # one\\n# two\\ny = (\\n    2\\n)\\n')
    4
    """
    texts = {
        (node.lineno, node.col_offset)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    }
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _LAYOUT | {tokenize.COMMENT} and token.start not in texts:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines)


def without_comments(source: str) -> str:
    """Return C++ source with its comments blanked out, strings left as they are."""

    def blanked(found: re.Match[str]) -> str:
        text = found[0]
        return "\n" * text.count("\n") + " " if text.startswith("/") else text

    return _CPP_TOKEN.sub(blanked, source)


def size_of(paths: list[Path]) -> Size:
    """Return the counts of Python modules or C++ sources together."""
    lines = classes = 0
    for path in paths:
        source = path.read_text("utf-8")
        if path.suffix == ".py":
            lines += code_lines(source)
            classes += sum(isinstance(node, ast.ClassDef) for node in ast.walk(ast.parse(source)))
        else:
            source = without_comments(source)
            lines += sum(bool(line.strip()) for line in source.splitlines())
            classes += len(_CPP_CLASS.findall(source))
    return Size(lines, len(paths), classes)


def measured() -> dict[str, Size]:
    """Return the present counts of every room."""
    return {room: size_of(paths) for room, paths in modules().items()} | {
        CORE: size_of(core_files())
    }


def bounds() -> dict[str, Size]:
    """Return the written bounds of every room."""
    rows = [line.split() for line in BOUNDS.read_text("utf-8").splitlines()]
    return {room: Size(*map(int, counts)) for room, *counts in rows if room != "room"}


def write_bounds(sizes: dict[str, Size]) -> None:
    """Write the bounds that these counts get."""
    rows = [("room", *Size._fields), *((room, *each.rounded()) for room, each in sizes.items())]
    width = max(len(str(row[0])) for row in rows)
    lines = [f"{row[0]:<{width}} {row[1]:>6} {row[2]:>6} {row[3]:>8}" for row in rows]
    BOUNDS.write_text("\n".join(lines) + "\n", "utf-8")


def table() -> str:
    """Return the bounds as the table in ``docs/rooms/sizes.md``."""
    written = bounds()
    python = [size for room, size in written.items() if room != CORE]
    total = Size(*(sum(counts) for counts in zip(*python, strict=True)))
    rows = [*((f"`{room}`", size) for room, size in written.items()), ("Python in all", total)]
    head = "| room | code lines, at most | files | classes |\n|---|---:|---:|---:|\n"
    return head + "".join(
        f"| {room} | {size.lines:,} | {size.files:,} | {size.classes:,} |\n" for room, size in rows
    )


def block() -> str:
    """Return the marked block that stands in ``docs/rooms/sizes.md``."""
    found = BLOCK.search(PAGE.read_text("utf-8"))
    assert found is not None, f"{PAGE}: expected <!-- size --> and <!-- end -->, got neither"
    return found[0]


def main() -> None:
    """Print the counts, and write the bounds into ``docs/rooms/sizes.md``."""
    parser = argparse.ArgumentParser(prog="python -m tests.size", description=__doc__)
    parser.add_argument("--write-bounds", action="store_true", help="set bounds to the counts")
    sizes = measured()
    if parser.parse_args().write_bounds:
        write_bounds(sizes)
    written = bounds()
    print(f"{'room':<20} {'lines':>15} {'files':>11} {'classes':>11}")
    for room, size in sizes.items():
        most = written.get(room, Size(0, 0, 0))
        pairs = [f"{count} / {bound}" for count, bound in zip(size, most, strict=True)]
        over = "" if size.within(most) else "  above its bound"
        print(f"{room:<20} {pairs[0]:>15} {pairs[1]:>11} {pairs[2]:>11}{over}")
    python = [size for room, size in sizes.items() if room != CORE]
    total = Size(*(sum(counts) for counts in zip(*python, strict=True)))
    print(f"{'Python in all':<20} {total.lines:>15} {total.files:>11} {total.classes:>11}")
    text = PAGE.read_text("utf-8")
    block()
    PAGE.write_text(BLOCK.sub(lambda _: table(), text), "utf-8")


if __name__ == "__main__":
    main()
