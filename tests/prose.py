"""Count idioms that the package's prose does without, and hold the counts to a list of exceptions.

``python -m tests.prose`` lowers the exceptions to the present counts; it refuses to raise one.
``python -m tests.prose NAME ...`` prints the findings in all rooms whose names begin so, with file
and line: ``docs/design.md``, ``buffer``, ``buffer: comments``, ``tests/buffer``.

A room that is renamed or merged takes its exceptions along by hand, in ``prose_exceptions.json``.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import io
import json
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from tests.public_api import MODULES
from tests.rooms import CORE, PACKAGE, ROOT, core_files, modules
from tests.rooms import pages as site_pages

EXCEPTIONS = Path(__file__).with_name("prose_exceptions.json")
Counts = dict[str, dict[str, int]]

_PEOPLE = "users?|people|persons?|callers?|readers?|newcomers?|authors?|engineers?"
_ASKING = (
    "says?|said|saying|shows?|showing|shown|knows?|known|knowing|sees?|seen|asks?|asked|decides?"
    "|decided|explains?|describes?|learns?|finds?|out|remembers?|tells?|checks?|lists?|defines?"
    "|reports?|prints?|and|or|about|matters?|exactly"
)
_NO_NOUN = (
    "to|that|which|who|what|may|can|could|must|might|will|would|should|shall|not|and|or|but|never"
    "|cannot|does|do|if|when|while|where|so|than|as|is|are|was|were|because|already|since|just|now"
    "|ever|only|long|yet"
)
_CAUSED = "be|make|do|go|keep|come|give|take"

PATTERNS = {
    "anew": r"\banew\b",
    "as it were": r"\bas it were\b",
    "beside": r"\bbesides?\b",
    "elsewhere": r"\belsewhere\b",
    "has X be": rf"\b(?:ha[sd]|have|having)\s+(?!\w+ed\b|let\b)"
    rf"(?:(?!(?:{_NO_NOUN})\b)[\w'`()-]+\s+){{1,8}}?(?:{_CAUSED})\b",
    "let go": r"\blet(?:s|ting)?\s+(?:\w+\s+){0,2}go\b",
    "nobody": r"\b(?:no|some|any)body\b|\bwho(?:m|so)?ever\b",
    "of its own": r"\bof\s+(?:one'?s|its|their|your|his|her|my|our)\s+own\b",
    "of whom": r"\bof\s+whom\b",
    "told": r"\btold\b",
    "what": rf"\b(?i:{_ASKING})\s+what\b|\bwhat\s+(?:to|if)\b|(?P<hit>\bwhat\b)",
    "who": rf"\b(?:{_PEOPLE}),?\s+who\b|(?P<hit>\bwho\b)",
}
"""Idioms anywhere in a text. Where there is a group ``hit``, matches without it are allowed."""

OPENING = "opening"
"""A statement that begins with a question word: a clause in the place of a noun or a verb."""

_COMPILED = {name: re.compile(pattern, re.IGNORECASE) for name, pattern in PATTERNS.items()}
_COMPILED["what"] = re.compile(PATTERNS["what"])  # a capital one is an opening
_OPENING = re.compile(
    r"(?:\A[\W_]*(?i:(?P<first>what|which|who|whose|where|how|whether))"
    r"|[.!?][\"')*`]*\s+[\"'(*`]*(?P<later>What|Which|Who|Whose|Where|How|Whether))\b"
)
_SENTENCE_END = re.compile(r"[.!?](?=[\"')*`]*(?:\s|$))")


class Text(NamedTuple):
    """A piece of prose: a paragraph, a docstring, a comment, an error text, a test name."""

    path: Path
    line: int
    text: str
    is_title: bool = False

    def at(self, position: int) -> str:
        """Return file and line of a position in the text, and the words around it."""
        line = self.line + self.text.count("\n", 0, position)
        around = " ".join(self.text[max(0, position - 30) : position + 50].split())
        return f"{self.path.relative_to(ROOT)}:{line}: ...{around}..."


def findings(text: Text) -> Iterator[tuple[str, int]]:
    """Yield the idioms in a text with their positions.

    >>> [name for name, _ in findings(Text(ROOT, 1, "Whoever writes is told of it."))]
    ['nobody', 'told']
    >>> [name for name, _ in findings(Text(ROOT, 1, "Has the rows be read anew."))]
    ['anew', 'has X be']
    >>> [name for name, _ in findings(Text(ROOT, 1, "What was drawn. Say what is wrong."))]
    ['opening']
    >>> list(findings(Text(ROOT, 1, "Users who write rows know what to do. Which rows?")))
    []
    """
    for name, pattern in _COMPILED.items():
        if text.is_title and name == "what":
            continue
        for found in pattern.finditer(text.text):
            if "hit" not in pattern.groupindex or found["hit"] is not None:
                yield name, found.start("hit" if "hit" in pattern.groupindex else 0)
    if text.is_title:
        return
    for found in _OPENING.finditer(text.text):
        end = _SENTENCE_END.search(text.text, found.end())
        if end is None or end[0] != "?":
            yield OPENING, found.start("first" if found["first"] else "later")


# Markdown.


def page(path: Path) -> Iterator[Text]:
    """Yield paragraphs, list items, table cells and headings of a page, and its code's comments."""
    fenced = False
    begin, pending = 0, list[str]()

    def done() -> Iterator[Text]:
        if pending:
            yield Text(path, begin, "\n".join(pending))
            pending.clear()

    for number, line in enumerate(_without_code(path.read_text("utf-8")).splitlines(), 1):
        if line.lstrip().startswith("```"):
            yield from done()
            fenced = not fenced
        elif fenced:
            if comment := re.search(r"(?:^|\s)# (.*)", line):
                yield Text(path, number, comment[1])
        elif line.startswith("#"):
            yield from done()
            yield Text(path, number, line.lstrip("# "), is_title=True)
        elif line.startswith("|"):
            yield from done()
            for cell in re.split(r"(?<!\\)\|", line):
                yield Text(path, number, cell.strip())
        elif not line.strip():
            yield from done()
        else:
            if re.match(r"\s*(?:[-*]|\d+\.)\s", line):
                yield from done()
            if not pending:
                begin = number
            pending.append(line.strip(" -"))
    yield from done()


def _without_code(text: str) -> str:
    """Return a text with its code and targets of links replaced, and as many lines as before."""

    def replaced(found: re.Match[str]) -> str:
        return "`X`" + "\n" * found[0].count("\n")

    text = re.sub(r"(?<!`)(`{1,2})(?!`)[^`]+\1(?!`)", replaced, text)
    return re.sub(r"\]\([^)\n]*\)", "]", text)


# Python.


@functools.cache
def public_names() -> frozenset[tuple[str, str]]:
    """Return module and qualified name of everything that users can import, and its members."""
    names = {(module, "") for module in MODULES}
    for module in MODULES:
        found = importlib.import_module(module)
        for name in getattr(found, "__all__", ()):
            value = getattr(found, name)
            if inspect.isclass(value):
                names.add((value.__module__, value.__qualname__))
                for base in value.__mro__:
                    if base.__module__.split(".")[0] == PACKAGE.name:
                        names.update(
                            (base.__module__, f"{base.__qualname__}.{member}")
                            for member in {*vars(base), *vars(base).get("__annotations__", ())}
                            if not member.startswith("_") or member.startswith("__")
                        )
            elif inspect.isfunction(value):
                names.add((value.__module__, value.__qualname__))
    return frozenset(names)


def module_texts(path: Path) -> Iterator[tuple[str, Text]]:
    """Yield the prose of a module with its kind."""
    source = path.read_text("utf-8")
    tree = ast.parse(source)
    parts = path.relative_to(ROOT).with_suffix("").parts
    module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    for name, text in _docstrings(path, tree, ""):
        kind = "public" if (module, name) in public_names() else "private"
        yield f"{kind} docstrings", text
    for text in _comments(path, source):
        yield "comments", text
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and node.exc is not None:
            for text in _strings(path, node.exc):
                yield "error texts", text
        elif isinstance(node, ast.keyword) and node.arg == "help":
            for text in _strings(path, node.value):
                yield "help texts", text
    for text in _messages(path, tree):
        yield "messages", text


def _docstrings(path: Path, node: ast.AST, name: str) -> Iterator[tuple[str, Text]]:
    """Yield docstrings with the qualified names of what they describe, attributes included."""
    described = name
    for child in ast.iter_child_nodes(node):
        if (
            isinstance(child, ast.Expr)
            and isinstance(child.value, ast.Constant)
            and isinstance(child.value.value, str)
        ):
            prose = re.sub(r"^[ \t]*(?:>>>|\.\.\.).*", "", child.value.value, flags=re.MULTILINE)
            for begin, paragraph in _paragraphs(_without_code(prose)):
                yield described, Text(path, child.lineno + begin, paragraph)
        described = name
        if isinstance(child, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield from _docstrings(path, child, f"{name}.{child.name}".lstrip("."))
        elif isinstance(child, (ast.Assign, ast.AnnAssign)):
            target = child.targets[0] if isinstance(child, ast.Assign) else child.target
            described = f"{name}.{ast.unparse(target)}".lstrip(".")
        elif isinstance(child, (ast.If, ast.Try, ast.With)):
            yield from _docstrings(path, child, name)


def _paragraphs(text: str) -> Iterator[tuple[int, str]]:
    """Yield paragraphs and list items with the numbers of their first lines."""
    begin, pending = 0, list[str]()
    for number, line in enumerate([*text.splitlines(), ""]):
        if pending and (not line.strip() or re.match(r"\s*(?:[-*]|\d+\.)\s", line)):
            yield begin, "\n".join(pending)
            pending = []
        if line.strip():
            if not pending:
                begin = number
            pending.append(line.strip(" -"))


def _comments(path: Path, source: str) -> Iterator[Text]:
    """Yield comments; lines with nothing else that follow one another are one text."""
    begin, last, pending = 0, 0, list[str]()
    lines = source.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT or re.match(r"#\s*(?:type:|noqa|pragma|!)", token.string):
            continue
        number, column = token.start
        alone = not lines[number - 1][:column].strip()
        if pending and not (alone and number == last + 1):
            yield Text(path, begin, _without_code("\n".join(pending)))
            pending = []
        if not pending:
            begin = number
        pending.append(token.string.lstrip("# "))
        last = number if alone else 0
    if pending:
        yield Text(path, begin, _without_code("\n".join(pending)))


def _strings(path: Path, node: ast.AST) -> Iterator[Text]:
    """Yield the string literals of an expression, with the values in them left out."""
    if isinstance(node, ast.Constant):
        if isinstance(node.value, str):
            yield Text(path, node.lineno, node.value)
    elif isinstance(node, ast.JoinedStr):
        parts = (each.value if isinstance(each, ast.Constant) else "X" for each in node.values)
        yield Text(path, node.lineno, "".join(map(str, parts)))
    else:
        for child in ast.iter_child_nodes(node):
            yield from _strings(path, child)


def _messages(path: Path, tree: ast.AST) -> Iterator[Text]:
    """Yield other strings of three words or more: texts that errors, warnings or tables use later.

    They may be parts of sentences, so none is an opening.
    """
    counted = {
        id(each)
        for node in ast.walk(tree)
        if isinstance(node, ast.Raise)
        or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
        or (isinstance(node, ast.keyword) and node.arg == "help")
        for each in ast.walk(node)
    }
    for node in ast.walk(tree):
        if isinstance(node, (ast.Constant, ast.JoinedStr)) and id(node) not in counted:
            for text in _strings(path, node):
                if len(text.text.split()) >= 3:
                    yield text._replace(text=f"it: {text.text}")


def names_of_tests(path: Path) -> Iterator[Text]:
    """Yield the names of the tests in a file as sentences."""
    source = path.read_text("utf-8")
    for found in re.finditer(r"^[ ]*def test_(\w+)", source, re.MULTILINE):
        words = re.sub(r"\Aof\b", "which", found[1].replace("_", " "))
        yield Text(path, source.count("\n", 0, found.start()) + 1, words)


# C++.


def core_comments(path: Path) -> Iterator[Text]:
    """Yield the comments of a C++ source; lines that follow one another are one text."""
    source = path.read_text("utf-8")
    pattern = re.compile(
        r"(?P<lines>//[^\n]*(?:\n[ \t]*//[^\n]*)*)|(?P<block>/\*.*?\*/)|\"(?:\\.|[^\"\\\n])*\"",
        re.DOTALL,
    )
    for found in pattern.finditer(source):
        if not found[0].startswith('"'):
            text = re.sub(r"^[ \t]*(?:///?|/\*+|\*+/?)[ \t]?|\*/$", "", found[0], flags=re.M)
            yield Text(path, source.count("\n", 0, found.start()) + 1, _without_code(text))


# Rooms.


def texts() -> Iterator[tuple[str, Text]]:
    """Yield all prose with the names of its rooms."""
    pages = [*sorted(ROOT.glob("*.md")), *site_pages()]
    for path in pages:
        for text in page(path):
            yield str(path.relative_to(ROOT)), text
    for room, paths in modules().items():
        for path in paths:
            for kind, text in module_texts(path):
                yield f"{room}: {kind}", text
    for path in core_files():
        for text in core_comments(path):
            yield f"{CORE}: comments", text
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        folder = "/".join(path.relative_to(ROOT).parts[:-1][:2])
        for text in names_of_tests(path):
            yield f"{folder}: test names", text


def counted() -> Counts:
    """Return the count of every idiom in every room; rooms without one are left out."""
    counts: dict[str, Counter[str]] = {}
    for room, text in texts():
        for name, _ in findings(text):
            counts.setdefault(room, Counter())[name] += 1
    return {room: dict(sorted(each.items())) for room, each in counts.items()}


def exceptions() -> Counts:
    """Return the counts that are let pass."""
    allowed: Counts = json.loads(EXCEPTIONS.read_text("utf-8"))
    return allowed


def write_exceptions(counts: Counts) -> None:
    """Write the counts that are let pass, one room a line."""
    lines = [
        f"  {json.dumps(room)}: {json.dumps(each)}"
        for room, each in sorted(counts.items())
        if any(each.values())
    ]
    EXCEPTIONS.write_text("{\n" + ",\n".join(lines) + "\n}\n", "utf-8")


def differing(a: Counts, b: Counts) -> Counts:
    """Return the counts of the first that are above those of the second."""
    over = {
        room: {name: count for name, count in each.items() if count > b.get(room, {}).get(name, 0)}
        for room, each in a.items()
    }
    return {room: each for room, each in over.items() if each}


def show(begins: tuple[str, ...], keep: Callable[[str, str], bool]) -> None:
    """Print the findings in the rooms whose names begin so."""
    for room, text in texts():
        if room.startswith(begins):
            for name, position in findings(text):
                if keep(room, name):
                    print(f"{name:<10} {text.at(position)}")


def main(names: list[str]) -> int:
    """Show findings, or lower the exceptions to the present counts."""
    if names:
        show(tuple(names), lambda room, name: True)
        return 0
    counts = counted()
    allowed = exceptions() if EXCEPTIONS.exists() else counts
    write_exceptions(
        {
            room: {
                name: count
                for name, most in each.items()
                if (count := min(most, counts.get(room, {}).get(name, 0)))
            }
            for room, each in allowed.items()
        }
    )
    sums = sum((Counter(each) for each in counts.values()), Counter[str]())
    print(*(f"{name:<10} {count:>5}" for name, count in sorted(sums.items())), sep="\n")
    print(f"{'together':<10} {sums.total():>5} in {len(counts)} rooms")
    more = differing(counts, allowed)
    if more:
        print("\nmore than the exceptions allow, which only shrink:", file=sys.stderr)
        show(tuple(more), lambda room, name: name in more.get(room, {}))
    return bool(more)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
